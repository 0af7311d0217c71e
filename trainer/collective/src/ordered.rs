//! The all-reduce whose result does not depend on the number of ranks: the shards' sums are added in the order of
//! [`tree`](super::tree). It sends as many bytes as a ring when the shares are even.
//!
//! The buffer is cut into one chunk for each rank, which owns it. Each rank sends its partial sums of a chunk to the
//! owner, which completes the tree and sends the finished chunk to all. To each peer, both halves are one byte stream,
//! cut into segments: a segment is added as soon as all peers have sent it, and is sent while the next ones are
//! received. What a peer sends too early waits in the socket, so that the numbers to add are still in the processor's
//! cache. A finished segment may overwrite this rank's own part of it, which its owner has already received.
//!
//! Of a small buffer every rank owns everything: each rank sends its partial sums to all, and all add the same numbers
//! in the same order. So the data crosses the network once, not twice. If the numbers of ranks and shards are powers of
//! two, the ranks' nodes are neighbours in the tree by pairs, pairs of pairs and so on, and are added
//! [pairwise], in fewer messages.

use std::convert::Infallible;
use std::ops::Range;

use super::peer_stream::{Interest, Kind, PeerStream};
use super::tree::{Node, SumPlan};
use super::{CollectiveError, Group, pairwise};

/// Bytes of each partial sum that are added at a time. A chunk is a rank's whole share of a step, and this overlaps its
/// halves even at a megabyte.
const SEGMENT_BYTES: usize = 64 * 1024;

const SEGMENT: usize = SEGMENT_BYTES / size_of::<f32>();

/// The most segments of a peer's partial sums that are held.
const WINDOW: usize = 4;

/// By how many segments the bytes sent to a peer may be ahead of those received from it; both have about as much for
/// each other. Bytes sent to a peer that does not read yet would fill its socket beyond the room that it has announced.
/// Linux then drops the last packets, and repeats them only after 200 ms.
const LEAD: usize = 8;

/// Numbers of a segment that are added at a time, few enough that they stay in the nearest cache.
const BLOCK: usize = 2048;

/// Buffers up to this many bytes are added by every rank. It is not more than a segment.
const EVERYWHERE_BYTES: usize = 32 * 1024;

/// Room for the peers' partial sums. It is kept from call to call, since fresh pages would cost more time than the
/// sums.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// The window of each peer's partial sums, by rank.
    received: Vec<Vec<f32>>,
    /// A block of this rank's first partial sum, which the sum overwrites.
    own: Vec<f32>,
    /// For sums within the tree.
    scratch: Vec<Vec<f32>>,
}

/// The streams to and from one peer: first partial sums, then finished chunks.
struct Stream {
    peer_stream: PeerStream,
    /// Partial sums of each element that go to it, the bytes of all of them, and the bytes sent so far.
    nodes_out: usize,
    partials_out: usize,
    sent: usize,
    /// Bytes of the partial sums that come from it, and the bytes received so far.
    partials_in: usize,
    received: usize,
    /// Bytes of the finished chunks to it and from it.
    finished_out: usize,
    finished_in: usize,
    /// Its own chunk.
    chunk: Range<usize>,
    /// The nodes that it owns whole.
    nodes: Vec<Node>,
}

/// Who gets a finished chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finished {
    ToAll,
    /// To the [second](SumPlan::second) owner. A small buffer goes to all.
    ToOwners,
}

pub(super) fn sum(
    group: &mut Group,
    shards: u32,
    rest: &[&[f32]],
    sum: &mut [f32],
    (finished, vote): (Finished, u32),
) -> Result<u32, CollectiveError> {
    let in_pairs =
        group.world_size.is_power_of_two() && shards.is_power_of_two() && group.world_size <= shards as usize;
    if in_pairs && size_of_val(sum) <= EVERYWHERE_BYTES {
        assert!(rest.is_empty(), "each rank's shards lie under one node");
        return pairwise::sum_in_tree(group, sum, vote);
    }
    let mut staging = std::mem::take(&mut group.staging);
    let result = run(group, &mut staging, shards, rest, sum, (finished, vote));
    group.staging = staging;
    result
}

