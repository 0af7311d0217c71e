//! The worker's side of the agent's socket: JSON lines. A separate thread reads them, so that a collective operation
//! that waits for a peer learns that a round is forming.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use elastic_collective::stop::{GLANCE, Stop};
use elastic_proto::worker::{Assignment, Checkpoint, FailureClass, FromWorker, MAX_LINE, ToWorker};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tracing::debug;

use crate::settings::Environment;

/// How long the agent may take to answer a registration, and to read what it is sent.
const AGENT_TIME: Duration = Duration::from_secs(10);
/// Shortest time between two reports of progress.
const PROGRESS_TIME: Duration = Duration::from_millis(100);

/// Why the agent cannot be spoken with.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No agent listens on the socket.
    #[error("cannot reach the agent at {}: {cause}; unset ELASTIC_AGENT_SOCKET to run without one", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The agent has ended, or no longer reads.
    #[error("lost the agent: {0}")]
    Lost(io::Error),
    /// The agent did not accept the worker.
    #[error("the agent refused this worker: {0}")]
    Refused(String),
    /// The agent did not answer in time.
    #[error("the agent did not answer within {} s", AGENT_TIME.as_secs())]
    Silent,
    /// Environment and agent contradict each other.
    #[error("the agent assigns round {}, rank {} of {}, but the environment says round {}, rank {} of {}: this \
        worker was started for another round", .0.round, .0.rank, .0.world_size, .1.round, .1.rank, .1.world_size)]
    Disagrees(Box<Assignment>, Box<Environment>),
    /// The stop flag was raised.
    #[error("stopped")]
    Stopped,
}

/// A message of the agent, and the file that came with it.
struct Received {
    message: ToWorker,
    file: Option<OwnedFd>,
}

/// A connection to the agent, registered.
#[derive(Debug)]
pub(crate) struct Agent {
    socket: UnixStream,
    inbox: Receiver<Result<Received, io::Error>>,
    /// Messages that came while this worker waited for an answer.
    aside: VecDeque<ToWorker>,
    requests: u64,
    last_progress: Option<Instant>,
}

impl Agent {
    /// Connects, registers, and returns this worker's assignment. A worker that was started ahead of its round waits
    /// for it without a limit.
    pub(crate) fn register(
        path: &Path,
        environment: &Environment,
        stop: &Stop,
    ) -> Result<(Agent, Assignment), AgentError> {
        let connect = || {
            let socket = UnixStream::connect(path)?;
            socket.set_write_timeout(Some(AGENT_TIME))?;
            let (reader, stop, (outbox, inbox)) = (socket.try_clone()?, stop.clone(), channel());
            std::thread::Builder::new().name("agent".into()).spawn(move || read(reader, &stop, &outbox))?;
            Ok((socket, inbox))
        };
        let (socket, inbox) = connect().map_err(|cause| AgentError::Connect { path: path.to_owned(), cause })?;
        let mut agent = Agent { socket, inbox, aside: VecDeque::new(), requests: 0, last_progress: None };
        let local_rank = environment.local_rank;
        agent.say(&FromWorker::Register { local_rank, pid: std::process::id(), round_aware: true })?;
        let deadline = Instant::now() + AGENT_TIME;
        loop {
            let until = if environment.warm_up { Instant::now() + AGENT_TIME } else { deadline };
            match agent.next(until, stop)? {
                None if environment.warm_up => {}
                None => return Err(AgentError::Silent),
                Some(ToWorker::Error { message, .. }) => return Err(AgentError::Refused(message)),
                Some(ToWorker::Welcome(assignment)) => {
                    let told = (environment.round, environment.rank, environment.world_size);
                    if environment.warm_up || (assignment.round, assignment.rank, assignment.world_size) == told {
                        return Ok((agent, assignment));
                    }
                    return Err(AgentError::Disagrees(Box::new(assignment), Box::new(environment.clone())));
                }
                Some(_) => {}
            }
        }
    }

    /// Reports progress, at most ten times a second.
    pub(crate) fn progress(&mut self, step: u64, epoch: u64, loss: f64, total_steps: u64) -> Result<(), AgentError> {
        if step < total_steps && self.last_progress.is_some_and(|last| last.elapsed() < PROGRESS_TIME) {
            return Ok(());
        }
        self.last_progress = Some(Instant::now());
        let loss = Some(loss).filter(|loss| loss.is_finite());
        self.say(&FromWorker::Progress { step, epoch: Some(epoch), loss, total_steps: Some(total_steps) })
    }

    /// Asks to commit a checkpoint and returns the number that the answer will carry.
    pub(crate) fn commit(&mut self, checkpoint: &Checkpoint) -> Result<u64, AgentError> {
        self.requests += 1;
        self.say(&FromWorker::Commit { id: self.requests, checkpoint: checkpoint.clone() })?;
        Ok(self.requests)
    }

    /// Says that this worker is at rest after `step` steps, for the sake of the round that is forming.
    pub(crate) fn quiesced(&mut self, round: u64, step: u64) -> Result<(), AgentError> {
        self.say(&FromWorker::Quiesced { round, step })
    }

    /// Says why the worker is about to exit. Nothing can be done when this fails too.
    pub(crate) fn failing(&mut self, class: FailureClass, message: &str) {
        let message = message.chars().take(2000).collect();
        if let Err(error) = self.say(&FromWorker::Failing { class, message }) {
            debug!(%error, "cannot tell the agent why");
        }
    }

