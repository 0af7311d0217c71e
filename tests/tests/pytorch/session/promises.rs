//! What must hold of a session's trace, whichever ranks died and came meanwhile.

use elastic_tests::prelude::*;

use crate::pytorch::trace::Line;

/// As in the scripts.
const SAMPLES: u64 = 240;
const BATCH: u64 = 30;

/// A step that several rounds have begun was done by the last of them.
pub(super) fn each_sample_once_an_epoch(told: &[Line], epochs: u64) {
    let mut done_in: BTreeMap<u64, u64> = BTreeMap::new();
    for line in told.iter().filter(|line| line.is("uses")) {
        let round = done_in.entry(line.number("step")).or_default();
        *round = line.number("round").max(*round);
    }
    let mut used: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for line in told.iter().filter(|line| line.is("uses") && done_in[&line.number("step")] == line.number("round")) {
        assert_eq!(line.number("step") / (SAMPLES / BATCH), line.number("epoch"), "{line:?}");
        used.entry(line.number("epoch")).or_default().extend(line.used());
    }
    assert_eq!(used.len() as u64, epochs);
    for (epoch, mut samples) in used {
        samples.sort_unstable();
        assert_eq!(samples, (0..SAMPLES).collect::<Vec<_>>(), "the samples of epoch {epoch}");
    }
}

/// The sum over the trained parameters, on which all ranks agree.
pub(super) fn result(told: &[Line]) -> f64 {
    let sums: Vec<f64> = told.iter().filter(|line| line.is("end")).map(|line| line.real("sum")).collect();
    assert!(!sums.is_empty() && sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
    sums[0]
}

/// No one begins a step that it has done: what any survivor has done counts, and who has missed it gets its state. For
/// scripts whose `applied` tells how many steps it has finished.
pub(super) fn no_step_is_lost(told: &[Line]) {
    let mut done: BTreeMap<u64, u64> = BTreeMap::new();
    for line in told {
        let done = done.entry(line.number("pid")).or_default();
        if line.is("applied") {
            *done = line.number("step");
        } else if line.is("uses") {
            assert!(line.number("step") >= *done, "it has done {done} steps: {line:?}");
        }
    }
}

/// Each rank that has done a step has the same parameters then, in whatever group and however often it was done.
pub(super) fn all_agree(told: &[Line]) -> BTreeMap<u64, f64> {
    let mut sums = BTreeMap::new();
    for line in told.iter().filter(|line| line.is("applied")) {
        let sum = line.real("sum");
        let first = *sums.entry(line.number("step")).or_insert(sum);
        assert!((first - sum).abs() < 1e-9 * first, "another had {first} after this step: {line:?}");
    }
    sums
}
