//! One communicator of one rank, and every call of NCCL on it, in one thread.
//!
//! No call blocks: what NCCL has begun is polled until it is done, its time is over, or another thread has raised the
//! flag. In the last two cases the communicator is then aborted. An abort blocks, and has a thread of its own.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Device;
use super::library::{Config, FLOAT32, Functions, IN_PROGRESS, Library, RawComm, RawStream, SUCCESS, UniqueId};
use super::ordered::{Moves, Steps};
use crate::gpu::pause;

/// How long it may take until the stream of an aborted communicator is empty.
const CALM_TIME: Duration = Duration::from_secs(5);

/// Why a call has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The flag was raised.
    Interrupted,
    /// The time is over.
    Late,
    /// A function of NCCL's returned an error.
    Call { function: &'static str, code: c_int, message: String },
    /// The device reports an error.
    Device(String),
    /// There is no communicator, or no thread that has one.
    Unfit(String),
}

pub(super) struct Handle {
    library: Arc<Library>,
    device: Box<dyn Device>,
    bound: bool,
    comm: Option<NonNull<std::ffi::c_void>>,
    /// Aborts that have begun.
    parting: Vec<JoinHandle<()>>,
    /// Raised by another thread to give up the call under way.
    interrupted: Arc<AtomicBool>,
}

impl Handle {
    pub(super) fn new(library: Arc<Library>, device: Box<dyn Device>, interrupted: Arc<AtomicBool>) -> Handle {
        Handle { library, device, bound: false, comm: None, parting: Vec::new(), interrupted }
    }

    /// Makes the device this thread's, at the first call.
    fn bind(&mut self) -> Result<(), Failure> {
        if !self.bound {
            self.device.bind().map_err(Failure::Device)?;
            self.bound = true;
        }
        Ok(())
    }