    /// Asks for memory that outlives this worker, and waits for it: a file, or why there is none. `rescue` is the
    /// command line that saves what is in it; it is empty where there is no such command.
    pub(crate) fn memory(
        &mut self,
        bytes: u64,
        rescue: Vec<String>,
        stop: &Stop,
    ) -> Result<Result<OwnedFd, String>, AgentError> {
        self.requests += 1;
        let asked = self.requests;
        self.say(&FromWorker::Memory { id: asked, bytes, rescue })?;
        let deadline = Instant::now() + AGENT_TIME;
        loop {
            let Some(Received { message, file }) = self.receive(deadline, stop)? else {
                return Ok(Err(AgentError::Silent.to_string()));
            };
            match message {
                ToWorker::Memory { id, .. } if id == asked => {
                    return Ok(file.ok_or_else(|| "no descriptor came with it".to_owned()));
                }
                // An agent that cannot read a line cannot repeat its number.
                ToWorker::Error { id, message, .. } if id.is_none_or(|id| id == asked) => return Ok(Err(message)),
                other => self.aside.push_back(other),
            }
        }
    }

    /// Gives that memory back.
    pub(crate) fn forget(&mut self) -> Result<(), AgentError> {
        self.say(&FromWorker::Forget)
    }

    /// The agent's next message, if there is one. Does not wait.
    pub(crate) fn poll(&mut self) -> Result<Option<ToWorker>, AgentError> {
        if let Some(message) = self.aside.pop_front() {
            return Ok(Some(message));
        }
        match self.inbox.try_recv() {
            Ok(said) => said.map(|said| Some(said.message)).map_err(AgentError::Lost),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(AgentError::Lost(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Waits for the agent's next message. `None` at the deadline.
    pub(crate) fn next(&mut self, deadline: Instant, stop: &Stop) -> Result<Option<ToWorker>, AgentError> {
        match self.aside.pop_front() {
            Some(message) => Ok(Some(message)),
            None => Ok(self.receive(deadline, stop)?.map(|said| said.message)),
        }
    }

    fn receive(&mut self, deadline: Instant, stop: &Stop) -> Result<Option<Received>, AgentError> {
        loop {
            if stop.is_raised() {
                return Err(AgentError::Stopped);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(left.min(GLANCE)) {
                Ok(said) => return said.map(Some).map_err(AgentError::Lost),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(AgentError::Lost(io::ErrorKind::UnexpectedEof.into()));
                }
            }
        }
    }

    fn say(&mut self, message: &FromWorker) -> Result<(), AgentError> {
        let mut line = serde_json::to_vec(message).map_err(|error| AgentError::Lost(error.into()))?;
        line.push(b'\n');
        self.socket.write_all(&line).map_err(AgentError::Lost)
    }
}

/// Tells the agent, if there is one, that this worker is about to exit with an error that each restart would meet again:
/// for a program that does not come as far as [`Elastic::run`](crate::Elastic::run), which tells its own errors.
pub(crate) fn give_up(why: &str) {
    let Ok(environment) = Environment::read(|name| std::env::var(name).ok()) else { return };
    let Some(Ok(socket)) = environment.agent.map(UnixStream::connect) else { return };
    let mut agent = Agent { socket, inbox: channel().1, aside: VecDeque::new(), requests: 0, last_progress: None };
    let (local_rank, pid) = (environment.local_rank, std::process::id());
    // If this cannot be said, the rest cannot either.
    let _ = agent.say(&FromWorker::Register { local_rank, pid, round_aware: false });
    agent.failing(FailureClass::Permanent, why);
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Ends the thread that reads, whose copy of the socket would keep the connection open.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// A socket's bytes, and, separately, the files that came with them.
struct Incoming {
    socket: UnixStream,
    files: VecDeque<OwnedFd>,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(buffer)];
        let received = rustix::net::recvmsg(&self.socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        Ok(received.bytes)
    }
}

/// Reads messages until the connection ends.
fn read(socket: UnixStream, stop: &Stop, outbox: &Sender<Result<Received, io::Error>>) {
    let mut reader = BufReader::new(Incoming { socket, files: VecDeque::new() });
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line);
        let end = match read {
            Ok(0) => io::ErrorKind::UnexpectedEof.into(),
            Ok(_) if line.len() > MAX_LINE => io::Error::new(io::ErrorKind::InvalidData, "it sent a line without end"),
            Ok(_) => match serde_json::from_slice(&line) {
                Ok(message) => {
                    match &message {
                        ToWorker::Forming { round, quiesce_ms, .. } => {
                            stop.forms(*round, Duration::from_millis(*quiesce_ms));
                        }
                        ToWorker::Draining { grace_ms } => stop.grants(Duration::from_millis(*grace_ms)),
                        _ => {}
                    }
                    // The descriptor comes with the line's first bytes, so it has been received.
                    let file = match &message {
                        ToWorker::Memory { .. } => reader.get_mut().files.pop_front(),
                        _ => None,
                    };
                    if outbox.send(Ok(Received { message, file })).is_err() {
                        return;
                    }
                    continue;
                }
                // A newer agent may send messages that this worker does not know.
                Err(error) => {
                    debug!(%error, "skipped a line from the agent");
                    continue;
                }
            },
            Err(error) => error,
        };
        // The receiver may be gone.
        let _ = outbox.send(Err(end));
        return;
    }
}
