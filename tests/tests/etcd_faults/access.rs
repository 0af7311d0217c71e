//! Access: credentials, TLS, and servers that are not etcd.

use elastic_tests::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LIMIT: Duration = Duration::from_secs(15);

fn user(name: &str, password: &str) -> EtcdUser {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), password).unwrap();
    EtcdUser { name: name.into(), password: Secret::from_file(file.path()).unwrap() }
}

fn store_as(server: &EtcdServer, who: Option<EtcdUser>) -> EtcdStore {
    let mut config = server.config();
    config.user = who;
    EtcdStore::connect(config).unwrap()
}

async fn why(store: &EtcdStore) -> StoreError {
    let error = within("a probe", LIMIT, store.probe()).await.unwrap_err();
    eprintln!("{error}");
    error
}

#[tokio::test]
async fn only_the_right_password_opens() {
    let mut server = EtcdServer::start(EtcdOptions::default()).await;
    let own = Txn::of([Op::put("/elastic/a", "1")]);

    // Given credentials that etcd does not ask for, then they do no harm
    let early = store_as(&server, Some(user("trainer", "secret")));
    early.txn(own.clone()).await.unwrap();

    server.enable_auth("root-secret", "secret").await;
    let denied = |error: StoreError| matches!(error, StoreError::Denied { .. }) && !error.is_transient();
    for wrong in [None, Some(user("trainer", "guess")), Some(user("stranger", "secret"))] {
        let store = store_as(&server, wrong);
        assert!(denied(why(&store).await));
        assert!(denied(store.txn(own.clone()).await.unwrap_err()));
        let mut watcher = store.watch(Scope::Prefix("/elastic/".into()), Revision(1)).await.unwrap();
        let update = within("the watch is refused", LIMIT, watcher.recv()).await.unwrap();
        assert!(matches!(&update, WatchUpdate::Broken(StoreError::Denied { .. })), "{update:?}");
    }

    // Given the right password, then own keys are open, and others are not
    let store = store_as(&server, Some(user("trainer", "secret")));
    store.probe().await.unwrap();
    let at = store.txn(own.clone()).await.unwrap().revision;
    assert!(denied(store.txn(Txn::of([Op::put("/other", "1")])).await.unwrap_err()));
    let mut other = store.watch(Scope::Prefix("/other".into()), Revision(1)).await.unwrap();
    let update = within("the watch is refused", LIMIT, other.recv()).await.unwrap();
    assert!(matches!(&update, WatchUpdate::Broken(StoreError::Denied { .. })), "{update:?}");
    let mut watcher = store.watch(Scope::Prefix("/elastic/".into()), at).await.unwrap();
    assert!(matches!(within("an event", LIMIT, watcher.recv()).await, Some(WatchUpdate::Events(_))));
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();

    // When etcd forgets our token (as after five minutes, or when the password is set again), then no one notices
    for _ in 0..2 {
        server.forget_tokens("root-secret", "trainer", "secret").await;
        store.txn(own.clone()).await.unwrap();
    }
    server.forget_tokens("root-secret", "trainer", "secret").await;
    let mut again = store.watch(Scope::Prefix("/elastic/".into()), at).await.unwrap();
    let update = within("an event", LIMIT, again.recv()).await;
    assert!(matches!(&update, Some(WatchUpdate::Events(_))), "{update:?}");
    assert!(store.keep_alive(lease).await.unwrap().is_some());

    // And the same when it restarts
    server.restart().await;
    let last = store.txn(own).await.unwrap().revision;
    assert!(store.keep_alive(lease).await.unwrap().is_some());
    while within("an event", LIMIT, watcher.recv()).await.is_some_and(|update| match update {
        WatchUpdate::Events(events) => events.last().unwrap().revision() < last,
        other => panic!("{other:?}"),
    }) {}
}

