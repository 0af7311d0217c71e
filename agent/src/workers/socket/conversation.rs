//! A worker's connection: its lines there and back, and the files that come with some.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use elastic_proto::worker::{FromWorker, MAX_LINE, ToWorker};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};

use super::requests::{Requests, answer};
use super::{Connection, Shared, WAITING};

/// A message to a worker, and a file to send with it.
#[derive(Clone)]
pub(super) struct Outgoing {
    pub(super) message: ToWorker,
    pub(super) file: Option<Arc<OwnedFd>>,
}

impl From<ToWorker> for Outgoing {
    fn from(message: ToWorker) -> Outgoing {
        Outgoing { message, file: None }
    }
}

/// Serves a worker until its connection ends.
pub(super) async fn converse(stream: UnixStream, shared: Arc<Shared>) {
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
    let (reader, writer) = stream.into_split();
    let (line, lines) = mpsc::channel(WAITING);
    let let_go = Arc::new(Notify::new());
    let id = {
        let mut state = shared.state();
        state.next += 1;
        let id = state.next;
        let connection = Connection { line: line.clone(), let_go: Arc::clone(&let_go), registered: None, pid };
        state.connections.insert(id, connection);
        id
    };
    let writing = tokio::spawn(write_lines(writer, lines));
    tokio::select! {
        () = listen(id, reader, &line, &shared) => {}
        // What is queued will not be read.
        () = let_go.notified() => writing.abort(),
    }
    shared.state().connections.remove(&id);
    shared.ended.notify_waiters();
    shared.awareness.notify_one();
}

async fn write_lines(mut writer: OwnedWriteHalf, mut lines: mpsc::Receiver<Outgoing>) {
    while let Some(Outgoing { message, file }) = lines.recv().await {
        let Ok(mut line) = serde_json::to_vec(&message) else { continue };
        line.push(b'\n');
        // The kernel delivers a file with the line's first bytes.
        let stream: &UnixStream = writer.as_ref();
        let begun = match &file {
            Some(file) => stream.async_io(Interest::WRITABLE, || send_with(stream, &line, file)).await,
            None => Ok(0),
        };
        let Ok(begun) = begun else { return };
        if writer.write_all(&line[begun..]).await.is_err() {
            return;
        }
    }
}

/// Sends some of `bytes`, together with the descriptor of `file`.
fn send_with(stream: &UnixStream, bytes: &[u8], file: &OwnedFd) -> io::Result<usize> {
    let descriptors = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("there is no room for a descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// The id of a line that is no message that we know, so that a worker of a later release need not wait for an answer.
fn id_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<serde_json::Value>(line).ok()?.get("id")?.as_u64()
}

async fn listen(id: u64, reader: OwnedReadHalf, line: &mpsc::Sender<Outgoing>, shared: &Arc<Shared>) {
    let mut reader = BufReader::new(reader);
    let mut buffer = Vec::new();
    let mut requests = Requests::default();
    loop {
        buffer.clear();
        match (&mut reader).take(MAX_LINE as u64 + 1).read_until(b'\n', &mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(read) if read > MAX_LINE => {
                let message = format!("a line of over {MAX_LINE} bytes; the connection is closed");
                let _ = line.send(ToWorker::Error { id: None, message, again: false }.into()).await;
                return;
            }
            Ok(_) => {}
        }
        match serde_json::from_slice::<FromWorker>(&buffer) {
            Ok(message) => {
                if let Some(request) = answer(id, message, line, shared).await {
                    requests.begin(reader.get_ref().as_ref(), request).await;
                }
            }
            Err(error) => {
                let message = format!("cannot parse the line: {error}; see the worker socket in docs/protocol.md");
                let _ = line.send(ToWorker::Error { id: id_of(&buffer), message, again: false }.into()).await;
            }
        }
    }
}
