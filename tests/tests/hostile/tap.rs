//! A proxy in front of a store that records when leases are renewed. It passes everything on.

use elastic_tests::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::hostile::WITHIN;

/// Ends when dropped.
pub(crate) struct Tap {
    address: SocketAddr,
    renewals: Arc<Mutex<Vec<Instant>>>,
    accepting: JoinHandle<()>,
}

impl Tap {
    pub(crate) async fn before(store: String) -> Tap {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let renewals = Arc::<Mutex<Vec<Instant>>>::default();
        let heard = Arc::clone(&renewals);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass_on(client, store.clone(), Arc::clone(&heard)));
            }
        });
        Tap { address, renewals, accepting }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The longest pause between two of the next renewals.
    pub(crate) async fn longest_pause(&self, renewals: usize) -> Duration {
        let begun = self.renewals.lock().unwrap().len();
        let came = async || (self.renewals.lock().unwrap().len() > begun + renewals).then_some(());
        eventually("the lease is renewed", WITHIN, came).await;
        let times = self.renewals.lock().unwrap();
        times[begun..].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn pass_on(client: TcpStream, store: String, renewals: Arc<Mutex<Vec<Instant>>>) {
    let Ok(store) = TcpStream::connect(store).await else { return };
    let _ = (client.set_nodelay(true), store.set_nodelay(true));
    let ((mut words, mut heard), (mut answers, mut asked)) = (client.into_split(), store.into_split());
    let up = async {
        let mut chunk = vec![0; 64 << 10];
        while let Ok(count @ 1..) = words.read(&mut chunk).await {
            if is_renewal(&chunk[..count]) {
                renewals.lock().unwrap().push(Instant::now());
            }
            if asked.write_all(&chunk[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        _ = tokio::io::copy(&mut answers, &mut heard) => {}
    }
}

/// Renewals are data on a stream that is already open. So are a watch's questions for its progress, but these are
/// shorter. Every other request opens a stream of its own.
fn is_renewal(mut frames: &[u8]) -> bool {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    /// Bytes of a question for progress, at most.
    const PROGRESS: usize = 9;
    let mut data = false;
    while let Some((head, rest)) = frames.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        match head[3] {
            HEADERS => return false,
            DATA => data |= length > PROGRESS,
            _ => {}
        }
        frames = rest.get(length..).unwrap_or_default();
    }
    data
}
