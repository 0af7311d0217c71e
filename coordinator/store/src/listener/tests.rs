use axum::Extension;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const WITHIN: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(50);

fn long() -> Patience {
    Patience { greeting: WITHIN, headers: WITHIN, old: WITHIN, last_answer: WITHIN }
}

async fn port(places: usize, patience: Patience) -> (Port, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (Port::with(listener, places, patience), address)
}

async fn http(patience: Patience) -> TcpStream {
    let (port, address) = port(4, patience).await;
    tokio::spawn(port.serve_http(Router::new().route("/", get(async || "yes"))));
    TcpStream::connect(address).await.unwrap()
}

/// Asks for `/`; whether that was answered.
async fn asks(client: &mut TcpStream) -> bool {
    let mut answer = [0; 1024];
    client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.is_ok()
        && timeout(WITHIN, client.read(&mut answer)).await.unwrap().is_ok_and(|count| count > 0)
}

async fn ends(client: &mut TcpStream) {
    let _ = timeout(WITHIN, client.read_to_end(&mut Vec::new())).await.expect("it is hung up on");
}

#[tokio::test]
async fn a_silent_client_is_disconnected_and_no_other() {
    let (mut port, address) = port(4, Patience { greeting: SHORT, ..long() }).await;
    let mut greeter = TcpStream::connect(address).await.unwrap();
    let mut greeted = port.accept().await;
    greeter.write_all(&[7; PREFACE]).await.unwrap();
    greeted.read_exact(&mut [0; PREFACE]).await.unwrap();
    // Its patience begins later, and ends later.
    let _silent = TcpStream::connect(address).await.unwrap();
    let mut ignored = port.accept().await;
    let heard = timeout(WITHIN, ignored.read_u8()).await.expect("an end");
    assert_eq!(heard.unwrap_err().kind(), ErrorKind::TimedOut);
    greeter.write_all(b"!").await.unwrap();
    assert_eq!(timeout(WITHIN, greeted.read_u8()).await.unwrap().unwrap(), b'!');
}

#[tokio::test]
async fn a_header_that_does_not_end_ends_its_connection() {
    let mut client = http(Patience { headers: SHORT, ..long() }).await;
    client.write_all(b"GET / HTTP/1.1\r\nHost:").await.unwrap();
    ends(&mut client).await;
}

#[tokio::test]
async fn an_idle_http_connection_ends() {
    let mut client = http(Patience { headers: SHORT, ..long() }).await;
    assert!(asks(&mut client).await);
    ends(&mut client).await;
}

#[tokio::test]
async fn an_old_http_connection_ends_however_busy_it_is() {
    let mut client = http(Patience { old: SHORT, ..long() }).await;
    let asking = async { while asks(&mut client).await {} };
    timeout(WITHIN, asking).await.expect("it is hung up on");
}

#[tokio::test]
async fn an_http_client_that_says_nothing_is_hung_up_on() {
    let mut client = http(Patience { greeting: SHORT, ..long() }).await;
    ends(&mut client).await;
}

#[tokio::test]
async fn an_old_http_connection_is_kept_for_an_answer_that_lasts() {
    let release = Arc::new(tokio::sync::Notify::new());
    let released = Arc::clone(&release);
    let lasting = async move |Extension(hold): Extension<Hold>| {
        let _kept = hold.keep();
        released.notified().await;
        "yes"
    };
    let (port, address) = port(4, Patience { old: SHORT, last_answer: SHORT, ..long() }).await;
    let router = Router::new().route("/lasting", get(lasting)).route("/slow", get(std::future::pending::<String>));
    tokio::spawn(port.serve_http(router));
    let mut clients = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    for (client, path) in clients.iter_mut().zip(["/lasting", "/slow"]) {
        client.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.unwrap();
    }
    // The later one is too old already.
    ends(&mut clients[1]).await;
    release.notify_one();
    let mut answer = Vec::new();
    timeout(WITHIN, clients[0].read_to_end(&mut answer)).await.expect("then it is too old, too").unwrap();
    assert!(answer.ends_with(b"yes"), "{answer:?}");
}

#[tokio::test]
async fn who_finds_no_place_waits_for_one() {
    let (mut port, address) = port(1, long()).await;
    let _first = TcpStream::connect(address).await.unwrap();
    let _second = TcpStream::connect(address).await.unwrap();
    let first = port.accept().await;
    let mut second = Box::pin(port.accept());
    assert!(futures::poll!(&mut second).is_pending());
    drop(first);
    timeout(WITHIN, second).await.expect("a place");
}

#[tokio::test]
async fn who_watches_an_http_port_keeps_no_monitor_waiting() {
    let (port, address) = port(2, long()).await;
    let router = Router::new().route("/", get(async || "yes")).route("/slow", get(std::future::pending::<String>));
    tokio::spawn(port.serve_http(router));
    let mut watching = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        watching.push(client);
    }
    // The oldest makes room, and a monitor is answered.
    assert!(asks(&mut TcpStream::connect(address).await.unwrap()).await);
    ends(&mut watching[0]).await;
}

#[tokio::test]
async fn the_kernel_asks_whether_a_silent_host_is_there() {
    let (mut port, address) = port(1, long()).await;
    let _client = TcpStream::connect(address).await.unwrap();
    let accepted = port.accept().await.stream;
    assert!(sockopt::socket_keepalive(&accepted).unwrap());
    let idle = sockopt::tcp_keepidle(&accepted).unwrap();
    let asking = sockopt::tcp_keepintvl(&accepted).unwrap() * sockopt::tcp_keepcnt(&accepted).unwrap();
    assert_eq!(idle + asking, Duration::from_secs(120));
}

fn shares(limit: usize, serves: Serves) -> [usize; 4] {
    [Share::Peers, Share::Store, Share::Workers, Share::Monitors].map(|share| share.of(limit, serves))
}

#[test]
fn what_is_not_served_leaves_its_share_to_the_peer_port() {
    for (store, workers, limit, peers) in [
        // An agent that may serve a store: a quarter.
        (true, true, 20_000, 5_000),
        // An agent with etcd: a half.
        (false, true, 20_000, 10_000),
        // A coordinator with the embedded store, whose every client is a member too.
        (true, false, 20_000, 8_750),
        // A coordinator with etcd.
        (false, false, 18_000, 15_750),
        // No port has more.
        (false, false, 1 << 20, MOST),
        (true, true, 1 << 30, MOST),
    ] {
        let serves = Serves { store, workers };
        let [found, at_store, at_workers, monitors] = shares(limit, serves);
        assert_eq!(found, peers, "{serves:?}");
        assert!(!store || at_store == peers, "a store has a client for each member: {at_store} of {peers}");
        assert!(!workers || at_workers == limit / 8 * 3, "{serves:?}: {at_workers} for workers");
        assert_eq!(monitors, FEW);
    }
}

#[test]
fn all_shares_leave_some_descriptors() {
    let all = [false, true];
    for serves in all.into_iter().flat_map(|store| all.map(|workers| Serves { store, workers })) {
        for limit in [64, 256, 1024, 4096, 20_000, 1 << 20, usize::MAX] {
            let [peers, store, workers, monitors] = shares(limit, serves);
            let store = if serves.store { store } else { 0 };
            let workers = if serves.workers { workers } else { 0 };
            let taken = peers + store + workers + monitors;
            let own = (limit / 16).max(192.min(limit / 4));
            assert!(taken <= limit - own, "{serves:?}: {taken} of {limit}");
        }
        assert_eq!(shares(1, serves), [1; 4]);
    }
}