/// Some releases tell their version to root alone.
#[tokio::test]
async fn a_user_without_the_rights_of_root_is_let_in_on_each_release() {
    for (release, options) in EtcdOptions::of(["3.4", "3.5", "3.6", "3.7"]) {
        let server = EtcdServer::start(options.args(["--bcrypt-cost=4"])).await;
        server.enable_auth("root-secret", "secret").await;
        let probe = store_as(&server, Some(user("trainer", "secret"))).probe().await;
        assert!(probe.is_ok(), "{release}: {probe:?}");
    }
}

#[tokio::test]
async fn a_password_that_changes_is_read_again_and_costs_no_watch() {
    // Given a store whose password is in a file, with a watch and a lease
    let server = EtcdServer::start(EtcdOptions::default()).await;
    server.enable_auth("root-secret", "old").await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "old\n").unwrap();
    let password = Secret::from_file(file.path()).unwrap();
    let store = store_as(&server, Some(EtcdUser { name: "trainer".into(), password }));
    let own = Txn::of([Op::put("/elastic/a", "1")]);
    let at = store.txn(own.clone()).await.unwrap().revision;
    let mut watcher = store.watch(Scope::Prefix("/elastic/".into()), at).await.unwrap();
    assert!(matches!(within("an event", LIMIT, watcher.recv()).await, Some(WatchUpdate::Events(_))));
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();

    for (cut, new) in [(false, "new"), (true, "newer")] {
        // when etcd gets another password, then it refuses us
        server.forget_tokens("root-secret", "trainer", new).await;
        let error = store.txn(own.clone()).await.unwrap_err();
        assert!(matches!(error, StoreError::Denied { .. }), "{error}");
        if cut {
            // (and lets no watch be opened again, either)
            let again = store.watch(Scope::Prefix("/elastic/".into()), at).await.unwrap();
            drop(again);
        }
        // and once the file has it, it lets us in
        std::fs::write(file.path(), new).unwrap();
        let last = store.txn(own.clone()).await.unwrap().revision;
        assert!(store.keep_alive(lease).await.unwrap().is_some());
        // and the watch has everything
        let update = within("an event", LIMIT, watcher.recv()).await;
        assert!(matches!(&update, Some(WatchUpdate::Events(events)) if events[0].revision() == last), "{update:?}");
    }
}

#[tokio::test]
async fn tls_works_and_each_mismatch_has_its_message() {
    let certs = Arc::new(Certs::new());
    let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() };
    let server = EtcdServer::start(options).await;
    let right = server.config();
    let with = |change: &dyn Fn(&mut EtcdConfig)| {
        let mut config = right.clone();
        change(&mut config);
        EtcdStore::connect(config).unwrap()
    };
    let tls = |files: &mut EtcdConfig| files.tls.clone().unwrap();

    // Given the right files, then it works
    let store = with(&|_| {});
    store.probe().await.unwrap();
    store.txn(Txn::of([Op::put("a", "1")])).await.unwrap();

    // Given a client without TLS, another CA, no certificate of its own, or another name, then the error says which
    let other = Certs::new();
    let cases: [(&str, EtcdStore, &str); 5] = [
        ("no TLS", with(&|config| config.tls = None), "https://"),
        (
            "another CA",
            with(&|config| config.tls = Some(EtcdTls { ca: other.ca.clone(), ..tls(config) })),
            "not signed by the CA",
        ),
        (
            "no certificate",
            with(&|config| config.tls = Some(EtcdTls { client: None, ..tls(config) })),
            "client certificate",
        ),
        (
            "a stranger's certificate",
            with(&|config| config.tls = Some(EtcdTls { client: Some(other.client.clone()), ..tls(config) })),
            "",
        ),
        (
            "another name",
            with(&|config| config.tls = Some(EtcdTls { server_name: Some("etcd.example".into()), ..tls(config) })),
            "name",
        ),
    ];
    for (what, store, expected) in cases {
        let error = why(&store).await;
        assert!(matches!(error, StoreError::Tls { .. }), "{what}: {error}");
        assert!(error.to_string().contains(expected), "{what}: {error}");
    }

    // Given a server without TLS and a client with it, the same
    let plain = EtcdServer::start(EtcdOptions::default()).await;
    let store = with(&|config| config.endpoints = vec![plain.address()]);
    let error = why(&store).await;
    assert!(matches!(error, StoreError::Tls { .. }) && error.to_string().contains("http://"), "{error}");

    // Given a file that is not there, then it is named before anything is tried
    let mut config = right.clone();
    config.tls = Some(EtcdTls { ca: "/nonexistent/ca.pem".into(), ..tls(&mut right.clone()) });
    let Err(error) = EtcdStore::connect(config) else { panic!("a missing file is an error") };
    assert!(error.to_string().contains("/nonexistent/ca.pem"), "{error}");
}

