//! A real Prometheus beside jobs that meet every failure that an alert is for: what fires, and what dashboards show.
//! What each alert needs to fire, minute by minute, is in `deploy/prometheus/alerts_test.yaml`, not here.

use std::cell::Cell;

use elastic_tests::prelude::*;
use futures::future::join_all;

use super::alerts::alerts;
use super::deploy;
use crate::agents::gpus::with_library;

/// Some of what is waited for takes a quarter of a minute by itself.
const LONG: Duration = Duration::from_secs(60);

/// A worker that says how far it has come. The first round of all saves once.
const WORKER: &str = r#"
say = agent()
if rank == 0 and not (folder / "manifest.json").exists():
    (folder / "manifest.json").touch()
    say(type="commit", id=1, checkpoint=dict(step=5, path=str(folder / "manifest.json"), digest="crc32c:0"))
here()
step = 0
while True:
    step += 1
    say(type="progress", step=step, loss=1 / step)
    time.sleep(0.1)
"#;

/// The program of Debian's package, which lies in the folder of builds, beside the profile's.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    let program = binary("elastic-agent").parent()?.parent()?.join("prometheus").join(name);
    if !program.is_file() {
        skip("PROMETHEUS", format!("{name} is not there: scripts/prometheus.sh fetches it"));
        return None;
    }
    Some(program)
}

/// The alerts with times that a test can wait for: a hundredth of each, and 15 s at most.
fn hurried(rules: &str) -> String {
    let mut hurried = String::new();
    let mut rest = rules;
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, number) = rest.split_at(at);
        let digits = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
        let (digits, after) = number.split_at(digits);
        let minutes = match after.chars().next() {
            Some('m') => Some(1),
            Some('h') => Some(60),
            _ => None,
        };
        // A time is a word of its own: in brackets, after `offset` or after `for:`.
        let whole = after.get(1..).is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric()));
        hurried.push_str(before);
        match minutes.filter(|_| whole && before.ends_with(['[', ' '])) {
            Some(minutes) => {
                let ms = digits.parse::<u64>().unwrap() * minutes * 600;
                hurried = hurried + &ms.min(15_000).to_string() + "ms";
                rest = &after[1..];
            }
            None => {
                hurried.push_str(digits);
                rest = after;
            }
        }
    }
    hurried + rest
}

struct Prometheus {
    process: Process,
    dir: TempDir,
    address: String,
    begun: Instant,
}

