//! The certificate of the HTTP port, from two PEM files.

use std::path::PathBuf;

use rustls::ServerConfig;

use super::{certificates, key, provider, usual_versions, warn_if_everybody_reads};
use crate::followed::Followed;

/// Serves with this certificate and its key, and with what the files hold later.
pub fn certificate(certificate: PathBuf, key: PathBuf) -> Result<Followed<ServerConfig>, String> {
    warn_if_everybody_reads("the key", &key);
    let names = [certificate.display().to_string(), key.display().to_string()];
    Followed::new("the certificate and the key of --http", vec![certificate, key], move |texts| {
        let [certificate, key] = texts else { return Err("there are two files".to_owned()) };
        config(&names, certificate, key)
    })
}

fn config([certificate_file, key_file]: &[String; 2], certificate: &str, pem: &str) -> Result<ServerConfig, String> {
    let chain = certificates(certificate_file, certificate.as_bytes())?;
    let mut config = usual_versions(ServerConfig::builder_with_provider(provider()))?
        .with_no_client_auth()
        .with_single_cert(chain, key(key_file, pem.as_bytes())?)
        .map_err(|error| format!("{certificate_file} and {key_file} do not fit: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
