//! Which corners of the machines a set of seeds has reached.

use std::collections::BTreeMap;

use elastic_rendezvous::job::RoundState;
use elastic_rendezvous::{GroupReport, MemberInput};

#[derive(Default, Clone)]
pub(crate) struct Coverage {
    /// How often each pair of a round's state and a verdict was met.
    pub(crate) verdicts: BTreeMap<(&'static str, &'static str), u64>,
    /// How often each pair of a member's mode and an input was met.
    pub(crate) members: BTreeMap<(&'static str, &'static str), u64>,
}

const STATES: [&str; 5] = ["forming", "running", "succeeded", "failed", "closed"];
const VERDICTS: [&str; 7] = ["wait", "probe", "form", "seal", "finish", "refuse", "prune"];
const MODES: [&str; 10] =
    ["joining", "waiting", "starting", "running", "done", "failed", "warming up", "leaving", "ending", "evicted"];
const INPUTS: [&str; 12] = [
    "tick",
    "answered",
    "leased",
    "renewed",
    "watched",
    "word",
    "leader dead",
    "started",
    "ended",
    "stopped",
    "quiesced",
    "drain",
];

/// Verdicts that no state of this name can lead to, and why.
const NO_VERDICT: [(&str, &[&str], &str); 5] = [
    ("forming", &["probe", "prune"], "failures are judged, and old rounds pruned, while a round runs"),
    ("running", &["seal"], "only what forms is sealed"),
    ("succeeded", &["probe", "form", "seal", "finish", "refuse", "prune"], "a final state is final"),
    ("failed", &["probe", "form", "seal", "finish", "refuse", "prune"], "a final state is final"),
    ("closed", &["probe", "form", "seal", "finish", "refuse", "prune"], "a final state is final"),
];

/// Inputs that no member in this mode can get, and why.
const NO_INPUT: [(&str, &[&str], &str); 6] = [
    (
        "joining",
        &["leader dead", "started", "ended", "stopped", "quiesced"],
        "it has no stream to a leader, and no workers",
    ),
    ("starting", &["stopped", "quiesced"], "no one asked for a stop"),
    ("running", &["started", "stopped", "quiesced"], "workers start once, and no one asked for a stop"),
    ("done", &["quiesced"], "workers that have ended do not"),
    ("warming up", &["ended"], "an end ahead of a place is reported to no one"),
    ("failed", &["quiesced"], "workers quiesce for a round that forms, which ends this mode"),
];

/// The modes too short to meet everything in some thousand seeds: they last as long as a kill does, and until workers
/// have quiesced.
const SHORT: [&str; 1] = ["evicted"];

/// Too seldom to count on: a start is reported in the very moment in which workers, the round or the job end, or the
/// guard kills what workers that ended well left behind, or a lost lease comes back while the last workers end, or the
/// node is to leave or the job ends in the moment in which its workers have quiesced, or a lease is lost while they warm
/// up, or a start is reported so late that they do.
const SELDOM: [(&str, &str); 9] = [
    ("warming up", "leased"),
    ("warming up", "started"),
    ("ending", "started"),
    ("ending", "leased"),
    ("waiting", "started"),
    ("done", "started"),
    ("done", "ended"),
    ("leaving", "quiesced"),
    ("ending", "quiesced"),
];

fn state(state: RoundState) -> &'static str {
    match state {
        RoundState::Forming => "forming",
        RoundState::Running => "running",
        RoundState::Succeeded => "succeeded",
        RoundState::Failed => "failed",
        RoundState::Closed => "closed",
    }
}

fn kind(input: &MemberInput) -> &'static str {
    match input {
        MemberInput::Tick => "tick",
        MemberInput::Answered { .. } => "answered",
        MemberInput::Leased { .. } => "leased",
        MemberInput::Renewed { .. } => "renewed",
        MemberInput::Watched(_) => "watched",
        MemberInput::Word { .. } => "word",
        MemberInput::LeaderDead(_) => "leader dead",
        MemberInput::Agent(GroupReport::Started(_)) => "started",
        MemberInput::Agent(GroupReport::Ended { .. }) => "ended",
        MemberInput::Agent(GroupReport::Stopped { .. }) => "stopped",
        MemberInput::Agent(GroupReport::Quiesced { .. }) => "quiesced",
        MemberInput::Agent(GroupReport::Drain) => "drain",
        MemberInput::Agent(GroupReport::Finished { .. }) => "finished",
        MemberInput::Agent(GroupReport::Concluded) => "concluded",
    }
}

impl Coverage {
    pub(crate) fn verdict(&mut self, of: RoundState, verdict: &'static str) {
        *self.verdicts.entry((state(of), verdict)).or_default() += 1;
    }

    pub(crate) fn member(&mut self, mode: &'static str, input: &MemberInput) {
        *self.members.entry((mode, kind(input))).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Coverage) {
        for (pair, count) in &other.verdicts {
            *self.verdicts.entry(*pair).or_default() += count;
        }
        for (pair, count) in &other.members {
            *self.members.entry(*pair).or_default() += count;
        }
    }

    /// Pairs that were not reached although they can be, or reached although they cannot.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check =
            |what: &str, pair: (&'static str, &'static str), reached: bool, table: &[(&str, &[&str], &str)]| {
                let reason = table.iter().find(|(of, which, _)| *of == pair.0 && which.contains(&pair.1));
                match (reached, reason) {
                    (true, Some((.., why))) => wrong.push(format!("{what} {pair:?} was reached, though {why}")),
                    (false, None) => wrong.push(format!("{what} {pair:?} was never reached")),
                    _ => {}
                }
            };
        for state in STATES {
            for verdict in VERDICTS {
                check("verdict", (state, verdict), self.verdicts.contains_key(&(state, verdict)), &NO_VERDICT);
            }
        }
        for mode in MODES.into_iter().filter(|mode| !SHORT.contains(mode)) {
            for input in INPUTS.into_iter().filter(|input| !SELDOM.contains(&(mode, *input))) {
                check("input", (mode, input), self.members.contains_key(&(mode, input)), &NO_INPUT);
            }
        }
        for short in SHORT {
            if !self.members.keys().any(|(mode, _)| *mode == short) {
                wrong.push(format!("no member was ever {short}"));
            }
        }
        wrong
    }
}
