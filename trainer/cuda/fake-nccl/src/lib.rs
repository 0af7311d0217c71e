//! A stand-in for NCCL's library, with the functions that the trainer calls: for tests of what it does when ranks die,
//! hang and come back. It moves bytes in host memory over loopback between processes; what passes here says nothing of
//! NCCL or of a GPU.
//!
//! Like those of NCCL 2.30, its communicators do not block: work goes to a thread of the communicator's own, and an
//! operation whose peer is gone never ends by itself.
//!
//! ```text
//! init         hands out a communicator that is in progress
//! operations   are in progress until they are on the stream, which is after the call has returned
//! abort        returns when all is over, which takes a while
//! ```
//!
//! A communicator in progress may only be aborted; any other call gets an error code. The stand-in is stricter than
//! NCCL: it ends the process when two threads use one communicator (an abort is allowed), and when a communicator is
//! made while a forgotten one exists. The stream is a pair of counters, see [`Stream`].
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
//! FAKE_NCCL_FAIL=ncclAllReduce:2      these return this code
//! FAKE_NCCL_LATE=ncclGroupEnd#8:6     these fail with this code when all their bytes are where they were to go, so
//!                                     that the other ranks have finished them
//! FAKE_NCCL_HANG=ncclGroupEnd#57      of this function the 57th call of the process alone; so with FAKE_NCCL_FAIL too
//! FAKE_NCCL_FLIP=ncclGroupEnd#4       a bit of what arrives in these is flipped
//! FAKE_NCCL_WRONG_ID=1                an id that the ranks are to meet under is another one here
//! FAKE_NCCL_DEATHS=seen               a peer's death is an asynchronous error instead of a hang
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
use std::sync::atomic::{AtomicBool, AtomicU64};

use communicator::{COMMUNICATORS_TAKE, Comm, Shared, none_is_left};
use faults::{enter, take_a_while};
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
    // SAFETY: the caller hands over what an init has made, and has not ended it.
    let comm = unsafe { comm.as_mut() }.ok_or(INVALID_ARGUMENT)?;
    if comm.caller != std::thread::current().id() && name != ABORT {
        eprintln!("fake-nccl: {name} in another thread than the communicator's first call");
        std::process::abort();
    }
    enter(name).map(|()| comm)
}

fn code(result: Result<c_int, c_int>) -> c_int {
    result.unwrap_or_else(|code| code)
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
        none_is_left();
        let comm = Comm::start();
        comm.submit_long("ncclCommInitRankConfig", move |shared| meet(shared, id, rank, ranks));
        // SAFETY: the caller's place for a communicator.
        unsafe { made.write(Box::into_raw(Box::new(comm))) };
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
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, state: *mut c_int) -> c_int {
    code(open("ncclCommGetAsyncError", comm).map(|comm| {
        // SAFETY: the caller's place for the code.
        unsafe { state.write(comm.shared.state()) };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> c_int {
    communicator::parts(comm);
    code(open(ABORT, comm).map(|_| {
        let _ = take_a_while(COMMUNICATORS_TAKE, &AtomicBool::new(false));
        // SAFETY: made by the init, and given back.
        drop(unsafe { Box::from_raw(comm) });
        SUCCESS
    }))
}
