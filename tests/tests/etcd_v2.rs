//! The client of etcd's v2 API against real servers: conditions, times to live, long polls, and what servers and
//! networks do to them.

use elastic_node::Membership;
use elastic_node::Status;
use elastic_node::requests::barrier::BarrierError;
use elastic_tests::prelude::*;
use elastic_torchelastic::etcd_v2::{Answer, Entry, EtcdV2, News, Only, Refusal, Request};
use elastic_torchelastic::{Paths, meet_on_v2};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

const LIMIT: Duration = Duration::from_secs(30);

fn put(key: &str, value: &str, only: Only) -> Request {
    Request::Put { key: key.into(), value: value.into(), ttl: None, only }
}

fn brief(key: &str, ttl: u64) -> Request {
    Request::Put { key: key.into(), value: String::new(), ttl: Some(ttl), only: Only::Always }
}

fn read(key: &str) -> Request {
    Request::Read { key: key.into(), recursive: true }
}

fn client(config: EtcdConfig) -> EtcdV2 {
    EtcdV2::connect(config).unwrap()
}

async fn ask(client: &EtcdV2, request: Request) -> Answer {
    let what = format!("{request:?}");
    within(&what, LIMIT, client.request(request)).await.unwrap_or_else(|error| panic!("{what}: {error}"))
}

async fn done(client: &EtcdV2, request: Request) -> Entry {
    ask(client, request).await.outcome.unwrap()
}

/// The next change. Empty answers and failing members are passed over.
async fn change(client: &EtcdV2, key: &str, index: u64) -> (bool, Entry) {
    let next = eventually("a change", LIMIT, async || match client.wait(key, index).await {
        Ok(News::Change { gone, entry }) => Some((gone, entry)),
        Ok(News::Nothing) | Err(StoreError::Unavailable { .. }) => None,
        other => panic!("{other:?}"),
    });
    next.await
}

/// A member of a version of three nodes, and what says that it is.
fn member(group_rank: u32) -> watch::Sender<Status> {
    let membership = Membership { version: 7, group_rank, group_world_size: 3 };
    watch::Sender::new(Status { membership: Some(membership), ..Status::default() })
}

#[tokio::test]
async fn a_barrier_is_passed_by_all_or_by_none() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let (client, paths) = (client(server.config()), Paths::new("/p", "job"));
    let members: Vec<_> = (0..3).map(member).collect();
    let meet = |rank: usize, name: &'static str, limit| {
        let (client, paths, status) = (client.clone(), paths.clone(), members[rank].subscribe());
        tokio::spawn(async move { meet_on_v2(&client, &paths, &status, name, limit).await })
    };
    let arrived = async |rank, name| {
        let arrival = async || ask(&client, read(&paths.arrival(7, name, rank))).await.outcome.ok();
        eventually("an arrival", LIMIT, arrival).await;
    };

    // Who arrives first waits for the last; to come again is to pass
    let early = [meet(0, "..", LIMIT), meet(1, "..", LIMIT)];
    arrived(0, "..").await;
    arrived(1, "..").await;
    assert!(early.iter().all(|waiting| !waiting.is_finished()));
    assert_eq!(meet(2, "..", LIMIT).await.unwrap(), Ok(()));
    for passed in early {
        assert_eq!(within("it passes", LIMIT, passed).await.unwrap(), Ok(()));
    }
    assert_eq!(meet(0, "..", LIMIT).await.unwrap(), Ok(()));

    // Another barrier knows nothing of that, and says who may be missing
    let error = meet(0, "next", Duration::from_millis(50)).await.unwrap().unwrap_err();
    assert!(error.to_string().ends_with("within 50ms; nodes that run torchrun never do"), "{error}");

    // It fails with the version, and for who is in none
    let waiting = meet(1, "next", LIMIT);
    arrived(1, "next").await;
    members[1].send_replace(Status::default());
    let ended = BarrierError::RoundEnded { round: 7, name: "next".into() };
    assert_eq!(within("it hears", LIMIT, waiting).await.unwrap(), Err(ended));
    assert_eq!(meet(1, "next", LIMIT).await.unwrap(), Err(BarrierError::NotMember("next".into())));
    assert_eq!(meet(0, "a/b", LIMIT).await.unwrap(), Err(BarrierError::Name("a/b".into())));
}

