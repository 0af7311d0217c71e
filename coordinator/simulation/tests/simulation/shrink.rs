//! Shrinks the schedule of a seed that breaks a promise: leaves out faults, and seconds of lateness and loss, as long as
//! the rest still breaks the same promise.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::dice::{Dice, SECOND};
use crate::schedule::{Ran, Telling, run, run_edited};
use crate::world::Mutation;

/// Most runs of one shrinking.
const MOST_RUNS: usize = 2_000;
/// Longest that one shrinking takes.
const LONGEST: Duration = Duration::from_secs(60);

/// A part of a schedule that can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// The injected fault with this number.
    Fault(usize),
    /// A second in which calls and messages can be lost or late, and workers that start can be going to fail.
    Second(u64),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Fault(number) => write!(f, "f{number}"),
            Part::Second(second) => write!(f, "s{second}"),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Part, String> {
        let unknown = || format!("{text:?} is no part of a schedule: write f3 for a fault, s12 for a second");
        let (kind, number) = text.split_at_checked(1).ok_or_else(unknown)?;
        let number: u64 = number.parse().map_err(|_| unknown())?;
        match kind {
            "f" => Ok(Part::Fault(number as usize)),
            "s" => Ok(Part::Second(number)),
            _ => Err(unknown()),
        }
    }
}

/// An injected fault as the whole schedule had it.
#[derive(Clone)]
pub(crate) struct Injected {
    pub(crate) at: u64,
    /// The dice just before it.
    pub(crate) before: Dice,
    /// The dice just after it.
    pub(crate) after: Dice,
}

/// Some parts of a seed's schedule. Around each fault the dice are those of the whole schedule, so
/// that what is left out changes the rest little.
#[derive(Clone)]
pub(crate) struct Edit {
    pub(crate) injected: Vec<Injected>,
    kept: BTreeSet<Part>,
}

impl Edit {
    pub(crate) fn of(whole: &Ran, kept: impl IntoIterator<Item = Part>) -> Edit {
        Edit { injected: whole.injected.clone(), kept: kept.into_iter().collect() }
    }

    pub(crate) fn keeps(&self, part: Part) -> bool {
        self.kept.contains(&part)
    }
}

/// A schedule after shrinking.
pub(crate) struct Shrunk {
    seed: u64,
    /// How many parts the whole schedule has.
    pub(crate) whole: usize,
    pub(crate) kept: Vec<Part>,
    runs: usize,
    pub(crate) ran: Ran,
}

/// Shrinks the schedule of a seed. Panics where the seed breaks no promise.
pub(crate) fn shrink(seed: u64, mutation: Option<Mutation>) -> Shrunk {
    let whole = run(seed, mutation, Telling::Silent);
    let promise = whole.breach.as_ref().expect("the same seed breaks the same promise").promise;
    let seconds = (0..=whole.ended / SECOND).map(Part::Second);
    let parts: Vec<Part> = (0..whole.injected.len()).map(Part::Fault).chain(seconds).collect();
    let (began, mut runs) = (Instant::now(), 0);
    let kept = fewest(parts.clone(), |kept| {
        if runs == MOST_RUNS || began.elapsed() > LONGEST {
            return false;
        }
        runs += 1;
        let edit = Edit::of(&whole, kept.iter().copied());
        run_edited(seed, mutation, Some(edit), Telling::Silent).breach.is_some_and(|breach| breach.promise == promise)
    });
    let edit = Edit::of(&whole, kept.iter().copied());
    Shrunk { seed, whole: parts.len(), kept, runs, ran: run_edited(seed, mutation, Some(edit), Telling::Kept) }
}

/// Few parts that still fail. Drops half of them, then quarters, down to single ones.
fn fewest(mut parts: Vec<Part>, mut fails: impl FnMut(&[Part]) -> bool) -> Vec<Part> {
    let mut chunk = parts.len().max(1);
    loop {
        let (mut at, before) = (0, parts.len());
        while at < parts.len() {
            let mut fewer = parts.clone();
            fewer.drain(at..parts.len().min(at + chunk));
            if fails(&fewer) {
                parts = fewer;
            } else {
                at += chunk;
            }
        }
        if chunk == 1 && parts.len() == before {
            return parts;
        }
        chunk = (chunk / 2).max(1);
    }
}

impl fmt::Display for Shrunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shrunk { seed, whole, kept, runs, ran } = self;
        if let Some(breach) = &ran.breach {
            writeln!(f, "seed {seed} breaks the promise \"{}\": {}", breach.promise, breach.what)?;
        }
        let only: Vec<String> = kept.iter().map(Part::to_string).collect();
        write!(
            f,
            "\n{}\n\nWhat still breaks it, {} of {whole} parts after {runs} runs, in seconds:\n\n{}\n\n\
             Its last events:\n\n{}\n\nTo repeat it: ELASTIC_SEED={seed} ELASTIC_ONLY={} cargo test -p elastic-simulation \
             --test simulation replay -- --ignored --nocapture\nThe whole schedule: the same without ELASTIC_ONLY",
            ran.scenario,
            kept.len(),
            ran.schedule.join("\n"),
            ran.story,
            only.join(",")
        )
    }
}
