//! The all-reduce whose result does not depend on the number of ranks: shard sums are added in the order of
//! [`tree`](super::tree). Not the fastest sum, but a ring's bytes when shares are even.
//!
//! The buffer is cut into one chunk for each rank, its owner. Each rank sends its partial sums of a chunk to the owner,
//! which completes the tree and sends the finished chunk to all. Both halves are one byte stream to each peer, cut into
//! segments: a segment is added as soon as all peers have sent it, and goes out while the next ones come in. What a peer
//! sends too early waits in the socket, so that what is added is still in the processor's cache. A finished segment may
//! take the place of this rank's own part of it: its owner had that before.
//!
//! Of a small buffer every rank owns all: each sends its partial sums to all, and each adds the same numbers in the same
//! order. One way through the network in place of two. Where ranks and shards are powers of two, their nodes are
//! neighbours by pairs, pairs of pairs and so on, and are added [pairwise](super::pairwise), in fewer messages.

use std::ops::Range;

use super::peer_stream::{Interest, Kind, PeerStream};
use super::tree::{Node, cover, shards_of};
use super::{CollectiveError, Group, pairwise};

/// Bytes of each partial sum that are added at a time. Smaller than the ring's: a chunk is a rank's whole share of a
/// step, and this overlaps its halves even at a megabyte.
const SEGMENT_BYTES: usize = 64 * 1024;

const SEGMENT: usize = SEGMENT_BYTES / size_of::<f32>();

/// Segments of a peer's partial sums that are held at most.
const WINDOW: usize = 4;

/// Segments by which what is sent to a peer may be ahead of what has come from it. Both have about as much for each other.
/// What is sent to a peer that does not read yet fills its socket beyond what it said it has room for; Linux then drops
/// packets that nothing follows, and repeats them after 200 ms.
const LEAD: usize = 8;

/// Numbers of a segment that are added at a time. What is copied and added for them stays in the nearest cache.
const BLOCK: usize = 2048;

/// Buffers up to this many bytes are added by every rank. Not longer than a segment.
const EVERYWHERE_BYTES: usize = 32 * 1024;

/// Room for windows of the peers' partial sums, kept from call to call: fresh pages cost more than the sums.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// By rank.
    received: Vec<Vec<f32>>,
    /// This rank's first partial sum of a block, in whose place the sum is made.
    own: Vec<f32>,
    /// For the inner nodes of the tree.
    scratch: Vec<Vec<f32>>,
}

