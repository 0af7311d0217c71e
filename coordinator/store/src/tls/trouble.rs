//! What a handshake's failure means, in words that say what to do.

use std::io;

use rustls::{AlertDescription, CertificateError, Error as TlsError};

/// What each explanation begins with, so that it is found again in a longer message.
const BEGINS: &str = "peers' TLS: ";

/// Puts what the failure means instead of TLS's words, where the failure is TLS's.
pub fn explain(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>());
    match inner.map(meaning) {
        Some(meaning) => io::Error::new(error.kind(), format!("{BEGINS}{meaning}")),
        None => error,
    }
}

fn meaning(error: &TlsError) -> String {
    let flags = "--peer-cert, --peer-key and --peer-ca";
    match error {
        TlsError::InvalidMessage(_) | TlsError::AlertReceived(AlertDescription::ProtocolVersion) => {
            format!("the other end does not speak TLS: give it {flags} as here, or take them from all")
        }
        TlsError::NoCertificatesPresented => format!("the other end shows no certificate: give it {flags} as here"),
        TlsError::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "the other end's certificate has ended: renew its --peer-cert, with elasticctl certs node if that made it"
                .to_owned()
        }
        TlsError::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "the other end's certificate is of another authority than those in --peer-ca here".to_owned()
        }
        TlsError::AlertReceived(AlertDescription::CertificateExpired) => {
            "the other end refuses the certificate of --peer-cert here, which has ended: renew it, or set the clocks"
                .to_owned()
        }
        TlsError::AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "the other end refuses the certificate of --peer-cert here: it is of another authority than those in its \
             --peer-ca"
                .to_owned()
        }
        other => other.to_string(),
    }
}

/// The explanation in an error's message, where there is one.
pub fn trouble_in(message: &str) -> Option<&str> {
    message.split_once(BEGINS).map(|(_, meaning)| meaning)
}

/// What an alert means that comes after the handshake, in the message of a call that failed by it.
pub fn refusal_in(message: &str) -> Option<String> {
    let (_, alert) = message.split_once("received fatal alert: ")?;
    Some(format!(
        "the other end refuses the certificate of --peer-cert here ({alert}): is it of its --peer-ca, and good still?"
    ))
}
