//! Connections of a port for programs of ours, over mutual TLS where there is a [`MutualTls`].

use std::io::{self, ErrorKind, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::{Connection, Peer, Port};
use crate::tls::{MutualTls, trouble_in};
use elastic_rendezvous::time::Time;

/// The least time between two warnings of a port about clients that it refuses.
const SELDOM: Duration = Duration::from_secs(30);

/// The first byte of a client that speaks TLS.
const HANDSHAKE: u8 = 0x16;

/// What such a client understands of a port that does not: a fatal alert, `protocol_version` (RFC 8446, 6.2).
const NO_TLS: &[u8] = &[0x15, 3, 3, 0, 2, 2, 70];

impl Port {
    /// All connections, for a gRPC server; with `tls` those alone that show a certificate of its authority.
    pub fn incoming(self, tls: Option<MutualTls>) -> impl Stream<Item = io::Result<PeerStream>> {
        let refusals = Arc::<Refusals>::default();
        let state = (self, tls, FuturesUnordered::new());
        futures::stream::unfold(state, move |(mut port, tls, mut handshakes)| {
            let refusals = Arc::clone(&refusals);
            async move {
                loop {
                    let (stream, within) = tokio::select! {
                        stream = port.accept() => (stream, port.patience.greeting),
                        Some(shaken) = handshakes.next() => match shaken {
                            Some(stream) => return Some((Ok(PeerStream::Tls(stream)), (port, tls, handshakes))),
                            None => continue,
                        },
                    };
                    let Some(tls) = tls.clone() else {
                        let stream = PeerStream::Plain { stream, unheard: Some(refusals) };
                        return Some((Ok(stream), (port, tls, handshakes)));
                    };
                    handshakes.push(shake(tls, stream, within, Arc::clone(&refusals)));
                }
            }
        })
    }
}

/// The handshake of one connection. One that ends before it has begun is somebody's look whether the port accepts.
async fn shake(
    tls: MutualTls,
    stream: Connection,
    within: Duration,
    refusals: Arc<Refusals>,
) -> Option<Box<TlsStream<Connection>>> {
    let Peer(from) = stream.connect_info();
    match timeout(within, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Box::new(stream)),
        Ok(Err(error)) => {
            let text = error.to_string();
            if let Some(trouble) = trouble_in(&text) {
                refusals.say(from, trouble);
            }
            None
        }
        Err(_) => None,
    }
}

/// Who was refused, for the log: not so often that a stranger could fill it.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    last: Option<Time>,
    untold: u64,
}

impl Refusals {
    fn say(&self, from: Option<IpAddr>, trouble: &str) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = crate::clock::now();
        if told.last.is_some_and(|last| now.since(last) < SELDOM) {
            told.untold += 1;
            return;
        }
        told.last = Some(now);
        let from = from.map_or_else(|| "somebody".to_owned(), |ip| ip.to_canonical().to_string());
        let more = match std::mem::take(&mut told.untold) {
            0 => String::new(),
            untold => format!(" (and {untold} others since the last such warning)"),
        };
        tracing::warn!("a connection from {from} is refused: {trouble}{more}");
    }
}

/// A connection from another program of ours, or from anyone who wants to be taken for one.
#[derive(Debug)]
pub enum PeerStream {
    /// Without TLS.
    Plain {
        /// The connection.
        stream: Connection,
        /// Until its first bytes have come: where to say that they are TLS.
        unheard: Option<Arc<Refusals>>,
    },
    /// Over TLS, after a certificate was shown.
    Tls(Box<TlsStream<Connection>>),
}

impl Connected for PeerStream {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        match self {
            PeerStream::Plain { stream, .. } => stream.connect_info(),
            PeerStream::Tls(stream) => stream.get_ref().0.connect_info(),
        }
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (stream, unheard) = match &mut *self {
            PeerStream::Tls(stream) => return Pin::new(stream).poll_read(cx, buf),
            PeerStream::Plain { stream, unheard } => (stream, unheard),
        };
        let before = buf.filled().len();
        let read = Pin::new(&mut *stream).poll_read(cx, buf);
        if let Some(first) = buf.filled().get(before)
            && let Some(refusals) = unheard.take()
            && *first == HANDSHAKE
        {
            let trouble = "it speaks TLS, and this port does not: give both ends --peer-cert, --peer-key and --peer-ca, \
                           or neither";
            refusals.say(stream.connect_info().0, trouble);
            let _ = Pin::new(stream).poll_write(cx, NO_TLS);
            return Poll::Ready(Err(ErrorKind::InvalidData.into()));
        }
        read
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            PeerStream::Plain { stream, .. } => Pin::new(stream).poll_write(cx, buf),
            PeerStream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            PeerStream::Plain { stream, .. } => Pin::new(stream).poll_write_vectored(cx, bufs),
            PeerStream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            PeerStream::Plain { stream, .. } => stream.is_write_vectored(),
            PeerStream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            PeerStream::Plain { stream, .. } => Pin::new(stream).poll_flush(cx),
            PeerStream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            PeerStream::Plain { stream, .. } => Pin::new(stream).poll_shutdown(cx),
            PeerStream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