/// One peer's streams: partial sums first, finished chunks after them.
struct Stream {
    peer_stream: PeerStream,
    /// Partial sums of each element to it, their bytes, and bytes sent in all.
    nodes_out: usize,
    partials_out: usize,
    sent: usize,
    /// Bytes of partial sums from it, and received in all.
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

pub(super) fn sum(
    group: &mut Group,
    shards: u32,
    rest: &[&[f32]],
    sum: &mut [f32],
    vote: u32,
) -> Result<u32, CollectiveError> {
    let in_pairs =
        group.world_size.is_power_of_two() && shards.is_power_of_two() && group.world_size <= shards as usize;
    if in_pairs && size_of_val(sum) <= EVERYWHERE_BYTES {
        assert!(rest.is_empty(), "each rank's shards lie under one node");
        return pairwise::sum_in_tree(group, sum, vote);
    }
    let mut staging = std::mem::take(&mut group.staging);
    let result = run(group, &mut staging, shards, rest, sum, vote);
    group.staging = staging;
    result
}

fn run(
    group: &mut Group,
    staging: &mut Staging,
    shards: u32,
    rest: &[&[f32]],
    sum: &mut [f32],
    vote: u32,
) -> Result<u32, CollectiveError> {
    let (operation, started) = group.begin(Kind::Ordered, size_of_val(sum));
    let (rank, ranks, elements) = (group.rank, group.world_size, sum.len());
    let everywhere = size_of_val(sum) <= EVERYWHERE_BYTES;
    let chunk_of = |rank: usize| match everywhere {
        true => 0..elements,
        false => elements * rank / ranks..elements * (rank + 1) / ranks,
    };
    let finished_bytes = |chunk: &Range<usize>| if everywhere { 0 } else { chunk.len() * size_of::<f32>() };
    let nodes_of = |rank: usize| cover(shards, &shards_of(rank as u32, ranks as u32, shards));
    let mine = chunk_of(rank);
    let my_nodes = nodes_of(rank);
    assert_eq!(rest.len(), my_nodes.len().saturating_sub(1), "one partial sum for each node of the rank's cover");
    assert!(rest.iter().all(|partial| partial.len() == elements), "partial sums as long as the sum");

    staging.received.resize_with(ranks, Vec::new);
    let mut streams: Vec<Stream> = (1..ranks)
        .map(|distance| {
            let peer = (rank + distance) % ranks;
            let (chunk, nodes) = (chunk_of(peer), nodes_of(peer));
            let room = nodes.len() * mine.len().min(WINDOW * SEGMENT);
            // Grows to what is needed most, and stays.
            let staged = &mut staging.received[peer];
            staged.resize(staged.len().max(room), 0.0);
            Stream {
                peer_stream: PeerStream::new(peer, operation, vote),
                nodes_out: my_nodes.len(),
                partials_out: my_nodes.len() * chunk.len() * size_of::<f32>(),
                sent: 0,
                partials_in: nodes.len() * mine.len() * size_of::<f32>(),
                received: 0,
                finished_out: finished_bytes(&mine),
                finished_in: finished_bytes(&chunk),
                chunk,
                nodes,
            }
        })
        .collect();

    // Elements of this rank's own chunk that are finished.
    let mut finished = 0;
    loop {
        let mut moved = false;
        for stream in &mut streams {
            moved |= stream.send(group, rest, sum, &mine, finished)?;
            moved |= stream.receive(group, &mut staging.received, sum, finished)?;
        }
        while finished < mine.len() {
            let segment = finished..mine.len().min(finished + SEGMENT);
            // A sum takes the place of what is still for others where each rank adds all.
            let is_ready =
                |stream: &Stream| stream.has_partials(segment.end) && !(everywhere && stream.owes_partials());
            if !streams.iter().all(is_ready) {
                break;
            }
            finished = segment.end;
            let Staging { received, own, scratch } = staging;
            for start in segment.clone().step_by(BLOCK) {
                let block = start..segment.end.min(start + BLOCK);
                let sum = &mut sum[mine.start + block.start..mine.start + block.end];
                own.clear();
                own.extend_from_slice(sum);
                let sources = Sources { own, rest, start: mine.start, nodes: &my_nodes, streams: &streams, received };
                add_tree(Node::root(shards), &|node| sources.find(node, &segment, &block), sum, scratch);
            }
            moved = true;
        }
        if finished == mine.len() && streams.iter().all(Stream::is_done) {
            return Ok(streams.iter().fold(vote, |votes, stream| votes | stream.peer_stream.word));
        }
        if !moved {
            let interests: Vec<Interest> = streams
                .iter()
                .map(|stream| Interest {
                    peer: stream.peer_stream.peer,
                    send: stream.can_send(finished),
                    receive: stream.can_receive(finished),
                })
                .filter(|interest| interest.send || interest.receive)
                .collect();
            group.wait(&interests, started)?;
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

    fn can_send(&self, finished: usize) -> bool {
        !self.peer_stream.opened() || self.sent < self.ready(finished)
    }

    /// Bytes that may have been sent by now, `finished` elements of this rank's chunk being added.
    fn ready(&self, finished: usize) -> usize {
        let ready = self.partials_out + self.finished_out.min(finished * size_of::<f32>());
        ready.min(self.let_ahead())
    }

    /// Nobody is held back for good: whoever has received least of a phase lets its peers send to it, and all that it
    /// waits for is ahead of it.
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

    /// Whether there is room for what it sends next, `finished` elements of this rank's chunk being added.
    fn can_receive(&self, finished: usize) -> bool {
        if self.received >= self.partials_in {
            return !self.has_received_all();
        }
        self.received < self.room(finished)
    }

    /// Bytes of its partial sums for which there has been room by now.
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
                // As far as there is room: segments lie in their order up to the window's end, and go on at its start.
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

/// Where byte `at` of a stream of `nodes` partial sums of a chunk comes from: the node, and the bytes of its chunk from
/// there on as far as they follow each other: to the end of the segment, or, of a single node, to byte `until`. Segments
/// follow each other; in a segment, nodes do.
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

/// Where the nodes that some rank owns whole are found.
struct Sources<'a> {
    /// A block of this rank's first node, and the other nodes.
    own: &'a [f32],
    rest: &'a [&'a [f32]],
    /// Where this rank's chunk starts in those.
    start: usize,
    nodes: &'a [Node],
    streams: &'a [Stream],
    received: &'a [Vec<f32>],
}

impl<'a> Sources<'a> {
    /// The partial sum of `node` over `block`, in `segment`, of this rank's chunk, if a rank owns the node whole.
    fn find(&self, node: Node, segment: &Range<usize>, block: &Range<usize>) -> Option<&'a [f32]> {
        let position = |nodes: &[Node]| nodes.iter().position(|&candidate| candidate == node);
        match position(self.nodes) {
            Some(0) => return Some(self.own),
            Some(number) => return Some(&self.rest[number - 1][self.start + block.start..self.start + block.end]),
            None => {}
        }
        self.streams.iter().find_map(|stream| {
            let number = position(&stream.nodes)?;
            let slot = segment.start / SEGMENT % WINDOW;
            let start = stream.nodes.len() * slot * SEGMENT + number * segment.len() + block.start - segment.start;
            Some(&self.received[stream.peer_stream.peer][start..start + block.len()])
        })
    }
}

/// Writes the sum under `node` into `sum`: `find` gives what is already added, the tree's order the rest.
fn add_tree<'a>(node: Node, find: &impl Fn(Node) -> Option<&'a [f32]>, sum: &mut [f32], scratch: &mut Vec<Vec<f32>>) {
    if let Some(known) = find(node) {
        return sum.copy_from_slice(known);
    }
    let Some((left, right)) = node.children() else { unreachable!("the ranks' covers hold every shard") };
    let known_right = find(right);
    if let (Some(left), Some(right)) = (find(left), known_right) {
        // In one pass over the memory.
        return sum.iter_mut().zip(left.iter().zip(right)).for_each(|(sum, (left, right))| *sum = left + right);
    }
    add_tree(left, find, sum, scratch);
    if let Some(known) = known_right {
        return pairwise::add(sum, known);
    }
    let mut more = scratch.pop().unwrap_or_default();
    more.resize(sum.len(), 0.0);
    add_tree(right, find, &mut more, scratch);
    pairwise::add(sum, &more);
    scratch.push(more);
}
