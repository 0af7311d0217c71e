//! What ranks do together on the stand-in: sums and copies. Not for how their bytes travel.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use super::network::Frame;
use super::{Comm, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, Stream, code, enter, hang, open};

/// What an operation sends, what it receives, and where that goes.
struct Transfer {
    out: Vec<Frame>,
    into: Vec<(usize, usize)>,
    place: Box<dyn FnOnce(Vec<Vec<u8>>) + Send>,
}

fn launch(name: &'static str, comm: &Comm, stream: *const Stream, transfer: Transfer) -> Result<c_int, c_int> {
    let mesh = comm.mesh().filter(|_| !comm.revoked).ok_or(INVALID_USAGE)?;
    // SAFETY: the caller's stream, which outlives the communicator.
    let stream: &'static Stream = unsafe { stream.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    stream.enqueued.fetch_add(1, Ordering::SeqCst);
    comm.submit(move |shared| {
        let Transfer { out, into, place } = transfer;
        // As a kernel that waits for a peer: a death alone does not end it.
        let seen = std::env::var("FAKE_NCCL_DEATHS").is_ok_and(|what| what == "seen");
        let received = hang(name, shared).ok().and_then(|()| mesh.exchange(out, &into, &shared.cancel, seen));
        match received.filter(|_| !shared.cancel.load(Ordering::SeqCst)) {
            Some(received) => place(received),
            None if seen => shared.result.store(REMOTE_ERROR, Ordering::SeqCst),
            None => {}
        }
        stream.ended.fetch_add(1, Ordering::SeqCst);
    });
    Ok(SUCCESS)
}

/// The bytes of `count` numbers at an address.
fn read(from: *const c_void, count: usize) -> Vec<u8> {
    // SAFETY: the caller's buffer.
    unsafe { std::slice::from_raw_parts(from.cast::<u8>(), count * 4) }.to_vec()
}

fn write(to: usize, bytes: &[u8]) {
    // SAFETY: the caller's buffer, which lives until the operation has ended.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
}

/// Everyone's bytes to everyone, and back by rank.
fn with_all(comm: &Comm, own: Vec<u8>, place: impl FnOnce(Vec<Vec<u8>>) + Send + 'static) -> Result<Transfer, c_int> {
    let mesh = comm.mesh().ok_or(INVALID_USAGE)?;
    let (rank, length) = (mesh.rank(), own.len());
    let peers: Vec<usize> = (0..mesh.ranks()).filter(|&peer| peer != rank).collect();
    Ok(Transfer {
        out: peers.iter().map(|&peer| (peer, own.clone())).collect(),
        into: peers.iter().map(|&peer| (peer, length)).collect(),
        place: Box::new(move |mut received| {
            received.insert(rank, own);
            place(received);
        }),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    _kind: c_int,
    _sum: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    code(open("ncclAllReduce", comm).and_then(|comm| {
        let to = to as usize;
        let transfer = with_all(comm, read(from, count), move |all| {
            let number = |bytes: &[u8], i: usize| f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
            let sums = (0..count).flat_map(|i| all.iter().map(|bytes| number(bytes, i)).sum::<f32>().to_le_bytes());
            write(to, &sums.collect::<Vec<u8>>());
        })?;
        launch("ncclAllReduce", comm, stream, transfer)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    _kind: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    code(open("ncclAllGather", comm).and_then(|comm| {
        let to = to as usize;
        let transfer = with_all(comm, read(from, count), move |all| write(to, &all.concat()))?;
        launch("ncclAllGather", comm, stream, transfer)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    _kind: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    code(open("ncclBroadcast", comm).and_then(|comm| {
        let to = to as usize;
        let transfer = with_all(comm, read(from, count), move |all| write(to, &all[root as usize]))?;
        launch("ncclBroadcast", comm, stream, transfer)
    }))
}

/// Sends and receives between a group's start and its end.
#[derive(Default)]
struct Pending {
    open: bool,
    comm: Option<(usize, usize)>,
    out: Vec<Frame>,
    into: Vec<(usize, usize)>,
    places: Vec<usize>,
}

thread_local! {
    static PENDING: RefCell<Pending> = RefCell::default();
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    PENDING.with_borrow_mut(|pending| *pending = Pending { open: true, ..Pending::default() });
    code(enter("ncclGroupStart").map(|()| SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let Pending { comm, out, into, places, .. } = PENDING.take();
    let Some((comm, stream)) = comm else { return SUCCESS };
    code(open("ncclGroupEnd", comm as *mut Comm).and_then(|comm| {
        let place =
            move |received: Vec<Vec<u8>>| places.iter().zip(received).for_each(|(&to, bytes)| write(to, &bytes));
        launch("ncclGroupEnd", comm, stream as *const Stream, Transfer { out, into, place: Box::new(place) })
    }))
}

/// Notes a send or a receive of the group that is open.
fn note(name: &str, comm: *mut Comm, stream: *const Stream, note: impl FnOnce(&mut Pending)) -> c_int {
    code(open(name, comm).and_then(|_| {
        PENDING.with_borrow_mut(|pending| {
            // NCCL takes single ones, too; the trainer has none.
            if !pending.open {
                return Err(INVALID_USAGE);
            }
            pending.comm = Some((comm as usize, stream as usize));
            note(pending);
            Ok(SUCCESS)
        })
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    _kind: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    note("ncclSend", comm, stream, |pending| pending.out.push((peer as usize, read(from, count))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    _kind: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    note("ncclRecv", comm, stream, |pending| {
        pending.into.push((peer as usize, count * 4));
        pending.places.push(to as usize);
    })
}
