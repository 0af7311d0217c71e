//! What ranks do together on the stand-in: sums and copies.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::communicator::Comm;
use super::faults::{Fault, enter, take_a_while};
use super::network::Frame;
use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, Stream};
use super::{code, open};

/// `ncclFloat32` and `ncclFloat64`
const FLOAT32: c_int = 7;
const FLOAT64: c_int = 8;

/// What an operation sends, which is read when the stream has reached the operation; what it receives, and where that
/// is written.
struct Transfer {
    out: Box<dyn FnOnce() -> Vec<Frame> + Send>,
    into: Vec<(usize, usize)>,
    place: Box<dyn FnOnce(Vec<Vec<u8>>) + Send>,
}

fn launch(name: &'static str, comm: &Comm, stream: *const Stream, transfer: Transfer) -> Result<c_int, c_int> {
    comm.ready()?;
    let mesh = comm.mesh().ok_or(INVALID_USAGE)?;
    // SAFETY: the caller's stream, which outlives the communicator.
    let stream: &'static Stream = unsafe { stream.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    let fault = Fault::of(name);
    comm.shared.result.store(IN_PROGRESS, Ordering::SeqCst);
    comm.submit(move |shared| {
        if let Err(code) = take_a_while(Duration::ZERO, &shared.cancel).and_then(|()| fault.stall(&shared.cancel)) {
            shared.result.store(code, Ordering::SeqCst);
            return;
        }
        let before = stream.enqueued.fetch_add(1, Ordering::SeqCst);
        shared.result.store(SUCCESS, Ordering::SeqCst);
        let Transfer { out, into, place } = transfer;
        // The device still works on what was asked for before.
        while stream.ended.load(Ordering::SeqCst) < before {
            std::thread::sleep(Duration::from_micros(20));
        }
        // Like a kernel that waits for a peer: the peer's death alone does not end it.
        let seen = std::env::var("FAKE_NCCL_DEATHS").is_ok_and(|what| what == "seen");
        let received = fault.hang(&shared.cancel).ok().and_then(|()| mesh.exchange(out(), &into, &shared.cancel, seen));
        match received.filter(|_| !shared.cancel.load(Ordering::SeqCst)) {
            Some(mut received) => {
                fault.flip(&mut received);
                place(received);
                if let Some(code) = fault.late() {
                    shared.result.store(code, Ordering::SeqCst);
                }
            }
            None => shared.lost.store(seen, Ordering::SeqCst),
        }
        stream.ended.fetch_add(1, Ordering::SeqCst);
    });
    Ok(IN_PROGRESS)
}

/// The bytes of `count` numbers at an address.
fn read(from: usize, count: usize) -> Vec<u8> {
    // SAFETY: the caller's buffer, which lives until the operation has ended.
    unsafe { std::slice::from_raw_parts(from as *const u8, count * 4) }.to_vec()
}

fn write(to: usize, bytes: &[u8]) {
    // SAFETY: the caller's buffer, which lives until the operation has ended.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
}

/// Adds numbers of one kind, place by place.
fn add_up<const WIDTH: usize, Number: std::iter::Sum<Number>>(
    all: &[Vec<u8>],
    number: impl Fn([u8; WIDTH]) -> Number,
    bytes: impl Fn(Number) -> [u8; WIDTH],
) -> Vec<u8> {
    let at = |of: &[u8], place: usize| number(of[place..place + WIDTH].try_into().unwrap());
    let places = (0..all[0].len()).step_by(WIDTH);
    places.flat_map(|place| bytes(all.iter().map(|of| at(of, place)).sum())).collect()
}

/// Sends `count` numbers of four bytes of each rank to all ranks. Returns their bytes by rank.
fn with_all(
    comm: &Comm,
    (from, count): (*const c_void, usize),
    place: impl FnOnce(Vec<Vec<u8>>) + Send + 'static,
) -> Result<Transfer, c_int> {
    let mesh = comm.mesh().ok_or(INVALID_USAGE)?;
    let (rank, from) = (mesh.rank(), from as usize);
    let peers: Vec<usize> = (0..mesh.ranks()).filter(|&peer| peer != rank).collect();
    Ok(Transfer {
        into: peers.iter().map(|&peer| (peer, count * 4)).collect(),
        out: Box::new(move || peers.iter().map(|&peer| (peer, read(from, count))).collect()),
        place: Box::new(move |mut received| {
            received.insert(rank, read(from, count));
            place(received);
        }),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    _sum: c_int,
    comm: *mut Comm,
    stream: *const Stream,
) -> c_int {
    code(open("ncclAllReduce", comm).and_then(|comm| {
        let to = to as usize;
        let fours = match kind {
            FLOAT32 => count,
            FLOAT64 => 2 * count,
            _ => return Err(INVALID_ARGUMENT),
        };
        let transfer = with_all(comm, (from, fours), move |all| {
            let sums = match kind {
                FLOAT64 => add_up(&all, f64::from_le_bytes, f64::to_le_bytes),
                _ => add_up(&all, f32::from_le_bytes, f32::to_le_bytes),
            };
            write(to, &sums);
        })?;
        launch("ncclAllReduce", comm, stream, transfer)
    }))
}

/// Sends and receives between a group's start and its end.
#[derive(Default)]
struct Pending {
    open: bool,
    comm: Option<(usize, usize)>,
    /// The peer, the address, and how many numbers to send.
    out: Vec<(usize, usize, usize)>,
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
        let out = move || out.into_iter().map(|(peer, from, count)| (peer, read(from, count))).collect();
        let transfer = Transfer { out: Box::new(out), into, place: Box::new(place) };
        launch("ncclGroupEnd", comm, stream as *const Stream, transfer)
    }))
}

/// Records a send or a receive of the open group.
fn note(name: &'static str, comm: *mut Comm, stream: *const Stream, note: impl FnOnce(&mut Pending)) -> c_int {
    code(open(name, comm).and_then(|_| {
        PENDING.with_borrow_mut(|pending| {
            // NCCL accepts them outside a group, too, but the trainer does not use that.
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
    note("ncclSend", comm, stream, |pending| pending.out.push((peer as usize, from as usize, count)))
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
