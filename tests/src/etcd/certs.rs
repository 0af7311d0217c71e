//! Certificates for tests: a CA, a server's and a client's. They are made for one test and deleted with it.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

/// PEM files in a directory that goes with them.
pub struct Certs {
    /// The CA's certificate.
    pub ca: PathBuf,
    /// The server's certificate for 127.0.0.1, and its key.
    pub server: (PathBuf, PathBuf),
    /// A client's certificate, and its key.
    pub client: (PathBuf, PathBuf),
    _dir: TempDir,
}

impl Certs {
    /// A fresh CA, and what it signed.
    pub fn new() -> Certs {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut params = CertificateParams::new(Vec::new()).expect("CA parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Each CA has a name of its own, as real ones do.
        let name = format!("CA of {}", dir.path().display());
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
        let ca_file = dir.path().join("ca.pem");
        std::fs::write(&ca_file, ca.pem()).expect("write the CA");
        // etcd's own gateway dials its client port with the server's certificate, so that serves both purposes.
        let server = leaf(dir.path(), "server", &["127.0.0.1", "localhost"], &ca);
        let client = leaf(dir.path(), "client", &[], &ca);
        Certs { ca: ca_file, server, client, _dir: dir }
    }
}

impl Default for Certs {
    fn default() -> Certs {
        Certs::new()
    }
}

fn leaf(dir: &Path, name: &str, hosts: &[&str], ca: &CertifiedIssuer<'_, KeyPair>) -> (PathBuf, PathBuf) {
    let mut params = CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).expect("names");
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, ca).expect("a certificate");
    let files = (dir.join(format!("{name}.pem")), dir.join(format!("{name}-key.pem")));
    std::fs::write(&files.0, certificate.pem()).expect("write a certificate");
    std::fs::write(&files.1, key.serialize_pem()).expect("write a key");
    files
}
