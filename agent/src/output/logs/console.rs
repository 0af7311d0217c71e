//! The console that the agent's own log and all piped workers share: whole lines, one writer. Not for files.
//!
//! A console that is slow, or stands still, holds up those who write much to it, as an inherited descriptor would:
//! a worker's lines wait in its pipe, and then the worker waits. Nothing of a worker is dropped. The agent itself never
//! waits, for its leases depend on it: of its own lines, those beyond [`OWN_CAPACITY`] are dropped and counted.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

/// Bytes of workers that may wait for the console before those who write more wait too.
const CAPACITY: usize = 4 << 20;
/// Bytes of the agent's own that may wait for it.
const OWN_CAPACITY: usize = 1 << 20;

/// Bytes of one write. A write into a pipe returns when all of it is read: smaller ones show that a slow reader reads.
const SLICE: usize = 32 * 1024;

/// One of the console's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleStream {
    /// The agent's standard output.
    Stdout,
    /// The agent's standard error.
    Stderr,
}

/// A shared writer to the agent's standard output and error, with a thread of its own, so that a terminal that is
/// stopped (or a pipe that nobody reads) does not hold up the agent.
#[derive(Debug, Clone)]
pub struct Console(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stdout: File,
    stderr: File,
    stderr_is_terminal: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes written so far: shows whether the console moves.
    moved: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Piece>,
    /// Bytes of workers queued or being written.
    waiting: usize,
    /// Bytes of the agent's own queued or being written.
    own: usize,
    own_lines_lost: u64,
}

#[derive(Debug)]
struct Piece {
    stream: ConsoleStream,
    bytes: Vec<u8>,
    own: bool,
}

impl State {
    fn push(&mut self, stream: ConsoleStream, bytes: Vec<u8>, own: bool) {
        *(if own { &mut self.own } else { &mut self.waiting }) += bytes.len();
        self.queue.push_back(Piece { stream, bytes, own });
    }

    fn is_empty(&self) -> bool {
        self.waiting + self.own == 0
    }
}

impl Console {
    /// The agent's own standard output and error.
    ///
    /// # Errors
    ///
    /// When the descriptors cannot be duplicated or the thread cannot start.
    pub fn standard() -> io::Result<Console> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        Console::new(stdout.into(), stderr.into())
    }

    /// A console on any two files.
    ///
    /// # Errors
    ///
    /// When the thread cannot start.
    pub fn new(stdout: File, stderr: File) -> io::Result<Console> {
        let stderr_is_terminal = stderr.is_terminal();
        let state = Mutex::default();
        let (changed, moved) = (Condvar::new(), AtomicU64::new(0));
        let console = Console(Arc::new(Shared { stdout, stderr, stderr_is_terminal, state, changed, moved }));
        let shared = Arc::clone(&console.0);
        thread::Builder::new().name("console".to_owned()).stack_size(128 * 1024).spawn(move || shared.run())?;
        Ok(console)
    }

    /// Whether its standard error is a terminal.
    pub fn stderr_is_terminal(&self) -> bool {
        self.0.stderr_is_terminal
    }

    /// Queues what a worker wrote, and waits while too much is queued already. Blocks the thread: not for the agent's own.
    pub fn write(&self, stream: ConsoleStream, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let state = self.0.lock();
        let room = self.0.changed.wait_while(state, |state| state.waiting >= CAPACITY);
        room.unwrap_or_else(PoisonError::into_inner).push(stream, bytes, false);
        self.0.changed.notify_all();
    }

    /// Queues whole lines of the agent's own. Never waits.
    pub fn say(&self, stream: ConsoleStream, lines: Vec<u8>) {
        let mut state = self.0.lock();
        if state.own + lines.len() > OWN_CAPACITY {
            state.own_lines_lost += lines.iter().filter(|byte| **byte == b'\n').count() as u64;
            return;
        }
        state.push(stream, lines, true);
        self.0.changed.notify_all();
    }

    /// A writer for the agent's own log: each call is taken for whole lines.
    pub fn log(&self) -> impl Write + use<> {
        Log(self.clone())
    }

    /// Waits until all that was queued is written; `false` when the console has stood still for `patience`. Blocks the
    /// thread: for the end of the agent.
    pub fn flush(&self, patience: Duration) -> bool {
        let mut state = self.0.lock();
        loop {
            let moved = self.0.moved.load(Ordering::Relaxed);
            let outcome = self.0.changed.wait_timeout_while(state, patience, |state| !state.is_empty());
            state = outcome.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_empty() || self.0.moved.load(Ordering::Relaxed) == moved {
                return state.is_empty();
            }
        }
    }
}

