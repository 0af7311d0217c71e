//! A worker's connection, from its first line to its end.

use std::sync::Arc;

use elastic_proto::worker::{FromWorker, MAX_LINE, ToWorker};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{Notify, mpsc};

use super::outgoing::{Outgoing, WAITING, write_lines};
use super::requests::{Requests, answer};
use super::state::{Connection, Shared};

/// Serves a worker until its connection ends.
pub(super) async fn converse(stream: UnixStream, shared: Arc<Shared>) {
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
    let (reader, writer) = stream.into_split();
    let (line, lines) = mpsc::channel(WAITING);
    let (let_go, asked) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let id = {
        let mut state = shared.state();
        state.next += 1;
        let id = state.next;
        let (line, let_go, asked) = (line.clone(), Arc::clone(&let_go), Arc::clone(&asked));
        state.connections.insert(id, Connection { line, let_go, registered: None, asked, heard: false, pid });
        id
    };
    let writing = tokio::spawn(write_lines(writer, lines));
    tokio::select! {
        () = listen(id, reader, &line, &asked, &shared) => {}
        // What is queued will not be read.
        () = let_go.notified() => writing.abort(),
    }
    shared.state().connections.remove(&id);
    shared.heard.notify_waiters();
    shared.awareness.notify_one();
}

/// The id of a line that is no message that we know, so that a worker of a later release need not wait for an answer.
fn id_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<serde_json::Value>(line).ok()?.get("id")?.as_u64()
}

async fn listen(
    id: u64,
    reader: OwnedReadHalf,
    line: &mpsc::Sender<Outgoing>,
    asked: &Arc<Notify>,
    shared: &Arc<Shared>,
) {
    let mut reader = BufReader::new(reader);
    let mut buffer = Vec::new();
    let mut requests = Requests::default();
    loop {
        let left = (MAX_LINE + 1 - buffer.len()) as u64;
        let mut limited = (&mut reader).take(left);
        let read = tokio::select! {
            biased;
            read = limited.read_until(b'\n', &mut buffer) => read,
            // What has come of a line stays in the buffer.
            () = asked.notified() => {
                hear(id, reader.get_ref().as_ref(), asked, shared).await;
                continue;
            }
        };
        match read {
            Err(_) => return,
            Ok(_) if buffer.is_empty() => return,
            Ok(_) if buffer.len() > MAX_LINE => {
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
        buffer.clear();
    }
}

/// Says that all that had come on a connection is read, if it is. Else asks once more.
async fn hear(id: u64, stream: &UnixStream, asked: &Notify, shared: &Shared) {
    if rustix::io::ioctl_fionread(stream).is_ok_and(|bytes| bytes > 0) {
        asked.notify_one();
        return tokio::task::yield_now().await;
    }
    if let Some(connection) = shared.state().connections.get_mut(&id) {
        connection.heard = true;
    }
    shared.heard.notify_waiters();
}
