//! Carries one worker stream through the agent: its bytes go to its file and to the console, and its last lines are
//! kept. A stream that goes straight to a file is the worker's own.
//!
//! Each stream has a thread. So a file system that hangs or a console that hangs holds up only this stream. It
//! does not hold up the agent's renewals or another worker's file.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use tokio::sync::{oneshot, watch};

use super::console::{Console, ConsoleStream};
use super::file::LogFile;
use super::filter::Duplicates;
use super::lines::{LONGEST, Lines, Tail};
use super::ring::Ring;

const CHUNK: usize = 64 * 1024;

/// How long a line without an end is kept from the console. The rest of a line usually comes sooner than this. A prompt
/// or a progress bar, which has no line end, is not noticeably late.
const HOLD: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The last lines of a stream, shared between its thread and the code that reports a failure.
#[derive(Debug, Clone, Default)]
pub struct SharedTail(Arc<Mutex<Tail>>);

impl SharedTail {
    pub(super) fn lines(&self) -> Vec<String> {
        self.lock().lines()
    }

    fn lock(&self) -> MutexGuard<'_, Tail> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts the streams of an agent that have not ended, and the bytes that move in them.
#[derive(Debug, Clone)]
pub(super) struct Flow(Arc<(watch::Sender<usize>, AtomicU64)>);

impl Flow {
    pub(super) fn new() -> Flow {
        Flow(Arc::new((watch::Sender::new(0), AtomicU64::new(0))))
    }

    /// Waits until every stream has ended, and all its bytes are in its files and queued for the console. Returns
    /// `false` if nothing has moved for `patience`.
    pub(super) async fn ends(&self, patience: Duration) -> bool {
        let mut live = self.0.0.subscribe();
        loop {
            let moved = self.0.1.load(Ordering::Relaxed);
            if tokio::time::timeout(patience, live.wait_for(|live| *live == 0)).await.is_ok() {
                return true;
            }
            if self.0.1.load(Ordering::Relaxed) == moved {
                return false;
            }
        }
    }
}

/// One stream in the count of streams that have not ended. The stream's thread holds it.
struct LiveStream(Flow);

impl LiveStream {
    fn begin(flow: Flow) -> LiveStream {
        flow.0.0.send_modify(|live| *live += 1);
        LiveStream(flow)
    }

