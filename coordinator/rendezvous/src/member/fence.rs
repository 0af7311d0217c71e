//! How long a node's workers may live: the fence point. The guard kills them then, even if the agent is frozen.
//!
//! Two proofs age: that the lease lives (its last renewal) and that the round is still the current one (a leader's word
//! or a read). Workers end before the lease's time to live has passed since the older of them was *sent*, so that
//! anyone who waits that long after an eviction finds them gone. Where the store is away, the leader's word that it
//! hears every member of the round takes their place, up to the takeover delay: no one else can then have formed a
//! round that keeps one of them.

use super::{Member, Workers};
use crate::job::{OnStoreLoss, Spec};
use crate::time::Time;

/// When each proof was last made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Proofs {
    /// When the newest lease that the own key has hung on was last known to be good; stays when that lease is lost.
    pub(super) leased: Time,
    /// When the round was last proven to be current.
    pub(super) round: Time,
    /// When the leader last vouched that all members were heard.
    pub(super) held: Time,
}

impl Proofs {
    /// Until when workers may live.
    fn fence_point(&self, spec: &Spec) -> Time {
        let timings = &spec.timings;
        // mutant fence_by_the_newer_proof: self.leased.min(self.round) => self.leased.max(self.round)
        let proven = self.leased.min(self.round);
        // mutant fence_after_the_lease: timings.lease_ttl - timings.margin => timings.lease_ttl + timings.margin
        let by_proof = proven + (timings.lease_ttl - timings.margin);
        if spec.on_store_loss == OnStoreLoss::Fence {
            return by_proof;
        }
        let by_leader = self.held + (timings.lease_ttl - timings.margin);
        let at_most = proven + timings.takeover_delay.saturating_sub(timings.margin);
        // mutant held_for_ever: by_leader.min(at_most) => by_leader
        by_proof.max(by_leader.min(at_most))
    }
}

impl Member {
    /// When this node's workers must be gone, if it has any that have had a place.
    pub(super) fn fence_point(&self) -> Option<Time> {
        (!matches!(self.workers, Workers::None | Workers::Dismissed)).then(|| self.proofs.fence_point(&self.spec))
    }

    /// Whether workers started now would have time to live.
    pub(super) fn may_start(&self, now: Time) -> bool {
        let timings = &self.spec.timings;
        now + timings.margin < self.proofs.leased.min(self.proofs.round) + (timings.lease_ttl - timings.margin)
    }
}