fn run(
    group: &mut Group,
    staging: &mut Staging,
    shards: u32,
    rest: &[&[f32]],
    sum: &mut [f32],
    (to, vote): (Finished, u32),
) -> Result<u32, CollectiveError> {
    let operation = group.begin(Kind::Ordered, size_of_val(sum));
    let (rank, ranks, elements) = (group.rank, group.world_size, sum.len());
    let plan = SumPlan { world_size: ranks as u32, shards, elements };
    let everywhere = size_of_val(sum) <= EVERYWHERE_BYTES;
    let chunk_of = |rank: usize| match to {
        _ if everywhere => 0..elements,
        Finished::ToAll => plan.chunk(rank as u32),
        Finished::ToOwners => plan.owned_chunk(rank as u32),
    };
    let finished_bytes = |chunk: &Range<usize>, from: usize, receiver: usize| {
        let goes = to == Finished::ToAll || plan.second(from as u32) == receiver as u32;
        if everywhere || !goes { 0 } else { chunk.len() * size_of::<f32>() }
    };
    let (mine, my_nodes) = (chunk_of(rank), plan.nodes(rank as u32));
    assert_eq!(rest.len(), my_nodes.len().saturating_sub(1), "one partial sum for each of the rank's nodes");
    assert!(rest.iter().all(|partial| partial.len() == elements), "partial sums as long as the sum");

    staging.received.resize_with(ranks, Vec::new);
    let mut streams: Vec<Stream> = (1..ranks)
        .map(|distance| {
            let peer = (rank + distance) % ranks;
            let (chunk, nodes) = (chunk_of(peer), plan.nodes(peer as u32));
            let room = nodes.len() * mine.len().min(WINDOW * SEGMENT);
            // It only grows.
            let staged = &mut staging.received[peer];
            staged.resize(staged.len().max(room), 0.0);
            Stream {
                peer_stream: PeerStream::new(peer, operation, vote),
                nodes_out: my_nodes.len(),
                partials_out: my_nodes.len() * chunk.len() * size_of::<f32>(),
                sent: 0,
                partials_in: nodes.len() * mine.len() * size_of::<f32>(),
                received: 0,
                finished_out: finished_bytes(&mine, rank, peer),
                finished_in: finished_bytes(&chunk, peer, rank),
                chunk,
                nodes,
            }
        })
        .collect();
    let is_known = |node: Node| my_nodes.contains(&node) || streams.iter().any(|stream| stream.nodes.contains(&node));
    let turns = turns(shards, &is_known);
    let own = OwnChunk { mine, nodes: my_nodes, everywhere, turns };

    // Elements of this rank's own chunk that are finished.
    let mut finished = 0;
    loop {
        let mut moved = false;
        for stream in &mut streams {
            moved |= stream.send(group, rest, sum, &own.mine, finished)?;
            moved |= stream.receive(group, &mut staging.received, sum, finished)?;
        }
        while let Some(segment) = own.next_segment(&streams, finished) {
            finished = segment.end;
            own.add(staging, &streams, rest, sum, &segment);
            moved = true;
        }
        if finished == own.mine.len() && streams.iter().all(Stream::is_done) {
            return Ok(streams.iter().fold(vote, |votes, stream| votes | stream.peer_stream.word));
        }
        if !moved {
            let interests: Vec<Interest> = streams.iter().filter_map(|stream| stream.interest(finished)).collect();
            group.wait(&interests)?;
        }
    }
}

/// What this rank adds.
struct OwnChunk {
    mine: Range<usize>,
    /// The nodes that this rank owns whole.
    nodes: Vec<Node>,
    /// Whether each rank adds everything.
    everywhere: bool,
    turns: Vec<Turn>,
}

impl OwnChunk {
    /// The segment after the first `finished` elements, if all its partial sums are here.
    fn next_segment(&self, streams: &[Stream], finished: usize) -> Option<Range<usize>> {
        let segment = finished..self.mine.len().min(finished + SEGMENT);
        // Where each rank adds everything, the sum overwrites numbers that may still have to be sent.
        let is_ready =
            |stream: &Stream| stream.has_partials(segment.end) && !(self.everywhere && stream.owes_partials());
        (!segment.is_empty() && streams.iter().all(is_ready)).then_some(segment)
    }

    /// Adds a segment's partial sums in the order of the shards.
    fn add(&self, staging: &mut Staging, streams: &[Stream], rest: &[&[f32]], sum: &mut [f32], segment: &Range<usize>) {
        let (Staging { received, own, scratch }, start_of_chunk) = (staging, self.mine.start);
        for start in segment.clone().step_by(BLOCK) {
            let block = start..segment.end.min(start + BLOCK);
            let sum = &mut sum[start_of_chunk + block.start..start_of_chunk + block.end];
            own.clear();
            own.extend_from_slice(sum);
            let sources = Sources { own, rest, start: start_of_chunk, nodes: &self.nodes, streams, received };
            add_up(&self.turns, |node| sources.find(node, segment, &block), sum, scratch);
        }
    }
}