struct Log(Console);

impl Write for Log {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.0.say(ConsoleStream::Stderr, lines.to_vec());
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never returns: the thread ends with the agent.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            let Some(piece) = state.queue.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let lost = std::mem::take(&mut state.own_lines_lost);
            drop(state);
            self.write_whole(piece.stream, &piece.bytes);
            if lost > 0 {
                let note = format!("[elastic-agent] the console stood still: {lost} lines of this log are missing\n");
                self.write_whole(ConsoleStream::Stderr, note.as_bytes());
            }
            state = self.lock();
            *(if piece.own { &mut state.own } else { &mut state.waiting }) -= piece.bytes.len();
            self.changed.notify_all();
        }
    }

    /// Writes everything. A console that is gone takes nothing: there is nobody to tell.
    fn write_whole(&self, stream: ConsoleStream, mut bytes: &[u8]) {
        let mut file = if stream == ConsoleStream::Stdout { &self.stdout } else { &self.stderr };
        while !bytes.is_empty() {
            match file.write(&bytes[..bytes.len().min(SLICE)]) {
                Ok(written) if written > 0 => {
                    bytes = &bytes[written..];
                    self.moved.fetch_add(written as u64, Ordering::Relaxed);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Another process made the shared terminal non-blocking.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let _ = rustix::event::poll(&mut [PollFd::new(file, PollFlags::OUT)], None);
                }
                Ok(_) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::Instant;

    fn pipe() -> (File, File) {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        (reader.into(), writer.into())
    }

    #[test]
    fn a_console_that_stands_still_holds_up_workers_not_the_agent_and_loses_nothing_of_theirs() {
        // Given a console whose reader does nothing, and workers that have filled its queue,
        let (mut shown, stdout) = pipe();
        let (mut notes, stderr) = pipe();
        let console = Console::new(stdout, stderr).unwrap();
        console.write(ConsoleStream::Stdout, vec![b'\n'; CAPACITY]);

        // when a worker writes, then it waits;
        let worker = thread::spawn({
            let console = console.clone();
            move || console.write(ConsoleStream::Stdout, b"last\n".to_vec())
        });
        assert!(!console.flush(Duration::from_millis(100)));
        assert!(!worker.is_finished());

        // when the agent writes, then it does not wait, not even for more than there is room for;
        let began = Instant::now();
        let line = vec![b'x'; OWN_CAPACITY - 1].into_iter().chain([b'\n']).collect::<Vec<u8>>();
        console.log().write_all(&line).unwrap();
        console.log().write_all(b"too much\nby far\n").unwrap();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());

        // and when the reader goes on, every byte of the workers comes, and a word about what the agent dropped.
        let reader = thread::spawn(move || {
            let mut all = vec![0; CAPACITY + 5];
            shown.read_exact(&mut all).unwrap();
            all
        });
        let mut text = vec![0; line.len() + 100];
        notes.read_exact(&mut text[..line.len()]).unwrap();
        worker.join().unwrap();
        assert_eq!(&reader.join().unwrap()[CAPACITY..], b"last\n");
        assert!(console.flush(Duration::from_secs(5)));
        let length = notes.read(&mut text).unwrap();
        assert!(String::from_utf8_lossy(&text[..length]).contains(": 2 lines"), "{text:?}");
    }

    #[test]
    fn a_slow_console_is_waited_for_as_long_as_it_moves() {
        let (mut shown, stdout) = pipe();
        let console = Console::new(stdout, File::open("/dev/null").unwrap()).unwrap();
        console.write(ConsoleStream::Stdout, vec![b'\n'; 200_000]);
        let reader = thread::spawn(move || {
            let mut buffer = [0; 20_000];
            for _ in 0..10 {
                thread::sleep(Duration::from_millis(100));
                shown.read_exact(&mut buffer).unwrap();
            }
        });
        assert!(console.flush(Duration::from_millis(600)), "a whole second, and never still for long");
        reader.join().unwrap();
    }
}
