//! Judges a history by the promises. Nothing here does any IO: it reads what the observer saw.

use elastic_tests::prelude::*;

use elastic_rendezvous::job::{NodeRecord, Phase, RankRecord, RoundRecord, RoundState};

use super::fault::{Action, Fault, Keeps};
use super::history::{Change, Events, Line};
use super::scene::Ended;

/// A promise that was broken, and by what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broken(pub String);

fn broken(text: impl Into<String>) -> Broken {
    Broken(text.into())
}

/// What the training has to show: the result of each step, as bits, of a run that nothing disturbed.
pub(crate) type Results = BTreeMap<u64, String>;

/// The results in a trace: of each step its loss, or the digest of all parameters after it.
pub(crate) fn results(lines: &[Line]) -> Result<Results, Broken> {
    let mut results = Results::new();
    for Line { event, .. } in lines.iter().filter(|line| line.is_step()) {
        let result = event.get("state").unwrap_or(&event["loss"]).to_string();
        let step = number(event, "step");
        if results.insert(step, result.clone()).is_some_and(|before| before != result) {
            return Err(broken(format!("step {step} was done again with another result")));
        }
    }
    Ok(results)
}

fn number(event: &Value, name: &str) -> u64 {
    event[name].as_u64().unwrap_or(u64::MAX)
}

/// All that is wrong with a history.
pub(crate) fn judge(fault: &Fault, events: &Events, lines: &[Line], ended: &Ended, reference: &Results) -> Vec<Broken> {
    let mut wrong: Vec<Broken> = ended.trouble.iter().chain(&ended.wrong).map(broken).collect();
    wrong.extend(history(events));
    wrong.extend(outcome(fault, events, ended));
    let succeeded = events.round().is_some_and(|round| round.state == RoundState::Succeeded);
    wrong.extend(training(lines, reference, succeeded, fault.keeps));
    if !ended.left.is_empty() {
        wrong.push(broken(format!("processes are left: {:?}", ended.left)));
    }
    wrong
}

/// What is wrong with the job's keys, where no one else wrote them and all was seen.
pub(crate) fn history(events: &Events) -> Vec<Broken> {
    if !events.ours.is_empty() || events.gaps {
        return Vec::new();
    }
    rounds(&events.changes).into_iter().chain(commits(&events.changes)).collect()
}

/// What is wrong with a training that was ended somewhere. Its first steps are those of the undisturbed run, which is
/// shorter.
pub(crate) fn endless(lines: &[Line], reference: &Results) -> Vec<Broken> {
    let mut expected = results(lines).unwrap_or_default();
    expected.extend(reference.iter().map(|(step, result)| (*step, result.clone())));
    let done = steps(lines);
    training(lines, &expected, false, Keeps::Committed).into_iter().chain(once(&done)).collect()
}

/// One group at work, agreement, numbers and restarts that only grow, one result.
fn rounds(changes: &[Change]) -> Vec<Broken> {
    let mut wrong = Vec::new();
    let mut before: Option<RoundRecord> = None;
    let mut ranks: BTreeMap<(String, String), BTreeMap<String, RankRecord>> = BTreeMap::new();
    let mut nodes: BTreeMap<String, NodeRecord> = BTreeMap::new();
    let mut evicted: BTreeSet<String> = BTreeSet::new();
    // A transaction's changes come in the order of their keys, so a round is judged when its revision is complete.
    let mut sorted: Vec<&Change> = changes.iter().collect();
    sorted.sort_by_key(|change| (change.revision, change.key == "round"));
    for change in sorted {
        let (kind, rest) = change.key.split_once('/').unwrap_or((&change.key, ""));
        match (kind, &change.value) {
            ("rounds", Some(value)) => {
                let parts: Vec<&str> = rest.splitn(3, '/').collect();
                if let ([round, plan, node], Ok(record)) = (&parts[..], serde_json::from_str(value)) {
                    ranks
                        .entry(((*round).to_owned(), (*plan).to_owned()))
                        .or_default()
                        .insert((*node).to_owned(), record);
                }
            }
            ("nodes", Some(value)) => {
                if let Ok(record) = serde_json::from_str(value) {
                    nodes.insert(rest.to_owned(), record);
                }
            }
            ("evicted", Some(_)) => {
                evicted.insert(rest.to_owned());
            }
            ("round", Some(value)) => match serde_json::from_str::<RoundRecord>(value) {
                Ok(round) => {
                    if let Some(before) = &before {
                        wrong.extend(follows(before, &round, change.revision));
                        wrong.extend(done_with(before, &round, &ranks, &nodes, &evicted));
                    }
                    if round.state == RoundState::Running {
                        wrong.extend(agrees(&round, &ranks));
                    }
                    before = Some(round);
                }
                Err(error) => wrong.push(broken(format!("the round at r{} is unreadable: {error}", change.revision))),
            },
            ("round", None) => wrong.push(broken(format!("the round was deleted at r{}", change.revision))),
            _ => {}
        }
    }
    wrong
}

