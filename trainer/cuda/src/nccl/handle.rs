//! One communicator of one rank, and every call of NCCL on it, in one thread.
//!
//! No call blocks: what NCCL has begun is polled until it is done, its time is over, or another thread has raised the
//! flag. In the last two cases the communicator is then revoked, or aborted if it cannot be revoked. An abort blocks,
//! and has a thread of its own.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::library::{Config, Functions, IN_PROGRESS, Library, RawComm, RawStream, SUCCESS, UniqueId};
use super::ordered::{Moves, Steps};
use super::{Device, Span};
use crate::gpu::pause;

/// How long it may take until the stream of a revoked communicator is empty.
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
    /// There is no communicator, or another one than was asked for.
    Unfit(String),
}

/// What is left of a communicator whose operation was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remains {
    /// Nothing is under way on it; it can still shrink.
    Revoked,
    /// It is gone.
    Nothing,
    /// It is gone, but the device has not finished its operation.
    Busy,
}

/// An operation of all ranks.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    AllReduce { data: Span },
    Exchange(Moves),
    OrderedSum(Steps),
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

    /// As [`mint`](Self::mint), for ranks that join this communicator.
    pub(super) fn mint_for_joiners(&mut self) -> Result<UniqueId, Failure> {
        let (comm, mut id) = (self.comm()?, UniqueId([0; 128]));
        let mint = self.functions().grow_id.ok_or_else(|| lacks("ncclCommGetUniqueId"))?;
        // SAFETY: a live communicator, and a place for the id.
        let code = unsafe { mint(comm, &raw mut id) };
        self.check("ncclCommGetUniqueId", code).map(|()| id)
    }

    /// Makes a new communicator.
    pub(super) fn init(&mut self, id: UniqueId, place: (u32, u32), deadline: Instant) -> Result<(), Failure> {
        self.retire();
        let (rank, ranks) = place;
        self.make("ncclCommInitRankConfig", None, place, deadline, |functions, _, made, config| {
            // SAFETY: NCCL writes the new communicator to a place that lives on, and reads the rest before it returns.
            Ok(unsafe { (functions.init)(made, ranks as c_int, id, rank as c_int, config) })
        })
    }

    /// Makes a communicator of this one's members without those in `without`. All members that stay call it.
    pub(super) fn shrink(
        &mut self,
        without: &[u32],
        revoke: bool,
        place: (u32, u32),
        deadline: Instant,
    ) -> Result<(), Failure> {
        let parent = self.comm()?;
        if revoke {
            self.revoke()?;
        }
        // It may be in progress, or an earlier one, by which an operation was given up.
        self.settle("ncclCommRevoke", parent, IN_PROGRESS, deadline)?;
        // Leaked, since NCCL's own thread may read it after the call has returned, as it may the id in `grow`.
        let without: &mut [c_int] = without.iter().map(|&rank| rank as c_int).collect::<Vec<_>>().leak();
        // A revoked parent has no operation under way, nor has one whose members left as planned.
        const NOTHING_UNDER_WAY: c_int = 0;
        self.make("ncclCommShrink", Some(parent), place, deadline, |functions, parent, made, config| {
            let shrink = functions.shrink.ok_or_else(|| lacks("ncclCommShrink"))?;
            let (list, length) = (without.as_mut_ptr(), without.len() as c_int);
            // SAFETY: as for `init`; the list is as long as is said, and stays.
            Ok(unsafe { shrink(parent, list, length, made, config, NOTHING_UNDER_WAY) })
        })
    }

    /// Makes a communicator of this one's members and new ranks. A new rank has no communicator. Rank 0 and the new
    /// ranks have the id.
    pub(super) fn grow(&mut self, id: Option<UniqueId>, place: (u32, u32), deadline: Instant) -> Result<(), Failure> {
        let parent = self.comm.map(NonNull::as_ptr);
        let (rank, ranks) = place;
        // Old members keep their ranks.
        let rank = if parent.is_some() { -1 } else { rank as c_int };
        self.make("ncclCommGrow", parent, place, deadline, |functions, parent, made, config| {
            let grow = functions.grow.ok_or_else(|| lacks("ncclCommGrow"))?;
            let id = id.map_or(null(), |id| &raw const *Box::leak(Box::new(id)));
            // SAFETY: as for `init`; the parent is live or null, and the id stays.
            Ok(unsafe { grow(parent, ranks as c_int, id, rank, made, config) })
        })
    }

    /// Has `call` begin a communicator, waits for it, and replaces its parent with it.
    fn make(
        &mut self,
        function: &'static str,
        parent: Option<RawComm>,
        (rank, ranks): (u32, u32),
        deadline: Instant,
        call: impl FnOnce(&Functions, RawComm, *mut RawComm, *mut Config) -> Result<c_int, Failure>,
    ) -> Result<(), Failure> {
        self.bind()?;
        // Leaked, since NCCL's own thread may write there after the call has returned, and after this has given up.
        let place: *mut RawComm = Box::leak(Box::new(null_mut()));
        let library = self.library.clone();
        let code = call(&library.functions, parent.unwrap_or(null_mut()), place, &mut Config::non_blocking())?;
        // The parent is busy until the child exists.
        let mut result = match parent {
            Some(parent) => self.settle(function, parent, code, deadline),
            None if code == IN_PROGRESS => Ok(()),
            None => self.check(function, code),
        };
        // SAFETY: the place is freed only after the last of these, and NCCL writes it whole, in a thread of its own.
        let child = || NonNull::new(unsafe { place.read_volatile() });
        if let Some(made) = child() {
            result = result.and_then(|()| self.settle(function, made.as_ptr(), IN_PROGRESS, deadline));
            result = result.and_then(|()| self.check_place(made.as_ptr(), rank, ranks));
        } else if result.is_ok() {
            result = Err(Failure::Unfit(format!("{function} made no communicator")));
        }
        // A parent that has shrunk must be aborted: to destroy it would wait for the ranks that are gone. If the shrink
        // was given up or has failed, NCCL finishes it only after this abort, and may then have made a child of no
        // use.
        if result.is_ok() {
            self.retire();
        } else {
            self.abort();
        }
        self.comm = child();
        match result {
            // SAFETY: neither NCCL nor this code uses it any more.
            Ok(()) => drop(unsafe { Box::from_raw(place) }),
            Err(_) => self.retire(),
        }
        result
    }

    /// Checks that a new communicator has the round's rank and size.
    fn check_place(&self, comm: RawComm, rank: u32, ranks: u32) -> Result<(), Failure> {
        let (mut own, mut all) = (0, 0);
        // SAFETY: a live communicator, and places for the numbers.
        let codes =
            unsafe { [(self.functions().user_rank)(comm, &raw mut own), (self.functions().count)(comm, &raw mut all)] };
        codes.into_iter().try_for_each(|code| self.check("ncclCommUserRank", code))?;
        if (own, all) == (rank as c_int, ranks as c_int) {
            return Ok(());
        }
        Err(Failure::Unfit(format!("NCCL made rank {own} of {all} of rank {rank} of {ranks}")))
    }

    /// Runs an operation to its end on the device.
    pub(super) fn run(&mut self, operation: Operation, deadline: Instant) -> Result<(), Failure> {
        let Operation::OrderedSum(Steps { partials, adds, finished }) = operation else {
            return self.call(&operation, deadline);
        };
        // One stage after the other, so that a lost peer fails the stage that needs it.
        self.call(&Operation::Exchange(partials), deadline)?;
        adds.into_iter().try_for_each(|added| self.device.add(added)).map_err(Failure::Device)?;
        self.call(&Operation::Exchange(finished), deadline)
    }

    fn call(&mut self, operation: &Operation, deadline: Instant) -> Result<(), Failure> {
        let comm = self.comm()?;
        let (function, code) = self.enqueue(comm, operation);
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

    fn enqueue(&self, comm: RawComm, operation: &Operation) -> (&'static str, c_int) {
        use super::library::{FLOAT32, SUM};
        let (functions, stream): (_, RawStream) = (self.functions(), self.device.stream());
        // SAFETY: a live communicator, the device's stream, and memory that the maker of the spans vouches for.
        unsafe {
            match operation {
                Operation::AllReduce { data } => {
                    let (place, count) = (data.pointer(), data.elements);
                    ("ncclAllReduce", (functions.all_reduce)(place, place, count, FLOAT32, SUM, comm, stream))
                }
                Operation::Exchange(Moves { sends, receives }) => {
                    let mut codes = vec![(functions.group_start)()];
                    codes.extend(sends.iter().map(|(peer, data)| {
                        (functions.send)(data.pointer(), data.elements, FLOAT32, *peer as c_int, comm, stream)
                    }));
                    codes.extend(receives.iter().map(|(peer, data)| {
                        (functions.recv)(data.pointer(), data.elements, FLOAT32, *peer as c_int, comm, stream)
                    }));
                    codes.push((functions.group_end)());
                    // The first error; without one, IN_PROGRESS if any call is in progress.
                    let wrong = codes.iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code));
                    ("ncclGroupEnd", *wrong.or(codes.iter().max()).unwrap_or(&SUCCESS))
                }
                Operation::OrderedSum(_) => unreachable!("it is run in stages"),
            }
        }
    }

    /// Ends the operation under way and waits until the stream is empty. A communicator that can be revoked can shrink
    /// afterwards; any other is gone.
    pub(super) fn calm(&mut self) -> Remains {
        let begun = Instant::now();
        self.interrupted.store(false, Ordering::Relaxed);
        // A revoke frees the device at once. NCCL's threads end later, and only a shrink needs to wait for that.
        if self.comm.is_some() && (!self.is_sound() || self.revoke().is_err()) {
            self.retire();
        }
        // The operation may be on the stream without a mark after it. A device that fails does no more work.
        let marked = self.device.mark().is_ok();
        while marked && !self.device.is_done().unwrap_or(true) {
            if self.pause(begun, begun + CALM_TIME).is_err() {
                self.retire();
                return Remains::Busy;
            }
        }
        if self.comm.is_some() { Remains::Revoked } else { Remains::Nothing }
    }

    /// Begins to revoke the communicator.
    fn revoke(&self) -> Result<(), Failure> {
        let comm = self.comm()?;
        let revoke = self.functions().revoke.ok_or_else(|| lacks("ncclCommRevoke"))?;
        // SAFETY: a live communicator.
        match unsafe { revoke(comm, 0) } {
            IN_PROGRESS => Ok(()),
            code => self.check("ncclCommRevoke", code),
        }
    }

    /// Whether the communicator can shrink or grow. If NCCL has seen the end of a peer's connection, it cannot: that
    /// error is kept where no revoke clears it (`proxyState->asyncResult` in NCCL's `init.cc`).
    pub(super) fn is_sound(&self) -> bool {
        self.comm().is_ok_and(|comm| matches!(self.state_of(comm), Ok(SUCCESS | IN_PROGRESS)))
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

fn lacks(function: &str) -> Failure {
    Failure::Unfit(format!("this NCCL has no {function}"))
}
