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