fn is_final(state: RoundState) -> bool {
    matches!(state, RoundState::Succeeded | RoundState::Failed | RoundState::Closed)
}

fn follows(before: &RoundRecord, round: &RoundRecord, revision: i64) -> Option<Broken> {
    let same_generation = before.generation == round.generation;
    let told = |what: &str| Some(broken(format!("at r{revision} {what}: {before:?}, then {round:?}")));
    if round.number < before.number || round.generation < before.generation {
        return told("a number falls");
    }
    if is_final(before.state) && same_generation {
        return told("a result is written over");
    }
    if before.state == RoundState::Running && round.state == RoundState::Running && before.number == round.number {
        return told("a round is sealed twice");
    }
    if same_generation && (round.restarts < before.restarts || round.restarts > before.restarts + 1) {
        return told("restarts do not grow one by one");
    }
    None
}

/// Before a round is sealed, each member of the last one has come to rest, or was evicted.
fn done_with(
    before: &RoundRecord,
    round: &RoundRecord,
    ranks: &BTreeMap<(String, String), BTreeMap<String, RankRecord>>,
    nodes: &BTreeMap<String, NodeRecord>,
    evicted: &BTreeSet<String>,
) -> Option<Broken> {
    let last = before.sealed.filter(|_| before.state == RoundState::Forming && round.state == RoundState::Running)?;
    let members = ranks.get(&(last.number.to_string(), last.plan.0.to_string()))?;
    let at_work = members.keys().find(|member| {
        !nodes.get(*member).is_some_and(|said| rests(said, last.number)) && !evicted.contains(*member)
    })?;
    Some(broken(format!("round {} was sealed while {at_work} was at work in {}", round.number, last.number)))
}

/// Whether a node says that its workers do nothing more in this round.
pub(crate) fn rests(node: &NodeRecord, round: u64) -> bool {
    node.round.is_none_or(|of| of > round) || matches!(node.phase, Phase::Failed | Phase::Stopped | Phase::Done)
}

/// A sealed round's ranks are disjoint, without holes, and as many as it says.
fn agrees(round: &RoundRecord, ranks: &BTreeMap<(String, String), BTreeMap<String, RankRecord>>) -> Option<Broken> {
    let sealed = round.sealed?;
    let members = ranks.get(&(sealed.number.to_string(), sealed.plan.0.to_string()));
    let mut places: Vec<&RankRecord> = members.into_iter().flat_map(BTreeMap::values).collect();
    places.sort_by_key(|place| place.group_rank);
    let mut next = 0;
    for (at, place) in places.iter().enumerate() {
        if place.group_rank as usize != at || place.first_rank != next {
            return Some(broken(format!("the ranks of round {} have a hole: {places:?}", round.number)));
        }
        next += place.slots;
    }
    let left_out = |name: &str| round.faults.iter().any(|faults| faults.excluded.is_some() && faults.node == name);
    if let Some(place) = places.iter().find(|place| left_out(&place.name)) {
        return Some(broken(format!("round {} has {}, which is left out", round.number, place.name)));
    }
    let whole = places.len() == round.group_world_size as usize && next == round.world_size;
    (!whole).then(|| broken(format!("round {} says {} workers: {places:?}", round.number, round.world_size)))
}

fn commits(changes: &[Change]) -> Option<Broken> {
    let mut newest = 0;
    for change in changes.iter().filter(|change| change.key == "checkpoint") {
        let Some(value) = &change.value else { return Some(broken("the checkpoint's record was deleted")) };
        let step = serde_json::from_str::<Value>(value).ok().map_or(u64::MAX, |value| number(&value, "step"));
        if step <= newest {
            return Some(broken(format!("step {step} was committed after {newest}")));
        }
        newest = step;
    }
    None
}

