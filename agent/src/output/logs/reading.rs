//! Answers those who read the workers' output through the agent. Who may is settled before: see
//! [`elastic_node::logs`].
//!
//! A reader costs the workers nothing: their files are read again, outside of the agent's task, and of what goes to no
//! file the end is in memory. A slow reader holds up no one else, and less than a megabyte is kept for it.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use elastic_node::logs::{LogQuery, LogRequest};
use elastic_proto::logs::{LogChunk, LogsReply};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::history::{History, ProcessOutput, Source};
use super::text::Text;

/// How often streams without new output are checked.
const AGAIN: Duration = Duration::from_millis(200);

/// How long a reader that takes nothing keeps its place.
const PATIENCE: Duration = Duration::from_secs(600);

/// Messages that are read before they are sent.
const BURST: usize = 8;

/// How long a reader may take to receive the last bytes.
const LAST_WORD: Duration = Duration::from_secs(10);

/// At the agent's end, for what is on its way through the network.
const LAST_BYTES: Duration = Duration::from_millis(100);

/// Those who read at present.
#[derive(Debug)]
pub(crate) struct LogReaders {
    closing: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl LogReaders {
    /// Answers requests until the agent's end. Must be called within a tokio runtime.
    pub(crate) fn start(history: History, mut requests: mpsc::Receiver<LogRequest>) -> LogReaders {
        let (closing, mut ends) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut readers = JoinSet::new();
            loop {
                tokio::select! {
                    Some(request) = requests.recv() => {
                        readers.spawn(answer(history.clone(), request, ends.clone()));
                    }
                    Some(_) = readers.join_next() => {}
                    _ = ends.changed() => break,
                }
            }
            // No other reader is let in.
            drop(requests);
            if !readers.is_empty() {
                while readers.join_next().await.is_some() {}
                sleep(LAST_BYTES).await;
            }
        });
        LogReaders { closing, task }
    }

    /// Lets those who follow read to the end, now that all workers have ended. A reader that takes longer than `patience`
    /// misses the rest.
    pub(crate) async fn finish(self, patience: Duration) {
        self.closing.send_replace(true);
        let _ = timeout(patience, self.task).await;
    }
}

async fn answer(history: History, request: LogRequest, mut ends: watch::Receiver<bool>) {
    let mut reader = Reader::new(history, request.query);
    loop {
        // Asked before the streams are checked: what was written until then is read.
        let last = *ends.borrow() || !request.query.follow;
        // A file system may take its time.
        let Ok((back, replies)) = spawn_blocking(move || reader.read(last)).await else { return };
        reader = back;
        let still = replies.is_empty();
        for reply in replies {
            if !matches!(timeout(PATIENCE, request.replies.send(Ok(reply))).await, Ok(Ok(()))) {
                return;
            }
        }
        if still && last {
            // A reader that takes nothing now learns it from the end of its stream.
            let _ = timeout(LAST_WORD, request.replies.send(Ok(LogsReply { end: true, ..LogsReply::default() }))).await;
            return;
        }
        if still {
            tokio::select! {
                () = sleep(AGAIN) => {}
                _ = ends.changed() => {}
                () = request.replies.closed() => return,
            }
        }
    }
}

/// Goes through the streams of the workers that a query is about.
struct Reader {
    history: History,
    query: LogQuery,
    /// Workers that were there when it looked, wanted or not; empty before the first look.
    known: BTreeSet<u64>,
    looked: bool,
    streams: Vec<Reading>,
    /// The stream to begin with next time.
    next: usize,
    noted: BTreeSet<String>,
}

struct Reading {
    worker: u64,
    local_rank: u32,
    place: Option<(u64, u32)>,
    stderr: bool,
    text: Text,
    /// Another worker has taken this one's place.
    is_past: bool,
}

impl Reader {
    fn new(history: History, query: LogQuery) -> Reader {
        Reader {
            history,
            query,
            known: BTreeSet::new(),
            looked: false,
            streams: Vec::new(),
            next: 0,
            noted: BTreeSet::new(),
        }
    }