impl Prometheus {
    async fn start(program: PathBuf, targets: &[String]) -> Prometheus {
        let dir = tempfile::Builder::new().prefix("elastic-prometheus-").tempdir().unwrap();
        let config = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}\n\
             rule_files: [alerts.yaml]\n\
             scrape_configs:\n  - job_name: elastic\n    honor_labels: true\n    static_configs:\n      \
             - targets: [{}]\n",
            targets.join(", ")
        );
        std::fs::write(dir.path().join("prometheus.yml"), config).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let mut command = Command::new(program);
        command.current_dir(dir.path()).arg("--config.file=prometheus.yml").arg("--storage.tsdb.path=data");
        command.arg(format!("--web.listen-address={address}")).arg("--log.level=warn");
        let process = Process::spawn("prometheus", command, &dir.path().join("log"));
        let prometheus = Prometheus { process, dir, address, begun: Instant::now() };
        eventually("Prometheus is ready", LIMIT, async || prometheus.get("api/v1/status/runtimeinfo", &[]).await.ok())
            .await;
        eventually("it scrapes all targets", LIMIT, async || {
            let up = prometheus.drawn("count(up == 1)").await.ok()?;
            (*up.last()? == targets.len() as f64).then_some(())
        })
        .await;
        prometheus
    }

    /// Has it load the alerts, and evaluate each once. Before the first scrape, a coordinator would count as gone.
    async fn watch(&self) {
        let rules = std::fs::read_to_string(deploy("prometheus/alerts.yaml")).unwrap();
        std::fs::write(self.dir.path().join("alerts.yaml"), hurried(&rules)).unwrap();
        self.process.signal(Signal::HUP);
        eventually("each alert is evaluated", LIMIT, async || {
            let rules = self.rules().await;
            let evaluated = |rule: &Value| rule["health"] == "ok" && rule["evaluationTime"] != 0.0;
            (!rules.is_empty() && rules.iter().all(evaluated)).then_some(())
        })
        .await;
    }

    async fn rules(&self) -> Vec<Value> {
        let data = self.get("api/v1/rules", &[]).await.unwrap();
        let groups = data["groups"].as_array().unwrap();
        groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).cloned().collect()
    }

    /// What its API answers under `data`, or its error.
    async fn get(&self, path: &str, parameters: &[(&str, &str)]) -> Result<Value, String> {
        let mut curl = tokio::process::Command::new("curl");
        curl.args(["--silent", "--show-error", "--globoff", "--get", "--max-time", "10"]).kill_on_drop(true);
        for (name, value) in parameters {
            curl.arg("--data-urlencode").arg(format!("{name}={value}"));
        }
        let answer = curl.arg(format!("http://{}/{path}", self.address)).output().await.unwrap();
        let text = String::from_utf8_lossy(&answer.stdout);
        let json: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        if json["status"] == "success" { Ok(json["data"].clone()) } else { Err(text.into_owned()) }
    }

    /// The numbers that an expression had since the beginning, as a panel draws them.
    async fn drawn(&self, expression: &str) -> Result<Vec<f64>, String> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let (start, end) = ((now - self.begun.elapsed().as_secs_f64()).to_string(), now.to_string());
        let range = [("query", expression), ("start", start.as_str()), ("end", end.as_str()), ("step", "500ms")];
        let data = self.get("api/v1/query_range", &range).await?;
        let series = data["result"].as_array().ok_or_else(|| format!("no series: {data}"))?;
        let points = series.iter().flat_map(|series| series["values"].as_array().into_iter().flatten());
        Ok(points.filter_map(|point| point[1].as_str()?.parse().ok()).filter(|value: &f64| !value.is_nan()).collect())
    }

    /// The names of all alerts that have fired.
    async fn fired(&self) -> BTreeSet<String> {
        let query = r#"count by (alertname) (last_over_time(ALERTS{alertstate="firing"}[10m]))"#;
        let data = self.get("api/v1/query", &[("query", query)]).await.unwrap();
        let series = data["result"].as_array().unwrap();
        series.iter().map(|series| series["metric"]["alertname"].as_str().unwrap().to_owned()).collect()
    }

    async fn fires(&self, alert: &str) {
        eventually(&format!("{alert} fires"), LONG, async || self.fired().await.contains(alert).then_some(())).await;
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("its log:\n{}", std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default());
        }
    }
}

/// The expressions of a dashboard's panels, as Grafana sends them when all jobs and nodes are chosen.
fn panels(dashboard: &Value) -> Vec<(String, String)> {
    let panels = dashboard["panels"].as_array().unwrap();
    let of_panel = |panel: &Value| -> Vec<(String, String)> {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        let sent = targets.iter().map(|target| {
            let expression = target["expr"].as_str().unwrap();
            expression.replace("$__rate_interval", "3s").replace("$job", ".*").replace("$node", ".*")
        });
        sent.map(|expression| (title.to_owned(), expression)).collect()
    };
    panels.iter().flat_map(of_panel).collect()
}

/// The variables of a dashboard that are asked of Prometheus: the metric and the label.
fn variables(dashboard: &Value) -> Vec<(String, String)> {
    let list = dashboard["templating"]["list"].as_array().unwrap();
    let queries = list.iter().filter_map(|variable| variable["query"]["query"].as_str());
    let parts = queries.map(|query| {
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).expect("label_values");
        let (metric, label) = inner.rsplit_once(", ").unwrap();
        (metric.replace("$job", ".*"), label.to_owned())
    });
    parts.collect()
}

fn coordinator(etcd: &EtcdServer, http: u16, flags: &[&str]) -> Process {
    let (etcd, http) = (etcd.address(), format!("127.0.0.1:{http}"));
    let args = ["--etcd", &etcd, "--peer-listen", "127.0.0.1:0", "--http", &http, "--lease-ttl", "4"];
    Process::start("elastic-coordinator", &[&args[..], flags].concat())
}