/// All agents end alike, and as the fault allows; the job paid no more than the fault may cost.
fn outcome(fault: &Fault, events: &Events, ended: &Ended) -> Vec<Broken> {
    let mut wrong = Vec::new();
    if ended.trouble.is_some() {
        return wrong;
    }
    // One that was asked to leave has left as planned, where the job was over before it came back.
    let codes: BTreeSet<i32> = ended.codes.iter().flatten().copied().filter(|&code| code != 3).collect();
    if codes.len() > 1 || !codes.iter().all(|code| fault.ends.contains(code)) {
        wrong.push(broken(format!("the agents end with {:?}", ended.codes)));
    }
    let Some(round) = events.round() else {
        if fault.ends == [0] {
            wrong.push(broken("no round is left"));
        }
        return wrong;
    };
    if fault.ends == [0] && round.state != RoundState::Succeeded {
        wrong.push(broken(format!("the job ends as {:?}: {}", round.state, round.reason)));
    }
    // A node that is lost again and again is named.
    let again = fault.actions.iter().any(|action| matches!(action, Action::ResetEachRound(..)));
    if again && round.state == RoundState::Failed && !round.reason.contains("was lost soon after they began") {
        wrong.push(broken(format!("the job ends for an unclear reason: {}", round.reason)));
    }
    if round.restarts > fault.charges {
        wrong.push(broken(format!("{} restarts were charged: {}", round.restarts, round.reason)));
    }
    wrong
}

/// Each sample once in each epoch, in steps with the undisturbed run's bits; no committed step is lost.
fn training(lines: &[Line], reference: &Results, succeeded: bool, keeps: Keeps) -> Vec<Broken> {
    let mut wrong = Vec::new();
    let (mut round, mut kept, mut furthest) = (0, 0, 0);
    for Line { event, .. } in lines {
        let (of, step) = (number(event, "round"), number(event, "step"));
        match event["event"].as_str() {
            Some("begin") => {
                if of < round && keeps != Keeps::Nothing {
                    wrong.push(broken(format!("round {of} begins after round {round}")));
                }
                if step < kept && keeps != Keeps::Nothing {
                    wrong.push(broken(format!("round {of} begins after step {step}, and {kept} was to be kept")));
                }
                (round, furthest) = (of, step);
            }
            Some("step") => {
                if of != round || step != furthest + 1 {
                    wrong.push(broken(format!("step {step} of round {of} after step {furthest} of round {round}")));
                }
                furthest = step;
                kept = if keeps == Keeps::All { kept.max(step) } else { kept };
            }
            Some("committed") => kept = kept.max(step),
            _ => {}
        }
    }
    match results(lines) {
        Ok(results) => {
            let differs = results.iter().find(|(step, result)| reference.get(step) != Some(result));
            wrong.extend(
                differs.map(|(step, result)| broken(format!("step {step} comes to {result}, not the undisturbed"))),
            );
        }
        Err(error) => wrong.push(error),
    }
    if succeeded {
        let done = steps(lines);
        let missing: Vec<&u64> = reference.keys().filter(|step| !done.contains_key(step)).collect();
        // A worker that dies between a step and its line leaves that line out: at most one for each worker's death.
        if missing.len() > 4 {
            wrong.push(broken(format!("steps are missing: {missing:?}")));
        }
        wrong.extend(once(&done));
    }
    wrong
}

/// Each step's epoch, its first sample, and the one after its last.
fn steps(lines: &[Line]) -> BTreeMap<u64, (u64, u64, u64)> {
    let samples = |event: &Value| (number(event, "epoch"), number(event, "first"), number(event, "end"));
    lines.iter().filter(|line| line.is_step()).map(|line| (number(&line.event, "step"), samples(&line.event))).collect()
}

/// The samples of the steps, in order, are those of the epochs, in order.
fn once(done: &BTreeMap<u64, (u64, u64, u64)>) -> Option<Broken> {
    let mut last: Option<(u64, (u64, u64, u64))> = None;
    for (&step, &(epoch, first, end)) in done {
        if let Some((before, (of, _, until))) = last
            && step == before + 1
            && !((epoch == of && first == until) || (epoch == of + 1 && first == 0))
        {
            return Some(broken(format!(
                "step {step} begins with sample {first} of epoch {epoch}, after {until} of {of}"
            )));
        }
        if end <= first {
            return Some(broken(format!("step {step} has no samples")));
        }
        last = Some((step, (epoch, first, end)));
    }
    None
}

#[cfg(test)]
mod tests;
