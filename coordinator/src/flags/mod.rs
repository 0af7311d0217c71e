//! The command lines of `elastic-coordinator` and `elasticctl`, and the flags that both have: which store, which
//! prefix, and how agents are spoken with.

pub mod coordinator;
pub mod operator;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use elastic_rendezvous::job::Keys;
use elastic_store::StoreError;
use elastic_store::etcd::{EtcdConfig, EtcdStore, EtcdTls, EtcdUser, Secret};
use elastic_store::tls::{MutualTls, TlsFiles};

/// Variable that holds etcd's password where no file does.
const PASSWORD: &str = "ELASTIC_ETCD_PASSWORD";

/// The script that completes the flags of `F` in this shell.
pub fn completion<F: CommandFactory>(shell: Shell) -> String {
    let (mut command, mut script) = (F::command(), Vec::new());
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Does a program's work, on one thread; what is still under way then is left.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}

/// Which store, and where in it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Store")]
pub struct StoreFlags {
    /// Members of the etcd cluster; also the address of an embedded store
    #[arg(
        long,
        env = "ELASTIC_ETCD",
        default_value = "127.0.0.1:2379",
        value_delimiter = ',',
        value_name = "HOST:PORT,…",
        global = true
    )]
    pub etcd: Vec<String>,

    /// Where the jobs live in the store: what the agents were given as `--rdzv-conf prefix=`
    #[arg(long, env = "ELASTIC_PREFIX", default_value = Keys::DEFAULT_PREFIX, value_name = "PATH", global = true)]
    pub prefix: String,

    /// PEM file of the CA that signed etcd's certificates; makes the connection TLS
    #[arg(long, env = "ELASTIC_ETCD_CACERT", value_name = "FILE", global = true)]
    pub cacert: Option<PathBuf>,

    /// PEM file of our own certificate, where etcd asks for one; with --key
    #[arg(long, env = "ELASTIC_ETCD_CERT", requires = "key", requires = "cacert", value_name = "FILE", global = true)]
    pub cert: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "ELASTIC_ETCD_KEY", requires = "cert", value_name = "FILE", global = true)]
    pub key: Option<PathBuf>,

    /// etcd user; the password comes from --password-file or else from $ELASTIC_ETCD_PASSWORD, never from a flag
    #[arg(long, env = "ELASTIC_ETCD_USER", value_name = "NAME", global = true)]
    pub user: Option<String>,

    /// File that holds the user's password
    #[arg(long, env = "ELASTIC_ETCD_PASSWORD_FILE", requires = "user", value_name = "FILE", global = true)]
    pub password_file: Option<PathBuf>,
}

impl StoreFlags {
    /// The etcd that they name. No connection is made yet.
    pub fn connect(&self) -> Result<EtcdStore, StoreError> {
        EtcdStore::connect(self.config()?)
    }

    /// How to reach the etcd that they name.
    pub fn config(&self) -> Result<EtcdConfig, StoreError> {
        let mut config = EtcdConfig::new(self.etcd.iter().cloned());
        config.tls = self.cacert.clone().map(|ca| EtcdTls {
            ca,
            client: self.cert.clone().zip(self.key.clone()),
            server_name: None,
        });
        if let Some(name) = self.user.clone() {
            let password = match &self.password_file {
                Some(file) => Secret::from_file(file)?,
                None => Secret::from_env(PASSWORD)?,
            };
            config.user = Some(EtcdUser { name, password });
        }
        Ok(config)
    }
}

/// How agents are spoken with: over mutual TLS, or plain.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "TLS with agents")]
pub struct PeerFlags {
    /// PEM file of our own certificate: with it agents are spoken with over mutual TLS, as the agents' own --peer-cert
    /// says
    ///
    /// `elasticctl certs` makes a private authority and its certificates. All three files are read again within a second
    /// when they change. A job's agents and its coordinators have them all, or none.
    #[arg(
        long,
        env = "ELASTIC_PEER_CERT",
        requires = "peer_key",
        requires = "peer_ca",
        value_name = "FILE",
        global = true
    )]
    pub peer_cert: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "ELASTIC_PEER_KEY", requires = "peer_cert", value_name = "FILE", global = true)]
    pub peer_key: Option<PathBuf>,

    /// PEM file of the authority: who shows a certificate of it is let in, whatever its name
    #[arg(long, env = "ELASTIC_PEER_CA", requires = "peer_cert", value_name = "FILE", global = true)]
    pub peer_ca: Option<PathBuf>,
}

impl PeerFlags {
    /// The files that they name.
    pub fn files(&self) -> Option<TlsFiles> {
        let (certificate, key) = self.peer_cert.clone().zip(self.peer_key.clone())?;
        Some(TlsFiles { certificate, key, authority: self.peer_ca.clone()? })
    }

    /// Mutual TLS by these files, where they are named. Must be called within a tokio runtime.
    pub fn tls(&self) -> Result<Option<MutualTls>, String> {
        self.files().map(MutualTls::follow).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_complete_commands_and_flags() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let operator = completion::<operator::Flags>(shell);
            assert!(operator.contains("drop-checkpoint") && operator.contains("older-than"), "{shell}");
            let coordinator = completion::<coordinator::Flags>(shell);
            assert!(coordinator.contains("elastic-coordinator") && coordinator.contains("http-users"), "{shell}");
        }
    }
}
