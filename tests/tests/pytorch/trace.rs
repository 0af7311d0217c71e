//! What the scripts told, and what must hold for every training: no step or epoch is lost that a checkpoint holds, and
//! each sample is used once.

use std::cell::{Ref, RefCell};

use elastic_tests::prelude::*;
use elastic_tests::trace::Tail;

/// Several processes import PyTorch meanwhile, on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// As in the scripts.
const SAMPLES: u64 = 240;

#[derive(Debug, Clone)]
pub(crate) struct Line(Value);

impl Line {
    pub(crate) fn is(&self, event: &str) -> bool {
        self.0["event"] == event
    }

    pub(crate) fn number(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    pub(crate) fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.0[name] == true
    }

    pub(crate) fn real(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    pub(crate) fn used(&self) -> Vec<u64> {
        self.0["used"].as_array().expect("samples").iter().filter_map(Value::as_u64).collect()
    }
}

pub(crate) fn lines(job: &Job) -> Vec<Line> {
    job.lines("trace").into_iter().map(Line).collect()
}

/// A long trace. Each look reads only what is new.
pub(crate) struct Trace {
    tail: RefCell<Tail>,
    lines: RefCell<Vec<Line>>,
}

impl Trace {
    pub(crate) fn of(job: &Job) -> Trace {
        Trace { tail: Tail::new(&job.path("trace")).into(), lines: RefCell::default() }
    }

    pub(crate) fn lines(&self) -> Ref<'_, [Line]> {
        self.lines.borrow_mut().extend(self.tail.borrow_mut().read().into_iter().map(Line));
        Ref::map(self.lines.borrow(), |lines| &lines[..])
    }

    /// Waits until `condition` holds of the lines.
    pub(crate) async fn until<T>(&self, what: &str, condition: impl Fn(&[Line]) -> Option<T>) -> T {
        eventually(what, LIMIT, async || condition(&self.lines())).await
    }
}

/// Waits until two or more of `event` are reported in a round of at least `round` and of `size` workers. Returns its
/// number.
pub(crate) async fn works(job: &Job, event: &str, round: u64, size: u64) -> u64 {
    eventually(&format!("`{event}` is reported twice in round {round} or later by {size} workers"), LIMIT, async || {
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        for line in lines(job) {
            if line.is(event) && line.number("round") >= round && line.number("size") == size {
                *counts.entry(line.number("round")).or_default() += 1;
            }
        }
        counts.into_iter().find(|(_, count)| *count >= 2 * size as usize).map(|(round, _)| round)
    })
    .await
}

pub(crate) async fn ended(agents: &mut [Agent], code: i32) {
    let codes = exits_within(LIMIT, agents).await;
    assert!(codes.iter().all(|&one| one == code), "{codes:?}");
}

/// Lets the scripts come to their end.
pub(crate) fn finish(job: &Job) {
    job.write("finish", "");
}

/// Checks that each round continued from what had been reported before it, `unit` by `unit`: from the one after the
/// last that is known to be saved, or later, as a worker may die between saving and telling. Within a round none is
/// left out.
pub(crate) fn continues(lines: &[Line], event: &str, unit: &str, first: u64) {
    let rounds: BTreeSet<u64> = lines.iter().map(|line| line.number("round")).collect();
    let mut next = first;
    for round in rounds {
        let of = |kind: &str| -> Vec<&Line> {
            lines.iter().filter(|line| line.is(kind) && line.number("round") == round).collect()
        };
        let begins: BTreeSet<u64> = of("begin").into_iter().map(|line| line.number(unit)).collect();
        assert!(begins.len() <= 1, "the workers of round {round} begin at {begins:?}");
        let Some(&begin) = begins.first() else { continue };
        let begin = begin + first;
        assert!(begin == next || begin == next + 1, "round {round} begins with {unit} {begin}, {next} was expected");
        let told: Vec<u64> =
            of(event).into_iter().filter(|line| line.number("rank") == 0).map(|line| line.number(unit)).collect();
        assert_eq!(told, (begin..).take(told.len()).collect::<Vec<_>>(), "the {unit}s of round {round}");
        next = begin + told.len() as u64;
    }
}

/// Checks that in each epoch that ended, every sample was used once. What a later round did again does not count.
pub(crate) fn used_once(lines: &[Line], event: &str, unit: &str, first: u64, ended: impl Fn(u64) -> bool) {
    let begins: BTreeSet<(u64, u64)> =
        lines.iter().filter(|line| line.is("begin")).map(|line| (line.number("round"), line.number(unit))).collect();
    let counts = |line: &Line| {
        let later = begins.iter().filter(|(round, _)| *round > line.number("round"));
        later.into_iter().all(|(_, begin)| line.number(unit) < begin + first)
    };
    let mut epochs: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.is(event) && ended(line.number("epoch")) && counts(line)) {
        epochs.entry(line.number("epoch")).or_default().extend(line.used());
    }
    for (epoch, used) in &mut epochs {
        used.sort_unstable();
        assert_eq!(*used, (0..SAMPLES).collect::<Vec<_>>(), "the samples of epoch {epoch}");
    }
    assert!(epochs.len() >= 2, "{} epochs ended", epochs.len());
}

/// The last epoch that any of these reported.
pub(crate) fn last_epoch(lines: &[Line], event: &str) -> u64 {
    lines.iter().filter(|line| line.is(event)).map(|line| line.number("epoch")).max().unwrap_or_default()
}

/// How many workers began with the very parameters that some group had saved at that step.
pub(crate) fn resumes_what_was_saved(lines: &[Line]) -> usize {
    let begins = lines.iter().filter(|line| line.is("begin") && line.number("step") > 0);
    begins
        .filter(|begin| {
            let mut saved = lines.iter().filter(|line| line.is("saves") && line.number("step") == begin.number("step"));
            saved.any(|line| line.text("digest") == begin.text("digest"))
        })
        .count()
}
