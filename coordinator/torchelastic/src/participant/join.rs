//! Finding a place: making a version or joining one, confirming it, and waiting while there is none.

use std::time::Duration;

use super::{
    Call, FROZEN_TTL, JOINABLE_TTL, LAST_CALL, Making, Mode, NEAR, NOTICE, Participant, RUN_TTL, SETUP_TTL, Stage,
    Swap, TORCHRUNS_LAST_CALL, VersionRank, Workers, torchruns,
};
use crate::etcd_v2::{Only, Request};
use crate::exchange;
use crate::state::{RendezvousState, RendezvousStatus};
use crate::view::Files;
use elastic_rendezvous::End;
use elastic_rendezvous::time::Time;

/// How often the node that waits for the last call refreshes its state: within half of the state's time to live.
const HOLD: Duration = Duration::from_secs(4);
/// As long as torchrun's sign of life lasts when no one refreshes it.
const TORCHRUN_TTL: Duration = Duration::from_secs(10);

impl Participant {
    /// The directories, as torchrun makes them, and before that a look for its other protocol.
    pub(super) fn open(&mut self, step: usize) {
        let paths = self.setup.paths.clone();
        if step == 0 {
            let key = paths.dynamic().to_owned();
            return self.ask(Call::Foreign, Request::Read { key, recursive: false });
        }
        let prefix = paths.prefix().map(|prefix| Request::MakeDir { key: prefix.to_owned(), ttl: None });
        let own = [
            Request::MakeDir { key: paths.run().to_owned(), ttl: Some(RUN_TTL) },
            Request::MakeDir { key: paths.rendezvous(), ttl: None },
            Request::Put { key: paths.counter(), value: "0".into(), ttl: None, only: Only::Absent },
        ];
        match prefix.into_iter().chain(own).nth(step - 1) {
            Some(request) => self.ask(Call::Open, request),
            None => self.mode = Mode::Seeking,
        }
        if self.mode == Mode::Seeking {
            // With the mode that has just begun.
            let key = paths.active();
            self.ask(Call::ReadActive, Request::Read { key, recursive: false });
        }
    }

    pub(super) fn find_place(&mut self, now: Time) {
        let Some(known) = self.view.active() else { return };
        let Some(state) = known.map(|active| active.state.clone()) else {
            self.takes_part = true;
            if self.workers == Workers::None {
                self.key = None;
                // Its own mark tells this setup from others', whatever becomes of the answer.
                let once = self.jitter(Duration::from_nanos(u64::MAX)).as_nanos();
                let mark = format!("{}/{once}", self.id);
                let value = RendezvousState::setup(&mark).text();
                let key = self.setup.paths.active();
                let request = Request::Put { key, value: value.clone(), ttl: Some(SETUP_TTL), only: Only::Absent };
                self.ask(Call::Setup(value), request);
            }
            return;
        };
        self.takes_part |= state.status != RendezvousStatus::Closed;
        let version = state.version.clone().unwrap_or_default();
        if self.key.as_ref().is_some_and(|key| key.place.version != version) && self.workers == Workers::None {
            self.key = None;
        }
        match state.status {
            RendezvousStatus::Setup
                if state.maker.as_ref().is_some_and(|maker| maker.starts_with(&format!("{}/", self.id))) =>
            {
                // Its own, and the answer was lost.
                let Some(raw) = self.view.active().flatten().map(|active| active.raw.clone()) else { return };
                self.mode = Mode::Making(raw.clone(), Making::Counter);
                self.make(&raw, Making::Counter);
            }
            RendezvousStatus::Setup => self.say("another node is making a version"),
            RendezvousStatus::Joinable | RendezvousStatus::Frozen if state.rank_of(&self.id).is_some() => {
                // It had joined, and the answer was lost.
                let rank = state.rank_of(&self.id).unwrap_or_default();
                let place = VersionRank { version, rank };
                self.mode = Mode::Joined(place.clone(), now);
                self.joined(now, &place, now);
            }
            RendezvousStatus::Joinable => self.join(&state),
            RendezvousStatus::Frozen => {
                self.say(format!("version {version} is being formed without this node; waiting"))
            }
            RendezvousStatus::Final => self.wait_in_line(now, &state, &version),
            RendezvousStatus::Closed => self.turned_away(now, &state),
        }
    }

