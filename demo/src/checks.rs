//! What must hold at the end, each with its evidence: pure functions of what the two runs have left.

use std::collections::BTreeMap;

use elastic_trainer::data::{Order, Schedule};

use crate::run::{Ended, Kill};
use crate::trace::{History, Step};

/// The share of test images that must be recognised.
const ACCURACY: f64 = 0.96;

#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) holds: bool,
    pub(crate) claim: &'static str,
    pub(crate) evidence: String,
}

impl Check {
    fn of(claim: &'static str, result: Result<String, String>) -> Check {
        let holds = result.is_ok();
        let (Ok(evidence) | Err(evidence)) = result;
        Check { holds, claim, evidence }
    }
}

pub(crate) fn all(schedule: &Schedule, order: &Order, quiet: &Ended, disturbed: &Ended, kill: &Kill) -> Vec<Check> {
    let counted = disturbed.history.counted();
    vec![
        Check::of("no committed step is lost or done twice", resumed(disturbed)),
        Check::of("each epoch has each sample once", samples(schedule, order, &disturbed.history, &counted)),
        Check::of("the loss is the undisturbed run's", losses(&quiet.history.counted(), &counted)),
        Check::of("the parameters are the undisturbed run's", parameters(quiet, disturbed)),
        Check::of("the digits are learned", accuracy(disturbed)),
        Check::of("nothing of the killed agent was left", killed(kill)),
        Check::of("the other workers kept their processes", kept(kill)),
    ]
}

/// Each group after the first continues from what the survivors hold in memory. That is all that was done, except perhaps
/// one step that only the dead worker had, and never less than what is committed.
fn resumed(run: &Ended) -> Result<String, String> {
    let mut told = Vec::new();
    for (before, group_run) in run.history.group_runs.iter().zip(run.history.group_runs.iter().skip(1)) {
        let (round, from) = (group_run.round, group_run.from);
        let done = before.steps.last().map_or(before.from, |step| step.step);
        let seal = run.seals.iter().find(|seal| seal.round == round);
        let seal = seal.ok_or(format!("the store told of no round {round}, in which workers trained"))?;
        let first = group_run.steps.first().map_or(from + 1, |step| step.step);
        let committed = seal.committed;
        let continues = (committed.max(done.saturating_sub(1))..=done).contains(&from);
        if seal.resume != committed || !continues || first != from + 1 {
            return Err(format!(
                "round {round}: step {done} was done and {committed} committed, the round's record says {}, the workers \
                 continued after {from} and began with {first}",
                seal.resume
            ));
        }
        told.push(format!("round {round} began with step {first}, after {done} was done and {committed} committed"));
    }
    if told.is_empty() { Err("there was no change".to_owned()) } else { Ok(told.join("; ")) }
}

/// The steps that count are steps 1 to the last, each once, and each epoch has each sample once.
fn samples(schedule: &Schedule, order: &Order, history: &History, counted: &[Step]) -> Result<String, String> {
    let total = schedule.total_steps();
    if !counted.iter().map(|step| step.step).eq(1..=total) {
        return Err(format!("{} steps count, not each of 1 to {total} once", counted.len()));
    }
    let mut times = vec![0u32; (schedule.epochs() * schedule.samples) as usize];
    for step in counted {
        for place in step.first..step.end.min(schedule.samples) {
            let sample = order.sample(step.epoch, place);
            let cell = times.get_mut((step.epoch * schedule.samples + sample) as usize);
            *cell.ok_or(format!("step {} is of epoch {}", step.step, step.epoch))? += 1;
        }
    }
    let wrong = times.iter().filter(|&&times| times != 1).count();
    if wrong > 0 {
        return Err(format!("{wrong} times a sample is missing from an epoch or in it more than once"));
    }
    let done: usize = history.group_runs.iter().map(|group_run| group_run.steps.len()).sum();
    Ok(format!(
        "{} epochs of {} samples; {} steps that only the dead had done were done again and count once",
        schedule.epochs(),
        schedule.samples,
        done - counted.len()
    ))
}

/// Compares the losses of all steps, bit by bit.
fn losses(quiet: &[Step], disturbed: &[Step]) -> Result<String, String> {
    let expected: BTreeMap<u64, f32> = quiet.iter().map(|step| (step.step, step.loss)).collect();
    if expected.len() != disturbed.len() {
        return Err(format!("{} steps against {}", disturbed.len(), expected.len()));
    }
    let (mut largest, mut at, mut equal) = (0.0f32, 0, 0);
    for step in disturbed {
        let loss = expected.get(&step.step).ok_or(format!("the undisturbed run has no step {}", step.step))?;
        equal += usize::from(loss.to_bits() == step.loss.to_bits());
        let difference = (loss - step.loss).abs();
        if difference > largest {
            (largest, at) = (difference, step.step);
        }
    }
    if equal == disturbed.len() {
        Ok(format!("equal in every bit in all {equal} steps; largest difference 0"))
    } else {
        Err(format!("equal in {equal} of {} steps; largest difference {largest:e}, in step {at}", disturbed.len()))
    }
}

fn parameters(quiet: &Ended, disturbed: &Ended) -> Result<String, String> {
    let (quiet, disturbed) = (&quiet.parameters, &disturbed.parameters);
    if quiet == disturbed {
        Ok(format!("both end with {quiet}"))
    } else {
        Err(format!("undisturbed {quiet}, disturbed {disturbed}"))
    }
}

