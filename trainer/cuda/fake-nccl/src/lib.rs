//! A stand-in for NCCL's library, with the functions that the trainer calls: for tests of what it does when ranks die,
//! hang and come back. It moves bytes in host memory over loopback between processes; what passes here says nothing of
//! NCCL or of a GPU.
//!
//! Like those of NCCL 2.30, its communicators do not block: work goes to a thread of the communicator's own, and an
//! operation whose peer is gone never ends by itself.
//!
//! ```text
//! init, grow         hand out a communicator that is in progress
//! shrink             its parent is in progress, and then there is a child, useless where the shrink failed
//! operations         are in progress until they are on the stream, which is after the call has returned
//! finalize, revoke   are in progress
//! abort, destroy     return when all is over, which takes a while
//! ```
//!
//! A communicator in progress may only be aborted or revoked; any other call gets an error code. The stand-in is
//! stricter than NCCL: it ends the process when two threads use one communicator (an abort is allowed), when a parent
//! is destroyed after it has shrunk, and when a communicator is made while a forgotten one exists. The stream is a pair
//! of counters, see [`Stream`].
//!
//! The environment asks for faults. It is read in each call:
//!
//! ```text
//! FAKE_NCCL_VERSION=21602             the version that it says it is
//! FAKE_NCCL_HANG=ncclAllReduce        what these begin never ends, but by an abort
//! FAKE_NCCL_STALL=ncclAllReduce       these are in progress until an abort, and never come to the stream
//! FAKE_NCCL_BLOCK=ncclCommAbort       these do not return
//! FAKE_NCCL_SLOW=50                   what takes a while takes so many milliseconds, and operations as long until they
//!                                     are on the stream; without it 3, and operations no time
//! FAKE_NCCL_FAIL=ncclCommShrink:2     these return this code
//! FAKE_NCCL_LATE=ncclGroupEnd#8:6     these fail with this code when all their bytes are where they were to go, so
//!                                     that the other ranks have finished them
//! FAKE_NCCL_HANG=ncclGroupEnd#57      of this function the 57th call of the process alone; so with FAKE_NCCL_FAIL too
//! FAKE_NCCL_FLIP=ncclGroupEnd#4       a bit of what arrives in these is flipped
//! FAKE_NCCL_WRONG_ID=1                an id that the ranks are to meet under is another one here
//! FAKE_NCCL_DEATHS=seen               a peer's death is an asynchronous error instead of a hang: one that a revoke
//!                                     does not clear, and that fails a shrink
//! FAKE_NCCL_TELLS=1                   what hangs says so on standard error
//! FAKE_NCCL_FAULT=/tmp/fault          a file that may come to hold one fault, as `4711 FAKE_NCCL_HANG=ncclGroupEnd`,
//!                                     or one of FAKE_NCCL_FAIL: process 4711 removes it, and does so once
//! ```
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]
// A test's stand-in may panic as tests may.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod communicator;
mod faults;
mod network;
pub mod operations;

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use communicator::{COMMUNICATORS_TAKE, Comm, Shared, only_beside};
use faults::{Fault, enter, take_a_while};
use network::Id;

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// What a test passes as a `cudaStream_t`: how many operations were put on it, by anyone, and how many have ended. An
/// operation reads its buffers when all operations before it have ended.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Stream {
    pub enqueued: AtomicU64,
    pub ended: AtomicU64,
}

/// The one function that another thread may call.
const ABORT: &str = "ncclCommAbort";