    /// What can be read now. With `last`, nothing is waited for: beginnings of lines count as lines.
    fn read(mut self, last: bool) -> (Reader, Vec<LogsReply>) {
        let mut replies = Vec::new();
        if !self.looked || self.query.follow {
            self.look(&mut replies);
        }
        // Who follows many streams hears all of them, even if one of them never ends.
        let fair = if self.query.follow { BURST / 4 } else { BURST };
        let count = self.streams.len();
        for turn in 0..count {
            let at = (self.next + turn) % count;
            let before = replies.len();
            while replies.len() < BURST && replies.len() - before < fair {
                match self.streams[at].piece(last) {
                    Ok(Some(chunk)) => replies.push(LogsReply { chunk: Some(chunk), ..LogsReply::default() }),
                    Ok(None) => break,
                    Err(error) => {
                        // Once: nothing more comes of it.
                        let local_rank = self.streams[at].local_rank;
                        replies.push(note(format!("the log of local rank {local_rank}: {error}")));
                        break;
                    }
                }
            }
            if replies.len() >= BURST {
                self.next = if self.query.follow { at + 1 } else { at };
                return (self, replies);
            }
        }
        self.next = 0;
        self.streams.retain(|stream| !(stream.is_past && stream.text.is_quiet()));
        (self, replies)
    }

    /// Takes up the streams of workers that are wanted, and lets go of those that are no more.
    fn look(&mut self, replies: &mut Vec<LogsReply>) {
        let LogQuery { rank, round, lines, .. } = self.query;
        let outputs = self.history.outputs();
        for output in &outputs {
            let place = output.place(round);
            let wanted = match rank {
                None => round.is_none() || place.is_some(),
                Some(rank) => place.is_some_and(|(_, has)| has == rank),
            };
            let newest = !outputs.iter().any(|other| other.local_rank == output.local_rank && other.id > output.id);
            let is_new = self.known.insert(output.id) || output.places.len() <= 1;
            let mut open = false;
            for stream in self.streams.iter_mut().filter(|stream| stream.worker == output.id) {
                (open, stream.place) = (true, place);
                stream.is_past |= !newest && round.is_none();
            }
            if open && !wanted {
                self.streams.retain(|stream| stream.worker != output.id);
            }
            if !open && wanted && (newest || round.is_some()) {
                // Who follows a rank hears of another worker from where it takes the rank over.
                let lines = if !self.looked {
                    lines
                } else if is_new {
                    u32::MAX
                } else {
                    0
                };
                self.open(output, place, lines, replies);
            }
        }
        if !self.looked && self.streams.is_empty() && self.noted.is_empty() && !self.query.follow {
            replies.push(note("no such worker has run here, or none that is remembered".to_owned()));
        }
        self.looked = true;
    }

    fn open(&mut self, output: &ProcessOutput, place: Option<(u64, u32)>, lines: u32, replies: &mut Vec<LogsReply>) {
        for (stderr, source) in [(false, &output.stdout), (true, &output.stderr)] {
            let what = if stderr { "standard error" } else { "standard output" };
            let text = match source {
                Source::File(path) => Text::of_file(path, lines, self.query.follow)
                    .map_err(|error: io::Error| format!("{}: {error}", path.display())),
                Source::Memory(ring) => Ok(Text::of_memory(ring, lines, self.query.follow)),
                Source::Nowhere(why) => Err(format!(
                    "the {what} of its workers {why}: start agents with --redirects=3 or --tee=3 to read it here"
                )),
            };
            match text {
                Ok(text) => self.streams.push(Reading {
                    worker: output.id,
                    local_rank: output.local_rank,
                    place,
                    stderr,
                    text,
                    is_past: false,
                }),
                Err(why) if self.noted.insert(why.clone()) => replies.push(note(why)),
                Err(_) => {}
            }
        }
    }
}

impl Reading {
    fn piece(&mut self, last: bool) -> io::Result<Option<LogChunk>> {
        let Some(text) = self.text.next(last || self.is_past)? else { return Ok(None) };
        let (local_rank, stderr) = (self.local_rank, self.stderr);
        let (round, rank) = self.place.unzip();
        Ok(Some(LogChunk { local_rank, rank, round: round.unwrap_or_default(), stderr, text }))
    }
}

fn note(line: String) -> LogsReply {
    LogsReply { note: line, ..LogsReply::default() }
}
