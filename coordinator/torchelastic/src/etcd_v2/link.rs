//! HTTP to one member at a time.
//!
//! A member that does not answer in time is left for the next one, with all long polls on it.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioExecutor;
use rustls::RootCertStore;
use rustls::pki_types::ServerName;
use tokio::time::{Instant, timeout, timeout_at};

use super::wire::{HttpReply, HttpRequest};
use elastic_store::etcd::fault::{Fault, Repeat, chain};
use elastic_store::etcd::rotation::{self, Rotation};
use elastic_store::etcd::{EtcdConfig, tls};
use elastic_store::{Result, StoreError};

/// The largest answer that is read: a directory of a job has some hundred small keys.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// How many idle connections are kept open: one for calls, and one that a long poll has just ended on.
const IDLE: usize = 2;

type Http = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

type Link = rotation::Link<Http>;

pub(super) struct Links {
    config: EtcdConfig,
    members: Rotation<Http>,
}

impl Links {
    pub(super) fn new(config: EtcdConfig) -> Result<Links> {
        let members = Rotation::new(config.uris()?, config.seed);
        let links = Links { config, members };
        links.http()?;
        Ok(links)
    }

    pub(super) fn endpoints(&self) -> String {
        self.members.endpoints()
    }

    /// The header with our credentials. The password is read for each request, so a changed one needs no restart.
    fn authorization(&self) -> Option<HeaderValue> {
        let user = self.config.user.as_ref()?;
        let credentials = STANDARD.encode(format!("{}:{}", user.name, user.password.reveal()));
        // Base64 has only characters that a header may contain.
        let mut value = HeaderValue::try_from(format!("Basic {credentials}")).unwrap_or(HeaderValue::from_static(""));
        value.set_sensitive(true);
        Some(value)
    }

    /// A client for the next member. It reads the certificates again, so renewed ones need no restart.
    fn http(&self) -> Result<Http> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(self.config.connect_timeout));
        let tls = match &self.config.tls {
            Some(files) => files.client_config()?,
            None => tls::builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
        };
        let mut https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        if let Some(name) = self.config.tls.as_ref().and_then(|tls| tls.server_name.as_ref()) {
            let name = ServerName::try_from(name.clone())
                .map_err(|_| StoreError::Invalid(format!("{name:?} is no server name")))?;
            https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
        }
        Ok(Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE)
            .build(https.enable_http1().wrap_connector(tcp)))
    }

    fn link(&self) -> Result<Arc<Link>, Fault> {
        match self.members.link() {
            Some(link) => Ok(link),
            None => Ok(self.members.connected(self.members.uri(), self.http().map_err(Fault::Refused)?)),
        }
    }

    /// Runs a request at the current member, and at others as far as that is safe, within the call's deadline.
    pub(super) async fn call(&self, repeat: Repeat, call: &HttpRequest) -> Result<HttpReply> {
        self.members.call(repeat, self.config.call_timeout, |until| self.attempt(until, call)).await
    }

    async fn attempt(&self, until: Instant, call: &HttpRequest) -> Result<HttpReply, Fault> {
        let link = self.link()?;
        let sent = Instant::now();
        let fault = match timeout_at(until, self.send(&link, call)).await {
            Ok(Ok(reply)) => {
                link.hear();
                match reply.is_election() {
                    Some(cause) => Fault::Later { cause: format!("{}: {cause}", link.uri), unsure: true },
                    None => return Ok(reply),
                }
            }
            Ok(Err(fault)) => fault,
            Err(_) => Fault::Late(format!("{} does not answer", link.uri)),
        };
        Err(self.members.judge(&link, sent, fault))
    }

    /// A request whose answer may take as long as `window`. `None`: no answer came, which is no error.
    pub(super) async fn poll(&self, call: &HttpRequest, window: Duration) -> Result<Option<HttpReply>> {
        let outcome = match self.link() {
            Err(fault) => Err(fault),
            Ok(link) => tokio::select! {
                sent = timeout(window, self.send(&link, call)) => match sent {
                    Err(_) => return Ok(None),
                    Ok(Ok(reply)) => return Ok(Some(reply)),
                    Ok(Err(fault)) => Err(self.members.judge(&link, Instant::now(), fault)),
                },
                () = link.retired() => return Ok(None),
            },
        };
        outcome.map_err(|fault| fault.into_error(false, &self.endpoints()))
    }

    async fn send(&self, link: &Link, call: &HttpRequest) -> Result<HttpReply, Fault> {
        let mut request = hyper::Request::builder().method(&call.method).uri(format!("{}{}", link.uri, call.path));
        if !call.body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        }
        if let Some(authorization) = self.authorization() {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Full::new(Bytes::from(call.body.clone())))
            .map_err(|error| Fault::Refused(StoreError::Invalid(format!("{}: {error}", call.path))))?;
        let response = link.client.request(request).await.map_err(|error| fault(&error, &link.uri))?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let status = response.status().as_u16();
        let cluster = header("x-etcd-cluster-id");
        let index = header("x-etcd-index").and_then(|index| index.parse().ok()).unwrap_or(0);
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|error| Fault::Unsure(format!("{}: {error}", link.uri)))?.to_bytes();
        Ok(HttpReply { status, cluster, index, body })
    }
}

fn fault(error: &Error, uri: &str) -> Fault {
    let cause = chain(error);
    if !error.is_connect() {
        // In TLS 1.3 a server refuses a client's certificate only after the client takes the connection for open.
        if ["CertificateRequired", "BadCertificate", "UnknownCA"].iter().any(|alert| cause.contains(alert)) {
            return distrust(uri, "it wants a client certificate from a CA that it trusts".into());
        }
        return Fault::Unsure(format!("{uri}: {cause}"));
    }
    if cause.contains("UnknownIssuer") || cause.contains("BadSignature") {
        return distrust(uri, "its certificate was not signed by the CA given".into());
    }
    if cause.contains("not valid for name") || cause.contains("NotValidForName") {
        return distrust(uri, format!("its certificate is for another name ({cause})"));
    }
    if cause.contains("corrupt message") || cause.contains("InvalidContentType") {
        return distrust(uri, "it speaks plain HTTP and we TLS: use http:// without TLS files".into());
    }
    Fault::NotSent(format!("{uri}: {cause}"))
}

fn distrust(uri: &str, cause: String) -> Fault {
    Fault::Refused(StoreError::Tls { endpoints: uri.to_owned(), cause })
}
