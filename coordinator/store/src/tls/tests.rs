use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;
use time::OffsetDateTime;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use super::mutual::anyone_of;
use super::*;
use crate::listener::{Port, Share};

const WITHIN: Duration = Duration::from_secs(20);

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// A certificate and its key, good for so many seconds from now on, or until as many ago.
    fn sign(&self, seconds: i64) -> (String, String) {
        let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
        params.not_after = OffsetDateTime::now_utc() + time::Duration::seconds(seconds);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Writes the files of a node that trusts this authority, with a certificate of `signed_by`.
    fn write(&self, folder: &Path, signed_by: &Authority) -> TlsFiles {
        let (certificate, key) = signed_by.sign(3600);
        let files = ["c", "k", "a"].map(|name| folder.join(name));
        for (file, text) in files.iter().zip([certificate, key, self.issuer.pem()]) {
            std::fs::write(file, text).unwrap();
        }
        let [certificate, key, authority] = files;
        TlsFiles { certificate, key, authority }
    }

    fn node(&self) -> (MutualTls, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        (MutualTls::follow(self.write(folder.path(), self)).unwrap(), folder)
    }
}

/// A port that answers each connection with what it hears.
async fn echo(tls: Option<MutualTls>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut incoming = std::pin::pin!(Port::new(listener, Share::Peers).incoming(tls));
        while let Some(Ok(mut stream)) = incoming.next().await {
            tokio::spawn(async move {
                let mut heard = [0; 4];
                while stream.read_exact(&mut heard).await.is_ok() && stream.write_all(&heard).await.is_ok() {}
            });
        }
    });
    address
}

/// Whether the port answers a client with this; or why not.
async fn asks(tls: &MutualTls, at: SocketAddr) -> Result<(), String> {
    let exchange = async {
        let mut stream = tls.connect("127.0.0.1", at.port()).await?;
        stream.write_all(b"ping").await?;
        stream.read_exact(&mut [0; 4]).await.map(drop)
    };
    timeout(WITHIN, exchange).await.expect("an answer").map_err(|error| error.to_string())
}

#[tokio::test]
async fn those_of_one_authority_speak_and_others_are_refused_by_both_ends() {
    let (ours, others) = (Authority::new("ours"), Authority::new("others"));
    let ((node, _a), (peer, _b), (stranger, _c)) = (ours.node(), ours.node(), others.node());
    let port = echo(Some(node)).await;
    assert_eq!(asks(&peer, port).await, Ok(()));
    let refused = asks(&stranger, port).await.unwrap_err();
    assert!(trouble_in(&refused).is_some_and(|why| why.contains("of another authority")), "{refused}");
    // One that trusts us, and has a certificate of another authority.
    let folder = tempfile::tempdir().unwrap();
    let spy = MutualTls::follow(ours.write(folder.path(), &others)).unwrap();
    assert!(asks(&spy, port).await.is_err());
    // The stranger was no hindrance.
    assert_eq!(asks(&peer, port).await, Ok(()));
}

#[tokio::test]
async fn a_certificate_that_has_ended_is_refused_by_its_owner_and_by_others() {
    let ours = Authority::new("ours");
    let ((node, _a), folder) = (ours.node(), tempfile::tempdir().unwrap());
    let port = echo(Some(node.clone())).await;
    let files = ours.write(folder.path(), &ours);
    let (certificate, pem) = ours.sign(-1);
    std::fs::write(&files.certificate, &certificate).unwrap();
    std::fs::write(&files.key, &pem).unwrap();
    let own = MutualTls::follow(files).unwrap_err();
    assert!(own.contains("has ended at") && own.contains("elasticctl certs node"), "{own}");

    // A program that shows it all the same.
    let roots = roots("ca", ours.issuer.pem().as_bytes()).unwrap();
    let client = usual_versions(rustls::ClientConfig::builder_with_provider(provider()))
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(anyone_of(Arc::new(roots)))
        .with_client_auth_cert(certificates("c", certificate.as_bytes()).unwrap(), key("k", pem.as_bytes()).unwrap())
        .unwrap();
    let stream = TcpStream::connect(port).await.unwrap();
    let exchange = async {
        let mut stream = TlsConnector::from(Arc::new(client)).connect("a".try_into().unwrap(), stream).await?;
        stream.write_all(b"ping").await?;
        stream.read_exact(&mut [0; 4]).await
    };
    assert!(timeout(WITHIN, exchange).await.expect("an answer").is_err());
}

#[tokio::test]
async fn a_client_without_tls_gets_nothing_and_one_with_tls_learns_of_a_plain_port() {
    let ours = Authority::new("ours");
    let (node, _a) = ours.node();
    // A plain client of a port with TLS
    let mut plain = TcpStream::connect(echo(Some(node.clone())).await).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut heard = Vec::new();
    let _ = timeout(WITHIN, plain.read_to_end(&mut heard)).await.expect("its end");
    assert!(!heard.windows(4).any(|part| part == b"PRI "), "{heard:?}");
    // A client with TLS of a plain port
    let refused = asks(&node, echo(None).await).await.unwrap_err();
    assert!(trouble_in(&refused).is_some_and(|why| why.contains("does not speak TLS")), "{refused}");
}

#[tokio::test]
async fn files_are_followed_and_broken_ones_change_nothing() {
    let (ours, next) = (Authority::new("ours"), Authority::new("next"));
    let folder = tempfile::tempdir().unwrap();
    let node = MutualTls::follow(ours.write(folder.path(), &ours)).unwrap();
    let ((old, _a), (new, _b)) = (ours.node(), next.node());
    let port = echo(Some(node.clone())).await;
    assert_eq!((asks(&old, port).await, asks(&new, port).await.is_ok()), (Ok(()), false));
    let hour = crate::clock::epoch_ms() / 1000 + 3600;
    assert!(node.good_until().abs_diff(hour) < 60, "{} {hour}", node.good_until());
    next.write(folder.path(), &next);
    let (certificate, key) = next.sign(7200);
    std::fs::write(folder.path().join("c"), certificate).unwrap();
    std::fs::write(folder.path().join("k"), key).unwrap();
    let renewed = async {
        while asks(&new, port).await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(WITHIN, renewed).await.expect("the new files are read");
    assert!(asks(&old, port).await.is_err());
    assert!(node.good_until().abs_diff(hour + 3600) < 60, "{} {hour}", node.good_until());
    // One is broken, and the next look but one finds it whole again: those in between were not used.
    std::fs::write(folder.path().join("a"), "rubbish").unwrap();
    sleep(crate::followed::LOOK + Duration::from_millis(200)).await;
    assert_eq!(asks(&new, port).await, Ok(()));
}
