//! etcd's own command line, as an operator uses it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use elastic_store::{Op, Store, Txn};
use tokio::sync::mpsc;

use super::{Served, serve, within};

fn command(server: &Served, args: &[&str]) -> Command {
    let mut command = Command::new("etcdctl");
    command.env_clear().env("PATH", "/usr/bin:/bin:/usr/local/bin").env("ETCDCTL_API", "3");
    command.args(["--endpoints", &server.address.to_string()]).args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command to its end: what it printed, or what it complained of.
async fn etcdctl_with(server: &Served, args: &[&str], input: &'static str) -> Result<String, String> {
    let mut child = command(server, args).spawn().expect("etcdctl is installed");
    let done = tokio::task::spawn_blocking(move || {
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    });
    let output = within(done).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

async fn etcdctl(server: &Served, args: &[&str]) -> Result<String, String> {
    etcdctl_with(server, args, "").await
}

async fn ok(server: &Served, args: &[&str]) -> String {
    etcdctl(server, args).await.unwrap_or_else(|error| panic!("{args:?}: {error}"))
}

/// A command that continues to print lines; killed when dropped.
struct Running {
    child: Child,
    lines: mpsc::UnboundedReceiver<String>,
}

impl Running {
    fn start(server: &Served, args: &[&str]) -> Running {
        let mut child = command(server, args).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                drop(sender.send(line));
            }
        });
        Running { child, lines }
    }

    async fn lines(&mut self, count: usize) -> Vec<String> {
        let mut lines = Vec::new();
        while lines.len() < count {
            lines.push(within(self.lines.recv()).await.expect("more output"));
        }
        lines
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[tokio::test]
async fn keys_are_put_read_and_deleted() {
    let server = serve().await;
    for (key, value) in [("jobs/a", "1"), ("jobs/b", "2"), ("other", "3"), ("jobs/a", "4")] {
        assert_eq!(ok(&server, &["put", key, value]).await, "OK");
    }
    assert_eq!(ok(&server, &["get", "--prefix", "jobs/"]).await, "jobs/a\n4\njobs/b\n2");
    assert_eq!(ok(&server, &["get", "--prefix", "", "--keys-only", "--limit=1"]).await, "jobs/a");
    assert_eq!(ok(&server, &["get", "--from-key", "jobs/b", "--print-value-only"]).await, "2\n3");
    assert_eq!(ok(&server, &["get", "jobs/a", "--rev=2"]).await, "jobs/a\n1");
    let by_write = ["get", "--prefix", "", "--keys-only", "--sort-by=MODIFY", "--order=DESCEND"];
    assert_eq!(ok(&server, &by_write).await.replace("\n\n", " "), "jobs/a other jobs/b");
    assert_eq!(ok(&server, &["put", "--prev-kv", "other", "5"]).await, "OK\nother\n3");
    assert_eq!(ok(&server, &["put", "--ignore-value", "other"]).await, "OK");
    assert_eq!(ok(&server, &["del", "--prefix", "--prev-kv", "jobs/"]).await, "2\njobs/a\n4\njobs/b\n2");
    assert_eq!(ok(&server, &["get", "--prefix", ""]).await, "other\n5");
    let missing = etcdctl(&server, &["put", "--ignore-value", "nothing"]).await.unwrap_err();
    assert!(missing.contains("etcdserver: key not found"), "{missing}");
}

#[tokio::test]
async fn a_transaction_takes_the_branch_that_its_conditions_choose() {
    let server = serve().await;
    const CLAIM: &str = "create(\"leader\") = \"0\"\n\nput leader me\n\nget leader\n\n";
    assert_eq!(etcdctl_with(&server, &["txn"], CLAIM).await.unwrap(), "SUCCESS\n\nOK");
    assert_eq!(etcdctl_with(&server, &["txn"], CLAIM).await.unwrap(), "FAILURE\n\nleader\nme");
    const TWICE: &str = "\nput a 1\nput a 2\n\n\n";
    let error = etcdctl_with(&server, &["txn"], TWICE).await.unwrap_err();
    assert!(error.contains("etcdserver: duplicate key given in txn request"), "{error}");
}

#[tokio::test]
async fn a_watch_replays_the_past_and_follows_the_present() {
    let server = serve().await;
    server.store.txn(Txn::of([Op::put("a", "0")])).await.unwrap();
    server.store.txn(Txn::of([Op::put("a", "1")])).await.unwrap();
    let mut watch = Running::start(&server, &["watch", "--rev=3", "--prev-kv", "--prefix", "a"]);
    assert_eq!(watch.lines(5).await, ["PUT", "a", "0", "a", "1"]);
    ok(&server, &["put", "ab", "2"]).await;
    ok(&server, &["put", "b", "3"]).await;
    ok(&server, &["del", "a"]).await;
    assert_eq!(watch.lines(3).await, ["PUT", "ab", "2"]);
    assert_eq!(watch.lines(5).await, ["DELETE", "a", "1", "a", ""]);
}

#[tokio::test]
async fn a_lease_is_granted_renewed_inspected_and_revoked() {
    let server = serve().await;
    let granted = ok(&server, &["lease", "grant", "60"]).await;
    let id = granted.split(' ').nth(1).unwrap();
    assert_eq!(granted, format!("lease {id} granted with TTL(60s)"));
    ok(&server, &["put", "--lease", id, "mine", "x"]).await;
    assert!(ok(&server, &["lease", "list"]).await.ends_with(id));
    assert_eq!(
        ok(&server, &["lease", "keep-alive", "--once", id]).await,
        format!("lease {id} keepalived with TTL(60)")
    );
    let status = ok(&server, &["lease", "timetolive", "--keys", id]).await;
    assert!(status.starts_with(&format!("lease {id} granted with TTL(60s), remaining(")), "{status}");
    assert!(status.ends_with("attached keys([mine])"), "{status}");
    assert_eq!(ok(&server, &["lease", "revoke", id]).await, format!("lease {id} revoked"));
    assert_eq!(ok(&server, &["get", "mine"]).await, "");
    assert_eq!(ok(&server, &["lease", "timetolive", id]).await, format!("lease {id} already expired"));
    for gone in [&["lease", "revoke", id][..], &["put", "--lease", id, "mine", "x"]] {
        let error = etcdctl(&server, gone).await.unwrap_err();
        assert!(error.contains("etcdserver: requested lease not found"), "{error}");
    }
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_takes_its_keys_with_it() {
    let server = serve().await;
    let granted = ok(&server, &["lease", "grant", "1"]).await;
    // etcd's shortest lease is two seconds, and so is ours.
    assert!(granted.ends_with("granted with TTL(2s)"), "{granted}");
    ok(&server, &["put", "--lease", granted.split(' ').nth(1).unwrap(), "mine", "x"]).await;
    let mut watch = Running::start(&server, &["watch", "--rev=2", "mine"]);
    assert_eq!(watch.lines(6).await, ["PUT", "mine", "x", "DELETE", "mine", ""]);
}

#[tokio::test]
async fn compacted_history_is_refused() {
    let server = serve().await;
    for value in ["1", "2", "3"] {
        ok(&server, &["put", "a", value]).await;
    }
    assert_eq!(ok(&server, &["compact", "3"]).await, "compacted revision 3");
    assert_eq!(ok(&server, &["get", "a", "--rev=3"]).await, "a\n2");
    for past in [&["get", "a", "--rev=2"][..], &["watch", "a", "--rev=2"], &["compact", "3"]] {
        let error = etcdctl(&server, past).await.unwrap_err();
        assert!(error.contains("mvcc: required revision has been compacted"), "{past:?}: {error}");
    }
    let error = etcdctl(&server, &["get", "a", "--rev=99"]).await.unwrap_err();
    assert!(error.contains("etcdserver: mvcc: required revision is a future revision"), "{error}");
}

#[tokio::test]
async fn the_one_member_shows_itself() {
    let server = serve().await;
    ok(&server, &["put", "a", "1"]).await;
    let status: serde_json::Value =
        serde_json::from_str(&ok(&server, &["endpoint", "status", "-w=json"]).await).unwrap();
    let status = &status[0]["Status"];
    assert_eq!(status["header"]["revision"], 2);
    assert_eq!(status["leader"], status["header"]["member_id"]);
    assert!(status["version"].as_str().unwrap().ends_with("embedded"));
    let members = ok(&server, &["member", "list"]).await;
    assert!(members.contains("started, embedded"), "{members}");
    assert!(members.contains(&format!("http://{}", server.address)), "{members}");
    let health = etcdctl(&server, &["endpoint", "health"]).await;
    assert!(health.is_ok(), "{health:?}");
    assert_eq!(ok(&server, &["alarm", "list"]).await, "");
    let error = etcdctl(&server, &["member", "add", "b", "--peer-urls=http://127.0.0.1:1"]).await.unwrap_err();
    assert!(error.contains("the embedded store has no second member"), "{error}");
    let error = etcdctl(&server, &["user", "list"]).await.unwrap_err();
    assert!(error.contains("authentication is not enabled"), "{error}");
}

#[tokio::test]
async fn etcds_own_locks_and_elections_work_on_it() {
    let server = serve().await;
    let mut holder = Running::start(&server, &["lock", "mutex"]);
    let held = holder.lines(1).await;
    assert!(held[0].starts_with("mutex/"), "{held:?}");
    let mut waiter = Running::start(&server, &["lock", "mutex", "echo", "mine now"]);
    assert!(waiter.lines.try_recv().is_err());
    // The lock's key vanishes: the waiter has it.
    ok(&server, &["del", &held[0]]).await;
    assert_eq!(waiter.lines(1).await, ["mine now"]);
    let mut elected = Running::start(&server, &["elect", "office", "me"]);
    assert_eq!(elected.lines(2).await[1], "me");
}