/// Two jobs on one etcd: one that will meet failures, and one that saves once and never again.
struct Site {
    etcd: EtcdServer,
    unsteady: Job,
    steady: Job,
    nodes: Vec<Agent>,
    others: Vec<Agent>,
    targets: Vec<String>,
}

impl Site {
    async fn start() -> Site {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let unsteady = Job::on(&etcd, "1:3").flag("--max-restarts=100").python(WORKER);
        let unsteady = with_library(unsteady, r#"{"GPU-a",0,1,0}"#);
        let lost = unsteady.path("lost");
        let unsteady = unsteady.env("FAKE_NVML_LOST", lost);
        let steady = Job::on(&etcd, "1").python(WORKER);
        let (mut nodes, mut targets) = (Vec::new(), Vec::new());
        for name in ["a", "b", "c"] {
            let port = free_port();
            targets.push(format!("'127.0.0.1:{port}'"));
            nodes.push(unsteady.start_with(name, &[&format!("--health-port={port}")]));
        }
        unsteady.runs(1, 3).await;
        let others = vec![steady.start_with("d", &["--rdzv-id=steady"])];
        steady.runs(1, 1).await;
        Site { etcd, unsteady, steady, nodes, others, targets }
    }

    /// Until that has happened, four jobs at a time begin and end.
    async fn beside_short_jobs(&self, until: impl Future<Output = ()>) {
        let over = &Cell::new(false);
        let short = &Job::on(&self.etcd, "1").program(["true"]);
        let jobs = (0..4).map(|place| async move {
            for number in (0..).take_while(|_| !over.get()) {
                let id = format!("--rdzv-id=short-{place}-{number}");
                assert_eq!(short.start_with("short", &[&id]).exit(LIMIT).await, 0);
            }
        });
        let until = async {
            until.await;
            over.set(true);
        };
        tokio::join!(until, join_all(jobs));
    }

    /// Until that has happened, etcd pauses again and again. What was written just before is answered late.
    async fn beside_pauses(&self, until: impl Future<Output = ()>) {
        let over = &Cell::new(false);
        let pauses = async {
            while !over.get() {
                self.etcd.pause().await;
                tokio::time::sleep(Duration::from_millis(700)).await;
                self.etcd.resume();
                tokio::time::sleep(Duration::from_millis(60)).await;
            }
        };
        let until = async {
            until.await;
            over.set(true);
        };
        tokio::join!(until, pauses);
    }
}

#[expect(clippy::too_many_lines, reason = "one scenario, step after step")]
#[tokio::test]
async fn alerts_fire_and_dashboards_show_what_happens_to_jobs() {
    let Some(program) = program("prometheus") else { return };
    let mut site = Site::start().await;
    let http = free_port();
    let first = coordinator(&site.etcd, http, &[]);
    let targets = [&site.targets[..], &[format!("'127.0.0.1:{http}'")]].concat();
    let prometheus = Prometheus::start(program, &targets).await;

    // Given jobs that train in peace, all alerts are loaded, and none fires or is about to.
    prometheus.watch().await;
    let all: BTreeSet<String> = alerts().into_iter().collect();
    let rules = prometheus.rules().await;
    let loaded: BTreeSet<String> = rules.iter().map(|rule| rule["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(loaded, all);
    assert!(rules.iter().all(|rule| rule["state"] == "inactive"), "{rules:?}");

    // When a job fails again and again until it has failed for good, and another finds no second node,
    // (after so long each time that every round is scraped)
    let looping = Job::on(&site.etcd, "1").flag("--max-restarts=7").flag("--restarts-without-progress=7");
    let looping = looping.program(["sh", "-c", "sleep 0.5; false"]);
    let mut failing = looping.start_with("loop", &["--rdzv-id=loop"]);
    let lonely = Job::on(&site.etcd, "2").conf("join_timeout", "300s");
    site.others.push(lonely.start_with("lonely", &["--rdzv-id=lonely"]));
    // a worker is killed, then an agent, and an operator drains a node,
    let round = site.unsteady.runs(1, 3).await;
    round.workers[0].kill();
    let round = site.unsteady.runs(round.number + 1, 3).await;
    site.nodes[2].kill();
    let round = site.unsteady.runs(round.number + 1, 2).await;
    site.unsteady.ctl_ok(&["drain", "job", "b"]).await;
    site.unsteady.runs(round.number + 1, 1).await;
    // and the only node of a job falls silent,
    let silent = Job::on(&site.etcd, "1");
    let mut mute = silent.start_with("silent", &["--rdzv-id=silent"]);
    silent.runs(1, 1).await;
    mute.signal(Signal::STOP);
    // and a GPU is lost,
    std::fs::write(site.unsteady.path("lost"), "").unwrap();
    // then each has its alert.
    for alert in [
        "ElasticJobRestartsOften",
        "ElasticGroupUnsteady",
        "ElasticJobLacksNodes",
        "ElasticNodeUnaccounted",
        "ElasticCheckpointOld",
        "ElasticJobFailed",
        "ElasticGpuUnfit",
    ] {
        prometheus.fires(alert).await;
    }
    assert_eq!(failing.exit(LIMIT).await, JOB_FAILED);
    mute.kill();
    site.unsteady.ctl_ok(&["close", "silent"]).await;

    // When many jobs begin and end in a short time, and etcd answers late, each has its alert. The jobs take long while
    // etcd does so.
    site.beside_short_jobs(async {
        site.beside_pauses(prometheus.fires("ElasticStoreSlow")).await;
        prometheus.fires("ElasticLeadershipUnsteady").await;
    })
    .await;

    // When etcd is away for a while, that is reported too.
    site.etcd.kill();
    prometheus.fires("ElasticStoreFails").await;
    site.etcd.restart().await;

    // Then every panel of both dashboards has something to draw, and every variable something to choose.
    for file in ["elastic", "agents"] {
        let text = std::fs::read_to_string(deploy(&format!("grafana/{file}.json"))).unwrap();
        let dashboard: Value = serde_json::from_str(&text).unwrap();
        for (title, expression) in panels(&dashboard) {
            let drawn = prometheus.drawn(&expression).await.unwrap_or_else(|error| panic!("{file}: {title}: {error}"));
            assert!(!drawn.is_empty(), "{file}: {title} shows nothing: {expression}");
        }
        for (metric, label) in variables(&dashboard) {
            let path = format!("api/v1/label/{label}/values");
            let values = prometheus.get(&path, &[("match[]", metric.as_str())]).await.unwrap();
            let choice = if label == "job" { "job" } else { "a" };
            assert!(values.as_array().unwrap().contains(&choice.into()), "{file}: {label} of {metric}: {values}");
        }
    }

    // When the only coordinator ends, and one comes that nodes cannot reach, each has its alert.
    drop(first);
    prometheus.fires("ElasticCoordinatorGone").await;
    let unreachable = coordinator(&site.etcd, http, &["--peer-address", "127.0.0.1:1"]);
    prometheus.fires("ElasticCoordinatorLeadsNothing").await;
    drop(unreachable);
    // When its certificate ends in three days, that is reported too.
    let pki = tempfile::tempdir().unwrap();
    let folder = pki.path().to_str().unwrap();
    site.unsteady.ctl_ok(&["certs", "authority", folder]).await;
    site.unsteady.ctl_ok(&["certs", "node", folder, "c", "--valid", "3d"]).await;
    let certificate = ["--peer-cert=c.pem", "--peer-key=c-key.pem", "--peer-ca=ca.pem"];
    let certificate = certificate.map(|flag| flag.replace('=', &format!("={folder}/")));
    let _outdated = coordinator(&site.etcd, http, &certificate.each_ref().map(String::as_str));
    prometheus.fires("ElasticCertificateEnds").await;

    let fired = prometheus.fired().await;
    assert_eq!(fired, all);
    // Agents end before the jobs whose folders they use.
    drop((site.nodes, site.others));
    drop((site.unsteady, site.steady));
}
