//! A network that takes everything and delivers nothing, for tests: its connections stay open.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Passes connections on to a server, until it is to swallow what they say.
pub(crate) struct BlackholeProxy {
    pub(crate) address: SocketAddr,
    swallows: watch::Sender<bool>,
}

impl BlackholeProxy {
    /// In front of a server.
    pub(crate) async fn before(server: SocketAddr) -> io::Result<BlackholeProxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (swallows, told) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(server).await else { return };
                let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
                tokio::spawn(pass_on(from_client, to_server, told.clone()));
                tokio::spawn(pass_on(from_server, to_client, told.clone()));
            }
        });
        Ok(BlackholeProxy { address, swallows })
    }

    /// From now on nothing is delivered, and nothing is closed.
    pub(crate) fn swallow(&self) {
        self.swallows.send_replace(true);
    }
}

async fn pass_on(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, swallows: watch::Receiver<bool>) {
    let mut chunk = vec![0; 4096];
    while let Ok(count @ 1..) = from.read(&mut chunk).await {
        if !*swallows.borrow() && to.write_all(&chunk[..count]).await.is_err() {
            return;
        }
    }
    if *swallows.borrow() {
        // The other side hears nothing of this end.
        std::future::pending::<()>().await;
    }
}
