//! Operations in which each pair of ranks exchanges other bytes: gathering numbers of all ranks, and spreading a buffer
//! from several holders at once.

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
    move_parts(group, &ends, |rank| !holds[rank], data)
}

pub(super) fn share(group: &mut Group, ends: &[usize], data: &mut [u8]) -> Result<(), CollectiveError> {
    move_parts(group, ends, |_| true, data)
}

/// Each rank's part of `data`, which ends where `ends` says and begins where that of the rank before ends, goes to all
/// others that want it.
fn move_parts(
    group: &mut Group,
    ends: &[usize],
    wants: impl Fn(usize) -> bool,
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
        let out = if wants(peer) { own } else { &[] };
        let into = if wants(rank) { part } else { &mut [] };
        let nothing = out.is_empty() && into.is_empty();
        (!nothing).then(|| Exchange::new(PeerStream::new(peer, operation, 0), Some(out), Some(into)))
    });
    run(group, &mut exchanges.collect::<Vec<_>>())
}
