//! Users of the coordinator's APIs, as they call them with curl and over gRPC: roles, tokens, TLS, and what they
//! change on real etcd.

use elastic_tests::prelude::*;
use tokio::process::Command;
use tonic::Code;

use super::grpc::{self, Rpc};
use super::{Scene, WITHIN, succeed};

/// A new token, and the line of the users file that knows it.
pub(super) async fn token(name: &str, flags: &[&str]) -> (String, String) {
    let args = [&["token", name, "-o", "json"], flags].concat();
    let made = output("elasticctl", &args, WITHIN).await;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    let token = made["token"].as_str().unwrap().to_owned();
    assert!(!made["line"].to_string().contains(&token), "the file never holds the token");
    (token, made["line"].to_string())
}

/// A coordinator with users, whose port is at `url`, and a job of two nodes on real etcd.
pub(super) struct Served {
    pub(super) coordinator: Process,
    pub(super) url: String,
    pub(super) scene: Scene,
    pub(super) nodes: [InProcessNode; 2],
    users: PathBuf,
    _dir: TempDir,
}

impl Served {
    /// Over plain HTTP, once it has read the jobs.
    pub(super) async fn start(lines: &[&str]) -> Served {
        let served = Served::over("http", lines, &[]).await;
        let ready = async || (served.call("/ready", None, None).await.0 == 200).then_some(());
        eventually("it has read the jobs", WITHIN, ready).await;
        served
    }

    pub(super) async fn over(scheme: &str, lines: &[&str], flags: &[&str]) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let users = dir.path().join("users");
        std::fs::write(&users, lines.join("\n")).unwrap();
        let scene = Scene::on_etcd(1, 2).await;
        let nodes = scene.nodes(["a", "b"]).await;
        let file = users.display().to_string();
        let coordinator = scene.coordinator_with(&[&["--http", "127.0.0.1:0", "--http-users", &file], flags].concat());
        let address = coordinator.says(&format!("page of all jobs is {scheme}://"), WITHIN).await;
        Served { coordinator, url: format!("{scheme}://{address}"), scene, nodes, users, _dir: dir }
    }

    pub(super) fn set_users(&self, text: &str) {
        std::fs::write(&self.users, text).unwrap();
    }

    /// The status and the body of an answer; a body given makes it a POST.
    async fn call(&self, path: &str, token: Option<&str>, body: Option<&str>) -> (u16, String) {
        self.curl(path, token, body, &[]).await.expect("an answer")
    }

    pub(super) async fn curl(
        &self,
        path: &str,
        token: Option<&str>,
        body: Option<&str>,
        flags: &[&str],
    ) -> Option<(u16, String)> {
        let mut curl = Command::new("curl");
        curl.args(["-s", "--max-time", "15", "-w", "\n%{http_code}"]).args(flags);
        if let Some(token) = token {
            curl.args(["-H", &format!("Authorization: Bearer {token}")]);
        }
        if let Some(body) = body {
            curl.args(["-X", "POST", "-d", body]);
        }
        let output = curl.arg(format!("{}{path}", self.url)).output().await.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, status) = text.rsplit_once('\n')?;
        output.status.success().then(|| (status.parse().unwrap(), body.to_owned()))
    }
}

/// Calls of the JSON API and what they are over gRPC, with the statuses of callers without a token, with one that is
/// none, and of rita, olga, otto, theo and lena. Changes that go through come last in their column.
type Row = (&'static str, Option<&'static str>, Vec<Rpc>, [u16; 7]);

