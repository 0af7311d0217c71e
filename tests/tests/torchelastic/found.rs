//! What an agent says where it would never find the others, or where the server cannot do what is needed.

use elastic_tests::prelude::*;
use elastic_torchelastic::etcd_v2::{EtcdV2, Only, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::torchelastic::scene::{Agent, Ours, Scene, Torchrun};

const SOON: Duration = Duration::from_secs(15);

async fn refuses(agent: &mut Agent, words: &[&str]) {
    assert_eq!(agent.exit(SOON).await, 1, "{}", agent.output());
    for words in words {
        assert!(agent.output().contains(words), "{words:?} is not in:\n{}", agent.output());
    }
}

#[tokio::test]
async fn nodes_of_either_api_do_not_begin_a_second_group() {
    let scene = Scene::new(None, "1:2").await;
    let mut v2 = scene.start(Ours, "v2");
    let group = scene.works(1, None).await;

    // When a node comes that speaks v3, then it names the flag that joins the group
    let mut v3 = scene.start_with(Ours, "v3", &["--rdzv-backend=etcd"]);
    refuses(&mut v3, &["--rdzv-conf api=v2", "/torchelastic/p2p/run_job/rdzv/active_version"]).await;
    assert_eq!(scene.group(1), Some(group));
    scene.ends_well([&mut v2]).await;

    // A group that is over is in no one's way
    let mut v3 = scene.start_with(Ours, "v3", &["--rdzv-backend=etcd"]);
    scene.works(1, None).await;
    // And the other way round
    let mut v2 = scene.start(Ours, "v2");
    refuses(&mut v2, &["without api=v2"]).await;
    scene.ends_well([&mut v3]).await;
}

#[tokio::test]
async fn torchruns_nodes_are_found_by_a_node_of_the_v3_api() {
    let Some(torch) = Torch::find() else { return };
    let scene = Scene::new(Some(&torch), "1:2").await;
    let mut theirs = scene.start(Torchrun, "torchrun");
    scene.works(1, None).await;
    let mut v3 = scene.start_with(Ours, "v3", &["--rdzv-backend=etcd"]);
    refuses(&mut v3, &["--rdzv-conf api=v2"]).await;
    scene.ends_well([&mut theirs]).await;
}

#[tokio::test]
async fn torchruns_other_protocol_is_found_and_never_read() {
    let Some(torch) = Torch::find() else { return };
    let scene = Scene::new(Some(&torch), "1:2").await;
    let mut theirs = scene.start_with(Torchrun, "torchrun", &["--rdzv-backend=etcd-v2"]);
    scene.works(1, None).await;
    for flags in [&["--rdzv-backend=etcd-v2"], &["--rdzv-backend=etcd"]] {
        let mut ours = scene.start_with(Ours, "ours", flags);
        refuses(&mut ours, &["/torch/elastic/rendezvous/job", "never meet", "--rdzv-backend=etcd"]).await;
    }
    scene.ends_well([&mut theirs]).await;
}

#[tokio::test]
async fn a_pickle_that_would_run_is_not_run() {
    let scene = Scene::new(None, "1").await;
    // cos\nsystem\n(S'touch …'\ntR. as base64, which is how torch's agents keep it
    let client = EtcdV2::connect(scene.etcd.config()).unwrap();
    let value = "Y29zCnN5c3RlbQooUyd0b3VjaCAvdG1wL3BpY2tsZScKdFIu".to_owned();
    let key = "/torch/elastic/rendezvous/job".to_owned();
    client.request(Request::Put { key, value, ttl: None, only: Only::Always }).await.unwrap().outcome.unwrap();
    let mut agent = scene.start(Ours, "a");
    refuses(&mut agent, &["delete that key"]).await;
}

#[tokio::test]
async fn a_server_without_the_v2_api_is_reported_with_the_flag_to_use() {
    let scene = Scene::new(None, "1").await;
    let without = EtcdServer::start(EtcdOptions::oldest()).await;
    let mut agent = scene.start_with(Ours, "a", &["--rdzv-backend=etcd-v2", &endpoint(&without.address())]);
    refuses(&mut agent, &["--enable-v2"]).await;

    // One that has none any more has no such flag
    let newer = version_server(r#"{"etcdserver":"3.6.1","etcdcluster":"3.6.0"}"#).await;
    let mut agent = scene.start_with(Ours, "a", &["--rdzv-backend=etcd-v2", &endpoint(&newer)]);
    refuses(&mut agent, &["etcd 3.6.1", "3.5 was the last", "--rdzv-backend=etcd without api=v2"]).await;
    assert!(!agent.output().contains("--enable-v2"), "{}", agent.output());
}

#[tokio::test]
async fn a_server_that_offers_v2_alone_is_reported_with_the_flag_to_use() {
    let scene = Scene::new(None, "1").await;
    let old = only_http_1(scene.etcd.address()).await;
    let mut agent = scene.start_with(Ours, "a", &["--rdzv-backend=etcd", &endpoint(&old)]);
    refuses(&mut agent, &["offers etcd's v2 API and not v3", "--rdzv-conf api=v2"]).await;

    // And with that flag it works
    let mut agent = scene.start_with(Ours, "a", &["--rdzv-backend=etcd-v2", &endpoint(&old)]);
    scene.works(1, None).await;
    scene.ends_well([&mut agent]).await;
}

#[tokio::test]
async fn an_exchange_of_the_old_kind_is_refused_and_keeps_no_node_waiting() {
    let scene = Scene::new(None, "2").await;
    let mut agent = scene.start(Ours, "a");
    agent.says("nodes of 2 to 2", SOON).await;
    // Given a member that joins as torchelastic 0.2.2 does, and tells its ranks in that way
    let client = EtcdV2::connect(scene.etcd.config()).unwrap();
    let root = "/torchelastic/p2p/run_job/rdzv";
    let put = async |key: String, value: String| {
        client.request(Request::Put { key, value, ttl: None, only: Only::Always }).await.unwrap();
    };
    let mut state: serde_json::Value =
        serde_json::from_str(&scene.read(&format!("{root}/active_version")).await.unwrap()).unwrap();
    state["participants"] = serde_json::json!([0, 1]);
    state["status"] = "frozen".into();
    let own = format!("{root}/v_1/rank_1");
    state["keep_alives"] = serde_json::json!([own]);
    put(own, String::new()).await;
    // base64 of torchelastic/role_info1, and of its value
    put(format!("{root}/v_1/kv/dG9yY2hlbGFzdGljL3JvbGVfaW5mbzE="), "e30=".into()).await;
    put(format!("{root}/active_version"), state.to_string()).await;

    refuses(&mut agent, &["torchelastic 0.2.2", "group rank 1"]).await;
    // Then that member has this one's part, base64 of torchelastic/role_info0, and has to form another group
    assert!(scene.read(&format!("{root}/v_1/kv/dG9yY2hlbGFzdGljL3JvbGVfaW5mbzA=")).await.is_some());
    assert!(scene.read(&format!("{root}/active_version")).await.unwrap().contains(r#""num_workers_waiting":1"#));
}

fn endpoint(address: &str) -> String {
    format!("--rdzv-endpoint={address}")
}

/// An etcd without gRPC: what does not speak HTTP/1.1 is hung up on.
async fn only_http_1(etcd: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let etcd = etcd.clone();
            tokio::spawn(async move {
                let mut begin = [0; 4];
                if client.read_exact(&mut begin).await.is_err() || begin == *b"PRI " || begin[0] == 0x16 {
                    return;
                }
                let mut server = TcpStream::connect(etcd).await.unwrap();
                let _ = server.write_all(&begin).await;
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}
