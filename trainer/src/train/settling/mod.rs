//! How ranks with sharded numbers come to one state, step by step, and put a whole one together. What moves is decided
//! in `shards`.

#[cfg(test)]
mod tests;

use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::Group;
use tracing::{info, warn};

use super::held::{Held, Holding};
use super::shards::{self, Plan, Sharding, Told};
use super::{QUIESCE, Run, TrainError, Trainer, keeper};
use crate::engine::owners::Share;
use crate::engine::state::Places;
use crate::model::Model;

/// How often a rank looks whether its agent has said that a round forms.
const TURN: Duration = Duration::from_millis(1);

impl<M: Model> Held<'_, M> {
    /// Whether the optimizer's numbers of some parameters are elsewhere.
    pub(super) fn is_cut(&self) -> bool {
        // In a world of two, each owns everything.
        self.sharding.as_ref().is_some_and(|sharding| !sharding.shares.iter().any(|share| share.world_size <= 2))
    }

    /// Has all ranks hold the same state, each its part: the step, and how many lacked something. What this rank holds
    /// counts if `counts` says so.
    pub(super) fn settle(
        &mut self,
        run: &Run<'_, M>,
        group: &mut Group,
        counts: bool,
    ) -> Result<(u64, usize), TrainError> {
        let Some(Sharding { cut, shares, fresh, .. }) = self.sharding.clone() else { return Ok((self.state.step, 0)) };
        let rank = group.rank() as usize;
        let step = Some(self.state.step).filter(|_| counts && self.holds());
        let own = Told { step, summed: self.engine.summed(), shares, fresh, last: self.last };
        let mut told: Vec<Told> = group.gather(own.words())?.iter().map(Told::heard).collect();
        let Some(step) = shards::furthest(&told, cut) else {
            self.holding = Holding::Nothing;
            return Err(shards::lost(&told));
        };
        if let Some(lost) = told.iter().filter_map(|told| told.step).max().filter(|furthest| *furthest > step)
            && rank == 0
        {
            warn!("{}; training continues after step {step}", shards::gone(lost));
        }
        if told[rank].step != Some(step) && told[rank].reaches(step) {
            info!(step, "does a step that a peer has done");
            self.move_owned(run)?;
        }
        told.iter_mut().for_each(|told| told.settle(step));
        let own = self.sharding.iter().filter_map(|sharding| sharding.shares.first()).next();
        let own = own.filter(|_| told[rank].step.is_some());
        let sums = group.gather(own.map_or([0; 3], |share| shards::checksums(&self.state, cut, *share)))?;
        let right = shards::right(&told, &sums, step, rank)?;
        let plan = Plan::to_reshard(&told, &right, cut).map_err(|_| shards::split(step, &sums))?;
        let world_size = group.world_size();
        let in_place = |(told, rank): (&Told, u32)| told.shares == [Share { world_size, rank }];
        if !plan.is_empty() || !told.iter().zip(0..).all(in_place) {
            self.reshard(group, &plan, (step, &told, &right))?;
        }
        Ok((step, plan.receivers()))
    }

    /// Does the step whose sums are here with what this rank owns.
    pub(super) fn move_owned(&mut self, run: &Run<'_, M>) -> Result<(), TrainError> {
        let along = run.along(self.state.step, self.skipped);
        self.engine.advance(&mut self.state, &along)?;
        let alone = !self.is_cut();
        self.sharding.iter_mut().for_each(|sharding| sharding.fresh = alone);
        Ok(())
    }

    /// Has all ranks hold the parameters that their owners have moved.
    pub(super) fn gather(&mut self, group: &mut Group) -> Result<(), TrainError> {
        self.engine.gather(&mut self.state, group)?;
        self.sharding.iter_mut().for_each(|sharding| sharding.fresh = true);
        Ok(())
    }

    fn reshard(
        &mut self,
        group: &mut Group,
        plan: &Plan,
        (step, told, right): (u64, &[Told], &[bool]),
    ) -> Result<(), TrainError> {
        let Some(Sharding { cut, .. }) = self.sharding else { return Ok(()) };
        let rank = group.rank() as usize;
        let own = Share { world_size: group.world_size(), rank: group.rank() };
        let all = vec![true; told.len()];
        if plan.is_empty() {
            // All have theirs, which may never have been compared.
            let sums = group.gather(shards::checksums(&self.state, cut, own))?;
            self.compare(&sums, &all, step)?;
        } else {
            let before = if right[rank] { told[rank].shares.clone() } else { Vec::new() };
            self.take_in(group, plan, step, (before, own), &all)?;
        }
        // Of two ranks that hold the step, one may have loaded it. Only one that did it knows how it was done.
        let last = told.iter().zip(right).filter(|(_, right)| **right).find_map(|(told, _)| told.last);
        self.last = self.last.filter(|_| told[rank].last.is_some()).or(last);
        let Some(sharding) = &mut self.sharding else { return Ok(()) };
        if sharding.shares != [own] {
            sharding.shares = vec![own];
            self.state = self.state.owning(sharding.cut.owned(&[own]));
            // Sums of a step that was not done are of other parts.
            self.engine.take(&self.state)?;
        }
        Ok(())
    }

    /// Carries a plan out, after which new shares are here too. Compares those of the ranks that `stay`. Returns when all
    /// ranks have theirs.
    fn take_in(
        &mut self,
        group: &mut Group,
        plan: &Plan,
        step: u64,
        (shares, new): (Vec<Share>, Share),
        stay: &[bool],
    ) -> Result<(), TrainError> {
        let Some(Sharding { cut, .. }) = self.sharding else { return Ok(()) };
        let shares = shards::with(shares, new);
        let mut state = self.state.owning(cut.owned(&shares));
        let places = state.places().clone();
        plan.carry_out(group, &self.state, (&mut state.flat, &places))?;
        state.step = step;
        let sums = group.gather(shards::checksums(&state, cut, new));
        if let Ok(sums) = &sums {
            self.compare(sums, stay, step)?;
        }
        // Where this rank does not know, its peers may: these keep nothing else.
        self.engine.take(&state)?;
        (self.state, self.holding) = (state, Holding::Reached);
        self.sharding.iter_mut().for_each(|sharding| (sharding.shares, sharding.fresh) = (shares.clone(), true));
        Ok(sums.map(drop)?)
    }

    /// Compares the ranks' checksums of new shares. Where they differ, each keeps what was compared before.
    fn compare(&mut self, sums: &[[u64; 3]], stay: &[bool], step: u64) -> Result<(), TrainError> {
        let theirs: Vec<[u64; 3]> = sums.iter().zip(stay).filter(|(_, stays)| **stays).map(|(sums, _)| *sums).collect();
        if shards::agree(&theirs) {
            return Ok(());
        }
        if let Some(sharding) = self.sharding.as_mut().filter(|sharding| sharding.shares.len() > 1) {
            sharding.shares.truncate(1);
            self.state = self.state.owning(sharding.cut.owned(&sharding.shares));
        }
        Err(TrainError::Damaged { step })
    }

    /// Has those ranks that stay own everything, before the others leave for good.
    fn hand_over(&mut self, group: &mut Group, stay: &[bool]) -> Result<(), TrainError> {
        let Some(Sharding { cut, .. }) = self.sharding else { return Ok(()) };
        let world_size = stay.iter().filter(|stays| **stays).count() as u32;
        let Some(plan) = Plan::to_hand_over(stay, cut).filter(|plan| !plan.is_empty()) else { return Ok(()) };
        let own = Share { world_size: group.world_size(), rank: group.rank() };
        let later = shards::places_of(stay)[own.rank as usize].map_or(own, |rank| Share { world_size, rank });
        self.take_in(group, &plan, self.state.step, (vec![own], later), stay)
    }

    /// Puts whole states together on the ranks that have room for one, from what all ranks own.
    pub(super) fn assemble(&self, group: &mut Group, into: Option<&mut [f32]>) -> Result<(), TrainError> {
        let Some(Sharding { cut, .. }) = self.sharding else { return Ok(()) };
        let wants: Vec<bool> = group.gather([u64::from(into.is_some())])?.iter().map(|[wants]| *wants > 0).collect();
        let plan = Plan::to_assemble(&wants, cut);
        let places = Places::whole(cut.parameters);
        let into = into.map_or(&mut [][..], |into| {
            self.state.copy_to(into, &places);
            into
        });
        Ok(plan.carry_out(group, &self.state, (into, &places))?)
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Puts the present state, which is cut, together for rank 0's last save, while there are peers.
    pub(super) fn keep_last(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let Trainer { run, held, keeper, membership, .. } = self;
        let reserved = keeper.saving().and_then(|saving| saving.reserve_last(held.state.step));
        let mut copying = keeper.assemble(run, &membership.config, held, group, reserved)?;
        // A rank that ends before rank 0 has its part would take it away.
        let all_there = keeper::during(copying.as_mut(), &[], || group.barrier());
        keeper.end_copy(copying)?;
        Ok(all_there?)
    }

    /// Where ranks leave for good after this step, leaves the state to the others, and to rank 0's last save.
    pub(super) fn hand_over(&mut self, group: &mut Group, votes: u32) -> Result<(), TrainError> {
        if !self.held.is_cut() {
            return Ok(());
        }
        let leaves = self.leaves(votes)?;
        let stay: Vec<bool> = group.gather([u64::from(leaves)])?.iter().map(|[leaves]| *leaves == 0).collect();
        if stay.iter().all(|stays| *stays) {
            return Ok(());
        }
        self.held.hand_over(group, &stay)?;
        self.keep_last(group)
    }

    /// Whether this rank leaves for good, where the ranks have voted to end the round. An agent says that its node
    /// drains before it says that a round forms. So if one forms, this waits until its own agent has said that too.
    fn leaves(&mut self, votes: u32) -> Result<bool, TrainError> {
        let deadline = Instant::now() + self.run.settings.peer_timeout / 2;
        while votes & QUIESCE != 0
            && self.membership.forming().is_none()
            && !self.membership.is_to_leave()
            && Instant::now() < deadline
        {
            thread::sleep(TURN);
        }
        self.hear()?;
        Ok(self.membership.drains || self.membership.is_to_leave())
    }
}
