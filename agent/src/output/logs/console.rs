//! The console that the agent's own log and all piped workers share: whole lines, one writer.
//!
//! A console that is slow or hangs holds up the workers that write much to it, as an inherited descriptor would:
//! a worker's lines wait in its pipe, and then the worker waits. No line of a worker is dropped. The agent itself never
//! waits, because its leases depend on it. Of its own lines, those beyond [`OWN_CAPACITY`] are dropped and counted.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

/// How many bytes of workers may wait for the console. Beyond this, workers that write more must wait.
const CAPACITY: usize = 4 << 20;
/// How many bytes of the agent's own lines may wait for the console.
const OWN_CAPACITY: usize = 1 << 20;

/// The bytes of one write. A write into a pipe returns only when all of it is read. Small writes show that a slow
/// reader reads.
const SLICE: usize = 32 * 1024;

/// One of the console's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleStream {
    /// The agent's standard output.
    Stdout,
    /// The agent's standard error.
    Stderr,
}

/// A shared writer to the agent's standard output and error. It has a thread of its own, so that a stopped terminal or
/// an unread pipe does not hold up the agent.
#[derive(Debug, Clone)]
pub struct Console(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stdout: File,
    stderr: File,
    stderr_is_terminal: bool,
    is_one_file: bool,
    state: Mutex<Queue>,
    changed: Condvar,
    /// The bytes written so far. They show whether the console moves.
    moved: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    queue: VecDeque<Piece>,
    /// The workers' bytes that are queued or being written.
    waiting: usize,
    /// The agent's own bytes that are queued or being written.
    own: usize,
    own_lines_lost: u64,
}

#[derive(Debug)]
struct Piece {
    stream: ConsoleStream,
    bytes: Vec<u8>,
    own: bool,
}

impl Queue {
    fn push(&mut self, stream: ConsoleStream, bytes: Vec<u8>, own: bool) {
        *(if own { &mut self.own } else { &mut self.waiting }) += bytes.len();
        self.queue.push_back(Piece { stream, bytes, own });
    }

    fn is_empty(&self) -> bool {
        self.waiting + self.own == 0
    }
}

/// A device, such as a terminal or `/dev/null`, keeps nothing in order.
fn are_one_file(stdout: &File, stderr: &File) -> bool {
    let (Ok(stdout), Ok(stderr)) = (stdout.metadata(), stderr.metadata()) else { return false };
    (stdout.dev(), stdout.ino()) == (stderr.dev(), stderr.ino()) && !stdout.file_type().is_char_device()
}

impl Console {
    /// The agent's own standard output and error.
    pub fn standard() -> io::Result<Console> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        Console::new(stdout.into(), stderr.into())
    }

    /// A console on any two files.
    pub fn new(stdout: File, stderr: File) -> io::Result<Console> {
        let stderr_is_terminal = stderr.is_terminal();
        let is_one_file = are_one_file(&stdout, &stderr);
        let state = Mutex::default();
        let (changed, moved) = (Condvar::new(), AtomicU64::new(0));
        let console =
            Console(Arc::new(Shared { stdout, stderr, stderr_is_terminal, is_one_file, state, changed, moved }));
        let shared = Arc::clone(&console.0);
        thread::Builder::new().name("console".to_owned()).stack_size(128 * 1024).spawn(move || shared.run())?;
        Ok(console)
    }

    /// Whether its standard error is a terminal.
    pub fn stderr_is_terminal(&self) -> bool {
        self.0.stderr_is_terminal
    }

    /// Whether its two streams are one file or one pipe, as after `> file 2>&1`.
    pub fn is_one_file(&self) -> bool {
        self.0.is_one_file
    }

    /// Queues what a worker wrote. Blocks the thread while too much is queued already, so the agent must not use it for
    /// its own lines.
    pub fn write(&self, stream: ConsoleStream, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let state = self.0.lock();
        let room = self.0.changed.wait_while(state, |state| state.waiting >= CAPACITY);
        room.unwrap_or_else(PoisonError::into_inner).push(stream, bytes, false);
        self.0.changed.notify_all();
    }

    /// Queues whole lines of the agent itself. Never waits.
    pub fn say(&self, stream: ConsoleStream, lines: Vec<u8>) {
        let mut state = self.0.lock();
        if state.own + lines.len() > OWN_CAPACITY {
            state.own_lines_lost += lines.iter().filter(|byte| **byte == b'\n').count() as u64;
            return;
        }
        state.push(stream, lines, true);
        self.0.changed.notify_all();
    }

    /// A writer for the agent's own log. The bytes of each call are taken for whole lines.
    pub fn log(&self) -> impl Write + use<> {
        Log(self.clone())
    }

    /// Waits until everything that was queued is written. Returns `false` if the console has stood still for
    /// `patience`. Blocks the thread, so it is only for the agent's end.
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
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never returns. The thread ends with the agent.
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

    /// Writes everything. If the console is gone, the bytes are dropped, because no one can read them.
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
    fn a_blocked_console_blocks_workers_not_the_agent_and_loses_none_of_their_output() {
        // A console whose reader does nothing, and workers that have filled its queue.
        let (mut shown, stdout) = pipe();
        let (mut notes, stderr) = pipe();
        let console = Console::new(stdout, stderr).unwrap();
        console.write(ConsoleStream::Stdout, vec![b'\n'; CAPACITY]);

        // A worker that writes must wait.
        let worker = thread::spawn({
            let console = console.clone();
            move || console.write(ConsoleStream::Stdout, b"last\n".to_vec())
        });
        assert!(!console.flush(Duration::from_millis(100)));
        assert!(!worker.is_finished());

        // The agent does not wait when it writes, even if there is no room for its lines.
        let began = Instant::now();
        let line = vec![b'x'; OWN_CAPACITY - 1].into_iter().chain([b'\n']).collect::<Vec<u8>>();
        console.log().write_all(&line).unwrap();
        console.log().write_all(b"too much\nby far\n").unwrap();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());

        // When the reader continues, it gets every byte of the workers, and a note about the lines that the agent
        // dropped.
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
