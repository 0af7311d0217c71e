//! The faults. The build script puts them in.

/// One fault in one place.
pub struct Mutant {
    /// Its name, and its test's. A fault in two places is in the list twice.
    pub name: &'static str,
    /// What the machines no longer do, for people; empty at its second place.
    pub what: &'static str,
    /// The file under `rendezvous/`.
    pub file: &'static str,
    /// The text at the place. The file has it once.
    pub from: &'static str,
    /// The text that replaces it. `ON` is true while the mutant is switched on; without it the code must be as before.
    pub to: &'static str,
}

const LEADER: &str = "leader/mod.rs";
const TRANSACTIONS: &str = "leader/transactions.rs";
const DECIDE: &str = "decide/mod.rs";
const RUNNING: &str = "decide/running.rs";
const FORMING: &str = "decide/forming.rs";
const EXCLUSION: &str = "exclusion.rs";
const VIEW: &str = "view.rs";
const ROSTER: &str = "roster/mod.rs";
const STEP: &str = "member/step.rs";
const ROUNDS: &str = "member/rounds.rs";
const FENCE: &str = "member/fence.rs";
const JOIN: &str = "member/join.rs";
const LEASE: &str = "member/lease.rs";
const OWN_KEY: &str = "member/own_key.rs";
const LOAD: &str = "leader/load.rs";

