//! The one thread that calls NCCL. Others hand it work and wait for the answer.

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

/// How long its end is waited for: a process that ends in the middle of NCCL's abort may leave peers waiting.
const END_TIME: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

/// The thread. It ends when this is dropped, which waits for it, unless it is known to be lost; its communicator is
/// aborted then.
#[derive(Debug)]
pub(super) struct NcclThread {
    works: Option<Sender<Work>>,
    interrupted: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    /// It is in a call that does not end.
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

    /// Has the thread do `work`. The answer comes when it is done.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Handle) -> Result<T, Failure> + Send + 'static,
    ) -> Answer<T> {
        let (sender, receiver) = channel();
        self.interrupted.store(false, Ordering::Relaxed);
        // Nobody may be left to hear the answer; and where the thread is gone, its end is the answer.
        let work: Work = Box::new(move |handle| drop(sender.send(work(handle))));
        let _ = self.works.as_ref().map(|works| works.send(work));
        Answer(receiver)
    }

    /// Has it give up what is under way, as soon as it is out of NCCL.
    pub(super) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Relaxed);
    }

    /// It will not come back.
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

/// What the thread will say.
pub(super) struct Answer<T>(Receiver<Result<T, Failure>>);

impl<T> Answer<T> {
    /// The answer, if it is there within `time`.
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
