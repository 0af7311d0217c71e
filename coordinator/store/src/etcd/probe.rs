//! What is wrong with an endpoint, found by asking it: nothing there, TLS or not, an old etcd, no etcd at all. Working
//! calls do not ask: they report faults as they meet them.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::StoreError;
use crate::tls::trouble_in;

const PATIENCE: Duration = Duration::from_secs(1);
/// How long a server has that answers the first question, until it gets the second.
const SOON: Duration = Duration::from_millis(300);

/// A TLS record with a ClientHello too short to be one: whatever speaks TLS answers with an alert (RFC 8446, 6.2), and
/// nothing else does.
const MALFORMED_HELLO: &[u8] = &[0x16, 3, 1, 0, 5, 1, 0, 0, 1, 0];

const ALERT: u8 = 0x15;

#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing(String),
    Tls,
    /// An HTTP server, and its answer to `GET /version`.
    Http(String),
    /// It accepts connections and says nothing that we understand.
    Mute,
}

/// Turns the failure of a probing call into the most telling error. `failure` is returned where nothing better is found.
pub(super) async fn explain(uri: &str, failure: StoreError) -> StoreError {
    let cause = match &failure {
        StoreError::Unavailable { cause, .. } | StoreError::Unknown { cause, .. } | StoreError::NotV3 { cause, .. } => {
            cause.clone()
        }
        _ => return failure,
    };
    // In etcd's words only etcd answers.
    if cause.starts_with("etcdserver: ") {
        return failure;
    }
    let Some((scheme, address)) = uri.split_once("://") else { return failure };
    let endpoints = uri.to_owned();
    if let Some(trouble) = trouble_in(&cause) {
        return StoreError::Tls { endpoints, cause: trouble.to_owned() };
    }
    let tls = |cause: String| StoreError::Tls { endpoints: uri.to_owned(), cause };
    let found = look(address).await;
    match (scheme, found) {
        (_, Found::Nothing(cause)) => StoreError::Unavailable { endpoints, cause },
        ("http", Found::Tls) => tls("it speaks TLS and we do not: use https:// and give the CA's certificate".into()),
        ("https", Found::Tls) => match certificate_trouble(&cause) {
            Some(trouble) => tls(trouble),
            None => failure,
        },
        ("https", Found::Http(_)) => tls("it speaks plain HTTP and we TLS: use http:// without TLS files".into()),
        ("http", Found::Http(answer)) => not_v3(endpoints, &answer, failure),
        _ => failure,
    }
}

/// What an HTTP server's answer says about it.
fn not_v3(endpoints: String, answer: &str, failure: StoreError) -> StoreError {
    let cause = match answer.split_once("\"etcdserver\":\"").and_then(|(_, rest)| rest.split_once('"')) {
        Some((version, _)) if version.starts_with("2.") || version.starts_with("3.0") => {
            format!("it is etcd {version}; 3.4 or newer is needed")
        }
        Some((version, _)) if matches!(failure, StoreError::NotV3 { .. }) => {
            format!("it is etcd {version}, and does not offer the v3 API there (is a proxy in between?)")
        }
        Some(_) => return failure,
        None => {
            let line = answer.lines().next().unwrap_or_default();
            format!("it is some HTTP server ({line}), not etcd; clients connect to etcd's port 2379 by default")
        }
    };
    StoreError::NotV3 { endpoints, cause }
}

/// The part of a handshake's failure that says who distrusts whom.
fn certificate_trouble(cause: &str) -> Option<String> {
    let says = |text: &str| cause.contains(text);
    if says("UnknownIssuer") || says("BadSignature") {
        return Some("its certificate was not signed by the CA given".into());
    }
    if says("NotValidForName") {
        return Some(format!("its certificate is for another name ({cause}): give the name to expect"));
    }
    // In TLS 1.3 a server refuses a client's certificate after the client's side of the handshake is done. It sends an
    // alert and hangs up, and whether the alert is read before our next write fails is a matter of luck.
    let refused =
        ["CertificateRequired", "BadCertificate", "UnknownCA", "connection closed", "broken pipe", "reset by peer"];
    if refused.iter().any(|text| says(text)) {
        return Some(
            "it ends the connection after the handshake: it wants a client certificate from a CA it trusts".into(),
        );
    }
    (says("certificate") || says("Certificate") || says("handshake") || says("alert")).then(|| cause.to_owned())
}

async fn look(address: &str) -> Found {
    let until = Instant::now() + PATIENCE;
    let request = format!("GET /version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let mut answer = std::pin::pin!(ask(address, request.as_bytes(), until));
    let soon = tokio::time::timeout(SOON, &mut answer).await;
    match &soon {
        Ok(Err(error)) => return Found::Nothing(error.to_string()),
        // As our own store says it. It would take the question for TLS for a mistake to warn of.
        Ok(Ok(answer)) if is_http2(answer) => return Found::Mute,
        _ => {}
    }
    // A server of TLS may answer in HTTP that it does not speak it.
    let late = async { if let Ok(soon) = soon { soon } else { answer.await } };
    match tokio::join!(ask(address, MALFORMED_HELLO, until), late) {
        (Err(error), _) => Found::Nothing(error.to_string()),
        (Ok(alert), _) if alert.first() == Some(&ALERT) => Found::Tls,
        (_, Ok(answer)) if answer.starts_with(b"HTTP/") => Found::Http(String::from_utf8_lossy(&answer).into_owned()),
        _ => Found::Mute,
    }
}

/// Whether it begins with the settings of a server that speaks HTTP/2 alone (RFC 9113, 6.5).
fn is_http2(answer: &[u8]) -> bool {
    answer.get(3) == Some(&4) && answer.get(5..9) == Some(&[0; 4])
}

/// Sends bytes on a new connection and returns what comes back, if anything. An error means that no connection was made.
async fn ask(address: &str, question: &[u8], until: Instant) -> std::io::Result<Vec<u8>> {
    let connected = tokio::time::timeout_at(until, TcpStream::connect(address)).await;
    let mut stream = connected.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    let mut answer = Vec::new();
    let exchange = async {
        stream.write_all(question).await?;
        (&mut stream).take(4096).read_to_end(&mut answer).await
    };
    // A server that hangs up or keeps the connection open has still said what it said.
    let _ = tokio::time::timeout_at(until, exchange).await;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

    use super::*;
    use crate::embedded::EmbeddedServer;

    #[tokio::test]
    async fn a_store_that_speaks_no_tls_is_not_asked_for_it() -> anyhow::Result<()> {
        let server = EmbeddedServer::bind("127.0.0.1:0".parse()?, false).await?;
        let address = server.address();
        tokio::spawn(server.serve(std::future::pending()));
        let way = TcpListener::bind("127.0.0.1:0").await?;
        let (to, asked) = (way.local_addr()?.to_string(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = way.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                let mut server = TcpStream::connect(address).await.expect("it serves");
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
            }
        });
        assert_eq!(look(&to).await, Found::Mute);
        assert_eq!(asked.load(Ordering::Relaxed), 1, "one question is enough");

        // Who says nothing to that is asked for TLS
        let mute = TcpListener::bind("127.0.0.1:0").await?;
        let address = mute.local_addr()?.to_string();
        let (found, asked) = tokio::join!(look(&address), async {
            let mut asked = Vec::new();
            for _ in 0..2 {
                let (mut stream, _) = mute.accept().await?;
                asked.push(stream.read_u8().await?);
            }
            anyhow::Ok(asked)
        });
        assert_eq!((found, asked?), (Found::Mute, vec![b'G', MALFORMED_HELLO[0]]));
        Ok(())
    }
}