#[tokio::test]
async fn conditions_decide() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let client = client(server.config());
    assert!(client.probe().await.unwrap().version.starts_with("3."));

    assert_eq!(ask(&client, read("/p/a")).await.outcome, Err(Refusal::Missing));
    let made = done(&client, put("/p/a", "1 +&=%", Only::Absent)).await;
    assert_eq!((made.value.as_str(), made.key.as_str()), ("1 +&=%", "/p/a"));
    assert_eq!(ask(&client, put("/p/a", "2", Only::Absent)).await.outcome, Err(Refusal::Exists));
    assert_eq!(ask(&client, put("/p/a", "2", Only::Value("1".into()))).await.outcome, Err(Refusal::Differs));
    let index = done(&client, put("/p/a", "2", Only::Value("1 +&=%".into()))).await.modified;
    assert_eq!(ask(&client, put("/p/a", "3", Only::Index(index - 1))).await.outcome, Err(Refusal::Differs));
    done(&client, put("/p/a", "3", Only::Index(index))).await;
    let deletion = |value: &str| Request::Delete { key: "/p/a".into(), only: Only::Value(value.into()) };
    assert_eq!(ask(&client, deletion("2")).await.outcome, Err(Refusal::Differs));
    done(&client, deletion("3")).await;
    assert_eq!(ask(&client, deletion("3")).await.outcome, Err(Refusal::Missing));

    // A directory is made once, and read with all that is in it
    let directory = |ttl| Request::MakeDir { key: "/p/d".into(), ttl };
    done(&client, directory(None)).await;
    assert_eq!(ask(&client, directory(Some(5))).await.outcome, Err(Refusal::Exists));
    done(&client, put("/p/d/e:+=@/f", "x", Only::Always)).await;
    let tree = done(&client, read("/p/d")).await;
    assert_eq!(tree.entries[0].entries[0].key, "/p/d/e:+=@/f");
    assert!(matches!(ask(&client, put("/p/d", "x", Only::Always)).await.outcome, Err(Refusal::Other(102, _))));
}

#[tokio::test]
async fn keys_expire_unless_refreshed_and_watchers_hear_only_of_the_one() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let client = client(server.config());
    let kept = done(&client, brief("/t/kept", 3)).await;
    done(&client, brief("/t/left", 1)).await;
    let begun = Instant::now();
    let refresh = Request::Refresh { key: "/t/kept".into(), dir: false, ttl: 60 };
    done(&client, refresh.clone()).await;
    let (gone, entry) = change(&client, "/t", kept.modified + 2).await;
    assert!(gone && entry.key == "/t/left", "{entry:?}");
    assert!(begun.elapsed() > Duration::from_millis(300), "it did not expire at once");
    assert_eq!(
        ask(&client, Request::Refresh { key: "/t/left".into(), dir: false, ttl: 5 }).await.outcome,
        Err(Refusal::Missing)
    );
    assert_eq!(done(&client, read("/t")).await.entries.len(), 1);
}

#[tokio::test]
async fn a_watch_that_fell_behind_is_an_error() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let client = client(server.config());
    let first = done(&client, put("/w/a", "0", Only::Always)).await.modified;
    // etcd keeps 1,000 events
    for n in 0..1_010 {
        done(&client, put("/other", &n.to_string(), Only::Always)).await;
    }
    assert_eq!(client.wait("/w", first).await.unwrap(), News::Forgotten);
    // Reading again tells where to continue
    let now = ask(&client, read("/w")).await.index;
    let watching = {
        let client = client.clone();
        tokio::spawn(async move { change(&client, "/w", now + 1).await })
    };
    done(&client, put("/w/a", "1", Only::Always)).await;
    assert_eq!(within("the change", LIMIT, watching).await.unwrap().1.value, "1");
}

