//! TLS for what is no gRPC: etcd's v2 API, and a look at a member's certificate.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::config::{EtcdTls, read};
use crate::{Result, StoreError};

impl EtcdTls {
    /// Reads the files, for a client by rustls.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] names the file that cannot be used.
    pub fn client_config(&self) -> Result<ClientConfig> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca)? {
            roots.add(certificate).map_err(|error| invalid(&self.ca, &error))?;
        }
        let builder = builder()?.with_root_certificates(roots);
        let Some((certificate, key_file)) = &self.client else { return Ok(builder.with_no_client_auth()) };
        let key = PrivateKeyDer::from_pem_slice(&read(key_file)?).map_err(|error| invalid(key_file, &error))?;
        builder.with_client_auth_cert(certificates(certificate)?, key).map_err(|error| invalid(certificate, &error))
    }
}

/// A client's TLS settings, before it is known whom it trusts.
///
/// # Errors
/// [`StoreError::Invalid`] if the provider lacks the protocol versions.
pub fn builder() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| StoreError::Invalid(format!("TLS: {error}")))
}

/// The certificates in a PEM file: one at least.
///
/// # Errors
/// [`StoreError::Invalid`] names the file that cannot be read, or that holds none.
pub fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let certificates: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(file)?).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(StoreError::Invalid(format!("{} holds no PEM certificate", file.display()))),
        Err(error) => Err(invalid(file, &error)),
    }
}

fn invalid(file: &Path, error: &dyn std::fmt::Debug) -> StoreError {
    StoreError::Invalid(format!("{}: {error:?}", file.display()))
}
