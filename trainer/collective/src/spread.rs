//! Operations in which each pair of ranks exchanges other bytes: gathering numbers of all ranks, spreading a buffer from
//! several holders at once, and passing pieces of it.

use super::peer_stream::{Exchange, Kind, PeerStream, run};
use super::{CollectiveError, Group};

pub(super) fn gather<const N: usize>(group: &mut Group, values: [u64; N]) -> Result<Vec<[u64; N]>, CollectiveError> {
    let own = values.map(u64::to_le);
    let mut all = vec![own; group.world_size];
    let operation = group.begin(Kind::Gather, size_of_val(&all[..]));
    let (rank, out) = (group.rank, bytemuck::cast_slice(&own));
    let peers = all.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
    let exchanges = peers.map(|(peer, into)| {
        Exchange::new(PeerStream::new(peer, operation, 0), Some(out), Some(bytemuck::cast_slice_mut(into)))
    });
    run(group, &mut exchanges.collect::<Vec<_>>())?;
    Ok(all.into_iter().map(|values| values.map(u64::from_le)).collect())
}

pub(super) fn spread(group: &mut Group, holds: &[bool], data: &mut [u8]) -> Result<(), CollectiveError> {
    let (total, parts) = (data.len() as u128, holds.iter().filter(|holds| **holds).count() as u128);
    // In 128 bits, since the product of a large state's bytes and many holders may not fit into 64.
    let bound = |part: u128| (total * part / parts) as usize;
    let mut ends = (1..).map(bound);
    let ends: Vec<usize> = (0..group.world_size)
        .scan(0, |end, rank| {
            *end = if holds[rank] { ends.next().unwrap_or(*end) } else { *end };
            Some(*end)
        })
        .collect();
    share(group, &ends, |_, to| !holds[to], data)
}

/// Each rank's part of `data`, which ends where `ends` says and begins where that of the rank before ends, goes to those
/// others that it `goes` to.
pub(super) fn share(
    group: &mut Group,
    ends: &[usize],
    goes: impl Fn(usize, usize) -> bool,
    data: &mut [u8],
) -> Result<(), CollectiveError> {
    let operation = group.begin(Kind::Spread, data.len());
    let (rank, mut rest, mut start) = (group.rank, data, 0);
    let (mut own, mut theirs): (&[u8], Vec<(usize, &mut [u8])>) = (&[], Vec::with_capacity(group.world_size));
    for (peer, &end) in ends.iter().enumerate() {
        let (part, after) = rest.split_at_mut(end - start);
        (rest, start) = (after, end);
        if peer == rank { own = part } else { theirs.push((peer, part)) }
    }
    let exchanges = theirs.into_iter().filter_map(|(peer, part)| {
        let out = if goes(rank, peer) { own } else { &[] };
        let into = if goes(peer, rank) { part } else { &mut [] };
        let nothing = out.is_empty() && into.is_empty();
        (!nothing).then(|| Exchange::new(PeerStream::new(peer, operation, 0), Some(out), Some(into)))
    });
    run(group, &mut exchanges.collect::<Vec<_>>())
}

/// Bytes that one rank sends to another, or receives from it, one piece after the other.
pub(super) type Pieces<T> = Vec<(usize, T)>;

pub(super) fn pass(
    group: &mut Group,
    total: usize,
    out: Pieces<&[u8]>,
    into: Pieces<&mut [u8]>,
) -> Result<(), CollectiveError> {
    let operation = group.begin(Kind::Pass, total);
    let mut all_out: Vec<Vec<&[u8]>> = (0..group.world_size).map(|_| Vec::new()).collect();
    let mut all_into: Vec<Vec<&mut [u8]>> = (0..group.world_size).map(|_| Vec::new()).collect();
    out.into_iter().for_each(|(peer, piece)| all_out[peer].push(piece));
    into.into_iter().for_each(|(peer, piece)| all_into[peer].push(piece));
    let exchanges = all_out.into_iter().zip(all_into).enumerate().filter_map(|(peer, (out, into))| {
        let nothing = out.is_empty() && into.is_empty();
        (!nothing).then(|| Exchange::in_pieces(PeerStream::new(peer, operation, 0), out, into))
    });
    run(group, &mut exchanges.collect::<Vec<_>>())
}
