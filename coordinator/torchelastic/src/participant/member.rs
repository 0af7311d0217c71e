//! What a member of a final version does: tells ranks, watches over the version, meets the others at the end.

use super::{Call, Mode, PATIENCE, Participant, Stage, VersionRank, torchruns};
use crate::etcd_v2::{Only, Request};
use crate::exchange::{self, Own};
use crate::keys::{kv_file, kv_value};
use crate::state::{JobEnd, RendezvousState, RendezvousStatus};
use crate::view::Files;
use elastic_rendezvous::End;
use elastic_rendezvous::time::Time;

/// Why a member has to leave its version.
pub(super) enum Trouble {
    Gone(String),
    /// Somebody waits for another one.
    Awaited(String),
    Dead(String),
}

impl Participant {
    /// Whether this node's version is over, as far as is known.
    pub(super) fn trouble(&mut self, now: Time) -> Option<Trouble> {
        let Mode::Member(place, ..) = &self.mode else { return None };
        let (version, own) = (place.version.clone(), place.rank);
        let Some(active) = self.view.active()? else {
            return Some(Trouble::Gone(format!("version {version} was given up")));
        };
        let state = &active.state;
        if state.version.as_ref() != Some(&version) {
            let other = state.version.as_deref().unwrap_or("another");
            return Some(Trouble::Gone(format!("version {version} was replaced by {other}")));
        }
        match state.waits() {
            _ if state.status != RendezvousStatus::Final => return None,
            0 => {}
            1 => return Some(Trouble::Awaited("a node waits to join, or to join again".into())),
            many => return Some(Trouble::Awaited(format!("{many} nodes wait to join, or to join again"))),
        }
        let dead: Vec<String> =
            self.dead(now).into_iter().filter(|rank| *rank != own).map(|rank| rank.to_string()).collect();
        (!dead.is_empty())
            .then(|| Trouble::Dead(format!("no sign of life from the node of group rank {}", dead.join(", "))))
    }

    /// What a member does at once, even while a request is on its way.
    pub(super) fn act_without_asking(&mut self, now: Time) {
        let Mode::Member(place, size, stage) = self.mode.clone() else { return };
        let Some(Some(state)) = self.view.active().map(|active| active.map(|active| active.state.clone())) else {
            if let (Some(Trouble::Gone(reason)), false) = (self.trouble(now), self.all_done(&place, size)) {
                self.seek(now, &reason, true);
            }
            return;
        };
        if state.status == RendezvousStatus::Closed && state.version.as_ref() == Some(&place.version) {
            return self.closed(now, &place, &state, &stage);
        }
        let trouble = self.trouble(now);
        match (stage, trouble) {
            (Stage::Blaming(failure, until), None) => {
                if self.is_time(now, until) {
                    if let Mode::Member(_, _, stage) = &mut self.mode {
                        *stage = Stage::Working;
                    }
                    self.failed(now, *failure);
                }
            }
            (_, None) => {}
            // Others wait for its part first.
            (Stage::Exchanging(_), Some(Trouble::Awaited(_) | Trouble::Dead(_))) => {}
            (Stage::Done { .. }, Some(_)) if self.all_done(&place, size) => {}
            // torchrun's agents do not come back from the exit barrier.
            (Stage::Done { .. }, Some(Trouble::Awaited(_) | Trouble::Dead(_)))
                if torchruns(&state).next().is_some() => {}
            (_, Some(Trouble::Gone(reason) | Trouble::Awaited(reason) | Trouble::Dead(reason))) => {
                self.seek(now, &reason, true);
            }
        }
    }

    fn all_done(&self, place: &VersionRank, size: u32) -> bool {
        self.view.files(&place.version).is_some_and(|files| exchange::all_done(files, size))
    }

    /// Somebody closed the rendezvous while this node is a member.
    fn closed(&mut self, now: Time, place: &VersionRank, state: &RendezvousState, stage: &Stage) {
        let Some(files) = self.view.files(&place.version) else { return };
        if exchange::all_done(files, state.size()) {
            return;
        }
        match &state.end {
            Some(end) if end.failed => {
                let end = End::Failed(end.cause.as_deref().cloned(), end.reason.clone());
                self.end(now, end, None);
            }
            Some(_) => {}
            None => {
                // One of torchrun's agents whose workers ended well waits for the others, but not for ever.
                let own = matches!(stage, Stage::Done { counted: Some(_), .. });
                if exchange::done(files, state.size()) <= u32::from(own) {
                    self.end(now, End::Failed(None, super::CLOSED_BY_TORCHRUN.into()), None);
                }
            }
        }
    }

    pub(super) fn member(&mut self, now: Time, place: &VersionRank, size: u32, stage: Stage) {
        let Some(files) = self.view.files(&place.version).cloned() else { return self.read_files(&place.version) };
        let is_final =
            matches!(self.view.active(), Some(Some(active)) if active.state.status == RendezvousStatus::Final);
        if is_final && self.key.is_some() && !files.has_rank(place.rank) {
            // It lapsed while etcd was away; no one has acted on it so far.
            return self.put_own_key(place);
        }
        match stage {
            Stage::Exchanging(since) => self.exchange(now, place, size, since, &files),
            Stage::Working | Stage::Blaming(..) => {}
            Stage::Done { counted, tried, since } => {
                self.meet_at_the_end(now, place, size, (counted, tried, since), &files)
            }
        }
    }

