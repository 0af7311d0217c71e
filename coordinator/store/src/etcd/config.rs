//! Where etcd is and how to be let in: endpoints, TLS, credentials, deadlines. The code that reads a command line fills
//! this in.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, Identity, TlsOptions};

use crate::tls::{MutualTls, warn_if_everybody_reads};
use crate::{Result, StoreError};

const DEFAULT_PORT: u16 = 2379;

/// How to reach an etcd cluster.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// Members' client addresses: `host`, `host:port`, `http://…` or `https://…`. A bare address is https where `tls`
    /// is set.
    pub endpoints: Vec<String>,
    /// TLS, where the cluster uses it.
    pub tls: Option<EtcdTls>,
    /// TLS of the peers' network, where one of our programs serves the store: instead of `tls`.
    pub peers: Option<MutualTls>,
    /// Credentials, where the cluster wants them.
    pub user: Option<EtcdUser>,
    /// The longest that any call takes, all its attempts together.
    pub call_timeout: Duration,
    /// The longest that one endpoint gets to accept a connection.
    pub connect_timeout: Duration,
    /// Gives the order in which this client goes round the members. Random, so that clients spread over all of them.
    pub seed: u64,
}

impl EtcdConfig {
    /// A cluster without TLS and credentials, with default deadlines: 3 s for a call, 1 s to connect.
    pub fn new<E: Into<String>>(endpoints: impl IntoIterator<Item = E>) -> EtcdConfig {
        EtcdConfig {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            tls: None,
            peers: None,
            user: None,
            call_timeout: Duration::from_secs(3),
            connect_timeout: Duration::from_secs(1),
            seed: rand::random(),
        }
    }

    /// The endpoints as URIs.
    pub fn uris(&self) -> Result<Vec<String>> {
        if self.endpoints.is_empty() {
            return Err(StoreError::Invalid("no etcd endpoint is given: name at least one, as host:port".into()));
        }
        self.endpoints.iter().map(|endpoint| self.uri(endpoint.trim())).collect()
    }

    /// Who this client is to etcd: its user, or else the user whose name its certificate has as CN. Reads that file.
    pub(super) fn who(&self) -> String {
        let certificate = self.tls.as_ref().and_then(|tls| tls.client.as_ref());
        match (&self.user, certificate) {
            (Some(user), _) => format!("user {:?}", user.name),
            (None, None) => "no user".to_owned(),
            (None, Some((file, _))) => match common_name(file) {
                Some(name) => format!("user {name:?} (the CN of {})", file.display()),
                None => format!("no user ({} has no CN)", file.display()),
            },
        }
    }

    fn uri(&self, endpoint: &str) -> Result<String> {
        let invalid = |why: &str| StoreError::Invalid(format!("etcd endpoint {endpoint:?}: {why}"));
        let (scheme, address) = match endpoint.split_once("://") {
            Some((scheme @ ("http" | "https"), address)) => (scheme, address),
            Some(_) => return Err(invalid("only http:// and https:// are known")),
            None => (if self.tls.is_some() { "https" } else { "http" }, endpoint),
        };
        match (scheme, &self.tls) {
            ("https", None) => return Err(invalid("https needs the file of the CA that signed etcd's certificate")),
            ("http", Some(_)) => return Err(invalid("TLS files are given, so it must be https://")),
            _ => {}
        }
        let (host, port) = elastic_flags::endpoint(address.trim_end_matches('/'), DEFAULT_PORT)
            .map_err(|refused| invalid(&refused.to_string()))?;
        match (port, host.contains(':')) {
            (0, _) => Err(invalid("port 0 is none")),
            (_, true) => Ok(format!("{scheme}://[{host}]:{port}")),
            (_, false) => Ok(format!("{scheme}://{host}:{port}")),
        }
    }
}

/// The files that TLS needs. They are read again for each connection, so renewed certificates need no restart.
#[derive(Clone, Debug)]
pub struct EtcdTls {
    /// PEM file of the CA that signed the members' certificates.
    pub ca: PathBuf,
    /// PEM files of our own certificate and its key, where etcd asks for one.
    pub client: Option<(PathBuf, PathBuf)>,
    /// The name to expect in a member's certificate, where it is not the endpoint's host.
    pub server_name: Option<String>,
}