    fn moved(&self, bytes: usize) {
        self.0.0.1.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Drop for LiveStream {
    fn drop(&mut self) {
        self.0.0.0.send_modify(|live| *live -= 1);
    }
}

#[derive(Debug)]
pub(super) struct Course {
    pub(super) file: Option<LogFile>,
    pub(super) console: Option<(Console, ConsoleStream)>,
    /// The text before each line. Without a prefix, bytes reach the console unchanged. Whole lines reach it together
    /// if the worker does not pause within them.
    pub(super) prefix: Option<Vec<u8>>,
    pub(super) duplicates: Option<Duplicates>,
    pub(super) tail: SharedTail,
    /// Keeps the end of a stream without a file, for those who read it through the agent.
    pub(super) ring: Option<Ring>,
}

/// Handle of a stream, which its thread carries.
#[derive(Debug)]
pub(super) struct Stream {
    asks: mpsc::Sender<oneshot::Sender<()>>,
    wake: Arc<OwnedFd>,
}

impl Stream {
    /// Starts to carry the bytes that come out of `pipe`, until its end.
    pub(super) fn start(name: String, pipe: File, course: Course, flow: &Flow) -> io::Result<Stream> {
        let (asks, asked) = mpsc::channel();
        let wake = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stream = Stream { asks, wake: Arc::clone(&wake) };
        let carrier = Carrier { course, lines: Lines::default(), held: Vec::new() };
        let running = LiveStream::begin(flow.clone());
        thread::Builder::new()
            .name(name)
            .stack_size(256 * 1024)
            .spawn(move || carrier.carry(&pipe, &wake, &asked, &running))?;
        Ok(stream)
    }

    /// Waits until everything that was in the stream at the time of the call is taken in. This covers all output of a
    /// worker that has exited. Does not wait for the stream's end, which a child of the worker may delay.
    pub(super) async fn settled(&self) {
        let (answer, answered) = oneshot::channel();
        if self.asks.send(answer).is_ok() {
            // The counter is full only after 2^64 calls.
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
            // An error means that the thread has ended, because the stream has.
            let _ = answered.await;
        }
    }
}

enum Ready {
    Data,
    /// There is no data, and somebody asks.
    Asked,
    /// Nothing came for [`HOLD`].
    Quiet,
}

struct Carrier {
    course: Course,
    lines: Lines,
    /// The beginning of a line that the console has not got yet. Used only without a prefix.
    held: Vec<u8>,
}

impl Carrier {
    fn carry(
        mut self,
        mut pipe: &File,
        wake: &OwnedFd,
        asked: &mpsc::Receiver<oneshot::Sender<()>>,
        running: &LiveStream,
    ) {
        let mut chunk = vec![0; CHUNK];
        loop {
            match self.wait(pipe, wake) {
                Ready::Data => match pipe.read(&mut chunk) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Ok(read @ 1..) => {
                        self.take(&chunk[..read]);
                        running.moved(read);
                    }
                    Ok(0) | Err(_) => return self.finish(),
                },
                Ready::Asked => {
                    self.course.tail.lock().set_partial(self.lines.partial());
                    let _ = rustix::io::read(wake, &mut [0; 8]);
                    for answer in asked.try_iter() {
                        // The task that asked may have lost patience.
                        let _ = answer.send(());
                    }
                }
                Ready::Quiet => self.show_held(),
            }
        }
    }

    fn wait(&self, pipe: &File, wake: &OwnedFd) -> Ready {
        let mut fds = [PollFd::new(pipe, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        let limit = (!self.held.is_empty()).then_some(&HOLD);
        match rustix::event::poll(&mut fds, limit) {
            Ok(0) => Ready::Quiet,
            Ok(_) if fds[0].revents().is_empty() => Ready::Asked,
            // The read shows what is wrong, if anything is.
            Ok(_) | Err(_) => Ready::Data,
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.course.file {
            file.append(bytes);
        }
        if let Some(ring) = &self.course.ring {
            ring.append(bytes);
        }
        self.pass_lines(|lines, each| lines.feed(bytes, each));
        if self.course.prefix.is_none() && self.course.console.is_some() {
            self.held.extend_from_slice(bytes);
            let whole = memchr::memrchr2(b'\n', b'\r', &self.held).map_or(0, |at| at + 1);
            let rest = self.held.split_off(whole);
            let whole = std::mem::replace(&mut self.held, rest);
            self.show(whole);
            if self.held.len() >= LONGEST {
                self.show_held();
            }
        }
    }

    fn finish(mut self) {
        self.pass_lines(|lines, each| lines.finish(each));
        self.show_held();
    }

    /// Hands the lines that `cut` cuts to everything that takes lines: the tail, the console and the duplicates.
    fn pass_lines(&mut self, cut: impl FnOnce(&mut Lines, &mut dyn FnMut(&[u8]))) {
        let Course { console, prefix, duplicates, tail, .. } = &self.course;
        let prefix = prefix.as_ref();
        let (mut shown, mut copied) = (Vec::new(), Vec::new());
        let mut tail = tail.lock();
        cut(&mut self.lines, &mut |line| {
            tail.push(line);
            let add = |to: &mut Vec<u8>| {
                to.extend_from_slice(prefix.map_or(&[], Vec::as_slice));
                to.extend_from_slice(line);
                to.push(b'\n');
            };
            if prefix.is_some() && console.is_some() {
                add(&mut shown);
            }
            if duplicates.as_ref().is_some_and(|duplicates| duplicates.wants(line)) {
                add(&mut copied);
            }
        });
        drop(tail);
        if let Some(duplicates) = duplicates {
            duplicates.write(&copied);
        }
        self.show(shown);
    }

    fn show_held(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.show(held);
    }

    fn show(&self, bytes: Vec<u8>) {
        if let Some((console, stream)) = &self.course.console {
            console.write(*stream, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn pipe() -> (File, File) {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        (reader.into(), writer.into())
    }

    struct Setting {
        shown: File,
        console: Console,
        tail: SharedTail,
        stream: Stream,
        worker: File,
        flow: Flow,
    }

    fn setting(change: impl FnOnce(&mut Course)) -> Setting {
        let (shown, stdout) = pipe();
        let (reader, worker) = pipe();
        let console = Console::new(stdout, File::open("/dev/null").unwrap()).unwrap();
        let (tail, flow) = (SharedTail::default(), Flow::new());
        let mut course = Course {
            file: None,
            console: Some((console.clone(), ConsoleStream::Stdout)),
            prefix: None,
            duplicates: None,
            tail: tail.clone(),
            ring: None,
        };
        change(&mut course);
        let stream = Stream::start("stream".to_owned(), reader, course, &flow).unwrap();
        Setting { shown, console, tail, stream, worker, flow }
    }

    impl Setting {
        fn shown(&mut self) -> String {
            let mut text = [0; 1000];
            let length = self.shown.read(&mut text).unwrap();
            String::from_utf8(text[..length].to_vec()).unwrap()
        }
    }

    #[tokio::test]
    async fn a_full_disk_does_not_stop_the_stream() {
        // A log file on a device that is always full, and a console.
        let mut setting = setting(|course| {
            course.file = Some(LogFile::open("/dev/full".as_ref(), None).unwrap());
            course.prefix = Some(b"[default0]:".to_vec());
        });
        // When a worker writes and exits, every line still reaches the console and the failure report.
        setting.worker.write_all(b"one\ntwo\nthree").unwrap();
        setting.stream.settled().await;
        assert_eq!(setting.tail.lines(), ["one", "two", "three"], "a line that was cut short counts too");
        setting.worker = File::open("/dev/null").unwrap();
        assert!(setting.flow.ends(PATIENCE).await);
        assert!(setting.console.flush(PATIENCE));
        assert_eq!(setting.shown(), "[default0]:one\n[default0]:two\n[default0]:three\n");
    }

    #[tokio::test]
    async fn bytes_without_a_prefix_pass_unchanged_and_soon() {
        let mut setting = setting(|_| {});
        setting.worker.write_all(b"10%\r20%\r\nno end yet").unwrap();
        assert_eq!(setting.shown(), "10%\r20%\r\n");
        assert_eq!(setting.shown(), "no end yet", "a prompt is shown while its line is open");
        setting.worker.write_all(b"\xff\x00\n").unwrap();
        let mut rest = [0; 3];
        setting.shown.read_exact(&mut rest).unwrap();
        assert_eq!(rest, [0xff, 0, b'\n']);
    }

    #[tokio::test]
    async fn an_open_stream_settles_once_it_is_empty() {
        let setting = setting(|course| course.console = None);
        (&setting.worker).write_all(&b"line\n".repeat(10_000)).unwrap();
        setting.stream.settled().await;
        assert_eq!(setting.tail.lines().len(), Tail::LINES);
        assert!(!setting.flow.ends(Duration::from_millis(50)).await, "the stream is still open");
        drop(setting.worker);
        assert!(setting.flow.ends(PATIENCE).await);
        setting.stream.settled().await;
    }
}