fn table() -> Vec<Row> {
    let absent = Some(r#"{"node":"absent"}"#);
    let empty = Some("{}");
    vec![
        ("/live", None, vec![], [200; 7]),
        ("/ready", None, vec![], [200; 7]),
        ("/metrics", None, vec![], [200; 7]),
        ("/", None, vec![], [200; 7]),
        ("/page.js", None, vec![], [200; 7]),
        ("/v1/me", None, vec![Rpc::Me], [401, 401, 200, 200, 200, 200, 401]),
        ("/v1/jobs", None, vec![Rpc::List, Rpc::WatchAll], [401, 401, 200, 200, 200, 200, 401]),
        ("/v1/jobs/train", None, vec![Rpc::Get], [401, 401, 200, 200, 404, 200, 401]),
        ("/v1/jobs/train/events", None, vec![Rpc::Events, Rpc::Watch], [401, 401, 200, 200, 404, 200, 401]),
        ("/v1/nothing", None, vec![Rpc::Unknown], [401, 401, 404, 404, 404, 404, 401]),
        ("/v1/jobs/train/drain", None, vec![], [401, 401, 405, 405, 405, 405, 401]),
        ("/v1/jobs/train/drain", absent, vec![grpc::drain("absent")], [401, 401, 403, 404, 404, 403, 401]),
        ("/v1/jobs/train/undrain", absent, vec![grpc::undrain("absent")], [401, 401, 403, 404, 404, 403, 401]),
        ("/v1/jobs/train/include", absent, vec![grpc::include("absent")], [401, 401, 403, 404, 404, 403, 401]),
        ("/v1/jobs/train/evict", absent, vec![grpc::evict("absent")], [401, 401, 403, 404, 404, 403, 401]),
        (
            "/v1/jobs/train/exclude",
            Some(r#"{"node":"a b"}"#),
            vec![grpc::exclude("a b"), grpc::drain("a b")],
            [401, 401, 403, 400, 404, 403, 401],
        ),
        ("/v1/jobs/train/drain", empty, vec![grpc::drain("")], [401, 401, 403, 400, 404, 403, 401]),
        ("/v1/jobs/train/drain", Some(r#"{"node":"b","nod":"a"}"#), vec![], [401, 401, 403, 400, 404, 403, 401]),
        (
            "/v1/jobs/train/set",
            Some(r#"{"min":9,"max":2}"#),
            vec![grpc::set(Some(9), Some(2))],
            [401, 401, 403, 400, 404, 403, 401],
        ),
        ("/v1/jobs/train/set", empty, vec![grpc::set(None, None)], [401, 401, 403, 400, 404, 403, 401]),
        ("/v1/jobs/train/sett", empty, vec![], [401, 401, 403, 404, 404, 403, 401]),
        ("/v1/jobs/train/delete", empty, vec![Rpc::Delete], [401, 401, 403, 409, 404, 403, 401]),
        ("/v1/jobs/train/drop-checkpoint", empty, vec![Rpc::DropCheckpoint], [401, 401, 403, 409, 404, 403, 401]),
        (
            "/v1/jobs/train/set",
            Some(r#"{"max":2}"#),
            vec![grpc::set(None, Some(2))],
            [401, 401, 403, 200, 404, 403, 401],
        ),
        ("/v1/jobs/train/exclude", absent, vec![grpc::exclude("absent")], [401, 401, 403, 200, 404, 403, 401]),
        ("/v1/jobs/train/resume", empty, vec![grpc::resume()], [401, 401, 403, 200, 404, 403, 401]),
        ("/v1/jobs/train/pause", empty, vec![grpc::pause()], [401, 401, 403, 200, 404, 403, 401]),
        ("/v1/jobs/train/close", Some(""), vec![grpc::close()], [401, 401, 403, 200, 404, 403, 401]),
    ]
}

/// What a status is over gRPC.
fn over_grpc(rpc: &Rpc, status: u16) -> Code {
    match status {
        200 => Code::Ok,
        400 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 if matches!(rpc, Rpc::Unknown) => Code::Unimplemented,
        404 => Code::NotFound,
        409 => Code::FailedPrecondition,
        other => panic!("nothing is {other} over gRPC"),
    }
}

#[tokio::test]
async fn each_role_may_make_its_calls_and_no_others() {
    let (reader, reads) = token("rita", &[]).await;
    let (operator, operates) = token("olga", &["--role", "operate"]).await;
    let (other, others) = token("otto", &["--role", "operate", "--job", "else"]).await;
    let (own, owns) = token("theo", &["--role", "read", "--job", "train"]).await;
    let (late, expired) = token("lena", &["--role", "operate", "--expires", "0s"]).await;
    let lines = ["# ours", &reads, &operates, &others, &owns, &expired];
    let callers = [None, Some("nonsense"), Some(&*reader), Some(&*operator), Some(&*other), Some(&*own), Some(&*late)];

    let served = Served::start(&lines).await;
    let mut refusals = Vec::new();
    for (path, body, _, statuses) in table() {
        for (caller, status) in callers.iter().zip(statuses) {
            let (found, answer) = served.call(path, *caller, body).await;
            assert_eq!(found, status, "{path} {body:?} by {caller:?}: {answer}");
            let why = serde_json::from_str::<Value>(&answer).ok().and_then(|it| Some(it["error"].as_str()?.to_owned()));
            assert!(status < 400 || why.is_some(), "{path}: {answer}");
            refusals.push(why.unwrap_or_default());
        }
    }
    let lists = async |token: &str| {
        let (_, answer) = served.call("/v1/jobs", Some(token), None).await;
        serde_json::from_str::<Value>(&answer).unwrap()["jobs"].as_array().unwrap().len()
    };
    assert_eq!((lists(&reader).await, lists(&other).await, lists(&own).await), (1, 0, 1));
    // A refusal names no job that is not the caller's.
    let (_, answer) = served.call("/v1/jobs/trian/close", Some(&operator), Some("{}")).await;
    assert!(answer.contains("there is no job") && !answer.contains("train"), "{answer}");
    let logs = |served: &Served| {
        let log = served.coordinator.output();
        log.contains("asked by olga (API): close") && [&reader, &operator, &other].iter().all(|it| !log.contains(*it))
    };
    assert!(logs(&served));

    // Over gRPC it is the same, to the word.
    let served = Served::start(&lines).await;
    let channel = grpc::channel(&served.url).await;
    let mut refusals = refusals.into_iter();
    for (path, _, rpcs, statuses) in table() {
        for (caller, status) in callers.iter().zip(statuses) {
            let why = refusals.next().unwrap();
            for rpc in &rpcs {
                let answer = rpc.clone().by(*caller, channel.clone()).await;
                let (found, says) =
                    answer.map_or_else(|no| (no.code(), no.message().to_owned()), |()| (Code::Ok, String::new()));
                assert_eq!(found, over_grpc(rpc, status), "{rpc:?} by {caller:?}: {says}");
                assert!(says == why || found == Code::Unimplemented, "{rpc:?}, {path}: {says:?} is not {why:?}");
            }
        }
    }
    assert!(logs(&served));
}

#[tokio::test]
async fn what_a_user_changes_is_carried_out_and_reported() {
    let (operator, line) = token("olga", &["--role", "operate"]).await;
    let mut served = Served::start(&[&line]).await;
    let (status, answer) = served.call("/v1/jobs/train/drain", Some(&operator), Some(r#"{"node":"b"}"#)).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, &answer["desired"]["drain"], &answer["advice"]), (200, &json!(["b"]), &Value::Null));
    served.nodes[0].runs(2, 1, WITHIN).await.unwrap();
    let (_, events) = served.call("/v1/jobs/train/events", Some(&operator), None).await;
    let events: Value = serde_json::from_str(&events).unwrap();
    let asked = events["events"].as_array().unwrap().iter().find(|event| !event["asked_by"].is_null());
    let asked = asked.unwrap_or_else(|| panic!("{events}"));
    assert_eq!(asked["asked_by"], json!({ "name": "olga", "via": "api" }));

    let (_, answer) = served.call("/v1/jobs/train/drain", Some(&operator), Some(r#"{"node":"a"}"#)).await;
    assert!(answer.contains("0 nodes stay and the job needs 1"), "{answer}");
    let (status, _) = served.call("/v1/jobs/train/undrain", Some(&operator), Some(r#"{"node":"b"}"#)).await;
    assert_eq!(status, 200);
    let (status, _) = served.call("/v1/jobs/train/close", Some(&operator), None).await;
    assert_eq!(status, 405, "a call that changes something is a POST");
    let (status, _) = served.call("/v1/jobs/train/close", Some(&operator), Some("{}")).await;
    assert_eq!(status, 200);
    drop(served.nodes);
}

#[tokio::test]
async fn tokens_change_while_the_coordinator_runs_and_a_bad_file_changes_nothing() {
    let (first, line) = token("anna", &[]).await;
    let served = Served::start(&[&line]).await;
    assert_eq!(served.call("/v1/jobs", Some(&first), None).await.0, 200);
    let becomes = async |token: &str, status: u16| {
        let what = format!("a call is answered with {status}");
        eventually(&what, WITHIN, async || {
            (served.call("/v1/jobs", Some(token), None).await.0 == status).then_some(())
        })
        .await;
    };
    let (second, next) = token("anna", &[]).await;
    served.set_users(&next);
    becomes(&second, 200).await;
    assert_eq!(served.call("/v1/jobs", Some(&first), None).await.0, 401, "the token was replaced");

    served.set_users(&format!("{line}\nnonsense\n"));
    served.coordinator.says("line 2: ", WITHIN).await;
    assert_eq!(served.call("/v1/jobs", Some(&second), None).await.0, 200, "those from before stay");
    assert_eq!(served.call("/v1/jobs", Some(&first), None).await.0, 401);
    std::fs::remove_file(&served.users).unwrap();
    served.coordinator.says("cannot read ", WITHIN).await;
    assert_eq!(served.call("/v1/jobs", Some(&second), None).await.0, 200);

    // One that expires is none from that moment on, though the file does not change.
    let (short, line) = token("lena", &["--expires", "3s"]).await;
    served.set_users(&line);
    becomes(&short, 200).await;
    becomes(&short, 401).await;
    succeed(served.nodes).await;
}

fn copy(from: &(PathBuf, PathBuf), to: &(PathBuf, PathBuf)) {
    std::fs::copy(&from.0, &to.0).unwrap();
    std::fs::copy(&from.1, &to.1).unwrap();
}

#[tokio::test]
async fn a_renewed_certificate_is_served_without_a_restart() {
    let (operator, line) = token("olga", &["--role", "operate"]).await;
    let (old, new, dir) = (Certs::new(), Certs::new(), tempfile::tempdir().unwrap());
    let files = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    copy(&old.server, &files);
    let (cert, key) = (files.0.display().to_string(), files.1.display().to_string());
    let (old_ca, new_ca) = (old.ca.display().to_string(), new.ca.display().to_string());
    let served = Served::over("https", &[&line], &["--http-cert", &cert, "--http-key", &key]).await;
    let trusts = async |ca: &str| {
        let answer = served.curl("/v1/jobs/train", Some(&operator), None, &["--cacert", ca]).await;
        answer.is_some_and(|(status, _)| status == 200)
    };
    eventually("TLS is served", WITHIN, async || trusts(&old_ca).await.then_some(())).await;
    assert!(!trusts(&new_ca).await, "a stranger's certificate is not trusted");

    // Half of a renewal does not fit, and is not served.
    std::fs::copy(&new.server.0, &files.0).unwrap();
    served.coordinator.says("do not fit", WITHIN).await;
    assert!(trusts(&old_ca).await);
    copy(&new.server, &files);
    eventually("the new certificate is served", WITHIN, async || trusts(&new_ca).await.then_some(())).await;
    assert!(!trusts(&old_ca).await);
    succeed(served.nodes).await;
}

#[tokio::test]
async fn what_cannot_be_served_safely_is_refused_at_start() {
    let (_, line) = token("olga", &["--role", "operate"]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (users, bad) = (file("users", &line), file("bad", "{\"name\":\"a\"}"));
    let certs = Certs::new();
    let show = |path: &Path| path.display().to_string();
    let (cert, other_key) = (show(&certs.server.0), show(&certs.client.1));
    let everywhere = "0.0.0.0:0";
    for (flags, says) in [
        (vec!["--http", everywhere, "--http-users", &users], "--http-insecure"),
        (vec!["--http", "127.0.0.1:0", "--http-users", &bad], "line 1: missing field `role`"),
        (vec!["--http", "127.0.0.1:0", "--http-users", "/nowhere/users"], "cannot read /nowhere/users"),
        (vec!["--http", everywhere, "--http-cert", &cert, "--http-key", &other_key], "do not fit"),
        (vec!["--http", everywhere, "--http-cert", &users, "--http-key", &other_key], "holds no PEM certificate"),
        (vec!["--http", everywhere, "--http-cert", &cert], "--http-key"),
        (vec!["--http-users", &users], "--http"),
    ] {
        let args = [&["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0"], &flags[..]].concat();
        let output = output("elastic-coordinator", &args, WITHIN).await;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(says), "{flags:?}: {text}");
    }
    let args = ["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--http", everywhere, "--http-users", &users];
    let behind_a_proxy = Process::start("elastic-coordinator", &[&args[..], &["--http-insecure"]].concat());
    behind_a_proxy.says("page of all jobs is ", WITHIN).await;
}