    /// What it brings to the version.
    pub(super) fn own(&self, rank: u32) -> Own<'_> {
        let record = &self.setup.record;
        let (master, identical) = (self.master.as_ref(), self.setup.identical);
        Own { role: &record.role, rank, slots: record.slots, master, identical }
    }

    fn exchange(&mut self, now: Time, place: &VersionRank, size: u32, since: Time, files: &Files) {
        let own = self.own(place.rank);
        if let Some(told) = exchange::to_tell(files, own, size) {
            return self.tell(place, told);
        }
        if let Some(rank) = exchange::speaks_old(files, place.rank) {
            if let Some(told) = exchange::to_tell_old(files, own) {
                // So that the others do not wait for this node's part, but start and then form a group without it.
                return self.tell(place, told);
            }
            return self.end(now, End::Refused(old_exchange(rank)), None);
        }
        let dead = self.dead(now);
        if !dead.is_empty() {
            if let Some(made_up) = exchange::to_fill_in(files, self.own(place.rank), size, &dead) {
                return self.make_up(place, made_up);
            }
            // Who lives may have to tell its part first, before the rest can be made up.
            let complete = exchange::is_complete(files, self.setup.identical, size);
            if complete || self.is_time(now, since + PATIENCE / 10) {
                self.seek(now, "a node died while ranks were exchanged", true);
            }
            return;
        }
        let seat = exchange::ranks(files, self.own(place.rank), size);
        let awaited = matches!(self.trouble(now), Some(Trouble::Awaited(_)));
        if awaited && (place.rank > 0 || seat.is_some()) {
            return self.seek(now, "a node came too late for this version", true);
        }
        if let Some(seat) = seat {
            self.mode = Mode::Member(place.clone(), size, Stage::Working);
            return self.start(place, seat, size);
        }
        if self.is_time(now, since + PATIENCE) {
            let silent: Vec<String> = exchange::silent(files, size).iter().map(ToString::to_string).collect();
            let reason = format!(
                "ranks were not told within {PATIENCE:?}: nothing was heard of the nodes of group rank {}; if \
                 TORCH_ELASTIC_WORKER_IDENTICAL=1 is set for any node, set it for all",
                silent.join(", ")
            );
            let close = JobEnd { failed: true, reason: reason.clone(), cause: None };
            self.end(now, End::Failed(None, reason), Some(close));
        }
    }

    pub(super) fn tell(&mut self, place: &VersionRank, told: (String, String)) {
        self.tell_if(place, told, Only::Always);
    }

    /// Tells what somebody else should have, unless somebody has.
    pub(super) fn make_up(&mut self, place: &VersionRank, told: (String, String)) {
        self.tell_if(place, told, Only::Absent);
    }

    fn tell_if(&mut self, place: &VersionRank, (key, value): (String, String), only: Only) {
        let (file, value) = (kv_file(&key), kv_value(&value));
        let key = format!("{}/{file}", self.setup.paths.version(&place.version));
        let request = Request::Put { key, value: value.clone(), ttl: None, only };
        self.ask(Call::Tell { version: place.version.clone(), file, value }, request);
    }

    /// torchrun's exit barrier: a counter, and a key by the node that counts last.
    fn meet_at_the_end(
        &mut self,
        now: Time,
        place: &VersionRank,
        size: u32,
        (counted, tried, since): (Option<u32>, Option<u32>, Time),
        files: &Files,
    ) {
        if exchange::all_done(files, size) {
            let close = JobEnd { failed: false, reason: "it succeeded".into(), cause: None };
            return self.end(now, End::Succeeded, Some(close));
        }
        if self.is_time(now, since + PATIENCE) {
            self.say(format!(
                "not all nodes ended within {PATIENCE:?} of this one; as torchrun does, it ends all the same"
            ));
            return self.end(now, End::Succeeded, None);
        }
        let mixed = matches!(self.view.active(), Some(Some(active)) if torchruns(&active.state).next().is_some());
        if !mixed {
            let mark = exchange::done_mark(place.rank);
            if files.kv_raw(&mark).is_none() {
                self.tell(place, (mark, exchange::IGNORED.into()));
            }
            return;
        }
        let so_far = exchange::done(files, size);
        match (counted, tried) {
            (Some(last), _) if last == size => self.tell(place, (exchange::ALL_DONE.into(), exchange::IGNORED.into())),
            (Some(_), _) => {}
            // The answer was lost, and somebody has counted that far.
            (None, Some(tried)) if so_far >= tried => {
                self.mode = Mode::Member(place.clone(), size, Stage::Done { counted: Some(tried), tried: None, since });
                self.wake_at(now);
            }
            (None, _) => {
                let number = so_far + 1;
                let file = kv_file(exchange::DONE_COUNT);
                let value = kv_value(&number.to_string());
                let only = files.kv_raw(exchange::DONE_COUNT).map_or(Only::Absent, |raw| Only::Value(raw.clone()));
                let key = format!("{}/{file}", self.setup.paths.version(&place.version));
                let stage = Stage::Done { counted: None, tried: Some(number), since };
                self.mode = Mode::Member(place.clone(), size, stage);
                let request = Request::Put { key, value: value.clone(), ttl: None, only };
                self.ask(Call::Count { version: place.version.clone(), number, value }, request);
            }
        }
    }
}

fn old_exchange(rank: u32) -> String {
    format!(
        "the node of group rank {rank} tells ranks as torchelastic 0.2.2 and early PyTorch did, which is not spoken \
         here: each side would wait for the other; bring that node to a PyTorch that tells them as 2.15 does, or to \
         elastic-agent"
    )
}