fn accuracy(run: &Ended) -> Result<String, String> {
    let (right, all) = run.correct;
    let share = right as f64 / all as f64;
    let told = format!("{share:.4} ({right} of {all} test images), at least {ACCURACY} is wanted");
    if share >= ACCURACY { Ok(told) } else { Err(told) }
}

fn list(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn killed(kill: &Kill) -> Result<String, String> {
    let Kill { node, processes, gone_after, round_waited, left, .. } = kill;
    if !left.is_empty() {
        return Err(format!("of agent {node} there still are processes {}", list(left)));
    }
    if !round_waited {
        return Err(format!("the next round began while workers of agent {node} still lived"));
    }
    Ok(format!(
        "agent {node}, its guard and its worker (processes {}) were gone within {} ms; the next round began after the \
         worker's end",
        list(processes),
        gone_after.as_millis()
    ))
}

fn kept(kill: &Kill) -> Result<String, String> {
    let (before, after) = (list(&kill.others), list(&kill.others_later));
    if before == after {
        Ok(format!("agents, guards and workers of the others are processes {before}, before the kill and at the end"))
    } else {
        Err(format!("agents, guards and workers of the others were processes {before}, and are {after}"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::job_view::Seal;
    use crate::trace::GroupRun;

    const SCHEDULE: Schedule = Schedule::of_epochs(10, 4, 2);

    fn step(round: u64, number: u64) -> Step {
        let batch = SCHEDULE.batch_after(number - 1);
        let loss = 1.0 / number as f32;
        Step { round, step: number, epoch: batch.epoch, first: batch.first, end: batch.end, loss, time_ms: number }
    }

    fn group_run(round: u64, from: u64, until: u64) -> GroupRun {
        GroupRun { round, from, steps: (from + 1..=until).map(|number| step(round, number)).collect() }
    }

    fn ended(group_runs: Vec<GroupRun>) -> Ended {
        let seal = |group_run: &GroupRun| {
            let (nodes, reason, at) = (2, String::new(), Duration::ZERO);
            Seal { round: group_run.round, nodes, reason, at, resume: group_run.from, committed: group_run.from }
        };
        let seals = group_runs.iter().map(seal).collect();
        let (parameters, correct, took) = ("crc32c:1".to_owned(), (97, 100), Duration::ZERO);
        Ended { history: History { group_runs, committed: 6 }, seals, parameters, correct, took }
    }

    fn kill() -> Kill {
        let (node, mark, gone_after) = ("b".to_owned(), "job/b/2/".to_owned(), Duration::from_millis(5));
        let (others, others_later) = (vec![5, 6], vec![5, 6]);
        Kill { node, mark, processes: vec![7], gone_after, round_waited: true, left: Vec::new(), others, others_later }
    }

    fn failing(disturbed: &Ended, kill: &Kill) -> Vec<usize> {
        let quiet = ended(vec![group_run(1, 0, 6)]);
        let checks = all(&SCHEDULE, &Order::new(0, SCHEDULE.samples), &quiet, disturbed, kill);
        (1..).zip(&checks).filter(|(_, check)| !check.holds).map(|(number, _)| number).collect()
    }

    fn good() -> Ended {
        // Step 4 was done before the change and again after it.
        ended(vec![group_run(1, 0, 4), group_run(2, 3, 5), group_run(3, 5, 6)])
    }

    #[test]
    fn a_good_run_passes() {
        assert_eq!(failing(&good(), &kill()), Vec::<usize>::new());
    }

    #[test]
    fn each_fault_is_found() {
        let faulty = |spoil: &dyn Fn(&mut Ended)| {
            let mut run = good();
            spoil(&mut run);
            failing(&run, &kill())
        };
        assert_eq!(
            faulty(&|run| (run.seals[1].committed, run.seals[1].resume) = (4, 4)),
            [1],
            "a committed step was lost"
        );
        assert_eq!(
            faulty(&|run| run.history.group_runs[1].from = 4),
            [1, 2, 3],
            "a step was repeated that counts already"
        );
        assert_eq!(faulty(&|run| run.history.group_runs[0].steps.push(step(1, 5))), [1], "a survivor's step was lost");
        assert_eq!(
            faulty(&|run| run.history.group_runs[1].steps = run.history.group_runs[1].steps[1..].to_vec()),
            [1, 2, 3],
            "a step was left out"
        );
        assert_eq!(faulty(&|run| run.history.group_runs[1].steps[1].first -= 1), [2], "a sample was taken twice");
        assert_eq!(faulty(&|run| run.history.group_runs[1].steps[1].loss += 1e-6), [3], "another loss");
        assert_eq!(faulty(&|run| run.parameters = "crc32c:2".into()), [4], "other parameters");
        assert_eq!(faulty(&|run| run.correct = (95, 100)), [5], "not learned");
        assert_eq!(failing(&good(), &Kill { left: vec![7], ..kill() }), [6], "something was left");
        assert_eq!(failing(&good(), &Kill { round_waited: false, ..kill() }), [6], "two groups at work");
        assert_eq!(failing(&good(), &Kill { others_later: vec![5, 8], ..kill() }), [7], "a worker was started again");
        assert_eq!(failing(&ended(vec![group_run(1, 0, 6)]), &kill()), [1], "nothing happened");
    }
}