impl Stream {
    /// Whether all its partial sums of the first `elements` of this rank's chunk are here.
    fn has_partials(&self, elements: usize) -> bool {
        self.peer_stream.heard()
            && self.received >= self.partials_in.min(self.nodes.len() * elements * size_of::<f32>())
    }

    fn owes_partials(&self) -> bool {
        self.sent < self.partials_out
    }

    /// What to wait for, if there is anything.
    fn interest(&self, finished: usize) -> Option<Interest> {
        let (send, receive) = (self.can_send(finished), self.can_receive(finished));
        (send || receive).then_some(Interest { peer: self.peer_stream.peer, send, receive })
    }

    fn can_send(&self, finished: usize) -> bool {
        !self.peer_stream.opened() || self.sent < self.ready(finished)
    }

    /// How many bytes may be sent once `finished` elements of this rank's chunk are added.
    fn ready(&self, finished: usize) -> usize {
        let ready = self.partials_out + self.finished_out.min(finished * size_of::<f32>());
        ready.min(self.let_ahead())
    }

    /// How many bytes may be sent by the rule of [`LEAD`]. No rank is held back for ever: the rank that has received
    /// least in a phase may always be sent to, and needs only bytes that its peers may send.
    fn let_ahead(&self) -> usize {
        if self.received < self.partials_in {
            let segments = self.received / (self.nodes.len() * SEGMENT_BYTES) + LEAD;
            return segments.saturating_mul(self.nodes_out * SEGMENT_BYTES);
        }
        match self.has_received_all() {
            true => usize::MAX,
            false => self.partials_out + self.received - self.partials_in + LEAD * SEGMENT_BYTES,
        }
    }

    fn has_received_all(&self) -> bool {
        self.peer_stream.heard() && self.received == self.partials_in + self.finished_in
    }

    /// Whether there is room for what it sends next, once `finished` elements of this rank's chunk are added.
    fn can_receive(&self, finished: usize) -> bool {
        if self.received >= self.partials_in {
            return !self.has_received_all();
        }
        self.received < self.room(finished)
    }

    /// Bytes of its partial sums for which there is or was room, once `finished` elements are added.
    fn room(&self, finished: usize) -> usize {
        (finished / SEGMENT + WINDOW) * self.nodes.len() * SEGMENT_BYTES
    }

    fn is_done(&self) -> bool {
        self.has_received_all() && self.peer_stream.opened() && self.sent == self.partials_out + self.finished_out
    }

