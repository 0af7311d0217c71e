//! What a client without rights can send to a port, as often as it can.

use std::future::{Future, pending};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use elastic_proto::pulse::pulse_client::PulseClient;
use elastic_proto::pulse::{Beat, Hello, MemberMessage};
use elastic_tests::hostile::streams::HELLO;
use elastic_tests::prelude::*;
use futures::StreamExt;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::hostile::{JOB, WITHIN};

pub(crate) type Said = Arc<AtomicU64>;

/// An attack that runs on a thread of its own until this is dropped.
pub(crate) struct Flood {
    said: Said,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    pub(crate) fn start<F: Future<Output = ()>>(attack: impl FnOnce(Said) -> F + Send + 'static) -> Flood {
        let said = Said::default();
        let (stop, stopped) = oneshot::channel();
        let counted = Arc::clone(&said);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    () = attack(counted) => {}
                    _ = stopped => {}
                }
            });
        });
        Flood { said, stop: Some(stop), thread: Some(thread) }
    }

    /// Waits until it has said so much more from now on.
    pub(crate) async fn says(&self, more: u64) {
        let enough = self.said.load(Ordering::Relaxed) + more;
        let heard = async || (self.said.load(Ordering::Relaxed) >= enough).then_some(());
        eventually(&format!("the flood says {more} things"), WITHIN, heard).await;
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

pub(crate) fn hello(node: &str) -> MemberMessage {
    let hello = Hello { job: JOB.into(), node: node.into(), nonce: Vec::new() };
    MemberMessage { hello: Some(hello), ..MemberMessage::default() }
}

/// Beats on eight streams whose answers no one reads.
pub(crate) async fn beats(peer: SocketAddr, said: Said) {
    let floods = (0..8).map(|stream| {
        let said = Arc::clone(&said);
        async move {
            let mut client = PulseClient::connect(format!("http://{peer}")).await.unwrap();
            let beats = futures::stream::iter(1..).map(move |seq| {
                said.fetch_add(1, Ordering::Relaxed);
                MemberMessage { beat: Some(Beat { seq, probe: 0, echo_ms: None }), ..MemberMessage::default() }
            });
            let words = futures::stream::iter([hello(&format!("flood:{stream}"))]).chain(beats);
            let _unread = client.watch(words).await;
            pending::<()>().await;
        }
    });
    join_all(floods).await;
}

/// Hellos with very long names, one after the other.
pub(crate) async fn names(peer: SocketAddr, said: Said) {
    let name = "n".repeat(3_900_000);
    let mut client = PulseClient::connect(format!("http://{peer}")).await.unwrap();
    loop {
        let words = futures::stream::iter([hello(&name)]).chain(futures::stream::pending());
        let answered = tokio::time::timeout(WITHIN, client.watch(words)).await.expect("an answer");
        assert!(answered.is_err(), "a name of {} bytes was taken", name.len());
        said.fetch_add(1, Ordering::Relaxed);
    }
}

/// Opens this many streams of a call on one connection, whatever the server allows, and waits until the server has
/// read all of them or hung up. Returns whether it hung up.
pub(crate) async fn streams(peer: SocketAddr, call: &str, count: u32) -> bool {
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const HEADERS: u8 = 1;
    const ACK: u8 = 1;
    const END_HEADERS: u8 = 4;
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let text = |name: &[u8], value: &str| [name, &[value.len() as u8], value.as_bytes()].concat();
    // POST and http by their numbers in HPACK's table, the path and the authority by the numbers of their names, all
    // others spelled out.
    let headers = [
        vec![0x83, 0x86],
        text(&[0x04], call),
        text(&[0x01], "x"),
        text(&[&[0x00, 12], &b"content-type"[..]].concat(), "application/grpc"),
        text(&[&[0x00, 2], &b"te"[..]].concat(), "trailers"),
    ]
    .concat();
    let (mut answers, mut words) = TcpStream::connect(peer).await.unwrap().into_split();
    let writing = async move {
        let opening = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(SETTINGS, 0, 0, &[])].concat();
        words.write_all(&opening).await?;
        for stream in 0..count {
            words.write_all(&frame(HEADERS, END_HEADERS, 2 * stream + 1, &headers)).await?;
        }
        words.write_all(&frame(PING, 0, 0, b"all read")).await?;
        Ok::<_, std::io::Error>(words)
    };
    let reading = async {
        let mut head = [0; 9];
        loop {
            if answers.read_exact(&mut head).await.is_err() {
                return true;
            }
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            if answers.read_exact(&mut payload).await.is_err() {
                return true;
            }
            if head[3..5] == [PING, ACK] {
                return false;
            }
        }
    };
    let (_written, hung_up) = tokio::join!(writing, reading);
    hung_up
}

/// Questions about health, on more connections than the server takes at once.
pub(crate) async fn health(port: u16, said: Said) {
    let clients = (0..100).map(|_| async {
        let mut http = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let mut answer = [0; 4096];
        while http.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.is_ok() {
            if !matches!(http.read(&mut answer).await, Ok(1..)) {
                return;
            }
            said.fetch_add(1, Ordering::Relaxed);
        }
    });
    join_all(clients).await;
    pending().await
}

pub(crate) async fn workers_store(address: SocketAddr, said: Said) {
    // VALIDATE; then SET of key `k`, a hundred times, and PING.
    let set = [&[1][..], &1_u64.to_le_bytes(), b"k", &64_u64.to_le_bytes(), &[7; 64]].concat();
    let words = [set.repeat(100), vec![13, 0, 0, 0, 0]].concat();
    let clients = (0..32).map(|_| async {
        let mut store = TcpStream::connect(address).await.unwrap();
        let mut answer = [0; 4];
        if store.write_all(&HELLO).await.is_err() {
            return;
        }
        while store.write_all(&words).await.is_ok() && store.read_exact(&mut answer).await.is_ok() {
            said.fetch_add(100, Ordering::Relaxed);
        }
    });
    join_all(clients).await;
    pending().await
}

/// Writes to the embedded store, under a key that belongs to no job.
pub(crate) async fn embedded_store(endpoint: String, said: Said) {
    let clients = (0..16).map(|client| {
        let (endpoint, said) = (endpoint.clone(), Arc::clone(&said));
        async move {
            let mut store = etcd_client::Client::connect([endpoint], None).await.unwrap();
            while store.put(format!("flood/{client}"), vec![7; 1024], None).await.is_ok() {
                said.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    join_all(clients).await;
    pending().await
}
