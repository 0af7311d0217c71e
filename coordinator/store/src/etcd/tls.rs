//! TLS for what is no gRPC: etcd's v2 API, and a look at a member's certificate.

use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ConfigBuilder, WantsVerifier};

use super::config::{EtcdTls, read};
use crate::{Result, StoreError, tls};

impl EtcdTls {
    /// Reads the files, for a client by rustls.
    pub fn client_config(&self) -> Result<ClientConfig> {
        let builder = builder()?.with_root_certificates(parsed(&self.ca, tls::roots)?);
        let Some((certificate, key)) = &self.client else { return Ok(builder.with_no_client_auth()) };
        let unfit = |error| StoreError::Invalid(format!("{}: {error}", certificate.display()));
        builder.with_client_auth_cert(certificates(certificate)?, parsed(key, tls::key)?).map_err(unfit)
    }
}

/// A client's TLS settings, before it is known whom it trusts.
pub fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>> {
    tls::usual_versions(ClientConfig::builder_with_provider(tls::provider())).map_err(StoreError::Invalid)
}

/// The certificates in a PEM file: one at least.
pub fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    parsed(file, tls::certificates)
}

fn parsed<T>(file: &Path, parse: fn(&str, &[u8]) -> std::result::Result<T, String>) -> Result<T> {
    parse(&file.display().to_string(), &read(file)?).map_err(StoreError::Invalid)
}
