//! What a coordinator serves over HTTP: the JSON API, and the page in a real browser.

use elastic_proto::jobs::ListRequest;
use elastic_proto::jobs::jobs_client::JobsClient;
use elastic_tests::http::answer_to;
use elastic_tests::prelude::*;
use tokio::process::Command;
use tonic::Code;
use tonic::transport::Endpoint;

use super::{Scene, WITHIN, http, succeed};

/// What a failed worker says: a page that took it for markup would run it.
const MESSAGE: &str = "<img src=x onerror=\"document.title='owned'\"> ran out of memory";

/// A coordinator whose port is at `page`, with a job of two nodes in round 2: a worker of the first had failed.
struct Served {
    coordinator: Process,
    page: String,
    scene: Scene,
    nodes: [InProcessNode; 2],
}

impl Served {
    async fn start() -> Served {
        let (coordinator, page, scene) = Scene::embedded(2, 2).await;
        let [mut a, b] = scene.nodes(["a", "b"]).await;
        b.fail(FailureClass::Own, MESSAGE);
        a.runs(2, 2, WITHIN).await.unwrap();
        Served { coordinator, page, scene, nodes: [a, b] }
    }

    /// The status and the JSON of an answer.
    async fn get(&self, path: &str) -> (u16, Value) {
        let answer = http(&self.page, path).await;
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let lower = head.to_lowercase();
        assert!(lower.contains("content-type: application/json"), "{head}");
        assert!(!lower.contains("access-control-allow"), "other sites' pages must not read it: {head}");
        (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    async fn ok(&self, path: &str) -> Value {
        let (status, value) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {value}");
        value
    }
}

#[tokio::test]
async fn the_api_answers_what_elasticctl_prints() {
    let served = Served::start().await;
    let printed = async |command: &[&str]| -> Value {
        let args = [command, &["-o", "json"]].concat();
        serde_json::from_str(&served.scene.ctl_ok(&args).await).unwrap()
    };
    // The store hears first, then the coordinator.
    eventually("the list is elasticctl's", WITHIN, async || {
        (served.ok("/v1/jobs").await["jobs"] == printed(&["jobs"]).await).then_some(())
    })
    .await;
    eventually("the job is elasticctl's", WITHIN, async || {
        (served.ok("/v1/jobs/train").await == printed(&["describe", "train"]).await).then_some(())
    })
    .await;
    let job = served.ok("/v1/jobs/train").await;
    assert_eq!((&job["state"], job["nodes"].as_array().unwrap().len()), (&"running".into(), 2));
    assert_eq!(served.ok("/v1/jobs?state=failed").await["jobs"].as_array().unwrap().len(), 0);
    assert_eq!(served.ok("/v1/jobs?state=running&limit=1").await["next"], Value::Null);

    for (path, status, says) in [
        ("/v1/jobs/trian", 404, "there is no job \"trian\""),
        ("/v1/jobs/trian/events", 404, "there is no job"),
        ("/v1/job", 404, "there are /v1/jobs"),
        ("/v1/jobs?state=runing", 400, "runing"),
        ("/v1/jobs?sate=running", 400, "sate"),
        ("/v1/jobs?limit=-1", 400, "limit"),
        ("/v1/jobs/train/events?wait=60", 400, "wait is at most 8 seconds"),
    ] {
        let (found, value) = served.get(path).await;
        let error = value["error"].as_str().unwrap_or_default();
        assert!(found == status && error.contains(says), "{path}: {found} {value}");
    }
    succeed(served.nodes).await;
}

#[tokio::test]
async fn a_client_that_waits_for_events_hears_of_them_at_once() {
    let served = Served::start().await;
    let all = served.ok("/v1/jobs/train/events").await;
    let events = all["events"].as_array().unwrap();
    assert!(events.iter().any(|event| event["reason"].as_str().unwrap().contains(MESSAGE)), "{all}");
    // What follows the failure may still be on its way here.
    let mut next = all["next"].as_u64().unwrap();
    loop {
        let more = served.ok(&format!("/v1/jobs/train/events?after={next}&wait=1")).await;
        if more["events"].as_array().unwrap().is_empty() {
            assert_eq!(more["next"], next);
            break;
        }
        next = more["next"].as_u64().unwrap();
    }

    let asked = Instant::now();
    let path = format!("/v1/jobs/train/events?after={next}&wait=8");
    let (heard, ()) = tokio::join!(served.ok(&path), async {
        served.scene.ctl_ok(&["close", "train"]).await;
    });
    let event = &heard["events"][0];
    assert!(asked.elapsed() < Duration::from_secs(8), "it waited for its whole time");
    assert!(event["number"].as_u64().unwrap() > next, "{heard}");
    drop(served.nodes);
}

#[tokio::test]
async fn before_the_jobs_are_read_the_api_says_so_and_unasked_it_shows_none() {
    let args = ["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let coordinator = Process::start("elastic-coordinator", &args);
    let page = coordinator.says("http://", WITHIN).await;
    for path in ["/", "/page.js", "/v1/jobs"] {
        let answer = http(&page, path).await;
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("--http-jobs"), "{path}: {answer}");
    }
    let coordinator = Process::start("elastic-coordinator", &[&args[..], &["--http-jobs"]].concat());
    let page = coordinator.says("http://", WITHIN).await;
    let answer = http(&page, "/v1/jobs").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("is the store there?"), "{answer}");
}

/// Another site's page has its name lead to this port. The browser sends that name, and lets the page read all answers.
#[tokio::test]
async fn a_page_of_another_site_reads_no_job() {
    let names = ["--peer-address", "coordinator.example", "--allowed-host", "jobs.example"];
    let args = ["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--http-jobs"];
    let coordinator = Process::start("elastic-coordinator", &[&args[..], &names].concat());
    let page = coordinator.says("http://", WITHIN).await;
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // 503: let in, and no job was read yet.
    for (host, path, status) in [
        ("evil.example:9400", "/v1/jobs", 403),
        ("evil.example", "/v1/jobs/train/events", 403),
        ("evil.example", "/live", 200),
        ("evil.example", "/metrics", 200),
        ("localhost:9400", "/v1/jobs", 503),
        ("jobs.example", "/v1/jobs", 503),
        ("coordinator.example:9400", "/v1/jobs", 503),
        (&machine, "/v1/jobs", 503),
    ] {
        let answer = answer_to(host, &page, path).await;
        assert_eq!(answer[9..12], status.to_string(), "{host} {path}: {answer}");
        assert!(status != 403 || answer.contains("--allowed-host evil.example"), "{answer}");
    }
    let called = |name: &str| Endpoint::from_shared(format!("http://{page}")).unwrap().origin(name.parse().unwrap());
    for (name, code) in [("http://evil.example", Code::PermissionDenied), ("http://localhost", Code::Unavailable)] {
        let mut jobs = JobsClient::new(called(name).connect().await.unwrap());
        assert_eq!(jobs.list(ListRequest::default()).await.unwrap_err().code(), code, "{name}");
    }
}

/// The page of `address` as Chromium has made it after three seconds of the page's own time; with `shot`, a picture
/// of it too.
async fn look(chromium: &Path, address: &str, profile: &Path, shot: Option<&Path>) -> String {
    let mut command = Command::new(chromium);
    command.args(["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]);
    // Its sandbox refuses to run as root. The page is our own.
    command.arg("--no-sandbox").arg(format!("--user-data-dir={}", profile.display()));
    command.args(["--virtual-time-budget=3000", "--window-size=1280,900"]);
    match shot {
        Some(shot) => command.arg(format!("--screenshot={}", shot.display())),
        None => command.arg("--dump-dom"),
    };
    let output = command.arg(address).kill_on_drop(true).output();
    let output = tokio::time::timeout(4 * WITHIN, output).await.expect("chromium ends").unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn the_page_shows_jobs_rounds_nodes_and_failures() {
    let chromium = Path::new("/usr/bin/chromium");
    if !chromium.exists() {
        return skip("CHROMIUM", "there is no /usr/bin/chromium to look at the page with");
    }
    let mut served = Served::start().await;
    let profile = tempfile::tempdir().unwrap();
    let progress = r#"{"generation":1,"round":2,"step":1200,"total_steps":5000,"epoch":3,"loss":2.34567,
        "steps_per_second":4.125,"furthest_step":1200,"since_ms":1000000,"at_ms":1400000,"productive_ms":300000}"#;
    let put = Op::put(served.scene.keys.progress(), progress);
    served.scene.store.put(vec![], put).await.unwrap();
    let list = look(chromium, &format!("http://{}/", served.page), profile.path(), None).await;
    for shown in ["href=\"#train\"", "state running", "1200 / 5000", "2.3457", "4.13", "75 %"] {
        assert!(list.contains(shown), "{shown} is missing:\n{list}");
    }

    let address = format!("http://{}/#train", served.page);
    let job = look(chromium, &address, profile.path(), None).await;
    for shown in ["<title>train – elastic jobs</title>", "2 here, 2 to 2 wanted", "class=\"timeline\"", "Group rank"]
        .into_iter()
        .chain(["step 1200 of 5000 (24 %), epoch 3, loss 2.3457, steps/s 4.13, goodput 75 %", "<progress max=\"5000\""])
    {
        assert!(job.contains(shown), "{shown} is missing:\n{job}");
    }
    assert!(job.contains("&lt;img src=x") && !job.contains("<img"), "records are shown as text:\n{job}");
    if let Some(shot) = std::env::var_os("ELASTIC_PAGE_PICTURE") {
        look(chromium, &address, profile.path(), Some(Path::new(&shot))).await;
    }

    let unknown = look(chromium, &format!("http://{}/#trian", served.page), profile.path(), None).await;
    assert!(unknown.contains("there is no job \"trian\""), "{unknown}");
    succeed(served.nodes).await;
    assert_eq!(served.coordinator.terminate(WITHIN).await, 0);
}
