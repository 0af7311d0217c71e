//! A TCP balancer as clouds have them: it hands each new connection to the next server, cuts those that are idle, and now
//! and then all.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// It runs on the test's runtime and ends when dropped.
pub struct Balancer {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    running: [JoinHandle<()>; 2],
}

impl Balancer {
    /// Listens on a port of the kernel's choice. A connection that sends nothing for `idle` in one of its directions and
    /// in the other is closed, and each `all` every one.
    pub async fn start(servers: Vec<String>, idle: Duration, all: Duration) -> Balancer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let connections = Arc::new(AtomicUsize::new(0));
        let (cut, cuts) = watch::channel(());
        let counted = Arc::clone(&connections);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = servers[counted.fetch_add(1, Ordering::Relaxed) % servers.len()].clone();
                let mut cuts = cuts.clone();
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    tokio::select! {
                        () = carry(client, server, idle) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        let cutting = tokio::spawn(async move {
            loop {
                sleep(all).await;
                cut.send_replace(());
            }
        });
        Balancer { address, connections, running: [accepting, cutting] }
    }

    /// `host:port` to connect to.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// How many connections it has taken.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.running.iter().for_each(JoinHandle::abort);
    }
}

/// Until one end closes, or no byte comes for so long. What is dropped then is closed.
async fn carry(mut client: TcpStream, mut server: TcpStream, idle: Duration) {
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let last = watch::Sender::new(());
    tokio::select! {
        () = copy(&mut from_client, &mut to_server, &last) => {}
        () = copy(&mut from_server, &mut to_client, &last) => {}
        () = silence(last.subscribe(), idle) => {}
    }
}

async fn copy(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin), last: &watch::Sender<()>) {
    let mut piece = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut piece).await {
        last.send_replace(());
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

async fn silence(mut last: watch::Receiver<()>, idle: Duration) {
    while let Ok(Ok(())) = timeout(idle, last.changed()).await {}
}