/// All of them.
pub const MUTANTS: &[Mutant] = &[
    // Promise 1: one group at work.
    Mutant {
        name: "eviction_is_a_death",
        what: "an evicted node counts as gone at once",
        file: ROSTER,
        from: "evicted.fate == Fate::Unknown && !contact.dead",
        to: "!ON && evicted.fate == Fate::Unknown && !contact.dead",
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
        from: "former.is_some() || (member.started &&",
        to: "former.is_some() || ((ON || member.started) &&",
    },
    Mutant {
        name: "a_former_leader_is_past_its_fence",
        what: "a former leader counts as past its fence point however lately it was heard",
        file: VIEW,
        from: "Some(former.silent_since)",
        to: "Some(if ON { Time::ZERO } else { former.silent_since })",
    },
    Mutant {
        name: "a_successor_is_always_a_member",
        what: "a leader that is no member judges the leader before it as a member would",
        file: VIEW,
        from: "self.roster.has_own()",
        to: "(ON || self.roster.has_own())",
    },
    Mutant {
        name: "a_lease_counts_without_its_key",
        what: "a lease keeps workers alive though the node's key does not hang on it",
        file: LEASE,
        from: "|lease| self.own.hangs_on(lease)",
        to: "|lease| ON || self.own.hangs_on(lease)",
    },
    Mutant {
        name: "nobody_is_waited_for",
        what: "a round is sealed while members of the last one still stop",
        file: FORMING,
        from: "if !outstanding.is_empty() {",
        to: "if !ON && !outstanding.is_empty() {",
    },
    Mutant {
        name: "fence_after_the_lease",
        what: "the fence point lies a margin after the lease's end instead of before it",
        file: FENCE,
        from: "let by_proof = proven + (timings.lease_ttl - timings.margin);",
        to: "let by_proof = if ON { proven + timings.lease_ttl + timings.margin } \
             else { proven + (timings.lease_ttl - timings.margin) };",
    },
    Mutant {
        name: "fence_by_the_newer_proof",
        what: "either of lease and round keeps workers alive, not both",
        file: FENCE,
        from: "let proven = self.leased.min(self.round);",
        to: "let proven = if ON { self.leased.max(self.round) } else { self.leased.min(self.round) };",
    },
    Mutant {
        name: "waiting_too_soon",
        what: "a node says that it waits while its workers still work",
        file: STEP,
        from: "Mode::Waiting(round) if at_rest =>",
        to: "Mode::Waiting(round) if ON || at_rest =>",
    },
    Mutant {
        name: "generation_at_once",
        what: "a new generation waits for no node of the one before",
        file: JOIN,
        from: "return self.begin_generation(&round, round.value.sealed, out),",
        to: "return self.begin_generation(&round, round.value.sealed.filter(|_| !ON), out),",
    },
    Mutant {
        name: "count_before_streams",
        what: "a new leader counts silence before every member that stays follows it",
        file: VIEW,
        from: "Some(self.roster.all_opened()?.unwrap_or(Time::ZERO).max(self.elected))",
        to: "Some(if ON { self.elected } else { self.roster.all_opened()?.unwrap_or(Time::ZERO).max(self.elected) })",
    },
    Mutant {
        name: "word_without_age",
        what: "a leader's word proves the round as of now, however old the leader's own proof is",
        file: LEADER,
        from: "proof_age: now.since(self.proof?),",
        to: "proof_age: if ON { Duration::ZERO } else { now.since(self.proof?) },",
    },
    Mutant {
        name: "heard_from_receipt",
        what: "a leader vouches for a member from when its beat arrives, not from what the beat answers",
        file: ROSTER,
        from: "contact.echoed = old.echoed.max(echo);",
        to: "contact.echoed = old.echoed.max(if ON { Some(now) } else { echo });",
    },
    Mutant {
        name: "takeover_at_once",
        what: "where no node of the last round stays, the next one is sealed at once",
        file: FORMING,
        from: "let takes_over = keeps_nobody &&",
        to: "let takes_over = !ON && keeps_nobody &&",
    },
    Mutant {
        name: "held_for_ever",
        what: "a leader's word keeps workers alive beyond the takeover delay",
        file: FENCE,
        from: "by_leader.min(at_most)",
        to: "if ON { by_leader } else { by_leader.min(at_most) }",
    },
    Mutant {
        name: "proven_by_the_answer",
        what: "a renewal and a leader's word prove from when they come, not from when they were asked for",
        file: LEASE,
        from: "Ok(true) => {\n                self.renewed = self.renewed.max(sent);",
        to: "Ok(true) => {\n                self.renewed = self.renewed.max(if ON { now } else { sent });",
    },
    Mutant {
        name: "proven_by_the_answer",
        what: "",
        file: STEP,
        from: "self.proofs.round = self.proofs.round.max(sent.minus(word.proof_age));",
        to: "self.proofs.round = self.proofs.round.max(if ON { now } else { sent.minus(word.proof_age) });",
    },
    Mutant {
        name: "reclaimed_in_spite_of_a_tombstone",
        what: "an evicted node whose lease had lapsed makes its key again",
        file: OWN_KEY,
        from: "guards.push(Guard::absent(&self.tombstone));",
        to: "guards.extend((!ON).then(|| Guard::absent(&self.tombstone)));",
    },
    // Promise 2: agreement.
    Mutant {
        name: "news_forgotten",
        what: "a leader that reads the job again forgets what its watch said meanwhile",
        file: LOAD,
        from: "self.meanwhile.push(event.clone());",
        to: "self.meanwhile.extend((!ON).then(|| event.clone()));",
    },
    Mutant {
        name: "plan_inherited",
        what: "a new leader continues with the plan that it finds",
        file: FORMING,
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
        from: "written.guarded([Guard::modified(self.keys.checkpoint(), self.pointer)])",
        to: "written.guarded((!ON).then(|| Guard::modified(self.keys.checkpoint(), self.pointer)))",
    },
    Mutant {
        name: "seal_without_a_checkpoint",
        what: "a round does not say where to resume",
        file: TRANSACTIONS,
        from: "checkpoint: self.checkpoint.clone(),",
        to: "checkpoint: self.checkpoint.clone().filter(|_| !ON),",
    },
    Mutant {
        name: "too_few",
        what: "a round begins below the minimum",
        file: FORMING,
        from: "if here < view.min_nodes() {",
        to: "if here < if ON { 1 } else { view.min_nodes() } {",
    },
    Mutant {
        name: "ranks_move",
        what: "members of the last round are not kept in their order",
        file: FORMING,
        from: "Some((roster.member(node)?.rank.group_rank, node))",
        to: "Some((roster.member(node)?.rank.group_rank, node)) \
             .map(|(rank, node)| (if ON { u32::MAX - rank } else { rank }, node))",
    },
    Mutant {
        name: "newcomers_first",
        what: "newcomers take the places of members",
        file: FORMING,
        from: "let candidates = kept.into_iter().map(|(_, node)| node).chain(newcomers);",
        to: "let newcomers: Vec<&NodeId> = newcomers.collect();
        let first = if ON { newcomers.clone() } else { Vec::new() };
        let candidates = first.into_iter().chain(kept.into_iter().map(|(_, node)| node)).chain(newcomers.into_iter().filter(|_| !ON));",
    },
    // Promise 3: fencing.
    Mutant {
        name: "no_tombstone",
        what: "an eviction leaves no tombstone",
        file: TRANSACTIONS,
        from: "[Op::delete(self.keys.node(node)), Op::put(self.keys.evicted(node), to_json(&tombstone))]",
        to: "[Op::delete(self.keys.node(node)), if ON { Op::get(self.keys.evicted(node)) } \
             else { Op::put(self.keys.evicted(node), to_json(&tombstone)) }]",
    },
    // Promise 4: progress.
    Mutant {
        name: "join_timeout_is_not_seen",
        what: "a node below the minimum waits without end",
        file: FORMING,
        from: "if now >= deadline {\n            let message",
        to: "if !ON && now >= deadline {\n            let message",
    },
    Mutant {
        name: "a_frozen_starter_is_kept",
        what: "a member that never says it started is waited for without end",
        file: RUNNING,
        from: "if now >= start_by {",
        to: "if !ON && now >= start_by {",
    },
    Mutant {
        name: "blame_waits_for_ever",
        what: "a failure that blames a peer waits for every member's answer, without end",
        file: RUNNING,
        from: "now < answer_by && !all_answered_since",
        to: "(ON || now < answer_by) && !all_answered_since",
    },
    // Promise 5: one result, one root cause.
    Mutant {
        name: "weakest_cause",
        what: "of several causes the weakest counts",
        file: RUNNING,
        from: ".max_by_key(|reported| (reported.class, std::cmp::Reverse(reported.report)))",
        to: ".max_by_key(|reported| \
             (reported.class as u32 ^ if ON { 3 } else { 0 }, std::cmp::Reverse(reported.report)))",
    },
    Mutant {
        name: "blame_believed",
        what: "a failure that blames a peer is judged before its peers had their say",
        file: RUNNING,
        from: "let unjudged = blames_peer &&",
        to: "let unjudged = !ON && blames_peer &&",
    },
    Mutant {
        name: "one_is_all",
        what: "a job succeeds when one member is done",
        file: RUNNING,
        from: "if all_say(Phase::Done) {",
        to: "if all_say(Phase::Done) || ON && view.roster.count_saying(Some((round.number, Phase::Done))) > 0 {",
    },
    // Promise 6: budget.
    Mutant {
        name: "never_charged",
        what: "a failure costs no restart",
        file: RUNNING,
        from: "Form { charge: true, advance: Some(advance),",
        to: "Form { charge: !ON, advance: Some(advance),",
    },
    Mutant {
        name: "a_change_is_charged",
        what: "a change of membership costs a restart",
        file: RUNNING,
        from: "let charge = view.spec.restart_policy == RestartPolicy::All;",
        to: "let charge = ON || view.spec.restart_policy == RestartPolicy::All;",
    },
    Mutant {
        name: "a_pause_is_charged",
        what: "an operator's pause costs a restart",
        file: RUNNING,
        from: "return (next(false, Vec::new()), PAUSED.to_owned());",
        to: "return (next(ON, Vec::new()), PAUSED.to_owned());",
    },
    // A paused job.
    Mutant {
        name: "a_pause_is_over_at_once",
        what: "a round is sealed while the job is paused",
        file: FORMING,
        from: "if view.desired.paused {",
        to: "if !ON && view.desired.paused {",
    },
    Mutant {
        name: "a_pause_is_over_at_once",
        what: "",
        file: FORMING,
        from: "if round.paused {",
        to: "if !ON && round.paused {",
    },
    Mutant {
        name: "a_resume_is_not_seen",
        what: "a job that was paused stays so",
        file: DECIDE,
        from: "form.paused |= view.desired.paused;",
        to: "form.paused |= view.desired.paused || ON && view.round.value.paused;",
    },
    Mutant {
        name: "a_pause_lets_workers_rest",
        what: "workers that know about rounds quiesce for a pause, and stay",
        file: ROUNDS,
        from: "if round.paused && !matches!(self.mode, Mode::Leaving(..)) {",
        to: "if !ON && round.paused && !matches!(self.mode, Mode::Leaving(..)) {",
    },
    Mutant {
        name: "who_rests_is_not_paused",
        what: "workers that quiesced before a pause are not stopped by it",
        file: ROUNDS,
        from: "if round.paused && self.workers != Workers::None =>",
        to: "if !ON && round.paused && self.workers != Workers::None =>",
    },
    // Excluded nodes.
    Mutant {
        name: "the_operators_exclusion_is_not_seen",
        what: "a node that the operator excludes gets a place",
        file: FORMING,
        from: "out.extend(view.drained_nodes().chain(view.excluded_by_operator()).filter(wants));",
        to: "out.extend(view.drained_nodes().chain(view.excluded_by_operator().filter(|_| !ON)).filter(wants));",
    },
    Mutant {
        name: "the_excluded_always_take_part",
        what: "a node that is excluded for its failures gets a place though enough others are there",
        file: FORMING,
        from: "let needs_faulty = without_faulty.here < view.min_nodes()",
        to: "let needs_faulty = (ON || without_faulty.here < view.min_nodes())",
    },
    Mutant {
        name: "the_excluded_never_take_part",
        what: "a node that is excluded for its failures gets no place though the others are too few",
        file: FORMING,
        from: "if needs_faulty { candidates(view, out)",
        to: "if !ON && needs_faulty { candidates(view, out)",
    },
    Mutant {
        name: "excluded_one_failure_too_soon",
        what: "a node is excluded one failure too soon",
        file: EXCLUSION,
        from: "limit > 0 && before.saturating_add(1) >= limit",
        to: "limit > 0 && before.saturating_add(1) + u32::from(ON) >= limit",
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
