//! What goes to a worker: lines, and the files that come with some.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use elastic_proto::worker::ToWorker;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;

/// The most lines that are queued for a worker that does not read. Beyond this, answers wait, and the next news of a
/// round closes the connection: a worker that misses one could wait for ever.
pub(super) const WAITING: usize = 256;

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

/// Writes all that is queued.
pub(super) async fn write_lines(mut writer: OwnedWriteHalf, mut lines: mpsc::Receiver<Outgoing>) {
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
