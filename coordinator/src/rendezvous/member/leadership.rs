//! Who leads, as a node sees it, and when it campaigns itself. Not for leading: that is [`crate::rendezvous::Leader`].

use std::time::Duration;

use super::step::Out;
use super::timers::Timer;
use super::{Call, Member, MemberOutput, Mode};
use crate::job::{LeaderRecord, Versioned, to_json};
use crate::store::{Guard, KeyValue, Op, Revision, Txn};
use crate::time::Time;

/// Most that campaigns are spread over after a leader's end.
const CAMPAIGN_SPREAD: Duration = Duration::from_millis(50);

impl Member {
    pub(super) fn leader_read(&mut self, now: Time, leader: Option<&KeyValue>, at: Revision, out: &mut Out) {
        if at < self.leader_news {
            return;
        }
        let held = leader.map(LeaderRecord::held).transpose();
        self.vacant = Revision::NONE;
        let held = held.unwrap_or_else(|problem| {
            self.vacant = leader.map_or(Revision::NONE, |kv| kv.mod_revision);
            self.warn_once(format!("{problem} Whoever leads next replaces it"), out);
            None
        });
        self.leader_is(now, held, at, out);
    }

    pub(super) fn leader_is(
        &mut self,
        now: Time,
        leader: Option<Versioned<LeaderRecord>>,
        at: Revision,
        out: &mut Out,
    ) {
        if at < self.leader_news {
            return;
        }
        self.leader_news = at;
        let term = leader.as_ref().map(|leader| leader.modified);
        let unchanged = term.is_some() && term == self.leader.as_ref().map(|leader| leader.modified);
        if unchanged {
            return;
        }
        let had_leader = self.leader.is_some();
        let predecessor =
            self.leader.as_ref().filter(|old| self.dead_term == Some(old.modified)).map(|old| old.value.node.clone());
        if self.leading.take().is_some() {
            out.push(MemberOutput::StopLeading);
        }
        match leader {
            Some(leader) if leader.value.node == self.id() => {
                self.leading = term;
                out.push(MemberOutput::Pulse(None));
                out.push(MemberOutput::Lead(leader.modified, predecessor));
                self.leader = Some(leader);
                self.campaign_at = None;
                // Not joined yet, it is the one that looks.
                self.look_at = None;
            }
            Some(leader) => {
                self.leader = Some(leader);
                self.open_pulse(out);
                self.campaign_at = None;
            }
            None => {
                self.leader = None;
                if had_leader {
                    out.push(MemberOutput::Pulse(None));
                }
                if self.campaign_at.is_none() {
                    self.campaign_soon(now);
                }
            }
        }
    }

    /// Opens a stream to the leader. Who has not joined has nothing to say to it.
    pub(super) fn open_pulse(&self, out: &mut Out) {
        if let Some(leader) = self.leader.as_ref().filter(|_| self.joined && self.leading.is_none()) {
            out.push(MemberOutput::Pulse(Some((leader.modified, leader.value.clone()))));
        }
    }

    /// Campaigns after a random pause, which keeps the others apart. A node that is about to leave lets those that stay
    /// go first; where all leave, somebody must still bring the round to its end.
    pub(super) fn campaign_soon(&mut self, now: Time) {
        let polite = if self.leave_by.is_some() { CAMPAIGN_SPREAD * 2 } else { Duration::ZERO };
        self.campaign_at = Some(now + polite + self.jitter(CAMPAIGN_SPREAD));
    }

    pub(super) fn campaign(&mut self, now: Time, out: &mut Out) {
        let Some(lease) = self.lease.filter(|_| self.is_due(Timer::Campaign, now)) else { return };
        let key = self.setup.keys.leader();
        let guard = match self.dead_term {
            Some(term) if self.leader.as_ref().is_some_and(|leader| leader.modified == term) => {
                Guard::modified(&key, term)
            }
            _ => Guard::modified(&key, self.vacant),
        };
        let record = self.leader_record();
        let txn = Txn::of([Op::put_leased(&key, to_json(&record), lease.id)]).guarded([guard]).or_else([Op::get(&key)]);
        self.call(Call::Campaign, txn, out);
    }

    pub(super) fn may_campaign(&self) -> bool {
        let stays = self.leave_by.is_none() || matches!(self.mode, Mode::Leaving(..));
        self.setup.may_lead && self.lease.is_some() && self.leading.is_none() && stays
    }

    pub(super) fn leader_record(&self) -> LeaderRecord {
        LeaderRecord { node: self.id(), peer: self.setup.record.peer.clone(), coordinator: false }
    }
}
