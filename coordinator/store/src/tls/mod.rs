//! TLS of what this project serves. What etcd's own TLS needs is with [`store::etcd`](crate::etcd).
//!
//! [`MutualTls`] is the peers' network's: each end of a connection shows a certificate of one private authority. The rest
//! of the code hands an `Option` of it through; without it connections are plain. [`http_certificate`] is for the
//! coordinator's HTTP port, which browsers trust without having one.
//!
//! All files are read again while the program runs.

mod chain;
mod mutual;
#[cfg(test)]
mod tests;
mod trouble;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ConfigBuilder, ConfigSide, RootCertStore, ServerConfig, WantsVerifier, WantsVersions};

use crate::followed::Followed;

pub use chain::ChainVerifier;
pub use mutual::{Connector, MutualTls, TlsFiles};
pub use trouble::{explain, refusal_in, trouble_in};

/// What a server of TLS is set to at the moment of a connection.
pub type ServerSettings = Box<dyn Fn() -> Arc<ServerConfig> + Send + Sync>;

/// In a file's mode: others than its owner and group may read it.
const OTHERS_READ: u32 = 0o004;

/// Warns of a file with a secret that everybody on the host may read. `what` says which.
pub fn warn_if_everybody_reads(what: &str, path: &Path) {
    if std::fs::metadata(path).is_ok_and(|file| file.mode() & OTHERS_READ != 0) {
        tracing::warn!(
            "everybody on this host can read {what} in {}: take that from them with chmod 600",
            path.display()
        );
    }
}

/// The settings of the coordinator's HTTP port: a certificate and its key, read again when the files change.
pub fn http_certificate(certificate: PathBuf, key: PathBuf) -> Result<Followed<ServerConfig>, String> {
    warn_if_everybody_reads("the key", &key);
    let names = [certificate.display().to_string(), key.display().to_string()];
    Followed::new("the certificate and the key of --http", vec![certificate, key], move |texts| {
        let [certificate, key] = texts else { return Err("there are two files".to_owned()) };
        http_config(&names, certificate, key)
    })
}

fn http_config(
    [certificate_file, key_file]: &[String; 2],
    certificate: &str,
    pem: &str,
) -> Result<ServerConfig, String> {
    let chain = certificates(certificate_file, certificate.as_bytes())?;
    let mut config = usual_versions(ServerConfig::builder_with_provider(provider()))?
        .with_no_client_auth()
        .with_single_cert(chain, key(key_file, pem.as_bytes())?)
        .map_err(|error| format!("{certificate_file} and {key_file} do not fit: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The certificates of a PEM text: one at least.
pub(crate) fn certificates(file: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| format!("{file}: {error}"))?;
    if chain.is_empty() { Err(format!("{file} holds no PEM certificate")) } else { Ok(chain) }
}

pub(crate) fn key(file: &str, pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| format!("{file}: {error}"))
}

pub(crate) fn roots(file: &str, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for root in certificates(file, pem)? {
        roots.add(root).map_err(|error| format!("{file}: {error}"))?;
    }
    Ok(roots)
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The versions that rustls takes for safe.
pub(crate) fn usual_versions<S: ConfigSide>(
    builder: ConfigBuilder<S, WantsVersions>,
) -> Result<ConfigBuilder<S, WantsVerifier>, String> {
    builder.with_safe_default_protocol_versions().map_err(|error| format!("TLS: {error}"))
}
