//! The one thread that calls NCCL. Others hand it work and wait for the answer. Not for what the work is.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::Device;
use super::handle::{Failure, Handle};
use super::library::Library;

type Work = Box<dyn FnOnce(&mut Handle) + Send>;

/// The thread. It ends when this is dropped, once NCCL lets it; its communicator is aborted then.
#[derive(Debug)]
pub(super) struct Owner {
    works: Sender<Work>,
    interrupted: Arc<AtomicBool>,
}

impl Owner {
    pub(super) fn start(library: Arc<Library>, device: Box<dyn Device>) -> io::Result<Owner> {
        let (works, inbox) = channel::<Work>();
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        std::thread::Builder::new().name("nccl".into()).spawn(move || {
            let mut handle = Handle::new(library, device, flag);
            for work in inbox {
                work(&mut handle);
            }
        })?;
        Ok(Owner { works, interrupted })
    }

    /// Has the thread do `work`. The answer comes when it is done.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Handle) -> Result<T, Failure> + Send + 'static,
    ) -> Answer<T> {
        let (sender, receiver) = channel();
        self.interrupted.store(false, Ordering::Relaxed);
        // Nobody may be left to hear the answer; and where the thread is gone, its end is the answer.
        let _ = self.works.send(Box::new(move |handle| drop(sender.send(work(handle)))));
        Answer(receiver)
    }

    /// Has it give up what is under way, as soon as it is out of NCCL.
    pub(super) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Relaxed);
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