impl EtcdTls {
    pub(super) fn load(&self) -> Result<TlsOptions> {
        let mut options = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&self.ca)?));
        if let Some((certificate, key)) = &self.client {
            options = options.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        if let Some(name) = &self.server_name {
            options = options.domain_name(name);
        }
        Ok(options)
    }
}

fn common_name(certificate: &Path) -> Option<String> {
    let pem = std::fs::read(certificate).ok()?;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&pem).ok()?;
    let own = pem.parse_x509().ok()?;
    own.subject().iter_common_name().next()?.as_str().ok().map(str::to_owned)
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| StoreError::Invalid(format!("cannot read {}: {error}", path.display())))
}

/// An etcd user.
#[derive(Clone, Debug)]
pub struct EtcdUser {
    /// The user's name.
    pub name: String,
    /// The password.
    pub password: Secret,
}

/// A password. It comes from a file or the environment, since a command line is for all to read, and is never printed.
#[derive(Clone)]
pub struct Secret {
    first: String,
    file: Option<PathBuf>,
}

impl Secret {
    /// Reads a file; a line end after the secret is not part of it. Warns if everybody on the host may read it.
    pub fn from_file(path: &Path) -> Result<Secret> {
        warn_if_everybody_reads("the password", path);
        Ok(Secret { first: password_in(path)?, file: Some(path.to_owned()) })
    }

    /// Reads an environment variable.
    pub fn from_env(name: &str) -> Result<Secret> {
        match std::env::var(name) {
            Ok(secret) if !secret.is_empty() => Ok(Secret { first: secret, file: None }),
            _ => Err(StoreError::Invalid(format!("the environment variable {name} holds no password"))),
        }
    }

    /// What its file holds now, so that a changed password needs no restart; as first read, if the file is gone.
    pub fn reveal(&self) -> String {
        let now = self.file.as_ref().and_then(|file| password_in(file).ok());
        now.unwrap_or_else(|| self.first.clone())
    }
}

fn password_in(path: &Path) -> Result<String> {
    let text = String::from_utf8(read(path)?)
        .map_err(|_| StoreError::Invalid(format!("the password in {} is not UTF-8", path.display())))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(StoreError::Invalid(format!("the password file {} is empty", path.display()))),
        secret => Ok(secret.to_owned()),
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uris(endpoints: &[&str], tls: bool) -> Result<Vec<String>> {
        let mut config = EtcdConfig::new(endpoints.iter().copied());
        config.tls = tls.then(|| EtcdTls { ca: "ca.pem".into(), client: None, server_name: None });
        config.uris()
    }

    #[test]
    fn addresses_are_completed() {
        assert_eq!(
            uris(&["a", "b:1", "http://c", "http://d:4/", "[::1]", "[::1]:5"], false).unwrap(),
            ["http://a:2379", "http://b:1", "http://c:2379", "http://d:4", "http://[::1]:2379", "http://[::1]:5"]
        );
        assert_eq!(uris(&["a:1", "https://b"], true).unwrap(), ["https://a:1", "https://b:2379"]);
    }

    #[test]
    fn wrong_addresses_are_named() {
        for (endpoint, tls) in [
            ("", false),
            ("ftp://a", false),
            ("a:b", false),
            ("a:70000", false),
            ("a:0", false),
            ("a/path", false),
            ("u:p@a:1", false),
            ("https://a", false),
            ("http://a", true),
        ] {
            let error = uris(&[endpoint], tls).unwrap_err().to_string();
            assert!(error.contains(endpoint), "{error}");
        }
        assert!(uris(&[], false).is_err());
    }

    #[test]
    fn secrets_are_read_from_files_and_never_printed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("password");
        std::fs::write(&file, "hunter two \n").unwrap();
        let secret = Secret::from_file(&file).unwrap();
        assert_eq!(secret.reveal(), "hunter two ");
        let mut config = EtcdConfig::new(["a"]);
        config.user = Some(EtcdUser { name: "root".into(), password: secret });
        assert!(!format!("{config:?}").contains("hunter"));
        // One that was changed since is the one that counts.
        let password = &config.user.as_ref().unwrap().password;
        for (now, counts) in [("changed\n", "changed"), ("\n", "hunter two ")] {
            std::fs::write(&file, now).unwrap();
            assert_eq!(password.reveal(), counts);
        }
        assert!(Secret::from_file(&file).is_err());
        assert!(Secret::from_env("ELASTIC_NO_SUCH_VARIABLE").is_err());
    }
}