/// The communicator at this pointer. It must belong to the calling thread.
#[allow(clippy::mut_from_ref)] // It comes from the pointer.
fn open(name: &'static str, comm: *mut Comm) -> Result<&'static mut Comm, c_int> {
    // SAFETY: the caller hands over what an init, shrink or grow has made, and has not ended it.
    let comm = unsafe { comm.as_mut() }.ok_or(INVALID_ARGUMENT)?;
    if comm.caller != std::thread::current().id() && name != ABORT {
        eprintln!("fake-nccl: {name} in another thread than the communicator's first call");
        std::process::abort();
    }
    enter(name).map(|()| comm)
}

/// The same for a communicator that must not be in progress.
fn open_ready(name: &'static str, comm: *mut Comm) -> Result<&'static mut Comm, c_int> {
    let comm = open(name, comm)?;
    comm.ready().map(|()| comm)
}

fn code(result: Result<c_int, c_int>) -> c_int {
    result.unwrap_or_else(|code| code)
}

fn give(made: *mut *mut Comm, comm: Comm) {
    // SAFETY: the caller's place for a communicator.
    unsafe { made.write(Box::into_raw(Box::new(comm))) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let said = std::env::var("FAKE_NCCL_VERSION").ok().and_then(|version| version.parse().ok());
    // SAFETY: the caller's place for the number.
    unsafe { version.write(said.unwrap_or(23_007)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"no error".as_ptr(),
        REMOTE_ERROR => c"remote process exited or there was a network error".as_ptr(),
        _ => c"an error of the stand-in".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut Comm) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> c_int {
    code(enter("ncclGetUniqueId").map(|()| {
        // SAFETY: the caller's place for an id.
        unsafe { id.write(network::serve_root()) };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    made: *mut *mut Comm,
    ranks: c_int,
    id: Id,
    rank: c_int,
    config: *const Config,
) -> c_int {
    code(enter("ncclCommInitRankConfig").and_then(|()| check_config(config)).map(|()| {
        only_beside("ncclCommInitRankConfig", 0);
        let comm = Comm::start();
        comm.submit_long("ncclCommInitRankConfig", move |shared| meet(shared, id, rank, ranks));
        give(made, comm);
        IN_PROGRESS
    }))
}

/// The start of `ncclConfig_t`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

fn check_config(config: *const Config) -> Result<(), c_int> {
    // SAFETY: the caller's configuration, or null.
    let config = unsafe { config.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    let right = (config.magic, config.version, config.blocking) == (0xcafe_beef, 21_700, 0) && config.size == 48;
    if right { Ok(()) } else { Err(INVALID_ARGUMENT) }
}

fn meet(shared: &Shared, mut id: Id, rank: c_int, ranks: c_int) -> Result<(), c_int> {
    if std::env::var_os("FAKE_NCCL_WRONG_ID").is_some() {
        id.0[0] ^= 1;
    }
    let mesh = network::meet(id, rank as usize, ranks as usize, &shared.cancel).ok_or(SYSTEM_ERROR)?;
    *shared.mesh.lock().unwrap() = Some(Arc::new(mesh));
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: *mut Comm,
    without: *const c_int,
    length: c_int,
    made: *mut *mut Comm,
    config: *const Config,
    flags: c_int,
) -> c_int {
    // As in NCCL, an error that is not cleared fails the shrink.
    code(open_ready("ncclCommShrink", comm).and_then(|parent| {
        check_config(config)?;
        only_beside("ncclCommShrink", 1);
        if flags != 0 || parent.shared.under_way.load(Ordering::SeqCst) > 0 {
            return Err(INVALID_USAGE);
        }
        // SAFETY: the caller's list is as long as it says.
        let without = unsafe { std::slice::from_raw_parts(without, length as usize) }.to_vec();
        let mesh = parent.mesh().ok_or(INVALID_USAGE)?;
        parent.shrunk = true;
        // SAFETY: the caller's place for a communicator.
        unsafe { made.write(std::ptr::null_mut()) };
        let (caller, made) = (parent.caller, made as usize);
        let fault = Fault::of("ncclCommShrink");
        parent.shared.result.store(IN_PROGRESS, Ordering::SeqCst);
        parent.submit(move |shared| {
            let waited = take_a_while(COMMUNICATORS_TAKE, &shared.cancel).and_then(|()| fault.hang(&shared.cancel));
            let smaller = waited.and_then(|()| mesh.shrink(&without, &shared.cancel).ok_or(REMOTE_ERROR));
            let result = smaller.as_ref().map_or_else(|code| *code, |_| SUCCESS);
            // NCCL hands out the child in any case, and its caller has to end it.
            let child = Comm::start_for(caller);
            *child.shared.mesh.lock().unwrap() = smaller.ok().map(Arc::new);
            child.shared.result.store(result, Ordering::SeqCst);
            give(made as *mut *mut Comm, child);
            shared.result.store(result, Ordering::SeqCst);
        });
        Ok(IN_PROGRESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRevoke(comm: *mut Comm, flags: c_int) -> c_int {
    code(open("ncclCommRevoke", comm).and_then(|comm| {
        if flags != 0 || comm.revoked {
            return Err(INVALID_ARGUMENT);
        }
        comm.revoked = true;
        comm.cancel();
        comm.shared.cancel.store(false, Ordering::SeqCst);
        comm.submit_long("ncclCommRevoke", |_| Ok(()));
        Ok(IN_PROGRESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetUniqueId(comm: *mut Comm, id: *mut Id) -> c_int {
    code(open_ready("ncclCommGetUniqueId", comm).map(|_| {
        // SAFETY: the caller's place for an id.
        unsafe { id.write(network::serve_root()) };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGrow(
    comm: *mut Comm,
    ranks: c_int,
    id: *const Id,
    rank: c_int,
    made: *mut *mut Comm,
    config: *const Config,
) -> c_int {
    code(enter("ncclCommGrow").and_then(|()| {
        check_config(config)?;
        // SAFETY: the caller's id, or null.
        let id = unsafe { id.as_ref() }.copied();
        let parent = if comm.is_null() { None } else { Some(open_ready("ncclCommGrow", comm)?) };
        only_beside("ncclCommGrow", usize::from(parent.is_some()));
        let mesh = parent.map(|parent| parent.mesh().ok_or(INVALID_USAGE)).transpose()?;
        if mesh.is_some() != (rank == -1) || (mesh.is_none() && id.is_none()) {
            return Err(INVALID_ARGUMENT);
        }
        let child = Comm::start();
        child.submit_long("ncclCommGrow", move |shared| {
            let Some(mesh) = mesh else { return meet(shared, id.unwrap(), rank, ranks) };
            // The member that has the id tells the others.
            let all = 0..mesh.ranks();
            let told = match id {
                Some(id) => {
                    let out = all.filter(|&peer| peer != mesh.rank()).map(|peer| (peer, id.0.to_vec())).collect();
                    mesh.exchange(out, &[], &shared.cancel, false).map(|_| id)
                }
                None => mesh
                    .exchange(Vec::new(), &[(0, 128)], &shared.cancel, false)
                    .map(|frames| Id(frames[0][..].try_into().unwrap())),
            };
            meet(shared, told.ok_or(REMOTE_ERROR)?, mesh.rank() as c_int, ranks)
        });
        give(made, child);
        Ok(IN_PROGRESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, state: *mut c_int) -> c_int {
    code(open("ncclCommGetAsyncError", comm).map(|comm| {
        // SAFETY: the caller's place for the code.
        unsafe { state.write(comm.shared.state()) };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: *mut Comm, count: *mut c_int) -> c_int {
    code(open_ready("ncclCommCount", comm).and_then(|comm| {
        let ranks = comm.mesh().ok_or(INVALID_USAGE)?.ranks();
        // SAFETY: the caller's place for the number.
        unsafe { count.write(ranks as c_int) };
        Ok(SUCCESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: *mut Comm, rank: *mut c_int) -> c_int {
    code(open_ready("ncclCommUserRank", comm).and_then(|comm| {
        let own = comm.mesh().ok_or(INVALID_USAGE)?.rank();
        // SAFETY: the caller's place for the number.
        unsafe { rank.write(own as c_int) };
        Ok(SUCCESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: *mut Comm) -> c_int {
    code(open_ready("ncclCommFinalize", comm).and_then(|comm| {
        let mesh = comm.mesh().filter(|_| !comm.revoked).ok_or(INVALID_USAGE)?;
        comm.submit_long("ncclCommFinalize", move |shared| {
            let peers: Vec<usize> = (0..mesh.ranks()).filter(|&peer| peer != mesh.rank()).collect();
            let out = peers.iter().map(|&peer| (peer, Vec::new())).collect();
            let into: Vec<(usize, usize)> = peers.iter().map(|&peer| (peer, 0)).collect();
            mesh.exchange(out, &into, &shared.cancel, true).map(drop).ok_or(REMOTE_ERROR)
        });
        Ok(IN_PROGRESS)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> c_int {
    communicator::parts(comm);
    code(open("ncclCommDestroy", comm).map(|opened| {
        if opened.shrunk {
            eprintln!("fake-nccl: a communicator that has shrunk must be aborted, not destroyed");
            std::process::abort();
        }
        let _ = take_a_while(COMMUNICATORS_TAKE, &AtomicBool::new(false));
        // SAFETY: made by `give`, and given back.
        drop(unsafe { Box::from_raw(comm) });
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> c_int {
    communicator::parts(comm);
    code(open(ABORT, comm).map(|_| {
        let _ = take_a_while(COMMUNICATORS_TAKE, &AtomicBool::new(false));
        // SAFETY: made by `give`, and given back.
        drop(unsafe { Box::from_raw(comm) });
        SUCCESS
    }))
}
