//! Listening sockets that everybody on the network can reach, and the descriptors that they cost. A connection is
//! accepted here before its client has said anything.
//!
//! Each connection costs this process a descriptor, so each listener has a share of them and lets no more in: those
//! that come on top wait in the kernel's queue, and at an HTTP port take the place of the oldest. What never says
//! anything, or whose host is gone, is closed, so that the share is not lost to it.

#[cfg(test)]
pub(crate) mod blackhole_proxy;
mod secure;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::Connected;

/// Connections that the kernel keeps for us until we take them; it takes less where `net.core.somaxconn` is lower.
pub const BACKLOG: i32 = 4096;

/// Most connections of one listener, however many descriptors there are: each costs memory too.
const MOST: usize = 1 << 14;

/// Connections of a port that only people and monitors ask.
const FEW: usize = 64;

/// Descriptors that a process keeps for itself where an eighth is less, up to half: an agent holds ports of past rounds,
/// and pipes and files of its workers.
const OWN: usize = 256;

/// Pause after an accept that failed for want of descriptors or memory: the next would fail too.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that every HTTP/2 client begins with.
const PREFACE: usize = 24;

/// Requests at once of one HTTP/2 connection to an HTTP port; more wait at the client.
const STREAMS: u32 = 32;

/// Bytes of a request's header, and of all that an HTTP/2 client may send ahead.
const HEADERS: u32 = 16 << 10;
const AHEAD: u32 = 64 << 10;

#[derive(Debug, Clone, Copy)]
struct Patience {
    /// For a connection's first words.
    greeting: Duration,
    /// For an HTTP/1 request's header, and for a connection that is idle between two requests; also for an HTTP/2
    /// client that does not answer pings.
    headers: Duration,
    /// How long a connection of an HTTP port is used for new requests.
    old: Duration,
    /// For the last answers of an old one.
    last_answer: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        let seconds = Duration::from_secs;
        Patience { greeting: seconds(10), headers: seconds(30), old: seconds(120), last_answer: seconds(10) }
    }
}

/// What a process may serve besides the peer port: each takes a part of the process's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Serves {
    /// The embedded store.
    pub store: bool,
    /// The TCPStore that workers meet through.
    pub workers: bool,
}

/// What this process has said that it serves: all, where it has said nothing.
static SERVES: OnceLock<Serves> = OnceLock::new();

/// Raises this process's limit on open descriptors as far as it may, shares them among what it serves, and returns the
/// limit. Call it once, before the first port opens: without it shares are those of a process that serves all.
pub fn share_descriptors(serves: Serves) -> usize {
    // The first word holds: ports may be open by it.
    SERVES.get_or_init(|| serves);
    raise_descriptor_limit()
}

/// The usual limit of 1,024 is less than one leader of a large job needs, and is there for programs that call `select`.
fn raise_descriptor_limit() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let limit = if raised { maximum } else { current };
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// What a listener is for: that decides how many connections it takes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Other agents' pulses.
    Peers,
    /// The embedded store's clients.
    Store,
    /// The TCPStore that workers meet through.
    Workers,
    /// Health and metrics.
    Monitors,
}

impl Share {
    /// Connections at once, of a process that may have `limit` descriptors. An eighth of them, or what a process needs
    /// in any case, is for files, pipes, connections of our own and monitors. What is not served leaves its part to the
    /// peer port: where there is no store, a leader has room for more members.
    fn of(self, limit: usize, serves: Serves) -> usize {
        let own = (limit / 8).max(OWN.min(limit / 2));
        let sevenths = |count: usize| (limit - own) / 7 * count;
        let for_workers = if serves.workers { 3 } else { 0 };
        let rest = sevenths(7 - for_workers);
        match self {
            Share::Peers if !serves.store => rest.min(MOST),
            Share::Peers | Share::Store => (rest / 2).min(MOST),
            Share::Workers => sevenths(3),
            Share::Monitors => FEW.min(limit / 16),
        }
        .max(1)
    }

    /// Connections at once in this process.
    pub fn connections(self) -> usize {
        let serves = SERVES.get().copied().unwrap_or(Serves { store: true, workers: true });
        self.of(raise_descriptor_limit(), serves)
    }
}

/// Listens on an address, with a long queue: a thousand agents may come at once.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        // Whatever the machine's default: this address means all of them.
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    socket.bind(address)?;
    socket.listen(BACKLOG as u32)
}

/// Has the kernel ask a silent peer whether its host is still there, and end the connection if not: about two minutes
/// after it was last heard.
pub fn keep_alive(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(15))?;
    Ok(sockopt::set_tcp_keepcnt(&socket, 4)?)
}

/// A listening socket with its share of this process's descriptors.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    places: Arc<Semaphore>,
    patience: Patience,
    /// The last accept failed, and the log says so.
    failing: bool,
}

impl Port {
    /// Takes connections on `listener`, as many as its share allows.
    pub fn new(listener: TcpListener, share: Share) -> Port {
        Port::with(listener, share.connections(), Patience::default())
    }

    fn with(listener: TcpListener, places: usize, patience: Patience) -> Port {
        Port { listener, places: Arc::new(Semaphore::new(places)), patience, failing: false }
    }

    /// The next connection, once there is a place for it.
    pub async fn accept(&mut self) -> Connection {
        let place = self.place().await;
        let stream = self.stream().await;
        self.placed(stream, place)
    }

