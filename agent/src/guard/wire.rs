//! The messages between the agent and its guard. Each message is one JSON packet, with attached descriptors. Both ends
//! are always the same binary.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::exit::Exit;

/// The longest packet, in bytes. Bodies without a bound travel in a memory file.
const MAX_PACKET: usize = 4096;
/// The most descriptors of one packet: see [`super::nursery`].
const MAX_DESCRIPTORS: usize = 5;

/// Names a worker for its whole life. An agent never uses the same id twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct WorkerId(pub(crate) u64);

/// A time of `elastic_store::clock`, since its zero.
pub(crate) type Stamp = Duration;

/// What the agent asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum GuardRequest {
    /// Start a worker. The descriptors are the [`body`](write_body), then stdout and stderr where they are not
    /// inherited. `cpus` is a mask of the CPUs that the worker may run on. If it is empty, these are the guard's CPUs.
    Spawn { worker: WorkerId, arguments: usize, stdout: bool, stderr: bool, cpus: Vec<u64> },
    /// Start the nursery. The descriptor is its body. `cpus` is as for a worker.
    Nursery { arguments: usize, cpus: Vec<u64> },
    /// Signal one worker's process group.
    Signal { worker: WorkerId, signal: i32 },
    /// Signal every worker's group now, without the helpers of who handles the signal. When the last worker has exited,
    /// signal what the workers left outside their groups.
    Stop { signal: i32 },
    /// Send SIGKILL to everything, and confirm it.
    Kill,
    /// Kill everything at `until`. `sent` tells a renewal in time from a renewal that a frozen agent sends too late.
    Deadline { until: Option<Stamp>, sent: Stamp },
    /// Keep the accompanying descriptor open until the tree is gone.
    Hold,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// The worker's program runs.
    Spawned { worker: WorkerId, pid: i32 },
    /// The worker could not be started.
    Refused { worker: WorkerId, refusal: SpawnRefusal },
    /// The nursery's process runs.
    NurseryRuns { pid: i32 },
    /// Workers are forked from the nursery from now on.
    NurseryReady { pid: i32 },
    /// There is no nursery any more, and why. No reason: it was killed with everything else.
    NurseryGone { why: Option<String> },
    /// A worker has exited.
    Exited { worker: WorkerId, pid: i32, exit: Exit, at: Stamp },
    /// Everything was sent SIGKILL, as asked.
    Killing,
    /// The deadline has passed: everything was sent SIGKILL.
    DeadlinePassed { at: Stamp },
    /// Nothing that any worker started is alive.
    TreeGone,
}

/// Why a worker was not started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SpawnRefusal {
    Deadline,
    /// The tree is being killed.
    Stopping,
    /// The system refused to make a process.
    Fork(i32),
    /// It could not be bound to its CPUs.
    Cpus(i32),
    /// The working directory could not be entered.
    Directory(i32),
    /// The program could not be executed.
    Execute(i32),
    /// The request was damaged.
    Request(String),
}

/// One end of the socket. It never blocks: a full or an empty socket returns `WouldBlock`.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Channel {
        Channel(socket)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl std::os::fd::AsRawFd for Channel {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

impl Channel {
    /// Two connected ends.
    pub(crate) fn pair() -> io::Result<(Channel, Channel)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Channel(one), Channel(other)))
    }

    /// Sends the whole message, or nothing.
    pub(crate) fn send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let packet = serde_json::to_vec(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors"));
        }
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.0, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Receives one message. `None` if the other end is gone.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut packet = [0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut packet)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            )
        })?;
        if received.bytes == 0 {
            return Ok(None);
        }
        let descriptors = control
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
                _ => Vec::new(),
            })
            .collect();
        Ok(Some((serde_json::from_slice(&packet[..received.bytes])?, descriptors)))
    }

    /// Ends the stream that the other end reads. The other end can still answer.
    pub(crate) fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write)?)
    }
}

/// Writes the body of a spawn request: strings that each end in NUL. The body is a memory file, because arguments and
/// environment do not fit into a packet. The strings themselves hold no NUL.
pub(crate) fn write_body(strings: impl Iterator<Item = OsString>) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("elastic-agent-spawn", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = io::BufWriter::new(File::from(file));
    for string in strings {
        file.write_all(&string.into_vec())?;
        file.write_all(&[0])?;
    }
    Ok(file.into_inner().map_err(io::IntoInnerError::into_error)?.into())
}

/// Reads the strings that [`write_body`] wrote.
pub(crate) fn read_body(file: OwnedFd) -> io::Result<Vec<CString>> {
    let mut file = File::from(file);
    file.rewind()?;
    let mut body = Vec::new();
    file.read_to_end(&mut body)?;
    let mut strings = Vec::new();
    for string in body.split_inclusive(|byte| *byte == 0) {
        let string = CString::from_vec_with_nul(string.to_vec());
        strings.push(string.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?);
    }
    Ok(strings)
}