/// Without a password etcd takes the certificate's CN for the user.
#[tokio::test]
async fn a_refusal_names_the_user_of_a_certificate() {
    let certs = Arc::new(Certs::new());
    for known in [true, false] {
        let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() };
        let server = EtcdServer::start(options).await;
        if known {
            server.client().await.user_add("client", "unused", None).await.unwrap();
        }
        server.enable_auth("root-secret", "secret").await;
        let refused = store_as(&server, None).txn(Txn::of([Op::put("/elastic/a", "1")])).await.unwrap_err();
        let who = format!("user \"client\" (the CN of {})", certs.client.0.display());
        let says = |text: &str| refused.to_string().contains(text);
        assert!(matches!(refused, StoreError::Denied { .. }) && says(&who), "{refused}");
        assert!(!known || says("permission denied for user"), "{refused}");
    }
}

#[tokio::test]
async fn a_certificate_that_is_just_being_written_again_is_waited_for() {
    let certs = Arc::new(Certs::new());
    let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() };
    let mut server = EtcdServer::start(options).await;
    let store = EtcdStore::connect(server.config()).unwrap();
    let own = Txn::of([Op::put("/elastic/a", "1")]);
    let at = store.txn(own.clone()).await.unwrap().revision;
    let mut watcher = store.watch(Scope::Prefix("/elastic/".into()), at).await.unwrap();
    assert!(matches!(within("an event", LIMIT, watcher.recv()).await, Some(WatchUpdate::Events(_))));

    // When etcd restarts while a file of ours is empty, then that is said, and is no end
    let (certificate, _) = &certs.client;
    let whole = std::fs::read(certificate).unwrap();
    std::fs::write(certificate, "").unwrap();
    server.kill();
    let error = store.txn(own.clone()).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let error = within("the file is named", LIMIT, async {
        loop {
            let error = store.txn(own.clone()).await.unwrap_err();
            if error.to_string().contains(certificate.to_str().unwrap()) {
                return error;
            }
        }
    });
    assert!(error.await.is_transient());

    // And once it is whole again, calls and the watch continue
    std::fs::write(certificate, whole).unwrap();
    server.restart().await;
    let last = store.txn(own).await.unwrap().revision;
    let update = within("an event", LIMIT, watcher.recv()).await;
    assert!(matches!(&update, Some(WatchUpdate::Events(events)) if events[0].revision() == last), "{update:?}");
}

#[tokio::test]
async fn what_is_no_etcd_is_called_so() {
    let store = |address: &str| EtcdStore::connect(EtcdConfig::new([address])).unwrap();

    // Nothing listens
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = why(&store(&free.to_string())).await;
    assert!(matches!(error, StoreError::Unavailable { .. }) && error.to_string().contains("refused"), "{error}");

    // A web server
    let error = why(&store(&web_server("404 Not Found", "nothing here").await)).await;
    assert!(matches!(error, StoreError::NotV3 { .. }) && error.to_string().contains("404"), "{error}");

    // An etcd too old for the v3 API
    let version = r#"{"etcdserver":"2.3.8","etcdcluster":"2.3.0"}"#;
    let error = why(&store(&web_server("200 OK", version).await)).await;
    assert!(matches!(error, StoreError::NotV3 { .. }) && error.to_string().contains("2.3.8"), "{error}");

    // A port that accepts and says nothing
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let error = why(&store(&mute.local_addr().unwrap().to_string())).await;
    assert!(error.is_transient(), "{error}");
}

/// An HTTP/1 server with one answer to everything.
async fn web_server(status: &'static str, body: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}
