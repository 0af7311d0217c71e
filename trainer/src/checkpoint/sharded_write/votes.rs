//! When all shares of a checkpoint are durable, and what follows if one never is. Each writer decides it by the votes
//! that travel with every step's sum.
//!
//! ```text
//! rank 0      wants one ── BEGIN ─▶ all writers copy that step's state, and write a share of it each
//! each        PENDING while its disk is busy with its share; FAILED if that cannot be
//! rank 0      no rank is PENDING: completes it     FAILED, or too late: writes all of it itself
//! ```
//!
//! All hear the same votes of the same step. A share that was given up may be written for as long as its disk likes: no
//! other is begun before.

use std::time::Duration;

/// The vote that begins a checkpoint: of the state that this step's sum leads to.
pub(crate) const BEGIN: u32 = 4;
/// The vote of a writer whose disk is busy with its share.
const PENDING: u32 = 8;
/// The vote of a writer that cannot write its share.
const FAILED: u32 = 16;

/// How long the slowest writer may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What one writer knows of the checkpoints of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShareVotes {
    /// Whether it is rank 0.
    leads: bool,
    /// Rank 0 wants one as soon as one can begin.
    wanted: bool,
    /// When the checkpoint that is under way was begun.
    begun: Option<Duration>,
    own: Own,
    /// Some writer's disk was busy at the last step.
    busy: bool,
}

/// What a writer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Own {
    Nothing,
    /// Its share is being written; perhaps of a checkpoint that is over.
    Writing,
    Durable,
    Failed,
}

/// What follows from a step's votes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    Nothing,
    /// The state that this step led to is to be copied, and this writer's share of it written.
    Begin,
    /// Rank 0: all shares are durable.
    Complete,
    /// Rank 0: it writes the whole of it.
    Alone,
}

impl ShareVotes {
    /// No checkpoint is under way.
    pub(super) fn new(leads: bool) -> ShareVotes {
        ShareVotes { leads, wanted: false, begun: None, own: Own::Nothing, busy: false }
    }

    /// Rank 0: a checkpoint is due. Whether it must write that one alone, since a disk is still busy with a share that
    /// was given up; else one begins as soon as it can.
    pub(super) fn want(&mut self) -> bool {
        let alone = self.busy && self.begun.is_none();
        self.wanted |= !alone;
        alone
    }

    /// Its vote in the next sum.
    pub(super) fn vote(&self) -> u32 {
        match self.own {
            Own::Writing => PENDING,
            Own::Failed => FAILED,
            Own::Nothing if self.leads && self.wanted && self.begun.is_none() && !self.busy => BEGIN,
            Own::Nothing | Own::Durable => 0,
        }
    }

    /// Its disk has finished its share: that is durable, or never will be.
    pub(super) fn wrote(&mut self, durable: bool) {
        if self.own == Own::Writing {
            self.own = match (self.begun, durable) {
                (None, _) => Own::Nothing,
                (Some(_), true) => Own::Durable,
                (Some(_), false) => Own::Failed,
            };
        }
    }

