//! The trainer's trace as a history: which steps were done in which round, and which of them count.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line {
    Begin { round: u64, step: u64 },
    Step(Step),
    Committed { step: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(crate) struct Step {
    pub(crate) round: u64,
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) loss: f32,
    /// Wall clock of the machine that all agents run on.
    pub(crate) time_ms: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct GroupRun {
    pub(crate) round: u64,
    /// The step it resumed from.
    pub(crate) from: u64,
    pub(crate) steps: Vec<Step>,
}

/// All that the trace has told so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    pub(crate) group_runs: Vec<GroupRun>,
    /// The last step whose checkpoint is committed.
    pub(crate) committed: u64,
}

impl History {
    fn add(&mut self, line: Line) -> anyhow::Result<()> {
        match line {
            Line::Begin { round, step } => {
                self.group_runs.push(GroupRun { round, from: step, steps: Vec::new() });
            }
            Line::Step(step) => {
                let group_run = self.group_runs.last_mut().filter(|group_run| group_run.round == step.round);
                group_run
                    .with_context(|| format!("step {} belongs to no round that has begun", step.step))?
                    .steps
                    .push(step);
            }
            Line::Committed { step } => self.committed = step,
        }
        Ok(())
    }

    pub(crate) fn last(&self) -> Option<&Step> {
        self.group_runs.iter().rev().find_map(|group_run| group_run.steps.last())
    }

    /// The steps that count: each group's, up to where the next group resumed.
    pub(crate) fn counted(&self) -> Vec<Step> {
        let resumed = self.group_runs.iter().skip(1).map(|next| next.from).chain([u64::MAX]);
        let kept = self.group_runs.iter().zip(resumed).map(|(group_run, until)| (&group_run.steps, until));
        kept.flat_map(|(steps, until)| steps.iter().filter(move |step| step.step <= until)).copied().collect()
    }
}

#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    read: u64,
    unfinished: Vec<u8>,
    pub(crate) history: History,
}

impl Tail {
    pub(crate) fn new(path: &Path) -> Tail {
        Tail { path: path.to_owned(), read: 0, unfinished: Vec::new(), history: History::default() }
    }

    /// Takes in what was written since the last time.
    pub(crate) fn catch_up(&mut self) -> anyhow::Result<()> {
        let Ok(mut file) = File::open(&self.path) else { return Ok(()) };
        file.seek(SeekFrom::Start(self.read))?;
        self.read += file.read_to_end(&mut self.unfinished)? as u64;
        while let Some(end) = self.unfinished.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.unfinished.drain(..=end).collect();
            let line: Line = serde_json::from_slice(&line).with_context(|| {
                format!("{}: cannot read {:?}", self.path.display(), String::from_utf8_lossy(&line))
            })?;
            self.history.add(line)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_step_that_was_done_again_counts_once() {
        // Given a group that did three steps. The next group repeats the last of them.
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let step = |round: u64, step: u64| {
            format!(
                r#"{{"event":"step","round":{round},"step":{step},"epoch":0,"first":0,"end":1,"loss":0.5,"time_ms":{step}}}"#
            )
        };
        let begin = |round: u64, step: u64| {
            format!(r#"{{"event":"begin","round":{round},"step":{step},"world_size":3,"time_ms":9}}"#)
        };
        let mut tail = Tail::new(file.path());
        for line in [begin(1, 0), step(1, 1), step(1, 2), step(1, 3), begin(2, 2), step(2, 3), step(2, 4)] {
            // When it is read in pieces.
            let (front, back) = line.split_at(line.len() / 2);
            write!(file, "{front}").unwrap();
            tail.catch_up().unwrap();
            writeln!(file, "{back}").unwrap();
            tail.catch_up().unwrap();
        }
        // Then each step counts once, in the round that kept it.
        let counted: Vec<_> = tail.history.counted().iter().map(|step| (step.round, step.step)).collect();
        assert_eq!(counted, [(1, 1), (1, 2), (2, 3), (2, 4)]);
        assert_eq!(tail.history.last().unwrap().step, 4);
    }
}
