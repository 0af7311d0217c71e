//! An agent introduces its host to the store that its workers find the others through: see
//! [`super::fence`].

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elastic_rendezvous::job::Endpoint;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::fence::{ADMITTED, INTRODUCTION, Known, NONCE};

/// The longest that one try may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How soon it is tried again, where no try has succeeded.
const RETRY: Duration = Duration::from_millis(200);
/// The store may come later than this node. After this, something keeps them apart.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is done again: a host may get another address while a round runs.
const AGAIN: Duration = Duration::from_secs(60);

/// An agent that introduces its host, until this is dropped.
#[derive(Debug)]
pub(crate) struct Introduction(#[expect(dead_code, reason = "dropping it ends the task")] JoinSet<()>);

impl Introduction {
    /// Begins, at the store of a round. Must be called on a runtime.
    pub(crate) fn begin(store: Endpoint, known: Known) -> Introduction {
        let mut task = JoinSet::new();
        task.spawn(introduce(store, known));
        Introduction(task)
    }
}

async fn introduce(store: Endpoint, known: Known) {
    let late = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        match everywhere(&store, &known).await {
            Ok(()) => {
                // Workers that have been let in see by themselves when the store goes away.
                told = true;
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => {
                if Instant::now() >= late && !std::mem::replace(&mut told, true) {
                    tracing::warn!(
                        "the workers' store at {}:{} has not let this host in for {} s, so its workers cannot meet the \
                         others: {error}. Each node must reach that port of rank 0's node",
                        store.host,
                        store.port,
                        PATIENCE.as_secs()
                    );
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// At each address of the store: a worker may take any. It is enough if one of them answers.
pub(crate) async fn everywhere(store: &Endpoint, known: &Known) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use elastic_rendezvous::job::JobSecret;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_host_that_is_not_let_in_says_so_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let store = Endpoint { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let known = Known { secret: JobSecret::of([7; JobSecret::LENGTH]), job: "job".into(), round: 1 };
        let (log, said) = mpsc::channel();
        let _told = tracing::subscriber::set_default(crate::log_to(log));
        let _introduction = Introduction::begin(store, known);
        let mut lines = Vec::new();
        let begun = Instant::now();
        while begun.elapsed() < 3 * PATIENCE {
            // It answers no one.
            drop(listener.accept().await.unwrap());
            lines.extend(said.try_iter());
            assert!(lines.is_empty() || begun.elapsed() >= PATIENCE, "it may only be late: {lines:?}");
        }
        let [line] = &lines[..] else { panic!("it is said once: {lines:?}") };
        assert!(line.contains("WARN") && line.contains("has not let this host in for 10 s"), "{line}");
    }
}
