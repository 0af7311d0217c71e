//! The flight recorder: the last collective operations of this process, and how far each came.
//!
//! It always runs. An operation reads the clock twice and locks a ring in memory twice; nothing is formatted or
//! written. Only when an operation is given up is the ring written to a file, which says in which operation this rank
//! was and for which peers it waited. The file of the rank that is behind has a smaller `number`, or there is no such
//! file. The idea is that of PyTorch's NCCL flight recorder; this one serves every transport.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::GroupConfig;

/// How many operations are remembered.
pub const REMEMBERED: usize = 1024;

/// How many files a process leaves at most. The oldest is removed.
pub const FILES: usize = 8;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// The round that it belongs to.
    pub round: u64,
    /// Its number among the operations of the round, on all transports: the same on all ranks.
    pub number: u64,
    /// The transport that moves the bytes.
    pub transport: &'static str,
    /// The operation's name.
    #[serde(rename = "operation")]
    pub name: &'static str,
    /// The length of this rank's buffer in bytes.
    pub bytes: u64,
}

/// How far an operation is with one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// The peer.
    pub rank: usize,
    /// Bytes that it has sent in this operation, headers included. 0 if it has not begun the operation, or sends
    /// nothing to this rank.
    pub received: u64,
    /// Bytes that this rank has sent to it.
    pub sent: u64,
    /// Whether it still has to send bytes that this rank waits for.
    pub owes: bool,
}

#[derive(Debug)]
struct Entry {
    sequence: u64,
    operation: Operation,
    begun: Instant,
    end: Option<(Instant, Ending)>,
}

#[derive(Debug)]
enum Ending {
    Done,
    GivenUp(Vec<Peer>),
}

/// The operations of this process. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    folder: Option<Arc<Path>>,
    ring: Arc<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    /// Oldest first. Their sequence numbers have no gaps.
    entries: VecDeque<Entry>,
    begun: u64,
    files: VecDeque<PathBuf>,
}

impl Recorder {
    /// A recorder that writes its files into `folder`. Without a folder it writes none.
    pub fn new(folder: Option<&Path>) -> Recorder {
        Recorder { folder: folder.map(Arc::from), ring: Arc::default() }
    }

    /// Records that an operation begins. Returns its sequence number in this process.
    pub fn begin(&self, operation: Operation, now: Instant) -> u64 {
        let mut ring = self.lock();
        if ring.entries.len() == REMEMBERED {
            ring.entries.pop_front();
        }
        ring.begun += 1;
        let sequence = ring.begun;
        ring.entries.push_back(Entry { sequence, operation, begun: now, end: None });
        sequence
    }

    /// Records that an operation is done.
    pub fn done(&self, sequence: u64, now: Instant) {
        self.end(sequence, now, Ending::Done);
    }

    /// Records that an operation is given up, and how far it came with each peer.
    pub fn give_up(&self, sequence: u64, now: Instant, peers: Vec<Peer>) {
        self.end(sequence, now, Ending::GivenUp(peers));
    }

    fn end(&self, sequence: u64, now: Instant, outcome: Ending) {
        let mut ring = self.lock();
        let Some(first) = ring.entries.front().map(|entry| entry.sequence) else { return };
        let place = sequence.checked_sub(first).and_then(|place| usize::try_from(place).ok());
        if let Some(entry) = place.and_then(|place| ring.entries.get_mut(place)) {
            entry.end = Some((now, outcome));
        }
    }

    /// Writes all entries into a file, after the last operation was given up for `error` in the round of `config`.
    /// Writes none, and returns none, if the last operation was not given up in that round, or if there is no folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, config: &GroupConfig, error: &str) -> io::Result<Option<PathBuf>> {
        let mut ring = self.lock();
        let Some(folder) = self.folder.as_deref().filter(|_| ring.has_given_up(config.round)) else { return Ok(None) };
        let text = serde_json::to_vec_pretty(&ring.report(config, error, Instant::now(), SystemTime::now()))?;
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("collectives-round-{}-rank-{}.json", config.round, config.rank));
        // A program that collects files while this process ends finds a whole file or none.
        let unfinished = path.with_extension("json.part");
        fs::write(&unfinished, text)?;
        fs::rename(&unfinished, &path)?;
        ring.files.retain(|known| *known != path);
        ring.files.push_back(path.clone());
        if ring.files.len() > FILES
            && let Some(oldest) = ring.files.pop_front()
        {
            // It may have been removed already.
            let _ = fs::remove_file(oldest);
        }
        Ok(Some(path))
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a file holds.
#[derive(Serialize)]
struct FlightRecord<'a> {
    version: u32,
    job: &'a str,
    round: u64,
    rank: u32,
    world_size: u32,
    pid: u32,
    error: &'a str,
    /// Seconds since 1970, as all times in it.
    written: f64,
    /// Oldest first.
    operations: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    sequence: u64,
    #[serde(flatten)]
    operation: Operation,
    begun: f64,
    state: &'static str,
    /// Its duration until it was done or given up, or until now if it is under way.
    seconds: f64,
    /// Only of an operation that was given up, if its transport knows.
    #[serde(skip_serializing_if = "<[Peer]>::is_empty")]
    peers: &'a [Peer],
}