#[tokio::test]
async fn a_restart_and_a_cut_cost_a_watch_nothing() {
    let mut server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let client = client(EtcdConfig::new([proxy.address()]));
    done(&client, put("/w/a", "0", Only::Always)).await;
    for fault in ["cut", "restart", "refusal"] {
        // A write that is tried again may have happened twice
        let from = ask(&client, read("/w/a")).await.index + 1;
        let watching = {
            let client = client.clone();
            tokio::spawn(async move { change(&client, "/w", from).await })
        };
        match fault {
            "cut" => proxy.cut(),
            "restart" => server.restart().await,
            // What happens while the watch is broken is reported afterwards
            _ => {
                proxy.refuse();
                done(&EtcdV2::connect(server.config()).unwrap(), put("/w/a", fault, Only::Always)).await;
                proxy.heal();
            }
        }
        if fault != "refusal" {
            eventually("a write", LIMIT, async || client.request(put("/w/a", fault, Only::Always)).await.ok()).await;
        }
        let (_, entry) = within("the change", LIMIT, watching).await.unwrap();
        assert_eq!(entry.value, fault);
    }
}

#[tokio::test]
async fn a_frozen_server_is_left_for_another_and_its_watches_with_it() {
    let cluster = EtcdCluster::start_with(EtcdOptions::with_v2()).await;
    let leader = cluster.leader(None).await;
    let follower = (leader + 1) % 3;
    // Given a client of a follower first
    let addresses = (0..3).map(|n| cluster.members[(follower + n) % 3].address());
    let client = client(EtcdConfig::new(addresses));
    let first = done(&client, put("/w/a", "0", Only::Always)).await.modified;
    let watching = {
        let client = client.clone();
        tokio::spawn(async move { change(&client, "/w", first + 1).await })
    };

    // When it freezes, then a read is answered by another within the call's deadline
    cluster.members[follower].pause().await;
    let begun = Instant::now();
    done(&client, read("/w")).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // And the watch continues there
    done(&client, put("/w/a", "1", Only::Always)).await;
    assert_eq!(within("the change", LIMIT, watching).await.unwrap().1.value, "1");

    // When nothing is left that answers, then a write's outcome is unknown, in time
    for member in &cluster.members {
        member.pause().await;
    }
    let begun = Instant::now();
    let error = client.request(put("/w/a", "2", Only::Always)).await.unwrap_err();
    assert!(error.outcome_unknown(), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    cluster.members.iter().for_each(EtcdServer::resume);
    eventually("the cluster works again", LIMIT, async || client.request(read("/w")).await.ok()).await;
}

#[tokio::test]
async fn an_election_is_survived() {
    let mut cluster = EtcdCluster::start_with(EtcdOptions::with_v2()).await;
    let leader = cluster.leader(None).await;
    let client = client(cluster.config());
    let first = done(&client, put("/w/a", "0", Only::Always)).await.modified;
    let watching = {
        let client = client.clone();
        tokio::spawn(async move { change(&client, "/w", first + 1).await })
    };
    cluster.members[leader].kill();
    eventually("a write", LIMIT, async || client.request(put("/w/a", "1", Only::Value("0".into()))).await.ok()).await;
    assert_eq!(within("the change", LIMIT, watching).await.unwrap().1.value, "1");
}

#[tokio::test]
async fn tls_and_its_mismatches() {
    let certs = Arc::new(Certs::new());
    let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..EtcdOptions::with_v2() };
    let server = EtcdServer::start(options).await;
    let right = server.config();
    client(right.clone()).probe().await.unwrap();
    let other = Certs::new();
    let tls = |change: &dyn Fn(&mut EtcdTls)| {
        let mut config = right.clone();
        change(config.tls.as_mut().unwrap());
        client(config)
    };
    let cases = [
        ("not signed by the CA", tls(&|tls| tls.ca = other.ca.clone())),
        ("another name", tls(&|tls| tls.server_name = Some("etcd.example".into()))),
        ("client certificate", tls(&|tls| tls.client = None)),
    ];
    for (expected, client) in cases {
        let error = within("a probe", LIMIT, client.probe()).await.unwrap_err();
        eprintln!("{error}");
        // The alert about a refused certificate may or may not be read before the connection breaks.
        let luck = expected == "client certificate" && error.is_transient();
        assert!(luck || matches!(error, StoreError::Tls { .. }) && error.to_string().contains(expected), "{error}");
    }
    let mut config = right.clone();
    config.tls.as_mut().unwrap().ca = "/nonexistent/ca.pem".into();
    let error = EtcdV2::connect(config).err().unwrap().to_string();
    assert!(error.contains("/nonexistent/ca.pem"), "{error}");
}

