//! Mutual TLS 1.3 by a private authority: anyone who holds one of its certificates may act as a node, and no one else.
//!
//! The names in certificates are not compared. Anyone who holds a node's certificate may join as a node anyhow,
//! addresses of nodes come and go, and which job and which node somebody speaks for is proved by the job's secret.
//! Sessions are not resumed: each connection shows its certificate again, so that one which has ended is of no use any
//! more.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{ChainVerifier, certificates, explain, key, provider, roots, warn_if_everybody_reads};
use crate::followed::Followed;
use elastic_rendezvous::time::date;

/// HTTP/2 and, for health and metrics, HTTP/1: clients such as `etcdctl` insist on hearing which.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Where the certificates are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file of our own certificate, and of those between it and the authority.
    pub certificate: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
    /// PEM file of the authority; of several while one follows another.
    pub authority: PathBuf,
}

/// Mutual TLS by what some files hold now. Cheap to clone.
#[derive(Clone)]
pub struct MutualTls(Followed<Ends>);

struct Ends {
    /// When our own certificate ends, in seconds since 1970.
    until: u64,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl fmt::Debug for MutualTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MutualTls")
    }
}

impl MutualTls {
    /// By these files, and by what they hold later. Must be called within a tokio runtime.
    pub fn follow(files: TlsFiles) -> Result<MutualTls, String> {
        let TlsFiles { certificate, key, authority } = files;
        warn_if_everybody_reads("the key", &key);
        let names = [&certificate, &key, &authority].map(|path| path.display().to_string());
        let what = "the files of --peer-cert, --peer-key and --peer-ca";
        Followed::new(what, vec![certificate, key, authority], move |texts| {
            let [certificate, key, authority] = texts else { return Err("there are three files".to_owned()) };
            Ends::of(&names, certificate, key, authority)
        })
        .map(MutualTls)
    }

    /// When our own certificate ends, in seconds since 1970.
    pub fn good_until(&self) -> u64 {
        self.0.now().until
    }

    /// What a server of HTTP is set to now.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.now().server)
    }

    /// A server's end of a connection.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<server::TlsStream<S>> {
        TlsAcceptor::from(self.server()).accept(stream).await.map_err(explain)
    }

    pub(super) async fn connect(&self, host: &str, port: u16) -> io::Result<client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        // No name is compared or sent.
        let nobody = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        let client = Arc::clone(&self.0.now().client);
        TlsConnector::from(client).connect(nobody, stream).await.map_err(explain)
    }

    /// Makes connections for gRPC. It does TLS below `http://`, so that no name is compared.
    pub fn connector(&self) -> Connector {
        Connector(self.clone())
    }
}

/// Connects gRPC's channels over mutual TLS.
#[derive(Debug, Clone)]
pub struct Connector(MutualTls);

impl Service<Uri> for Connector {
    type Response = TokioIo<client::TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
            let port = uri.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
            tls.connect(host, port).await.map(TokioIo::new)
        })
    }
}

impl Ends {
    fn of(
        [certificate_file, key_file, authority_file]: &[String; 3],
        certificate: &str,
        pem: &str,
        authority: &str,
    ) -> Result<Ends, String> {
        let chain = certificates(certificate_file, certificate.as_bytes())?;
        let until = end_of(certificate_file, &chain)?;
        let (roots, provider) = (Arc::new(roots(authority_file, authority.as_bytes())?), provider());
        let tls = |error: &dyn fmt::Display| format!("TLS: {error}");
        let unfit = |error: Error| format!("{certificate_file} and {key_file} do not fit: {error}");

        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| tls(&error))?
            .with_client_cert_verifier(clients.build().map_err(|error| format!("{authority_file}: {error}"))?)
            .with_single_cert(chain.clone(), key(key_file, pem.as_bytes())?)
            .map_err(unfit)?;
        server.alpn_protocols = ALPN.map(<[u8]>::to_vec).to_vec();
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;

        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| tls(&error))?
            .dangerous()
            .with_custom_certificate_verifier(anyone_of(roots))
            .with_client_auth_cert(chain, key(key_file, pem.as_bytes())?)
            .map_err(unfit)?;
        client.alpn_protocols = vec![ALPN[0].to_vec()];
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Ends { until, server: Arc::new(server), client: Arc::new(client) })
    }
}

/// When a certificate ends. No one would accept one that has: better to say so here.
fn end_of(file: &str, chain: &[CertificateDer<'_>]) -> Result<u64, String> {
    let (_, own) = X509Certificate::from_der(&chain[0]).map_err(|error| format!("{file}: {error}"))?;
    let until = u64::try_from(own.validity().not_after.timestamp()).unwrap_or(0);
    if until * 1000 > crate::clock::epoch_ms() {
        return Ok(until);
    }
    let ended = date::utc(until * 1000);
    Err(format!(
        "the certificate in {file} has ended at {ended}: make a new one, with elasticctl certs node if that made it"
    ))
}

/// Takes every server that shows a certificate of one of these authorities.
pub(super) fn anyone_of(roots: Arc<RootCertStore>) -> Arc<ChainVerifier> {
    let algorithms = provider().signature_verification_algorithms;
    let judge = move |own: &CertificateDer<'_>, others: &[CertificateDer<'_>], now| {
        let shown = ParsedCertificate::try_from(own)?;
        verify_server_cert_signed_by_trust_anchor(&shown, &roots, others, now, algorithms.all)
    };
    Arc::new(ChainVerifier { judge: Box::new(judge), algorithms })
}