impl Ring {
    fn has_given_up(&self, round: u64) -> bool {
        self.entries
            .back()
            .is_some_and(|entry| entry.operation.round == round && matches!(entry.end, Some((_, Ending::GivenUp(_)))))
    }

    fn report<'a>(
        &'a self,
        config: &'a GroupConfig,
        error: &'a str,
        now: Instant,
        wall: SystemTime,
    ) -> FlightRecord<'a> {
        let since_epoch = wall.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let seconds = |at: Instant| since_epoch.saturating_sub(now.saturating_duration_since(at)).as_secs_f64();
        let line = |entry: &'a Entry| {
            let (end, state, peers) = match &entry.end {
                None => (now, "under way", &[][..]),
                Some((end, Ending::Done)) => (*end, "done", &[][..]),
                Some((end, Ending::GivenUp(peers))) => (*end, "given up", &peers[..]),
            };
            let (sequence, operation, begun) = (entry.sequence, entry.operation, seconds(entry.begun));
            let taken = end.saturating_duration_since(entry.begun).as_secs_f64();
            Line { sequence, operation, begun, state, seconds: taken, peers }
        };
        FlightRecord {
            version: 1,
            job: &config.job,
            round: config.round,
            rank: config.rank,
            world_size: config.world_size,
            pid: std::process::id(),
            error,
            written: seconds(now),
            operations: self.entries.iter().map(line).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn operation(round: u64, number: u64) -> Operation {
        Operation { round, number, transport: "tcp", name: "ordered sum", bytes: 4096 }
    }

    fn config(round: u64) -> GroupConfig {
        GroupConfig {
            job: "job".to_owned(),
            round,
            rank: 1,
            world_size: 2,
            master_addr: String::new(),
            master_port: 0,
            agent_store: false,
            settings: String::new(),
        }
    }

    #[test]
    fn the_last_operations_are_written_with_how_they_ended() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::new(Some(folder.path()));
        let begun = Instant::now();
        let more = 7;
        for number in 1..=(REMEMBERED + more) as u64 {
            let sequence = recorder.begin(operation(3, number), begun);
            recorder.done(sequence, begun + Duration::from_millis(2));
        }
        recorder.begin(operation(3, 9998), begun);
        let last = recorder.begin(operation(3, 9999), begun);
        let peer = Peer { rank: 0, received: 24, sent: 100, owes: true };
        recorder.give_up(last, begun + Duration::from_millis(5), vec![peer]);

        let path = recorder.write(&config(3), "rank 0 is silent").unwrap().unwrap();
        let report: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!((&report["job"], &report["error"]), (&"job".into(), &"rank 0 is silent".into()));
        let lines = report["operations"].as_array().unwrap();
        assert_eq!(lines.len(), REMEMBERED);
        assert_eq!(lines[0]["sequence"], more as u64 + 3, "the oldest are forgotten");
        let [.., done, under_way, given_up] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!((&done["state"], done["seconds"].as_f64().unwrap()), (&"done".into(), 0.002));
        assert_eq!(under_way["state"], "under way");
        assert_eq!(given_up["state"], "given up");
        assert_eq!(given_up["peers"], serde_json::json!([{"rank": 0, "received": 24, "sent": 100, "owes": true}]));
        assert!(done.get("peers").is_none());
    }

    #[test]
    fn only_what_was_given_up_in_this_round_is_worth_a_file_and_files_are_few() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::new(Some(folder.path()));
        let now = Instant::now();
        let files = || fs::read_dir(folder.path()).unwrap().count();

        assert_eq!(recorder.write(&config(0), "nothing").unwrap(), None);
        recorder.done(recorder.begin(operation(0, 1), now), now);
        assert_eq!(recorder.write(&config(0), "it went well").unwrap(), None);
        for round in 1..=FILES as u64 + 2 {
            recorder.give_up(recorder.begin(operation(round, 1), now), now, Vec::new());
            assert_eq!(recorder.write(&config(round + 1), "another round").unwrap(), None);
            let path = recorder.write(&config(round), "lost").unwrap().unwrap();
            assert_eq!(recorder.write(&config(round), "lost again").unwrap(), Some(path));
        }
        assert_eq!(files(), FILES);
        assert!(!folder.path().join("collectives-round-2-rank-1.json").exists(), "the oldest make way");
        let nowhere = Recorder::default();
        nowhere.give_up(nowhere.begin(operation(1, 1), now), now, Vec::new());
        assert_eq!(nowhere.write(&config(1), "no folder").unwrap(), None);
    }

    #[test]
    fn an_operation_costs_no_memory_once_the_ring_is_full() {
        let (recorder, now) = (Recorder::default(), Instant::now());
        let record = |number| recorder.done(recorder.begin(operation(1, number), now), now);
        (0..REMEMBERED as u64).for_each(record);
        let capacity = recorder.lock().entries.capacity();
        (0..5 * REMEMBERED as u64).for_each(record);
        assert_eq!(recorder.lock().entries.capacity(), capacity);
    }
}
