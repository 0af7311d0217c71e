//! A TCP proxy that does to connections what networks do. For a server's own faults, freeze or kill the server.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the proxy does at present.
#[derive(Clone, Debug)]
struct Mode {
    accepts: bool,
    /// Whether bytes flow to the server, and to the client.
    flows: [bool; 2],
    delay: Duration,
    /// Connections that were opened at a lower age are closed.
    age: u64,
}

/// Directions, as indices of [`Mode::flows`].
const TO_SERVER: usize = 0;
const TO_CLIENT: usize = 1;

/// A proxy in front of one server. It runs on the test's runtime and ends when dropped.
pub struct FaultProxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    accepting: JoinHandle<()>,
}

impl FaultProxy {
    /// Listens on a port of the kernel's choice and passes everything on to `upstream`.
    pub async fn start(upstream: impl Into<String>) -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let mode = watch::Sender::new(Mode { accepts: true, flows: [true; 2], delay: Duration::ZERO, age: 0 });
        let accepting = tokio::spawn(accept(listener, upstream.into(), mode.subscribe()));
        FaultProxy { address, mode, accepting }
    }

    /// `host:port` to connect to.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Closes all connections. New ones are still accepted.
    pub fn cut(&self) {
        self.mode.send_modify(|mode| mode.age += 1);
    }

    /// Closes all connections and refuses new ones.
    pub fn refuse(&self) {
        self.mode.send_modify(|mode| {
            mode.accepts = false;
            mode.age += 1;
        });
    }

    /// Refuses new connections. Open ones stay open.
    pub fn refuse_new(&self) {
        self.mode.send_modify(|mode| mode.accepts = false);
    }

    /// Lets nothing through in either direction; connections stay open, and what comes in is kept.
    pub fn stall(&self) {
        self.mode.send_modify(|mode| mode.flows = [false; 2]);
    }

    /// Lets requests through and keeps the answers.
    pub fn stall_answers(&self) {
        self.mode.send_modify(|mode| mode.flows[TO_CLIENT] = false);
    }

    /// Delays every piece of data, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.mode.send_modify(|mode| mode.delay = delay);
    }

    /// Ends all faults; what was kept is passed on.
    pub fn heal(&self) {
        self.mode.send_modify(|mode| {
            mode.accepts = true;
            mode.flows = [true; 2];
            mode.delay = Duration::ZERO;
        });
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, upstream: String, mut mode: watch::Receiver<Mode>) {
    let address = listener.local_addr().expect("an address");
    let mut listener = Some(listener);
    loop {
        let (accepts, age) = {
            let mode = mode.borrow_and_update();
            (mode.accepts, mode.age)
        };
        if !accepts {
            // A connection is refused only where no one listens on the port.
            listener = None;
            if mode.changed().await.is_err() {
                return;
            }
            continue;
        }
        let listening = listener.get_or_insert_with(|| listen_again(address));
        tokio::select! {
            changed = mode.changed() => if changed.is_err() { return },
            accepted = listening.accept() => {
                if let Ok((client, _)) = accepted {
                    tokio::spawn(serve(client, upstream.clone(), mode.clone(), age));
                }
            }
        }
    }
}

fn listen_again(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("address reuse");
    socket.bind(address).expect("our own port again");
    socket.listen(64).expect("listen")
}

async fn serve(client: TcpStream, upstream: String, mode: watch::Receiver<Mode>, age: u64) {
    let Ok(server) = TcpStream::connect(&upstream).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let up = pump(from_client, to_server, TO_SERVER, mode.clone(), age);
    let down = pump(from_server, to_client, TO_CLIENT, mode, age);
    // When either side ends, so does the connection.
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

async fn pump<R, W>(mut from: R, mut to: W, direction: usize, mode: watch::Receiver<Mode>, age: u64)
where
    R: AsyncReadExt + Unpin,
    W: AsyncWriteExt + Unpin,
{
    let mut cut = mode.clone();
    let mut flow = mode;
    let pumping = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
            let Ok(delay) = flow.wait_for(|mode| mode.flows[direction]).await.map(|mode| mode.delay) else { return };
            tokio::time::sleep(delay).await;
            if to.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = pumping => {}
        _ = cut.wait_for(|mode| mode.age != age) => {}
    }
}