    /// An id by which the ranks of a new communicator find each other. They meet at this process.
    pub(super) fn mint(&mut self) -> Result<UniqueId, Failure> {
        self.bind()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: a place for the id.
        let code = unsafe { (self.functions().get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id)
    }

    /// Makes a new communicator. The former one is given up.
    pub(super) fn init(&mut self, id: UniqueId, (rank, ranks): (u32, u32), deadline: Instant) -> Result<(), Failure> {
        self.retire();
        self.bind()?;
        // Leaked, since NCCL's own thread may write there after the call has returned, and after this has given up.
        let place: *mut RawComm = Box::leak(Box::new(null_mut()));
        let config = &mut Config::non_blocking();
        // SAFETY: NCCL writes the new communicator to a place that lives on, and reads the rest before it returns.
        let code = unsafe { (self.functions().init)(place, ranks as c_int, id, rank as c_int, config) };
        // SAFETY: the place is freed only after this, and NCCL writes it whole.
        self.comm = NonNull::new(unsafe { place.read_volatile() });
        let made = self.made("ncclCommInitRankConfig", code, deadline);
        match made {
            // SAFETY: neither NCCL nor this code uses it any more.
            Ok(()) => drop(unsafe { Box::from_raw(place) }),
            Err(_) => self.retire(),
        }
        made
    }

    /// Waits until the new communicator can be used.
    fn made(&self, function: &'static str, code: c_int, deadline: Instant) -> Result<(), Failure> {
        if code != IN_PROGRESS {
            self.check(function, code)?;
        }
        self.settle(function, self.comm()?, IN_PROGRESS, deadline)
    }

    /// Makes a sum. Its end is that of all its work on the device.
    pub(super) fn sum(&mut self, steps: Steps, deadline: Instant) -> Result<(), Failure> {
        let Steps { partials, adds, finished } = steps;
        // One stage after the other, so that a lost peer fails the stage that needs it.
        self.exchange(&partials, deadline)?;
        adds.into_iter().try_for_each(|added| self.device.add(added)).map_err(Failure::Device)?;
        self.exchange(&finished, deadline)
    }

    fn exchange(&mut self, moves: &Moves, deadline: Instant) -> Result<(), Failure> {
        let (comm, function) = (self.comm()?, "ncclGroupEnd");
        let code = self.enqueue(comm, moves);
        self.settle(function, comm, code, deadline)?;
        self.device.mark().map_err(Failure::Device)?;
        let begun = Instant::now();
        while !self.device.is_done().map_err(Failure::Device)? {
            match self.state_of(comm)? {
                SUCCESS | IN_PROGRESS => self.pause(begun, deadline)?,
                code => self.check(function, code)?,
            }
        }
        // An operation may also end because of an error.
        match self.state_of(comm)? {
            IN_PROGRESS => Ok(()),
            code => self.check(function, code),
        }
    }

    /// Puts sends and receives on the stream. Returns the first error; without one, whether they are in progress.
    fn enqueue(&self, comm: RawComm, Moves { sends, receives }: &Moves) -> c_int {
        let (functions, stream): (_, RawStream) = (self.functions(), self.device.stream());
        // SAFETY: a live communicator, the device's stream, and memory that the maker of the spans vouches for.
        unsafe {
            let mut codes = vec![(functions.group_start)()];
            codes.extend(sends.iter().map(|(peer, data)| {
                (functions.send)(data.pointer(), data.elements, FLOAT32, *peer as c_int, comm, stream)
            }));
            codes.extend(receives.iter().map(|(peer, data)| {
                (functions.recv)(data.pointer(), data.elements, FLOAT32, *peer as c_int, comm, stream)
            }));
            codes.push((functions.group_end)());
            let wrong = codes.iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code));
            *wrong.or(codes.iter().max()).unwrap_or(&SUCCESS)
        }
    }

    /// Gives up the communicator and its operation, and waits until the stream is empty. Returns whether it is: else the
    /// device has not finished the operation.
    pub(super) fn calm(&mut self) -> bool {
        let begun = Instant::now();
        self.interrupted.store(false, Ordering::Relaxed);
        self.retire();
        // The operation may be on the stream without a mark after it. A device that fails does no more work.
        let marked = self.device.mark().is_ok();
        while marked && !self.device.is_done().unwrap_or(true) {
            if self.pause(begun, begun + CALM_TIME).is_err() {
                return false;
            }
        }
        true
    }

    /// Gives the communicator up, if there is one, and does not wait for it: NCCL takes up to a second to end its
    /// threads, which look only now and then whether they are to end, and no round needs to wait for that.
    pub(super) fn retire(&mut self) {
        let Some(comm) = self.comm.take() else { return };
        self.parting.retain(|parting| !parting.is_finished());
        let (abort, address) = (self.functions().abort, comm.as_ptr() as usize);
        let abort = move || {
            // SAFETY: a live communicator that no code uses afterwards. An error leaves nothing to do.
            unsafe { abort(address as RawComm) };
        };
        match std::thread::Builder::new().name("nccl-abort".into()).spawn(abort) {
            Ok(parting) => self.parting.push(parting),
            Err(_) => abort(),
        }
    }

    /// The same, and waits for it.
    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            // SAFETY: a live communicator that no code uses afterwards. An error leaves nothing to do.
            unsafe { (self.functions().abort)(comm.as_ptr()) };
        }
    }

    /// Waits until `function`, which returned `code`, is no longer in progress on `comm`.
    fn settle(&self, function: &'static str, comm: RawComm, code: c_int, deadline: Instant) -> Result<(), Failure> {
        let (mut code, begun) = (code, Instant::now());
        while code == IN_PROGRESS {
            code = self.state_of(comm)?;
            if code == IN_PROGRESS {
                self.pause(begun, deadline)?;
            }
        }
        self.check(function, code)
    }

    fn state_of(&self, comm: RawComm) -> Result<c_int, Failure> {
        let mut state = SUCCESS;
        // SAFETY: a live communicator, and a place for the code.
        let code = unsafe { (self.functions().get_async_error)(comm, &raw mut state) };
        self.check("ncclCommGetAsyncError", code).map(|()| state)
    }

    /// Pauses between two polls. Fails if the flag is raised or the time is over.
    fn pause(&self, begun: Instant, deadline: Instant) -> Result<(), Failure> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(Failure::Late);
        }
        pause(begun);
        Ok(())
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), Failure> {
        match code {
            SUCCESS => Ok(()),
            code => Err(Failure::Call { function, code, message: self.library.explain(code) }),
        }
    }

    fn comm(&self) -> Result<RawComm, Failure> {
        self.comm.map(NonNull::as_ptr).ok_or_else(|| Failure::Unfit("there is no communicator".to_owned()))
    }

    fn functions(&self) -> &Functions {
        &self.library.functions
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.abort();
        for parting in self.parting.drain(..) {
            let _ = parting.join();
        }
    }
}
