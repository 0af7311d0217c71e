//! Certificates for tests: a CA, a server's and a client's. They are made for one test and deleted with it.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

/// PEM files in a directory that goes with them.
pub struct Certs {
    /// The CA's certificate.
    pub ca: PathBuf,
    /// The server's certificate, for 127.0.0.1 if nothing else was said, and its key.
    pub server: (PathBuf, PathBuf),
    /// A client's certificate, and its key.
    pub client: (PathBuf, PathBuf),
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// What the server is called.
    hosts: Vec<String>,
    dir: TempDir,
}

impl Certs {
    /// A fresh CA, and what it signed.
    pub fn new() -> Certs {
        Certs::of_a_ca_until(None)
    }

    /// The same, of a CA that ends then.
    pub fn of_a_ca_until(until: impl Into<Option<SystemTime>>) -> Certs {
        Certs::made(until.into(), vec!["127.0.0.1".to_owned(), "localhost".to_owned()])
    }

    /// The same, of a server with these names and addresses.
    pub fn of_hosts(hosts: Vec<String>) -> Certs {
        Certs::made(None, hosts)
    }

    fn made(until: Option<SystemTime>, hosts: Vec<String>) -> Certs {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut params = CertificateParams::new(Vec::new()).expect("CA parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = until.map_or(params.not_after, SystemTime::into);
        // Each CA has a name of its own, as real ones do.
        let name = format!("CA of {}", dir.path().display());
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
        let ca_file = dir.path().join("ca.pem");
        std::fs::write(&ca_file, ca.pem()).expect("write the CA");
        // etcd's own gateway dials its client port with the server's certificate, so that serves both purposes.
        let server = leaf(dir.path(), "server", &hosts, None, &ca);
        let client = leaf(dir.path(), "client", &[], None, &ca);
        Certs { ca: ca_file, server, client, issuer: ca, hosts, dir }
    }

    /// Makes the server's certificate and key again, in place, until then.
    pub fn renew_server(&self, until: SystemTime) {
        leaf(self.dir.path(), "server", &self.hosts, Some(until), &self.issuer);
    }

    /// Makes the client's certificate and key again, in place, until then.
    pub fn renew_client(&self, until: SystemTime) {
        leaf(self.dir.path(), "client", &[], Some(until), &self.issuer);
    }
}

impl Default for Certs {
    fn default() -> Certs {
        Certs::new()
    }
}

fn leaf(
    dir: &Path,
    name: &str,
    hosts: &[String],
    until: Option<SystemTime>,
    ca: &CertifiedIssuer<'_, KeyPair>,
) -> (PathBuf, PathBuf) {
    let mut params = CertificateParams::new(hosts).expect("names");
    params.not_after = until.map_or(params.not_after, SystemTime::into);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, ca).expect("a certificate");
    let files = (dir.join(format!("{name}.pem")), dir.join(format!("{name}-key.pem")));
    std::fs::write(&files.0, certificate.pem()).expect("write a certificate");
    std::fs::write(&files.1, key.serialize_pem()).expect("write a key");
    files
}