#[tokio::test]
async fn only_the_right_password_opens() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    for (path, body) in [
        ("/v2/auth/users/root", r#"{"user":"root","password":"root-secret"}"#),
        ("/v2/auth/users/trainer", r#"{"user":"trainer","password":"secret"}"#),
        ("/v2/auth/roles/guest", r#"{"role":"guest","revoke":{"kv":{"read":["/*"],"write":["/*"]}}}"#),
        ("/v2/auth/roles/trainer", r#"{"role":"trainer","permissions":{"kv":{"read":["/*"],"write":["/p/*"]}}}"#),
        ("/v2/auth/users/trainer", r#"{"user":"trainer","grant":["trainer"]}"#),
        ("/v2/auth/enable", ""),
    ] {
        let status = admin(&server.address(), path, body).await;
        // The guest role exists once authentication is on: see below
        assert!(status.starts_with('2') || path.ends_with("guest"), "{path}: {status}");
    }
    let status = admin(
        &server.address(),
        "/v2/auth/roles/guest",
        r#"{"role":"guest","revoke":{"kv":{"read":["/*"],"write":["/*"]}}}"#,
    )
    .await;
    assert_eq!(status, "200");
    let as_user = |user: Option<(&str, &str)>| {
        let mut config = server.config();
        config.user = user.map(|(name, password)| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), password).unwrap();
            EtcdUser { name: name.into(), password: Secret::from_file(file.path()).unwrap() }
        });
        client(config)
    };
    for wrong in [None, Some(("trainer", "guess")), Some(("stranger", "secret"))] {
        let error = as_user(wrong).request(put("/p/a", "1", Only::Always)).await.unwrap_err();
        assert!(matches!(error, StoreError::Denied { .. }), "{wrong:?}: {error}");
    }
    let trainer = as_user(Some(("trainer", "secret")));
    trainer.probe().await.unwrap();
    done(&trainer, put("/p/a", "1", Only::Always)).await;
    let error = trainer.request(put("/q/a", "1", Only::Always)).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
}

/// A PUT to etcd's v2 user administration, as root; the answer's status.
async fn admin(address: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // root:root-secret
    let request = format!(
        "PUT {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Basic cm9vdDpyb290LXNlY3JldA==\r\nContent-Type: \
         application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    within("an answer", LIMIT, stream.read_to_string(&mut answer)).await.unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

/// etcd 3.6 panics where its log has an entry of the v2 API, and a quorum read makes one.
#[tokio::test]
async fn a_look_for_the_v2_api_writes_nothing() {
    let server = EtcdServer::start(EtcdOptions::with_v2()).await;
    let mut bare = server.client().await;
    let index = async |bare: &mut etcd_client::Client| bare.status().await.unwrap().raft_index();
    let before = index(&mut bare).await;
    client(server.config()).probe().await.unwrap();
    assert_eq!(index(&mut bare).await, before);
}

#[tokio::test]
async fn a_server_without_the_v2_api_is_reported_with_the_flag_to_use() {
    let server = EtcdServer::start(EtcdOptions::oldest()).await;
    let error = client(server.config()).probe().await.unwrap_err();
    assert!(matches!(error, StoreError::NotV2 { .. }), "{error}");
    assert!(error.to_string().contains("--enable-v2"), "{error}");

    // One that has none any more has no such flag
    for newer in ["3.6", "3.7"] {
        let Some(binary) = etcd_of(newer) else { continue };
        let server = EtcdServer::start(EtcdOptions { binary: Some(binary), ..EtcdOptions::default() }).await;
        let error = client(server.config()).probe().await.unwrap_err();
        assert!(matches!(error, StoreError::NotV2 { .. }), "{error}");
        let line = error.to_string();
        let parts = [&*format!("etcd {newer}"), "3.5 was the last", "--rdzv-backend=etcd"];
        assert!(line.lines().count() == 1 && parts.iter().all(|part| line.contains(part)), "{line}");
        assert!(!line.contains("--enable-v2"), "{line}");
    }

    let other = client(EtcdConfig::new([version_server("hello").await])).probe().await.unwrap_err().to_string();
    assert!(other.contains("not etcd"), "{other}");
}