    /// Hears a step's votes, at a time `now` of any monotonic clock.
    pub(super) fn heard(&mut self, votes: u32, now: Duration) -> Next {
        self.busy = votes & PENDING != 0;
        if votes & BEGIN != 0 {
            (self.wanted, self.begun, self.own) = (false, Some(now), Own::Writing);
            return Next::Begin;
        }
        let Some(begun) = self.begun else { return Next::Nothing };
        let late = self.leads && now.saturating_sub(begun) >= LIMIT;
        let next = match (votes & FAILED != 0, votes & PENDING != 0) {
            (true, _) => Next::Alone,
            (false, false) => Next::Complete,
            (false, true) if late => Next::Alone,
            (false, true) => return Next::Nothing,
        };
        self.begun = None;
        if self.own != Own::Writing {
            self.own = Own::Nothing;
        }
        if self.leads { next } else { Next::Nothing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A leader whose checkpoint was begun at second 10, and whose own share is as it says.
    fn begun(durable: Option<bool>) -> ShareVotes {
        let mut leader = ShareVotes::new(true);
        assert!(!leader.want());
        assert_eq!(leader.vote(), BEGIN);
        assert_eq!(leader.heard(BEGIN, seconds(10)), Next::Begin);
        durable.into_iter().for_each(|durable| leader.wrote(durable));
        leader
    }

    #[test]
    fn what_follows_from_a_steps_votes() {
        for (durable, votes, now, vote, next) in [
            (None, PENDING, 11, PENDING, Next::Nothing),
            (None, PENDING, 69, PENDING, Next::Nothing),
            (None, PENDING, 70, PENDING, Next::Alone),
            (None, PENDING | FAILED, 11, PENDING, Next::Alone),
            (Some(true), PENDING, 11, 0, Next::Nothing),
            (Some(true), PENDING, 70, 0, Next::Alone),
            (Some(true), 0, 11, 0, Next::Complete),
            (Some(true), 0, 99, 0, Next::Complete),
            (Some(true), FAILED, 11, 0, Next::Alone),
            (Some(false), FAILED, 11, FAILED, Next::Alone),
        ] {
            let mut leader = begun(durable);
            assert_eq!((leader.vote(), leader.heard(votes, seconds(now))), (vote, next), "{durable:?} {votes} {now}");
            // What other writers do is to know that it is over.
            let mut other = ShareVotes { leads: false, ..begun(durable) };
            assert_eq!(other.heard(votes, seconds(now)), Next::Nothing);
            assert_eq!(other.begun.is_some(), votes == PENDING);
        }
    }

    #[test]
    fn while_a_disk_is_busy_with_what_was_given_up_rank_0_writes_alone() {
        let mut leader = begun(Some(true));
        assert!(!leader.want(), "the one under way may end well");
        assert_eq!(leader.heard(PENDING, seconds(70)), Next::Alone);
        assert!(leader.want());
        assert_eq!((leader.vote(), leader.heard(0, seconds(71))), (0, Next::Nothing));
        assert!(!leader.want());
        assert_eq!(leader.vote(), BEGIN);
    }

    /// A number below `bound` that depends on all of `key`.
    fn dice(key: [u64; 4], bound: u64) -> u64 {
        key.into_iter().fold(0, |sum, part| mix(sum ^ part)) % bound
    }

    /// A writer, and what its disk really does.
    struct Writer {
        shares: ShareVotes,
        /// The share that it is writing: the checkpoint, the step, and whether it will be durable.
        disk: Option<(u64, u64, bool)>,
        /// The checkpoints whose share of its own is durable.
        durable: Vec<u64>,
    }

    #[test]
    fn no_schedule_completes_what_is_not_durable_and_each_that_continues_saves() {
        for seed in 0..3000 {
            let roll = |what: u64, step: u64, writer: u64, bound: u64| dice([seed, what, step, writer], bound);
            let count = 1 + roll(0, 0, 0, 4);
            let writer = |number| Writer { shares: ShareVotes::new(number == 0), disk: None, durable: Vec::new() };
            let mut writers: Vec<Writer> = (0..count).map(writer).collect();
            let (mut now, mut saved, mut wanted, mut checkpoint) = (seconds(0), 0, 0, 0);
            let (every, faults_end) = (1 + roll(1, 0, 0, 9), 150);
            for step in 1..=400 {
                now += seconds(if roll(2, step, 0, 20) == 0 { roll(3, step, 0, 90) } else { 1 });
                if roll(4, step, 0, 60) == 0 && step < faults_end {
                    // A round changes: the survivors start again, whatever their disks do.
                    writers.iter_mut().for_each(|writer| writer.shares = ShareVotes::new(writer.shares.leads));
                    writers.iter_mut().for_each(|writer| writer.disk = None);
                    (saved, wanted) = (step, step);
                }
                if step % every == 0 && step < 300 {
                    wanted = step;
                    if writers[0].shares.want() {
                        saved = step;
                    }
                }
                let votes = writers.iter().map(|writer| writer.shares.vote()).fold(0, |all, vote| all | vote);
                let nexts: Vec<Next> = writers.iter_mut().map(|writer| writer.shares.heard(votes, now)).collect();
                let begins = nexts.iter().filter(|next| **next == Next::Begin).count();
                assert!(begins == 0 || begins == writers.len(), "seed {seed}, step {step}: {nexts:?}");
                match nexts[0] {
                    Next::Begin => {
                        checkpoint = step;
                        for (number, writer) in (0..).zip(&mut writers) {
                            assert!(writer.disk.is_none(), "seed {seed}, step {step}: writer {number} is busy");
                            let faulty = step < faults_end;
                            match roll(5, step, number, 12) {
                                0 if faulty => writer.shares.wrote(false), // It has no slot.
                                1 if faulty => writer.disk = Some((step, step + roll(6, step, number, 120), true)),
                                2 if faulty => writer.disk = Some((step, step + 2, false)),
                                _ => writer.disk = Some((step, step + roll(7, step, number, 5), true)),
                            }
                        }
                    }
                    Next::Complete => {
                        let whole = writers.iter().all(|writer| writer.durable.contains(&checkpoint));
                        assert!(whole, "seed {seed}, step {step}: step {checkpoint} is not whole");
                        saved = step;
                    }
                    Next::Alone => saved = step,
                    Next::Nothing => {}
                }
                for writer in &mut writers {
                    if let Some((of, _, durable)) = writer.disk.take_if(|(_, at, _)| *at <= step) {
                        writer.durable.extend(durable.then_some(of));
                        writer.shares.wrote(durable);
                    }
                }
            }
            assert!(saved >= wanted, "seed {seed}: wanted at {wanted}, saved last at {saved}");
            assert!(!writers[0].shares.wanted && writers[0].shares.begun.is_none(), "seed {seed}");
        }
    }
}