    fn join(&mut self, state: &RendezvousState) {
        let spec = &self.setup.spec;
        if self.workers != Workers::None {
            return;
        }
        if state.size() >= spec.max_nodes {
            let max = spec.max_nodes;
            return self.say(format!(
                "{} nodes have joined, and --nnodes allows {max} here; others were started with a larger --nnodes: \
                 waiting",
                state.size()
            ));
        }
        let (min, max) = (spec.min_nodes, spec.max_nodes);
        let (next, rank) = state.clone().joined(&self.id, max);
        let ttl = match next.status {
            RendezvousStatus::Frozen => Some(FROZEN_TTL),
            _ if next.size() >= min => Some(JOINABLE_TTL),
            _ => None,
        };
        self.key = None;
        self.swap(Swap::Join(rank), &next, ttl);
    }

    /// A group is at work without this node.
    fn wait_in_line(&mut self, now: Time, state: &RendezvousState, version: &str) {
        let Some(files) = self.view.files(version).cloned() else { return self.read_files(version) };
        let was_member = self.key.is_some();
        if state.waits() == 0 {
            if was_member || !self.missing.is_empty() || state.size() < self.setup.spec.max_nodes {
                let next = state.clone().awaited_by(&self.id);
                return self.swap(Swap::Announce, &next, None);
            }
            // To ask would only have the group stopped and formed again, without this node or another.
            let (size, max) = (state.size(), self.setup.spec.max_nodes);
            return self.say(format!("version {version} has {size} of at most {max} nodes: this one is a spare"));
        }
        // Members that died before they had told their part leave torchrun's waiting for it.
        let dead = self.dead(now);
        if !dead.is_empty()
            && torchruns(state).any(|rank| files.has_rank(rank))
            && let Some(made_up) = exchange::to_fill_in(&files, self.own(u32::MAX), state.size(), &dead)
        {
            let place = VersionRank { version: version.to_owned(), rank: u32::MAX };
            return self.make_up(&place, made_up);
        }
        if let Err(later) = self.may_free(now, state, &files) {
            self.wake_at(later);
            return self.say(format!("version {version} is being given up; waiting until its members know"));
        }
        if self.workers != Workers::None {
            return;
        }
        if let Some(key) = &self.key {
            let place = key.place.clone();
            return self.drop_key(place);
        }
        let at_work: Vec<String> =
            state.agents.keys().filter(|rank| files.has_rank(**rank)).map(ToString::to_string).collect();
        if at_work.is_empty() {
            return self.free();
        }
        self.say(format!("version {version} is being given up; waiting for its members {}", at_work.join(", ")));
    }

    /// Whether a version can be taken away without leaving members of torchrun's behind in it; else, when to look again.
    pub(super) fn may_free(&self, now: Time, state: &RendezvousState, files: &Files) -> Result<(), Time> {
        let present = torchruns(state).filter(|rank| files.has_rank(*rank)).count();
        if present == 0 {
            return Ok(());
        }
        let since = self.waits_since.as_ref().map_or(now, |(_, since)| *since);
        if now < since + NOTICE {
            return Err(since + NOTICE);
        }
        // Those that wait and are not ours: its members, once they have stopped, and newcomers of its kind.
        let waiting = state.waits().saturating_sub(state.waiting.len() as u32);
        if waiting as usize >= present || now >= since + TORCHRUN_TTL {
            return Ok(());
        }
        Err(since + TORCHRUN_TTL)
    }

