//! An agent introduces its host to the store that its workers find the others through: see
//! [`super::workers_store::fence`].

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elastic_coordinator::job::Endpoint;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::workers_store::fence::{ADMITTED, INTRODUCTION, Known, NONCE};

/// The longest that one try may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How soon it is tried again, where no try has succeeded.
const RETRY: Duration = Duration::from_millis(200);
/// How often it is done again: a host may get another address while a round runs.
const AGAIN: Duration = Duration::from_secs(60);

/// An agent that introduces its host, until this is dropped.
#[derive(Debug)]
pub struct Introduction(JoinHandle<()>);

impl Introduction {
    /// Begins, at the store of a round. Must be called on a runtime.
    pub fn begin(store: Endpoint, known: Known) -> Introduction {
        Introduction(tokio::spawn(introduce(store, known)))
    }
}

impl Drop for Introduction {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn introduce(store: Endpoint, known: Known) {
    let mut told = false;
    loop {
        match everywhere(&store, &known).await {
            Ok(()) => tokio::time::sleep(AGAIN).await,
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    let at = format_args!("{}:{}", store.host, store.port);
                    tracing::debug!("the workers' store at {at} has not let this host in yet: {error}");
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// At each address of the store: a worker may take any. It is enough if one of them answers.
async fn everywhere(store: &Endpoint, known: &Known) -> io::Result<()> {
    let found: BTreeSet<SocketAddr> = tokio::net::lookup_host((store.host.as_str(), store.port)).await?.collect();
    let mut result = Err(io::Error::other("its name has no address"));
    for address in found {
        let tried = tokio::time::timeout(LIMIT, at(address, known)).await.unwrap_or_else(|late| Err(late.into()));
        result = result.or(tried);
    }
    result
}

async fn at(address: SocketAddr, known: &Known) -> io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_all(INTRODUCTION).await?;
    let mut nonce = [0; NONCE];
    stream.read_exact(&mut nonce).await?;
    stream.write_all(&known.prove(&nonce)).await?;
    match stream.read_u8().await? {
        ADMITTED => Ok(()),
        other => Err(io::Error::other(format!("it answers {other}"))),
    }
}
