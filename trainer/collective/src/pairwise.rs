//! Operations in which pairs of ranks exchange whole buffers: sums of small buffers, and broadcast.

use super::peer_stream::{Exchange, Kind, OperationHeader, PeerStream, run};
use super::{CollectiveError, Group};

/// The sum of [`ordered`](super::ordered) by recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of
/// collective communication operations in MPICH", 2005), for a power of two of ranks: each rank exchanges buffers with a
/// partner at distance 1, 2, 4 …, so log2(n) turns suffice. Each turn adds two neighbouring nodes of a binary tree: the
/// lower ranks' sum and the higher ranks' sum.
pub(super) fn sum_in_tree(group: &mut Group, sum: &mut [f32], vote: u32) -> Result<u32, CollectiveError> {
    let operation = group.begin(Kind::Ordered, size_of_val(sum));
    let mut theirs = vec![0.0; sum.len()];
    let (mut votes, mut distance) = (vote, 1);
    while distance < group.world_size {
        let partner = group.rank ^ distance;
        let (out, into) = (bytemuck::cast_slice(sum), bytemuck::cast_slice_mut(&mut theirs));
        votes |= exchange(group, operation, (partner, votes), Some(out), Some(into))?;
        add(sum, &theirs);
        distance *= 2;
    }
    Ok(votes)
}

/// Copies rank 0's bytes along a binomial tree.
pub(super) fn broadcast(group: &mut Group, data: &mut [u8]) -> Result<(), CollectiveError> {
    let operation = group.begin(Kind::Broadcast, data.len());
    let (rank, world_size) = (group.rank, group.world_size);
    // A rank receives from the rank without its own highest bit, and then sends to the ranks with one higher bit more.
    let mut bit = if rank == 0 { 1 } else { 2 << rank.ilog2() };
    if rank > 0 {
        receive(group, operation, rank ^ (bit >> 1), data)?;
    }
    while rank + bit < world_size {
        send(group, operation, rank + bit, data)?;
        bit *= 2;
    }
    Ok(())
}

pub(super) fn add(sum: &mut [f32], more: &[f32]) {
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

fn send(group: &mut Group, operation: OperationHeader, peer: usize, data: &[u8]) -> Result<(), CollectiveError> {
    exchange(group, operation, (peer, 0), Some(data), None).map(drop)
}

fn receive(group: &mut Group, operation: OperationHeader, peer: usize, data: &mut [u8]) -> Result<(), CollectiveError> {
    exchange(group, operation, (peer, 0), None, Some(data)).map(drop)
}

/// Sends `out` to a peer and fills `into` from it, at the same time. `word` is sent along; returns the peer's word.
fn exchange(
    group: &mut Group,
    operation: OperationHeader,
    (peer, word): (usize, u32),
    out: Option<&[u8]>,
    into: Option<&mut [u8]>,
) -> Result<u32, CollectiveError> {
    let mut exchange = [Exchange::new(PeerStream::new(peer, operation, word), out, into)];
    run(group, &mut exchange)?;
    let [Exchange { peer_stream, .. }] = exchange;
    Ok(peer_stream.word)
}