    fn turned_away(&mut self, now: Time, state: &RendezvousState) {
        let version = state.version.clone().unwrap_or_default();
        let end = match &state.end {
            _ if !self.takes_part => {
                let how = state.end.as_ref().map_or(String::new(), |end| format!(" ({})", end.reason));
                let directory = self.setup.paths.run();
                End::Refused(format!(
                    "the rendezvous of this job's id is closed: a job of that id has ended{how}; give the new one \
                     another --rdzv-id, or delete {directory} with all that is in it, once no node of the old one is left"
                ))
            }
            Some(end) if end.failed => {
                End::Failed(end.cause.as_deref().cloned(), format!("another node ended the job: {}", end.reason))
            }
            Some(_) => End::Succeeded,
            // torchrun closes it in any case; the others' exit barrier tells which it is.
            None => match self.view.files(&version) {
                None => return self.read_files(&version),
                Some(files) if exchange::all_done(files, state.size()) => End::Succeeded,
                Some(_) => End::Failed(None, super::CLOSED_BY_TORCHRUN.into()),
            },
        };
        self.end(now, end, None);
    }

    pub(super) fn make(&mut self, setup: &str, step: Making) {
        if self.view.active().flatten().is_none_or(|active| active.raw != setup) {
            self.mode = Mode::Seeking;
            self.view.forget_active();
            self.wake_at(Time::ZERO);
            return;
        }
        let paths = self.setup.paths.clone();
        let request = match step {
            Making::Counter => Request::Read { key: paths.counter(), recursive: false },
            Making::Bump { number, index } => {
                let (value, only) = (number.to_string(), Only::Index(index));
                Request::Put { key: paths.counter(), value, ttl: None, only }
            }
            Making::Directory(number) => Request::MakeDir { key: paths.version(&number.to_string()), ttl: None },
            Making::Publish(number) => {
                let spec = &self.setup.spec;
                let (min, max) = (spec.min_nodes, spec.max_nodes);
                let (next, _) = RendezvousState::joinable(&number.to_string()).joined(&self.id, max);
                let ttl = match next.status {
                    RendezvousStatus::Frozen => Some(FROZEN_TTL),
                    _ if min == 1 => Some(JOINABLE_TTL),
                    _ => None,
                };
                return self.swap(Swap::Publish, &next, ttl);
            }
        };
        self.ask(Call::Make(step), request);
    }

    pub(super) fn joined(&mut self, now: Time, place: &VersionRank, since: Time) {
        let Some(known) = self.view.active() else { return };
        let Some(active) = known.filter(|active| active.state.version.as_ref() == Some(&place.version)).cloned() else {
            return self.seek(now, &format!("version {} was given up while it was formed", place.version), false);
        };
        let state = active.state;
        let key = self.setup.paths.rank(&place.version, place.rank);
        match state.status {
            RendezvousStatus::Joinable => {
                let spec = &self.setup.spec;
                let (min, max) = (spec.min_nodes, spec.max_nodes);
                let near = self.torchruns.is_some_and(|at| now.since(at) < NEAR);
                let last_call = spec.timings.last_call.max(if near { TORCHRUNS_LAST_CALL } else { LAST_CALL });
                let (version, size) = (&place.version, state.size());
                self.say(format!("version {version}: {size} nodes of {min} to {max} are there"));
                // The node that completes the minimum waits for more, and then closes the door.
                if place.rank + 1 != min {
                    return;
                }
                if self.is_time(now, since + last_call) {
                    return self.swap(Swap::Freeze, &state.frozen(), Some(FROZEN_TTL));
                }
                if self.is_time(now, self.held_at.max(since) + HOLD) {
                    self.held_at = now;
                    self.swap(Swap::Hold, &state, Some(JOINABLE_TTL));
                }
            }
            RendezvousStatus::Frozen if state.has_confirmed(&key) => {}
            RendezvousStatus::Frozen if self.key.as_ref().is_some_and(|own| own.place == *place) => {
                let next = state.confirmed(&key);
                let ttl = (next.status == RendezvousStatus::Frozen).then_some(FROZEN_TTL);
                self.swap(Swap::Confirm, &next, ttl);
            }
            RendezvousStatus::Frozen => self.put_own_key(place),
            RendezvousStatus::Final if state.has_confirmed(&key) => {
                self.mode = Mode::Member(place.clone(), state.size(), Stage::Exchanging(now));
                self.member(now, place, state.size(), Stage::Exchanging(now));
            }
            _ => self.seek(now, &format!("version {} continued without this node", place.version), false),
        }
    }
}