    async fn place(&self) -> OwnedSemaphorePermit {
        match Arc::clone(&self.places).acquire_owned().await {
            Ok(place) => place,
            // No one closes it.
            Err(_) => std::future::pending().await,
        }
    }

    fn placed(&self, stream: TcpStream, place: OwnedSemaphorePermit) -> Connection {
        let greeting = Some(Greeting { missing: PREFACE, by: Box::pin(sleep(self.patience.greeting)) });
        Connection { stream, greeting, _place: place }
    }

    /// The next connection, at once: where there is no place for it, the oldest of these ends. A monitor that asks
    /// whether this process lives does not wait for people who watch, nor for strangers who say nothing.
    async fn accept_for_the_oldest(&mut self, answered: &mut VecDeque<AbortHandle>) -> Connection {
        let stream = self.stream().await;
        answered.retain(|task| !task.is_finished());
        if self.places.available_permits() == 0
            && let Some(oldest) = answered.pop_front()
        {
            oldest.abort();
        }
        let place = self.place().await;
        self.placed(stream, place)
    }

    async fn stream(&mut self) -> TcpStream {
        loop {
            match self.listener.accept().await.and_then(|(stream, _)| prepared(stream)) {
                Ok(stream) => {
                    if std::mem::take(&mut self.failing) {
                        tracing::info!("connections are accepted again");
                    }
                    return stream;
                }
                Err(error) if is_the_client_s(&error) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::warn!("no connection can be accepted for now: {error}; trying again");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Answers HTTP/1, and HTTP/2 where a client begins with it, until it is dropped. Connections that are idle or do not
    /// finish their requests are closed.
    pub async fn serve_http(mut self, router: Router) {
        let mut answered = VecDeque::new();
        loop {
            let stream = self.accept_for_the_oldest(&mut answered).await;
            let task = tokio::spawn(answer(stream, Speaks::AsItBegins, router.clone(), self.patience));
            answered.push_back(task.abort_handle());
        }
    }

    /// The same over TLS, each connection with the settings of that moment.
    pub async fn serve_https(mut self, router: Router, settings: impl Fn() -> Arc<ServerConfig> + Send) {
        let mut answered = VecDeque::new();
        loop {
            let mut stream = self.accept_for_the_oldest(&mut answered).await;
            // The handshake's own limit is the shorter way to say it.
            stream.greeting = None;
            let handshake = TlsAcceptor::from(settings()).accept(stream);
            let (router, patience) = (router.clone(), self.patience);
            let task = tokio::spawn(async move {
                if let Ok(Ok(stream)) = timeout(patience.greeting, handshake).await {
                    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let speaks = if http2 { Speaks::Http2 } else { Speaks::Http1 };
                    answer(stream, speaks, router, patience).await;
                }
            });
            answered.push_back(task.abort_handle());
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speaks {
    AsItBegins,
    Http1,
    Http2,
}

/// With each request of an HTTP port: keeps the request's connection, however old it is, for an answer that lasts.
#[derive(Debug, Clone)]
pub struct Hold(Arc<watch::Sender<()>>);

impl Hold {
    /// The connection is kept until this is dropped.
    pub fn keep(&self) -> watch::Receiver<()> {
        self.0.subscribe()
    }
}

/// Answers one connection until it ends or is too old.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    speaks: Speaks,
    router: Router,
    patience: Patience,
) {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(patience.headers);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(patience.headers)
        .keep_alive_timeout(patience.headers)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADERS)
        .initial_stream_window_size(AHEAD)
        .initial_connection_window_size(AHEAD);
    let http = match speaks {
        Speaks::AsItBegins => http,
        Speaks::Http1 => http.http1_only(),
        Speaks::Http2 => http.http2_only(),
    };
    let held = Hold(Arc::new(watch::Sender::new(())));
    let (router, hold) = (TowerToHyperService::new(router), held.clone());
    let service = service_fn(move |mut request: axum::http::Request<Incoming>| {
        request.extensions_mut().insert(hold.clone());
        router.call(request)
    });
    let serving = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    let old = async {
        sleep(patience.old).await;
        held.0.closed().await;
    };
    tokio::select! {
        // What a client breaks is its own loss.
        _ = serving.as_mut() => return,
        () = old => {}
    }
    serving.as_mut().graceful_shutdown();
    let _ = timeout(patience.last_answer, serving).await;
}

fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream)
}

/// Whether an accept failed for a reason of the one client's, so that the next may be taken at once.
fn is_the_client_s(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionAborted
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionRefused
            | ErrorKind::InvalidInput
            | ErrorKind::Interrupted
    )
}

/// A connection in its place, which is free again when this is dropped. One whose client does not begin to speak fails.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    greeting: Option<Greeting>,
    _place: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct Greeting {
    missing: usize,
    by: Pin<Box<Sleep>>,
}

impl Connection {
    fn hear(&mut self, bytes: usize) {
        if let Some(greeting) = &mut self.greeting {
            greeting.missing = greeting.missing.saturating_sub(bytes);
            if greeting.missing == 0 {
                self.greeting = None;
            }
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.hear(buf.filled().len() - before);
            return Poll::Ready(read);
        }
        match &mut self.greeting {
            Some(greeting) => {
                ready!(greeting.by.as_mut().poll(cx));
                Poll::Ready(Err(ErrorKind::TimedOut.into()))
            }
            None => Poll::Pending,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Whom a connection comes from, as gRPC requests on it tell; unknown where it is over already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub Option<IpAddr>);

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer(self.stream.peer_addr().ok().map(|address| address.ip()))
    }
}
