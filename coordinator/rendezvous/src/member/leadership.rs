//! Who leads, as a node sees it, and when it campaigns itself. Leading itself is in [`crate::Leader`].

use std::time::Duration;

use super::super::view::Former;
use super::step::{LONGEST, Out};
use super::timers::Timer;
use super::{Call, Leave, Member, MemberOutput, Mode};
use crate::job::{LeaderRecord, Versioned, to_json};
use crate::kv::{Guard, KeyValue, Op, Revision, Txn};
use crate::time::Time;

/// Least and most that campaigns are spread over after a leader's end, and how much it is for each member: about one
/// campaigns each millisecond, whatever their number, until all have heard of the first. Before there are members, a slow
/// store is the sign of many nodes.
const LEAST_SPREAD: Duration = Duration::from_millis(50);
const MOST_SPREAD: Duration = Duration::from_secs(2);
const SPREAD_FOR_EACH: Duration = Duration::from_millis(1);

fn campaign_spread(members: u32, answered_in: Duration) -> Duration {
    let sign = if members == 0 { answered_in } else { SPREAD_FOR_EACH * members };
    sign.clamp(LEAST_SPREAD, MOST_SPREAD)
}

/// Who leads, as far as this node knows.
#[derive(Debug, Clone, Default)]
pub(super) struct Leadership {
    pub(super) leader: Option<Versioned<LeaderRecord>>,
    /// The term that this node leads in.
    pub(super) own_term: Option<Revision>,
    /// The term of the leader that a stream was opened to last.
    pulsed: Option<Revision>,
    /// The revision up to which news of the leader are known.
    news: Revision,
    /// The mod revision of a `leader` record that no one holds: the node that campaigns writes over it.
    /// [`Revision::NONE`]: no such record is there.
    vacant: Revision,
    /// The leader's key is gone, which this node has not acted on: see [`Member::leader_is`].
    gone: bool,
    /// The term of a leader whose death is confirmed.
    pub(super) dead_term: Option<Revision>,
    /// Who led last, of those that lead no more.
    former: Option<Versioned<LeaderRecord>>,
    /// When a leader's word was last heard, from whichever leader.
    pub(super) heard: Time,
}

impl Leadership {
    /// Whether the leader is the one of this term.
    pub(super) fn is_of(&self, term: Revision) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.modified == term)
    }
}

impl Member {
    pub(super) fn leader_read(&mut self, now: Time, leader: Option<&KeyValue>, at: Revision, out: &mut Out) {
        if at < self.leadership.news {
            return;
        }
        let held = leader.map(LeaderRecord::held).transpose();
        self.leadership.vacant = Revision::NONE;
        let held = held.unwrap_or_else(|problem| {
            self.leadership.vacant = leader.map_or(Revision::NONE, |kv| kv.mod_revision);
            self.warn_once(format!("{problem} The next leader replaces it"), out);
            None
        });
        self.leader_is(now, held, at, out);
    }

    /// Takes in who leads. To a node that the store refuses, the end of the leader's key is news that may come late: what
    /// ended it may have been the same refusal, and the node could not campaign. So it follows on, or leads on, until
    /// another leads or the store lets it in. Its workers live no longer by that than the leader's word allows, which
    /// holds also where the leader itself does not know of its end.
    pub(super) fn leader_is(
        &mut self,
        now: Time,
        leader: Option<Versioned<LeaderRecord>>,
        at: Revision,
        out: &mut Out,
    ) {
        if at < self.leadership.news {
            return;
        }
        self.leadership.news = at;
        self.leadership.gone = leader.is_none() && self.refused && self.leadership.leader.is_some();
        if self.leadership.gone {
            return;
        }
        let term = leader.as_ref().map(|leader| leader.modified);
        let unchanged = term.is_some() && term == self.leadership.leader.as_ref().map(|leader| leader.modified);
        if unchanged {
            return;
        }
        let had_leader = self.leadership.leader.is_some();
        if let Some(former) = self.leadership.leader.take() {
            self.leadership.former = Some(former);
        }
        if self.leadership.own_term.take().is_some() {
            out.push(MemberOutput::StopLeading);
        }
        match leader {
            Some(leader) if leader.value.node == self.id() => {
                self.leadership.own_term = term;
                out.push(MemberOutput::Pulse(None));
                out.push(MemberOutput::Lead(leader.modified, self.former_leader()));
                self.leadership.leader = Some(leader);
                self.timers.stop(Timer::Campaign);
                // Not joined yet, it is the one that looks.
                self.timers.stop(Timer::Look);
            }
            Some(leader) => {
                self.leadership.leader = Some(leader);
                self.open_pulse(out);
                self.timers.stop(Timer::Campaign);
            }
            None => {
                if had_leader {
                    out.push(MemberOutput::Pulse(None));
                }
                if self.timers.get(Timer::Campaign).is_none() {
                    self.campaign_soon(now);
                }
            }
        }
    }

