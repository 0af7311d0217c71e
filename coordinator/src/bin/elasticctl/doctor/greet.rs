//! What a server shows before anything is asked of its store: its certificate, whether or not it is to be trusted, and
//! its clock. What it means is judged in `certificates` and `clocks`. No password is sent here.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use elastic_rendezvous::job::overview::Job;
use elastic_store::StoreError;
use elastic_store::clock::epoch_ms;
use elastic_store::etcd::EtcdTls;
use elastic_store::tls::ChainVerifier;
use http_body_util::Empty;
use hyper::Request;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::header::{DATE, HOST};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::certificates::{Shown, Whose};
use super::clocks::Reading;
use super::look::{resolve, within};

type Failure = Box<dyn Error + Send + Sync>;

#[derive(Debug)]
pub(super) struct Greeting {
    /// None where it speaks no TLS, or said nothing.
    pub(super) shown: Shown,
    pub(super) clock: Result<Reading, String>,
}

/// Greets an etcd at these addresses of a `host:port`, over TLS if there are files for it.
pub(super) async fn etcd(
    addresses: &[SocketAddr],
    address: &str,
    tls: Option<&EtcdTls>,
) -> Result<Greeting, StoreError> {
    let shown = |certificates| Shown { whose: Whose::Etcds, of: address.to_owned(), certificates };
    let Some(tls) = tls else {
        let clock = match within(plain(addresses, address, Speaks::Http1)).await {
            // Anyone who serves gRPC alone, as the embedded store does
            Err(_) => within(plain(addresses, address, Speaks::Http2)).await,
            read => read,
        };
        return Ok(Greeting { shown: shown(Vec::new()), clock });
    };
    let mut config = tls.client_config()?;
    // Any certificate is taken and kept. Whether it is to be trusted, `look` finds out by itself.
    let taken = Arc::<Mutex<Vec<CertificateDer<'static>>>>::default();
    let keep = Arc::clone(&taken);
    let judge = move |own: &CertificateDer<'_>, others: &[CertificateDer<'_>], _| {
        let all = std::iter::once(own).chain(others).map(|certificate| certificate.clone().into_owned()).collect();
        *keep.lock().unwrap_or_else(PoisonError::into_inner) = all;
        Ok(())
    };
    let algorithms = config.crypto_provider().signature_verification_algorithms;
    let verifier = ChainVerifier { judge: Box::new(judge), algorithms };
    config.dangerous().set_certificate_verifier(Arc::new(verifier));
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    let name = tls.server_name.clone().unwrap_or_else(|| host.to_owned());
    let secure = async {
        let stream = TcpStream::connect(addresses).await?;
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector.connect(ServerName::try_from(name)?, stream).await?;
        ask(stream, address, Speaks::Http1).await
    };
    let clock = within(secure).await;
    let taken = taken.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok(Greeting { shown: shown(taken), clock })
}

/// The clock of the coordinator that leads a job, and its port. `None` where a node leads it, or no one.
pub(super) async fn coordinator(job: &Job) -> Option<(String, Result<Reading, String>)> {
    let leader = job.leader.as_ref().map(|leader| &leader.value).filter(|leader| leader.coordinator)?;
    let address = leader.peer.to_string();
    let read = match resolve(&address).await {
        Ok(addresses) => within(plain(&addresses, &address, Speaks::Http2)).await,
        Err(why) => Err(why),
    };
    Some((address, read))
}

#[derive(Clone, Copy)]
enum Speaks {
    Http1,
    Http2,
}

async fn plain(addresses: &[SocketAddr], address: &str, speaks: Speaks) -> Result<Reading, Failure> {
    ask(TcpStream::connect(addresses).await?, address, speaks).await
}

/// Asks for any answer over HTTP: a server of it says what time it has (RFC 9110, 6.6.1).
async fn ask<S>(stream: S, address: &str, speaks: Speaks) -> Result<Reading, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stream = TokioIo::new(stream);
    // What drives the connection ends with the sender, at the end of this function.
    let (asked_ms, response): (_, hyper::Response<Incoming>) = match speaks {
        Speaks::Http1 => {
            let (mut sender, connection) = http1::handshake(stream).await?;
            tokio::spawn(connection);
            let request = Request::get("/version").header(HOST, address).body(Empty::<Bytes>::new())?;
            (epoch_ms(), sender.send_request(request).await?)
        }
        Speaks::Http2 => {
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
            tokio::spawn(connection);
            let request = Request::get(format!("http://{address}/version")).body(Empty::<Bytes>::new())?;
            (epoch_ms(), sender.send_request(request).await?)
        }
    };
    let answered_ms = epoch_ms();
    let date = response.headers().get(DATE).ok_or("its answer over HTTP has no date")?.to_str()?;
    let since = httpdate::parse_http_date(date)?.duration_since(std::time::UNIX_EPOCH)?;
    let date_ms = u64::try_from(since.as_millis())?;
    Ok(Reading { asked_ms, answered_ms, date_ms })
}