    /// Sends as much as is ready and the socket takes. Whether anything moved.
    fn send(
        &mut self,
        group: &Group,
        rest: &[&[f32]],
        sum: &[f32],
        mine: &Range<usize>,
        finished: usize,
    ) -> Result<bool, CollectiveError> {
        let mut moved = false;
        while self.can_send(finished) {
            let body: &[u8] = if self.owes_partials() {
                let (node, place) = piece(self.sent, self.nodes_out, self.chunk.len(), self.ready(finished));
                let start = self.chunk.start * size_of::<f32>();
                let partial = if node == 0 { sum } else { rest[node - 1] };
                &bytemuck::cast_slice(partial)[start + place.start..start + place.end]
            } else {
                let done: &[u8] = bytemuck::cast_slice(&sum[mine.start..mine.start + finished]);
                let end = self.ready(finished).saturating_sub(self.partials_out).min(done.len());
                &done[(self.sent - self.partials_out).min(end)..end]
            };
            let opened = self.peer_stream.opened();
            let taken = self.peer_stream.send(group, body)?;
            self.sent += taken;
            if taken == 0 && opened == self.peer_stream.opened() {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Receives as much as has arrived and there is room for. Whether anything moved.
    fn receive(
        &mut self,
        group: &Group,
        staging: &mut [Vec<f32>],
        sum: &mut [f32],
        finished: usize,
    ) -> Result<bool, CollectiveError> {
        let mut moved = false;
        while self.can_receive(finished) {
            let body: &mut [u8] = if self.received < self.partials_in {
                // As far as there is room. Segments lie in order up to the window's end, and then begin again at its
                // start.
                let window = WINDOW * self.nodes.len() * SEGMENT_BYTES;
                let (turn, start) = (self.received / window, self.received % window);
                let end = self.partials_in.min(self.room(finished)).min((turn + 1) * window) - turn * window;
                &mut bytemuck::cast_slice_mut(&mut staging[self.peer_stream.peer])[start..end]
            } else if self.finished_in > 0 {
                &mut bytemuck::cast_slice_mut(&mut sum[self.chunk.clone()])[self.received - self.partials_in..]
            } else {
                &mut []
            };
            let heard = self.peer_stream.heard();
            let got = self.peer_stream.receive(group, body)?;
            self.received += got;
            if got == 0 && heard == self.peer_stream.heard() {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }
}

/// Where byte `at` of a stream of `nodes` partial sums of a chunk comes from: the node, and the contiguous bytes of its
/// chunk from that place. These go to the end of the segment, or, if there is a single node, to byte `until`. The
/// stream has one segment after the other, and in each segment one node after the other.
fn piece(at: usize, nodes: usize, elements: usize, until: usize) -> (usize, Range<usize>) {
    let chunk = elements * size_of::<f32>();
    if nodes == 1 {
        return (0, at..until.min(chunk));
    }
    let segment = at / (nodes * SEGMENT_BYTES);
    let start = segment * SEGMENT_BYTES;
    let length = SEGMENT_BYTES.min(chunk - start);
    let within = at - segment * nodes * SEGMENT_BYTES;
    (within / length, start + within % length..start + length)
}

/// The partial sums of the nodes that one rank owns whole.
struct Sources<'a> {
    /// A block of this rank's first node, and this rank's other nodes.
    own: &'a [f32],
    rest: &'a [&'a [f32]],
    /// Where this rank's chunk starts in the other nodes.
    start: usize,
    nodes: &'a [Node],
    streams: &'a [Stream],
    received: &'a [Vec<f32>],
}

impl<'a> Sources<'a> {
    /// The partial sum of `node` over `block`, in `segment`, of this rank's chunk.
    fn find(&self, node: Node, segment: &Range<usize>, block: &Range<usize>) -> &'a [f32] {
        let position = |nodes: &[Node]| nodes.iter().position(|&candidate| candidate == node);
        match position(self.nodes) {
            Some(0) => return self.own,
            Some(number) => return &self.rest[number - 1][self.start + block.start..self.start + block.end],
            None => {}
        }
        let received = self.streams.iter().find_map(|stream| {
            let number = position(&stream.nodes)?;
            let slot = segment.start / SEGMENT % WINDOW;
            let start = stream.nodes.len() * slot * SEGMENT + number * segment.len() + block.start - segment.start;
            Some(&self.received[stream.peer_stream.peer][start..start + block.len()])
        });
        let Some(received) = received else { unreachable!("the ranks' nodes hold every shard") };
        received
    }
}

/// A turn of a sum, which is made on a stack.
enum Turn {
    /// Puts this node's sum on the stack.
    Take(Node),
    /// Replaces the two uppermost sums by their sum. The upper one is the right summand.
    Add,
}

/// The turns of the sum of all shards.
fn turns(shards: u32, known: &impl Fn(Node) -> bool) -> Vec<Turn> {
    let mut turns = Vec::new();
    let take = |turns: &mut Vec<Turn>, node: Node| {
        turns.push(Turn::Take(node));
        Ok::<(), Infallible>(())
    };
    let add = |turns: &mut Vec<Turn>, (): (), (): ()| {
        turns.push(Turn::Add);
        Ok(())
    };
    let Ok(()) = Node::root(shards).sum(&mut turns, known, &take, &add);
    turns
}

/// Writes the sum that `turns` make into `sum`. `find` returns the sums that they take.
fn add_up<'a>(turns: &[Turn], find: impl Fn(Node) -> &'a [f32], sum: &mut [f32], scratch: &mut Vec<Vec<f32>>) {
    // A sum that is made, not taken, lies at its height of the stack: the lowest in `sum`, the others in `scratch`.
    let mut stack: Vec<Option<&[f32]>> = Vec::with_capacity(turns.len());
    for turn in turns {
        if let Turn::Take(node) = turn {
            stack.push(Some(find(*node)));
            continue;
        }
        let (right, left) = (stack.pop().flatten(), stack.pop().flatten());
        let height = stack.len();
        scratch.resize_with(scratch.len().max(height + 1), Vec::new);
        let (lower, upper) = scratch.split_at_mut(height);
        let length = sum.len();
        let into = match lower.last_mut() {
            Some(made) => {
                made.resize(length, 0.0);
                &mut made[..]
            }
            None => &mut *sum,
        };
        let right = right.unwrap_or(&upper[0]);
        match left {
            // In one pass over the memory.
            Some(left) => into.iter_mut().zip(left).zip(right).for_each(|((sum, left), right)| *sum = left + right),
            None => pairwise::add(into, right),
        }
        stack.push(None);
    }
    if let Some(Some(known)) = stack.pop() {
        sum.copy_from_slice(known);
    }
}
