//! The faults. Not for putting them in: the build script does.

/// One fault in one place.
pub struct Mutant {
    /// Its name, and its test's.
    pub name: &'static str,
    /// What the machines no longer do, for people.
    pub what: &'static str,
    /// The file under `rendezvous/`.
    pub file: &'static str,
    /// The place, which stands there once.
    pub from: &'static str,
    /// What stands there instead. `ON` is true while the mutant is switched on; without it the code must be as before.
    pub to: &'static str,
}

const LEADER: &str = "leader/mod.rs";
const TRANSACTIONS: &str = "leader/transactions.rs";
const DECIDE: &str = "decide.rs";
const VIEW: &str = "view.rs";
const STEP: &str = "member/step.rs";
const ROUNDS: &str = "member/rounds.rs";
const FENCE: &str = "member/fence.rs";

/// All of them.
pub const MUTANTS: &[Mutant] = &[
    // Promise 1: one group at work.
    Mutant {
        name: "eviction_is_a_death",
        what: "an evicted node counts as gone at once",
        file: VIEW,
        from: "if evicted.fate != Fate::Unknown ||",
        to: "if ON || evicted.fate != Fate::Unknown ||",
    },
    Mutant {
        name: "absent_is_gone",
        what: "a member without a key counts as lost at once",
        file: VIEW,
        from: "if now >= lost_at {",
        to: "if ON || now >= lost_at {",
    },
    Mutant {
        name: "lost_is_fenced",
        what: "a lost member counts as past its fence point though it never said it started",
        file: VIEW,
        from: "let fate = if member.started {",
        to: "let fate = if ON || member.started {",
    },
    Mutant {
        name: "nobody_is_waited_for",
        what: "a round is sealed while members of the last one still stop",
        file: DECIDE,
        from: "if !outstanding.is_empty() {",
        to: "if !ON && !outstanding.is_empty() {",
    },
    Mutant {
        name: "fence_after_the_lease",
        what: "the fence point lies a margin after the lease's end in place of before it",
        file: FENCE,
        from: "let by_proof = proven + (timings.lease_ttl - timings.margin);",
        to: "let by_proof = if ON { proven + timings.lease_ttl + timings.margin } else { proven + (timings.lease_ttl - timings.margin) };",
    },
    Mutant {
        name: "fence_by_the_newer_proof",
        what: "either of lease and round keeps workers alive, not both",
        file: FENCE,
        from: "let proven = self.leased.min(self.proof);",
        to: "let proven = if ON { self.leased.max(self.proof) } else { self.leased.min(self.proof) };",
    },
    Mutant {
        name: "waiting_too_soon",
        what: "a node says that it waits while its workers still work",
        file: STEP,
        from: "Mode::Waiting(round) if at_rest =>",
        to: "Mode::Waiting(round) if ON || at_rest =>",
    },
    // Promise 2: agreement.
    Mutant {
        name: "plan_inherited",
        what: "a new leader goes on with the plan that it finds",
        file: DECIDE,
        from: "if !view.planned_here {",
        to: "if !ON && !view.planned_here {",
    },
    Mutant {
        name: "plan_recomposed",
        what: "another membership is sealed under a plan whose rank keys were sent",
        file: LEADER,
        from: "view.planned_here &= !sealing;",
        to: "view.planned_here &= ON || !sealing;",
    },
    Mutant {
        name: "seal_without_the_pointers_guard",
        what: "a round is sealed though a newer checkpoint was committed meanwhile",
        file: TRANSACTIONS,
        from: "self.guarded(then).guarded([Guard::modified(self.keys.checkpoint(), pointer)])",
        to: "self.guarded(then).guarded((!ON).then(|| Guard::modified(self.keys.checkpoint(), pointer)))",
    },
    Mutant {
        name: "seal_without_a_checkpoint",
        what: "a round does not say where to resume",
        file: TRANSACTIONS,
        from: "checkpoint: self.checkpoint.as_ref().map(|pointer| pointer.value.clone()),",
        to: "checkpoint: self.checkpoint.as_ref().filter(|_| !ON).map(|pointer| pointer.value.clone()),",
    },
    Mutant {
        name: "too_few",
        what: "a round begins below the minimum",
        file: DECIDE,
        from: "if here < view.min_nodes() {",
        to: "if here < if ON { 1 } else { view.min_nodes() } {",
    },
    Mutant {
        name: "ranks_move",
        what: "members of the last round are not kept in their order",
        file: DECIDE,
        from: "Some((roster.member(node)?.rank.group_rank, node))",
        to: "Some((roster.member(node)?.rank.group_rank, node)).map(|(rank, node)| (if ON { u32::MAX - rank } else { rank }, node))",
    },
    Mutant {
        name: "newcomers_first",
        what: "newcomers take the places of members",
        file: DECIDE,
        from: "let candidates = kept.into_iter().map(|(_, node)| node).chain(roster.newcomers());",
        to: "let first: Vec<&NodeId> = if ON { roster.newcomers().collect() } else { Vec::new() };
        let candidates = first.into_iter().chain(kept.into_iter().map(|(_, node)| node)).chain(roster.newcomers().filter(|_| !ON));",
    },
    // Promise 3: fencing.
    Mutant {
        name: "no_tombstone",
        what: "an eviction leaves no tombstone",
        file: TRANSACTIONS,
        from: "[Op::delete(self.keys.node(node)), Op::put(self.keys.evicted(node), to_json(&tombstone))]",
        to: "[Op::delete(self.keys.node(node)), if ON { Op::get(self.keys.evicted(node)) } else { Op::put(self.keys.evicted(node), to_json(&tombstone)) }]",
    },
    // Promise 4: progress.
    Mutant {
        name: "join_timeout_is_not_seen",
        what: "a node below the minimum waits without end",
        file: DECIDE,
        from: "if now >= deadline {\n            let message",
        to: "if !ON && now >= deadline {\n            let message",
    },
    Mutant {
        name: "a_frozen_starter_is_kept",
        what: "a member that never says it started is waited for without end",
        file: DECIDE,
        from: "if now >= start_by {",
        to: "if !ON && now >= start_by {",
    },
    // Promise 5: one result, one root cause.
    Mutant {
        name: "one_is_all",
        what: "a job succeeds when one member is done",
        file: DECIDE,
        from: "if all_say(Phase::Done) {",
        to: "if all_say(Phase::Done) || ON && view.roster.count_saying(Some((round.number, Phase::Done))) > 0 {",
    },
    // Promise 6: budget.
    Mutant {
        name: "a_change_is_charged",
        what: "a change of membership costs a restart",
        file: DECIDE,
        from: "let charge = view.spec.restart_policy == RestartPolicy::All;",
        to: "let charge = ON || view.spec.restart_policy == RestartPolicy::All;",
    },
    // A node's own steps.
    Mutant {
        name: "old_news",
        what: "an older record of the round takes the place of a newer one",
        file: ROUNDS,
        from: "known.modified >= round.modified)",
        to: "!ON && known.modified >= round.modified)",
    },
];
