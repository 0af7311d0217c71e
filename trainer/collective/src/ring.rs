//! The ring all-reduce for large buffers (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
//!
//! The buffer is cut into one chunk for each rank. The chunks go round the ring: in n - 1 turns each rank adds its own
//! numbers, and in n - 1 more turns the finished sums are copied. A rank sends in turn t + 1 what it has received in
//! turn t. So both directions are byte streams, and the outgoing one may be one chunk ahead. Both advance as far as the
//! sockets allow, a segment at a time: receiving, adding and sending overlap.

use std::ops::Range;

use super::peer_stream::{Interest, Kind, PeerStream};
use super::{CollectiveError, Group, SEGMENT_BYTES};

/// How far a stream is: the turn, and bytes of that turn's chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    turn: usize,
    bytes: usize,
}

pub(super) fn all_reduce(group: &mut Group, data: &mut [f32]) -> Result<(), CollectiveError> {
    let operation = group.begin(Kind::Ring, size_of_val(data));
    let (rank, ranks) = (group.rank, group.world_size);
    let turns = 2 * (ranks - 1);
    let elements = data.len();
    let sent_in = |turn: usize| chunk_bytes((rank + 2 * ranks - turn) % ranks, ranks, elements);
    let mut to = PeerStream::new((rank + 1) % ranks, operation, 0);
    let mut from = PeerStream::new((rank + ranks - 1) % ranks, operation, 0);
    // `received` counts the bytes that are added or copied; `pending` more bytes wait in the scratch segment.
    let (mut sent, mut received) = (Position { turn: 0, bytes: 0 }, Position { turn: 0, bytes: 0 });
    let mut scratch = vec![0f32; SEGMENT_BYTES / size_of::<f32>()];
    let mut pending = 0;
    loop {
        let before = (sent, received, pending, to.opened(), from.heard());

        while sent.turn < turns {
            let chunk = sent_in(sent.turn);
            let ready = ready(sent.turn, received, chunk.len());
            if sent.bytes == chunk.len() && to.opened() {
                sent = Position { turn: sent.turn + 1, bytes: 0 };
                continue;
            }
            let body = &bytemuck::cast_slice(data)[chunk.start + sent.bytes..chunk.start + ready];
            let taken = to.send(group, body)?;
            sent.bytes += taken;
            if taken == 0 {
                break;
            }
        }

        while received.turn < turns {
            let chunk = sent_in(received.turn + 1);
            let left = chunk.len() - received.bytes;
            if left == 0 && from.heard() {
                received = Position { turn: received.turn + 1, bytes: 0 };
                continue;
            }
            let at = chunk.start + received.bytes;
            let got = if received.turn < ranks - 1 {
                let segment = left.min(SEGMENT_BYTES);
                let got = from.receive(group, &mut bytemuck::cast_slice_mut(&mut scratch)[pending..segment])?;
                pending += got;
                if pending == segment {
                    let place = at / size_of::<f32>();
                    let sums = &mut data[place..place + segment / size_of::<f32>()];
                    sums.iter_mut().zip(&scratch).for_each(|(sum, more)| *sum += more);
                    received.bytes += segment;
                    pending = 0;
                }
                got
            } else {
                let got = from.receive(group, &mut bytemuck::cast_slice_mut(data)[at..at + left])?;
                received.bytes += got;
                got
            };
            if got == 0 {
                break;
            }
        }

        if sent.turn == turns && received.turn == turns {
            return Ok(());
        }
        if before == (sent, received, pending, to.opened(), from.heard()) {
            let can_send = sent.turn < turns
                && (!to.opened() || sent.bytes < ready(sent.turn, received, sent_in(sent.turn).len()));
            let interests = [
                Interest { peer: to.peer, send: can_send, receive: false },
                Interest { peer: from.peer, send: false, receive: received.turn < turns },
            ];
            group.wait(&interests)?;
        }
    }
}

/// Bytes of the chunk of `turn` that may be sent: in the first turn all, later those received in the turn before.
fn ready(turn: usize, received: Position, chunk: usize) -> usize {
    match turn.checked_sub(received.turn) {
        None | Some(0) => chunk,
        Some(1) => received.bytes,
        Some(_) => 0,
    }
}

/// The bytes of a rank's chunk in the buffer.
fn chunk_bytes(chunk: usize, ranks: usize, elements: usize) -> Range<usize> {
    let at = |number: usize| elements * number / ranks * size_of::<f32>();
    at(chunk)..at(chunk + 1)
}
