//! The certificate of the HTTP port, from two PEM files.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::followed::Followed;

/// Serves with this certificate and its key, and with what the files hold later.
///
/// # Errors
/// The file that cannot be used, and why.
pub fn certificate(certificate: PathBuf, key: PathBuf) -> Result<Followed<ServerConfig>, String> {
    let names = [certificate.display().to_string(), key.display().to_string()];
    Followed::new("the certificate and the key of --http", vec![certificate, key], move |texts| {
        let [certificate, key] = texts else { return Err("there are two files".to_owned()) };
        config(&names, certificate, key)
    })
}

fn config([certificate_file, key_file]: &[String; 2], certificate: &str, key: &str) -> Result<ServerConfig, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
    let chain = chain.map_err(|error| format!("{certificate_file}: {error}"))?;
    if chain.is_empty() {
        return Err(format!("{certificate_file} holds no PEM certificate"));
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| format!("{key_file}: {error}"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| format!("{certificate_file} and {key_file} do not fit: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