    /// The store takes what this node writes: what it has not acted on meanwhile, it does now.
    pub(super) fn let_in(&mut self, now: Time, out: &mut Out) {
        self.refused = false;
        if self.leadership.gone {
            self.leader_is(now, None, self.leadership.news, out);
        }
    }

    /// The leader before this node, as it knew it. A store that lost all leases at once lost this node's too: so what has
    /// ended since its own lease began has ended by itself.
    fn former_leader(&self) -> Option<Former> {
        let former = self.leadership.former.as_ref().filter(|former| former.value.node != self.id())?;
        Some(Former {
            node: former.value.node.clone(),
            dead: self.leadership.dead_term == Some(former.modified),
            silent_since: self.leadership.heard.max(self.granted),
        })
    }

    /// Opens a stream to the leader, once. A newcomer waits until its key is written: a leader turns away who is not in
    /// the store, and thousands that come back again and again leave it no time for others.
    pub(super) fn open_pulse(&mut self, out: &mut Out) {
        let unknown = self.own.created().is_none() && matches!(self.mode, Mode::Joining | Mode::Waiting(None));
        let Some(leader) = self.leadership.leader.as_ref() else { return };
        let term = Some(leader.modified);
        if !unknown && self.leadership.own_term.is_none() && self.leadership.pulsed != term {
            self.leadership.pulsed = term;
            out.push(MemberOutput::Pulse(Some((leader.modified, leader.value.clone()))));
        }
    }

    /// Campaigns after a random pause, which keeps the others apart. Three kinds of node let others go first. A node that
    /// is about to leave: where all leave, somebody must still bring the round to its end. One without a place: a member
    /// knows when it heard the leader last. And a leader that resigned, since the store refuses what it writes: for
    /// longer than a slow store takes to answer another node.
    pub(super) fn campaign_soon(&mut self, now: Time) {
        let members = self.round.as_ref().and_then(|round| round.value.sealed).map_or(0, |sealed| sealed.nodes);
        let spread = campaign_spread(members, self.answered_in);
        let placeless = members > 0 && matches!(self.mode, Mode::Joining | Mode::Waiting(None) | Mode::WarmingUp(_));
        let polite = self.leave != Leave::No || placeless;
        let first = spread * 2 * u32::from(polite) + LONGEST * u32::from(self.has_resigned(now));
        let pause = first + self.jitter(spread);
        self.timers.set(Timer::Campaign, now + pause);
    }

    /// Whether it led last, and its key was deleted: its lease has time left, so the key did not end with it.
    fn has_resigned(&self, now: Time) -> bool {
        let led = self.leadership.former.as_ref().is_some_and(|former| former.value.node == self.id());
        led && self.leadership.leader.is_none() && now.since(self.renewed) < self.spec.timings.lease_ttl
    }

    pub(super) fn campaign(&mut self, now: Time, out: &mut Out) {
        let Some(lease) = self.lease.id().filter(|_| self.is_due(Timer::Campaign, now)) else { return };
        let key = self.setup.keys.leader();
        let guard = match self.leadership.dead_term {
            Some(term) if self.leadership.is_of(term) => Guard::modified(&key, term),
            _ => Guard::modified(&key, self.leadership.vacant),
        };
        let record = self.leader_record();
        let txn = Txn::of([Op::put_leased(&key, to_json(&record), lease)]).guarded([guard]).or_else([Op::get(&key)]);
        self.call(Call::Campaign, txn, out);
    }

    pub(super) fn may_campaign(&self) -> bool {
        let stays = self.leave == Leave::No || matches!(self.mode, Mode::Leaving(..));
        self.setup.may_lead && self.lease.id().is_some() && self.leadership.own_term.is_none() && stays
    }

    pub(super) fn leader_record(&self) -> LeaderRecord {
        LeaderRecord::new(self.id(), self.setup.record.peer.clone(), false)
    }
}
