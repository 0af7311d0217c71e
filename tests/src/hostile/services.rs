//! gRPC: messages of any bytes to each method of the embedded store, and to each of the port that nodes have for their
//! peers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use elastic_node::{Command, Node};
use elastic_rendezvous::job::Keys;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::embedded::{EmbeddedServer, MemoryStore};
use elastic_store::{Op, Store};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::records;

/// The longest that an answer, or a stream's end, is waited for.
const WITHIN: Duration = Duration::from_millis(50);

/// The longest that a question takes that is as it should be.
const ANSWERED: Duration = Duration::from_secs(10);

const STORE: [&str; 14] = [
    "KV/Range",
    "KV/Put",
    "KV/DeleteRange",
    "KV/Txn",
    "KV/Compact",
    "Lease/LeaseGrant",
    "Lease/LeaseRevoke",
    "Lease/LeaseKeepAlive",
    "Lease/LeaseTimeToLive",
    "Lease/LeaseLeases",
    "Watch/Watch",
    "Maintenance/Status",
    "Cluster/MemberList",
    "Auth/Authenticate",
];

const PEERS: [&str; 4] = ["Pulse/Watch", "Pulse/Identify", "logs.Logs/Read", "bandwidth.Bandwidth/Measure"];

/// What comes before the bytes on a stream of pulses: the hello of a node that need not prove who it is.
const HELLO: [u8; 10] = [10, 8, 10, 1, b'J', 18, 3, b'b', b':', b'1'];

/// Calls methods of an embedded store, which must answer the next client all the same. The bytes are calls one after the
/// other: which method, how, how long, and as much of a message.
pub fn embedded_store(bytes: &[u8]) {
    on_a_runtime(async {
        let server = EmbeddedServer::bind(([127, 0, 0, 1], 0).into(), false).await.expect("a port");
        let address = server.address();
        tokio::spawn(server.serve(std::future::pending()));
        let mut client = connect(address).await;
        for (method, how, message) in calls(bytes).take(16) {
            let path = format!("/etcdserverpb.{}", STORE[usize::from(method) % STORE.len()]);
            call(&mut client, &path, body(how, &[], message)).await;
        }
        let mut another = connect(address).await;
        let answer = timeout(ANSWERED, ask(&mut another, "/etcdserverpb.KV/Range", body(0, &[], b"\x0a\x01k"))).await;
        assert!(answer.expect("an answer in time").is_some(), "the store does not answer any more");
    });
}

/// Calls a method of the port of a node that leads its job: which, how, and the message. The node must vouch for
/// itself to the next client all the same.
pub fn peer_port(bytes: &[u8]) {
    let [method, how, message @ ..] = bytes else { return };
    on_a_runtime(async {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::start(Limits::default()));
        let job = "J".parse().expect("an id");
        let keys = Keys::new("/elastic", &job);
        let mut stranger = records::node("b");
        stranger["place"] = serde_json::Value::Null;
        let key = keys.node(&elastic_rendezvous::job::NodeId::new("b", "1"));
        store.put(Vec::new(), Op::put(key, stranger.to_string())).await.expect("a write");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (logs, _requests) = mpsc::channel(1);
        let node = Node::new(store, job, listener, Some(logs), None);
        let mut status = node.status();
        let (commands, _commanded) = mpsc::unbounded_channel::<Command>();
        let (_reports, mut reports) = mpsc::unbounded_channel();
        let play = async {
            timeout(ANSWERED, status.wait_for(|status| status.leading)).await.expect("in time").expect("it leads");
            let mut client = connect(address).await;
            let name = PEERS[usize::from(*method) % PEERS.len()];
            let first: &[u8] = if name == "Pulse/Watch" && how & 4 == 0 { &HELLO } else { &[] };
            call(&mut client, &format!("/elastic.v1.{name}"), body(*how, first, message)).await;
            let mut another = connect(address).await;
            let asked = ask(&mut another, "/elastic.v1.Pulse/Identify", body(0, &[], b"\x0a\x03c:1"));
            let answer = timeout(ANSWERED, asked).await.expect("an answer in time");
            assert_eq!(
                answer.as_deref(),
                Some(&b"\0\0\0\0\x02\x18\x01"[..]),
                "the node does not vouch for itself any more"
            );
        };
        tokio::select! {
            left = node.run(records::setup(&keys), &commands, &mut reports) => panic!("the node has left: {left:?}"),
            () = play => {}
        }
    });
}

fn on_a_runtime(play: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(play);
    runtime.shutdown_timeout(WITHIN);
}

/// The calls in these bytes.
fn calls(mut bytes: &[u8]) -> impl Iterator<Item = (u8, u8, &[u8])> {
    std::iter::from_fn(move || {
        let [method, how, length, rest @ ..] = bytes else { return None };
        let (message, others) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes = others;
        Some((*method, *how, message))
    })
}

/// A request's body: one message after `first`, each in its frame; or many, each after its length in a byte; or these
/// bytes unchanged, with any frames.
fn body(how: u8, first: &[u8], bytes: &[u8]) -> Bytes {
    let mut body = Vec::new();
    if !first.is_empty() {
        frame(first, &mut body);
    }
    match how % 4 {
        0 | 1 => frame(bytes, &mut body),
        2 => {
            let mut left = bytes;
            while let [length, rest @ ..] = left {
                let (message, others) = rest.split_at(rest.len().min(usize::from(*length)));
                frame(message, &mut body);
                left = others;
            }
        }
        _ => body.extend(bytes),
    }
    body.into()
}

fn frame(message: &[u8], body: &mut Vec<u8>) {
    body.push(0);
    body.extend(u32::try_from(message.len()).expect("a short message").to_be_bytes());
    body.extend(message);
}

async fn connect(address: SocketAddr) -> SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(address).await.expect("a connection");
    let (client, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("HTTP/2");
    tokio::spawn(connection);
    client
}

/// Calls, and reads what comes until the stream ends or is silent.
async fn call(client: &mut SendRequest<Full<Bytes>>, path: &str, body: Bytes) {
    let _silent = timeout(WITHIN, ask(client, path, body)).await;
}

/// The answer's messages; none if the call was refused.
async fn ask(client: &mut SendRequest<Full<Bytes>>, path: &str, body: Bytes) -> Option<Bytes> {
    let request =
        Request::post(format!("http://a{path}")).header("content-type", "application/grpc").header("te", "trailers");
    let answer = client.send_request(request.body(Full::new(body)).expect("a request")).await.ok()?;
    let collected = answer.into_body().collect().await.ok()?;
    let well = collected.trailers().is_some_and(|trailers| trailers.get("grpc-status").is_some_and(|code| code == "0"));
    well.then(|| collected.to_bytes())
}
