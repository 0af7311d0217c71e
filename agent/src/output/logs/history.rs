//! Which workers have run here, in which places, and where their output is: what a reader of logs looks things up in.
//! No output is read here.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ring::Ring;

/// Worker processes that are remembered for each local rank.
const REMEMBERED: usize = 32;

/// Of these, those whose output in memory is kept: the newest, and the one before, whose end is of interest.
const KEPT: usize = 2;

/// Where the output of one stream can be read.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// In this file, and in those that were rotated away from it.
    File(PathBuf),
    /// Its end, in the agent's memory.
    Memory(Ring),
    /// Nowhere; why not.
    Nowhere(&'static str),
}

/// The output of one worker process.
#[derive(Debug, Clone)]
pub(super) struct ProcessOutput {
    /// Numbers grow with each process.
    pub(super) id: u64,
    pub(super) local_rank: u32,
    /// Round and rank of each place that it has had, the newest last.
    pub(super) places: Vec<(u64, u32)>,
    pub(super) stdout: Source,
    pub(super) stderr: Source,
}

impl ProcessOutput {
    /// Its place in this round, or else its newest.
    pub(super) fn place(&self, round: Option<u64>) -> Option<(u64, u32)> {
        self.places.iter().rev().find(|(number, _)| round.is_none_or(|round| *number == round)).copied()
    }
}

/// The output of all workers of this agent, the oldest first.
#[derive(Debug, Clone, Default)]
pub struct History(Arc<Mutex<Remembered>>);

#[derive(Debug, Default)]
struct Remembered {
    outputs: VecDeque<ProcessOutput>,
    begun: u64,
}

impl History {
    /// A worker is about to be started.
    pub(super) fn begin(&self, local_rank: u32, stdout: Source, stderr: Source) {
        let mut remembered = self.lock();
        let id = remembered.begun;
        remembered.begun += 1;
        let outputs = &mut remembered.outputs;
        outputs.push_back(ProcessOutput { id, local_rank, places: Vec::new(), stdout, stderr });
        let mut age = 0;
        for output in outputs.iter_mut().rev().filter(|output| output.local_rank == local_rank) {
            age += 1;
            if age > KEPT {
                for source in [&mut output.stdout, &mut output.stderr] {
                    if matches!(source, Source::Memory(_)) {
                        *source = Source::Nowhere("is no longer in the agent's memory");
                    }
                }
            }
        }
        if age > REMEMBERED
            && let Some(oldest) = outputs.iter().position(|output| output.local_rank == local_rank)
        {
            outputs.remove(oldest);
        }
    }

    /// The newest worker of this local rank has this rank in this round.
    pub(super) fn placed(&self, local_rank: u32, round: u64, rank: u32) {
        let mut remembered = self.lock();
        let mut newest = remembered.outputs.iter_mut().rev();
        if let Some(output) = newest.find(|output| output.local_rank == local_rank) {
            output.places.push((round, rank));
            // A worker may live through any number of rounds.
            let over = output.places.len().saturating_sub(REMEMBERED);
            output.places.drain(..over);
        }
    }

    pub(super) fn outputs(&self) -> Vec<ProcessOutput> {
        self.lock().outputs.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_of_two_workers_and_files_of_more() {
        let history = History::default();
        for round in 1..=40 {
            for local_rank in 0..2 {
                history.begin(local_rank, Source::File("stdout.log".into()), Source::Memory(Ring::default()));
                history.placed(local_rank, round, local_rank + 4);
            }
        }
        let outputs = history.outputs();
        assert_eq!(outputs.len(), 2 * REMEMBERED);
        let in_memory = outputs.iter().filter(|output| matches!(output.stderr, Source::Memory(_)));
        let rounds: Vec<u64> = in_memory.filter_map(|output| Some(output.place(None)?.0)).collect();
        assert_eq!(rounds, [39, 39, 40, 40]);
        assert!(outputs.iter().all(|output| matches!(output.stdout, Source::File(_))));
        assert_eq!(outputs[0].place(Some(9)), Some((9, 4)));
        assert_eq!(outputs[0].place(Some(40)), None);
    }
}
