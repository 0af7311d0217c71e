//! The one thread that calls NCCL. Other threads give it work and wait for the answer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Device;
use super::handle::{Failure, Handle};
use super::library::Library;

type Work = Box<dyn FnOnce(&mut Handle) + Send>;

/// How long to wait for the thread's end: a process that ends in the middle of NCCL's abort may leave peers waiting.
const END_TIME: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

/// The thread. Dropping this ends it, aborts its communicator, and waits for it unless it is known to be lost.
#[derive(Debug)]
pub(super) struct NcclThread {
    works: Option<Sender<Work>>,
    interrupted: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    /// Whether it is in a call that does not return.
    lost: bool,
}

impl NcclThread {
    pub(super) fn start(library: Arc<Library>, device: Box<dyn Device>) -> io::Result<NcclThread> {
        let (works, inbox) = channel::<Work>();
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || {
            let mut handle = Handle::new(library, device, flag);
            for work in inbox {
                work(&mut handle);
            }
        })?;
        Ok(NcclThread { works: Some(works), interrupted, thread, lost: false })
    }

    /// Has the thread do `work`.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Handle) -> Result<T, Failure> + Send + 'static,
    ) -> Answer<T> {
        let (sender, receiver) = channel();
        self.interrupted.store(false, Ordering::Relaxed);
        // The caller may have stopped waiting for the answer. If the thread is gone, the closed channel is the answer.
        let work: Work = Box::new(move |handle| drop(sender.send(work(handle))));
        let _ = self.works.as_ref().map(|works| works.send(work));
        Answer(receiver)
    }

    /// Has it give up its work as soon as the call of NCCL has returned.
    pub(super) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Relaxed);
    }

    /// Notes that its call will not return.
    pub(super) fn give_up(&mut self) {
        self.lost = true;
    }
}

impl Drop for NcclThread {
    fn drop(&mut self) {
        self.works = None;
        let begun = Instant::now();
        while !self.lost && !self.thread.is_finished() && begun.elapsed() < END_TIME {
            std::thread::sleep(PAUSE);
        }
    }
}

/// The thread's answer, which may still be to come.
pub(super) struct Answer<T>(Receiver<Result<T, Failure>>);

impl<T> Answer<T> {
    /// The answer, if it comes within `time`.
    pub(super) fn wait(&self, time: Duration) -> Option<Result<T, Failure>> {
        match self.0.recv_timeout(time) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(Failure::Unfit("the thread that calls NCCL is gone".into())))
            }
        }
    }
}
