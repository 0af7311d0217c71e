//! A communicator: a thread that does what is submitted to it, one thing after the other.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crate::faults::{Fault, take_a_while};
use crate::network::Mesh;
use crate::{IN_PROGRESS, INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS};

type Job = Box<dyn FnOnce(&Shared) + Send>;

/// What a communicator's callers and its thread share.
pub(crate) struct Shared {
    pub(crate) cancel: AtomicBool,
    pub(crate) result: AtomicI32,
    /// A peer's end was seen.
    pub(crate) lost: AtomicBool,
    pub(crate) under_way: AtomicUsize,
    pub(crate) mesh: Mutex<Option<Arc<Mesh>>>,
}

impl Shared {
    /// What `ncclCommGetAsyncError` tells.
    pub(crate) fn state(&self) -> c_int {
        match self.result.load(Ordering::SeqCst) {
            SUCCESS if self.lost.load(Ordering::SeqCst) => REMOTE_ERROR,
            code => code,
        }
    }
}

/// What callers hold a pointer to.
pub struct Comm {
    pub(crate) shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    pub(crate) caller: ThreadId,
}

impl Comm {
    /// Starts a communicator that belongs to the calling thread.
    pub(crate) fn start() -> Comm {
        LIVE.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::new(Shared {
            cancel: AtomicBool::new(false),
            result: AtomicI32::new(SUCCESS),
            lost: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            mesh: Mutex::new(None),
        });
        let (jobs, inbox) = channel::<Job>();
        let of_thread = shared.clone();
        let thread = std::thread::spawn(move || {
            for job in inbox {
                job(&of_thread);
                of_thread.under_way.fetch_sub(1, Ordering::SeqCst);
            }
        });
        Comm { shared, jobs: Some(jobs), thread: Some(thread), caller: std::thread::current().id() }
    }

    pub(crate) fn submit(&self, job: impl FnOnce(&Shared) + Send + 'static) {
        self.shared.under_way.fetch_add(1, Ordering::SeqCst);
        self.jobs.as_ref().unwrap().send(Box::new(job)).unwrap();
    }

    /// As `submit`. The communicator is in progress until the work ends with a code.
    pub(crate) fn submit_long(
        &self,
        name: &'static str,
        job: impl FnOnce(&Shared) -> Result<(), c_int> + Send + 'static,
    ) {
        self.shared.result.store(IN_PROGRESS, Ordering::SeqCst);
        let fault = Fault::of(name);
        self.submit(move |shared| {
            let begun = take_a_while(COMMUNICATORS_TAKE, &shared.cancel).and_then(|()| fault.hang(&shared.cancel));
            let result = begun.and_then(|()| job(shared));
            shared.result.store(result.err().unwrap_or(SUCCESS), Ordering::SeqCst);
        });
    }

    /// Makes the thread give up its work, and waits until it has.
    pub(crate) fn cancel(&self) {
        self.shared.cancel.store(true, Ordering::SeqCst);
        while self.shared.under_way.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn mesh(&self) -> Option<Arc<Mesh>> {
        self.shared.mesh.lock().unwrap().clone()
    }

    /// The check that NCCL makes at the begin of most functions.
    pub(crate) fn ready(&self) -> Result<(), c_int> {
        match self.shared.state() {
            SUCCESS => Ok(()),
            IN_PROGRESS => Err(INVALID_ARGUMENT),
            code => Err(code),
        }
    }
}

/// Communicators that were not aborted.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// How long functions take that make or end a communicator. They are slow in NCCL, too.
pub(crate) const COMMUNICATORS_TAKE: Duration = Duration::from_millis(3);

/// How long a call that ends a communicator may take to come from another thread.
const COMES_WITHIN: Duration = Duration::from_secs(2);

/// A new communicator may exist only beside those whose end has begun. The process ends if it has another one, which it
/// must have forgotten.
pub(crate) fn none_is_left() {
    let begun = Instant::now();
    while LIVE.load(Ordering::SeqCst) != 0 {
        if begun.elapsed() > COMES_WITHIN {
            let live = LIVE.load(Ordering::SeqCst);
            eprintln!("fake-nccl: a communicator is made beside {live} others: one was left behind");
            std::process::abort();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Notes that the end of a communicator has begun, before anything else is done.
pub(crate) fn parts(comm: *const Comm) {
    if !comm.is_null() {
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.cancel();
        self.jobs = None;
        let _ = self.thread.take().unwrap().join();
    }
}
