//! The ways out: telling the others, stopping the workers, making room.

use super::{Call, Ending, Mode, NOTICE, Output, Participant, Swap, VersionRank, Workers, torchruns};
use crate::etcd_v2::{Only, Request};
use crate::exchange;
use crate::state::{JobEnd, RendezvousState, RendezvousStatus};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Command, End};

impl Participant {
    /// Begins to end like this. The first end counts.
    pub(super) fn end(&mut self, now: Time, end: End, close: Option<JobEnd>) {
        let place = match std::mem::replace(&mut self.mode, Mode::Over) {
            mode @ (Mode::Ending(_) | Mode::Over) => {
                self.mode = mode;
                return;
            }
            Mode::Joined(place, _) => Some((place, 0)),
            Mode::Member(place, size, _) => Some((place, size)),
            Mode::Opening(_) | Mode::Seeking | Mode::Making(..) => self.key.as_ref().map(|key| (key.place.clone(), 0)),
        };
        // Who has ended well, or closed the rendezvous, leaves no one who would need the room.
        let makes_room = !matches!(end, End::Succeeded | End::StoreLost(_)) && close.is_none();
        let timings = self.setup.spec.timings;
        let grace = if end == End::Drained { timings.drain_grace } else { timings.stop_grace };
        self.mode = Mode::Ending(Box::new(Ending { end, place, close, makes_room, by: None }));
        self.retry_at = now;
        self.wake_at(now);
        self.stop(grace);
        self.fence(now);
    }

    pub(super) fn drain(&mut self, now: Time) {
        if !matches!(self.mode, Mode::Ending(_)) {
            self.put(Command::Leaving(self.setup.spec.timings.drain_grace));
            return self.end(now, End::Drained, None);
        }
        // Asked again.
        match self.workers {
            Workers::None => self.over(),
            _ => self.put(Command::Kill),
        }
    }

    pub(super) fn over(&mut self) {
        if let Mode::Ending(ending) = std::mem::replace(&mut self.mode, Mode::Over) {
            self.put(Output::End(ending.end));
        }
    }

    pub(super) fn drop_key(&mut self, place: VersionRank) {
        let key = self.setup.paths.rank(&place.version, place.rank);
        self.ask(Call::DropKey(place), Request::Delete { key, only: Only::Always });
    }

    /// The next request of a node on its way out, or its end.
    pub(super) fn leave(&mut self, now: Time, ending: &Ending) {
        let state = self.view.active().flatten().map(|active| active.state.clone());
        let lost = matches!(ending.end, End::StoreLost(_));
        let asked = match state {
            Some(state) if !lost => self.tell_the_others(now, ending, &state),
            _ => false,
        };
        if !asked && self.workers == Workers::None {
            self.over();
        }
    }

    /// Whether there is something left to tell, or to wait for.
    fn tell_the_others(&mut self, now: Time, ending: &Ending, state: &RendezvousState) -> bool {
        if let Some(close) = ending.close.as_ref().filter(|_| state.status != RendezvousStatus::Closed) {
            self.swap(Swap::Close, &state.clone().closed(close.clone()), None);
            return true;
        }
        let Some((place, _)) = ending.place.as_ref().filter(|_| ending.makes_room) else { return false };
        if state.version.as_ref() != Some(&place.version) {
            return false;
        }
        match state.status {
            // No one can take its rank, so the version is made again.
            RendezvousStatus::Joinable | RendezvousStatus::Frozen => self.free(),
            RendezvousStatus::Final => return self.leave_group(now, place, state),
            RendezvousStatus::Setup | RendezvousStatus::Closed => return false,
        }
        true
    }

    fn leave_group(&mut self, now: Time, place: &VersionRank, state: &RendezvousState) -> bool {
        let Some(files) = self.view.files(&place.version).cloned() else {
            self.read_files(&place.version);
            return true;
        };
        // Others may wait for its part.
        if let Some(told) = exchange::to_tell(&files, self.own(place.rank), state.size()) {
            self.tell(place, told);
            return true;
        }
        if state.waits() == 0 {
            let next = state.clone().awaited_by(&self.id);
            self.swap(Swap::Announce, &next, None);
            return true;
        }
        if self.workers != Workers::None {
            return true;
        }
        let since = self.waits_since.as_ref().map_or(now, |(_, since)| *since);
        if torchruns(state).any(|rank| files.has_rank(rank)) && !self.is_time(now, since + NOTICE) {
            return true;
        }
        let gives_back = self.key.is_some();
        if gives_back {
            self.drop_key(place.clone());
        }
        gives_back
    }
}
