//! The clocks of a real etcd and of a real coordinator. A wrong one is a real etcd's answer with another date in it.

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A way to a server on which its answers over HTTP/1.1 get this date; its address.
async fn dated(upstream: String, date: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = TcpStream::connect(&upstream).await.unwrap().into_split();
            tokio::spawn(async move { copy(&mut from_client, &mut to_server).await });
            tokio::spawn(async move {
                let mut first = vec![0; 4096];
                let length = from_server.read(&mut first).await?;
                first.truncate(length);
                if first.starts_with(b"HTTP/1.1") {
                    let text = String::from_utf8(first).unwrap();
                    let (before, after) = text.split_once("\r\nDate: ").expect("etcd tells the time");
                    let (_, after) = after.split_once("\r\n").unwrap();
                    first = format!("{before}\r\nDate: {date}\r\n{after}").into_bytes();
                }
                to_client.write_all(&first).await?;
                copy(&mut from_server, &mut to_client).await
            });
        }
    });
    address
}

#[tokio::test]
async fn a_clock_that_is_apart_is_a_warning() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (date, seen) in [
        ("Tue, 25 Nov 2025 12:00:00 GMT", "s behind this machine's"),
        ("Tue, 25 Nov 2098 12:00:00 GMT", "s ahead of this machine's"),
    ] {
        let at = dated(etcd.address(), date).await;
        let told = Told::by(&["--etcd", &at]).await;
        told.says("clock", &at, "warning", seen);
        told.says("answer", &at, "ok", "lets us in");
        assert_eq!(told.code, Some(0), "{:#?}", told.findings);
    }
    let at = dated(etcd.address(), "yesterday").await;
    Told::by(&["--etcd", &at]).await.says("clock", &at, "unknown", "not told");
}

#[tokio::test]
async fn the_coordinators_clock_is_shown_where_it_leads() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let at = etcd.address();
    let jobs = Jobs::on(&etcd, 1);
    let mut node = jobs.node("a").await;
    node.runs(1, 1, WITHIN).await.unwrap();
    let _coordinator = Process::start("elastic-coordinator", &["--etcd", &at, "--peer-listen", "127.0.0.1:0"]);
    let leader = eventually("it leads", WITHIN, async || {
        let kv = jobs.store.get(&jobs.keys.leader()).await.unwrap()?;
        Some(Versioned::<LeaderRecord>::parse(&kv).unwrap().value).filter(|leader| leader.coordinator)
    })
    .await;
    let told = Told::by(&["train", "--etcd", &at]).await;
    told.says("clock", &leader.peer.to_string(), "ok", "within");
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
}
