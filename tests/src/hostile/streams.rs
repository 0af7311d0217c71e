//! What comes over connections: PyTorch's TCPStore protocol, the lines of workers, and the answers of an etcd.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use elastic_agent::for_tests::{JobPaths, JobStore, TcpStore, WorkerSocket, WorkersStoreLimits};
use elastic_node::Status;
use elastic_rendezvous::job::Keys;
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::etcd::EtcdConfig;
use elastic_torchelastic::etcd_v2::{EtcdV2, Request};
use elastic_torchelastic::{DEFAULT_PREFIX, Paths};
use tokio::sync::watch;

/// The longest that a peer's end is waited for.
const WITHIN: Duration = Duration::from_millis(200);

/// What a client of PyTorch's TCPStore sends first.
pub const HELLO: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
/// And then, to see whether the store is there: its last four bytes come back.
pub const PING: [u8; 5] = [13, 1, 2, 3, 4];

/// Sends bytes to a workers' store, which must serve the next client all the same.
pub fn workers_store(bytes: &[u8]) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let limits = WorkersStoreLimits { memory: 1 << 20, ..WorkersStoreLimits::default() };
    let _store = TcpStore::serve(listener, limits, None).expect("a store");
    for greeting in [&HELLO[..], &[]] {
        let mut stranger = TcpStream::connect(address).expect("a connection");
        hear_out(&mut stranger, &[greeting, bytes].concat(), |stream| stream.shutdown(Shutdown::Write));
    }
    let mut client = TcpStream::connect(address).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
    client.write_all(&[HELLO, PING].concat()).expect("a request");
    let mut answer = [0; 4];
    client.read_exact(&mut answer).expect("an answer from the workers' store");
    assert_eq!(answer, PING[1..]);
}

/// Sends bytes to the socket of an agent's workers.
pub fn worker_socket(bytes: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let (_status, status) = watch::channel(Status::default());
    let socket = runtime.block_on(async {
        let store = JobStore::Store(Arc::new(MemoryStore::start(Limits::default())));
        let keys = Keys::new("/elastic", &"J".parse().expect("an id"));
        let paths = JobPaths { job: "J".parse().unwrap(), keys, paths: Paths::new(DEFAULT_PREFIX, "J") };
        WorkerSocket::open(&path, (store, paths), status, false).expect("a socket")
    });
    let mut worker = UnixStream::connect(&path).expect("a connection");
    socket.forming(2, "r", Duration::from_millis(20));
    hear_out(&mut worker, bytes, |stream| stream.shutdown(Shutdown::Write));
    let _told = (socket.awareness(0), (socket.furthest())().is_some(), socket.step_in(1), socket.failing(0));
    runtime.shutdown_timeout(WITHIN);
}

/// Answers an etcd v2 client's requests with these bytes, and nothing else.
pub fn etcd_v2(bytes: &[u8]) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    listener.set_nonblocking(true).expect("a listener that does not block");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let answer = bytes.to_vec();
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let answer = answer.clone();
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt, AsyncWriteExt};
                    let mut request = [0; 4096];
                    let _ = stream.read(&mut request).await;
                    let _ = stream.write_all(&answer).await;
                });
            }
        });
        let config = EtcdConfig { call_timeout: Duration::from_millis(20), ..EtcdConfig::new([address.to_string()]) };
        let client = EtcdV2::connect(config).expect("a client");
        let read = Request::Read { key: "/torchelastic".into(), recursive: true };
        let _told = (client.probe().await, client.request(read).await);
        let _news = tokio::time::timeout(Duration::from_millis(20), client.wait("/torchelastic", 3)).await;
    });
}

/// Sends all of it, then reads what comes until the peer ends, or is silent.
fn hear_out<S: Read + Write + Deadlines>(stream: &mut S, bytes: &[u8], shut: impl Fn(&S) -> std::io::Result<()>) {
    stream.within(WITHIN);
    // The peer may have ended already.
    let _ = stream.write_all(bytes);
    let _ = shut(stream);
    let mut answer = [0; 4096];
    for _ in 0..64 {
        if stream.read(&mut answer).unwrap_or(0) == 0 {
            return;
        }
    }
}

trait Deadlines {
    fn within(&self, time: Duration);
}

impl Deadlines for TcpStream {
    fn within(&self, time: Duration) {
        self.set_read_timeout(Some(time)).and_then(|()| self.set_write_timeout(Some(time))).expect("a deadline");
    }
}

impl Deadlines for UnixStream {
    fn within(&self, time: Duration) {
        self.set_read_timeout(Some(time)).and_then(|()| self.set_write_timeout(Some(time))).expect("a deadline");
    }
}
