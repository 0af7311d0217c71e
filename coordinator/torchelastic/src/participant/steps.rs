//! From an input to the next request: what every mode shares.

use std::time::Duration;

use super::{
    BLAME, Call, FAREWELL, Input, Mode, Output, PUT_BACK, Participant, RUN_TTL, RUN_UPKEEP, Stage, Swap, Upkeep,
    VersionRank, Workers, torchruns,
};
use crate::etcd_v2::{Only, Refusal, Request};
use crate::state::{JobEnd, RendezvousState, RendezvousStatus};
use elastic_rendezvous::job::{FailureClass, OnStoreLoss, PERMANENT, RestartPolicy};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Command, End, GroupReport, Outcome};
use elastic_store::StoreError;

/// Pause after etcd did not answer, and twice as much at most.
const AGAIN: Duration = Duration::from_millis(250);

impl Participant {
    pub(super) fn take(&mut self, now: Time, input: Input) {
        match input {
            Input::Tick => {}
            Input::Answered(result) => {
                if let Some(call) = self.call.take() {
                    self.answered(now, call, result);
                }
            }
            Input::Refreshed(upkeep, sent, result) => self.refreshed(now, upkeep, sent, result),
            Input::News(result) => {
                self.watching = false;
                match result {
                    Ok(news) => {
                        let told = self.view.told(news);
                        self.or_refuse(now, told);
                    }
                    Err(error) if error.is_transient() => {
                        self.away = Some((now, error.to_string()));
                        self.watch_at = now + AGAIN;
                    }
                    Err(error) => self.lost(now, &error),
                }
            }
            Input::Agent(report) => self.reported(now, report),
        }
    }

    fn reported(&mut self, now: Time, report: GroupReport) {
        match report {
            // No one is asked to quiesce here: every change restarts the workers, as torchrun's nodes do.
            GroupReport::Started(_) | GroupReport::Quiesced { .. } => {}
            GroupReport::Finished { .. } | GroupReport::Concluded => {}
            GroupReport::Ended { round, outcome } => self.ended(now, round, outcome),
            GroupReport::Stopped { master } => {
                self.workers = Workers::None;
                self.master = master.or(self.master.take());
                self.put(Command::Fence(None));
            }
            GroupReport::Drain => self.drain(now),
        }
    }

    /// Everything that follows from what is known.
    pub(super) fn settle(&mut self, now: Time) {
        self.watch(now);
        self.notice(now);
        // What has no need of etcd, and then the next request.
        self.act(now);
        self.keep_up(now);
    }

    fn watch(&mut self, now: Time) {
        let Some(index) = self.view.next().filter(|_| !self.watching) else { return };
        if self.is_time(now, self.watch_at) {
            self.watching = true;
            let directory = self.setup.paths.rendezvous();
            self.put(Output::Watch(directory, index));
        }
    }

    /// Keeps an eye on what is measured in time: who is missing, and since when somebody waits.
    fn notice(&mut self, now: Time) {
        let Some(Some(active)) = self.view.active() else {
            self.missing.clear();
            self.waits_since = None;
            return;
        };
        let state = active.state.clone();
        if torchruns(&state).next().is_some() || state.waits() > state.waiting.len() as u32 {
            self.torchruns = Some(now);
        }
        let version = state.version.clone().unwrap_or_default();
        let Some(files) = self.view.files(&version).filter(|_| state.status == RendezvousStatus::Final) else {
            self.missing.clear();
            return;
        };
        let gone: Vec<u32> = (0..state.size()).filter(|rank| !files.has_rank(*rank)).collect();
        self.missing.retain(|rank, _| gone.contains(rank));
        for rank in gone {
            self.missing.entry(rank).or_insert(now);
        }
        let over = state.waits() > 0 || !self.missing.is_empty() || self.key.is_some() && self.mode == Mode::Seeking;
        if !over {
            self.waits_since = None;
        } else if self.waits_since.as_ref().is_none_or(|(since, _)| *since != version) {
            self.waits_since = Some((version, now));
        }
    }

    /// Members that are gone for good, of those whose sign of life is missing.
    pub(super) fn dead(&mut self, now: Time) -> Vec<u32> {
        // After an outage everybody's time to live has ended, and who lives puts its sign back.
        let ttl = Duration::from_secs(self.ttl());
        let outage = self.away.as_ref().is_some_and(|(at, _)| now.since(*at) < ttl);
        let grace = if outage { PUT_BACK } else { Duration::ZERO };
        let missing: Vec<(u32, Time)> = self.missing.iter().map(|(rank, since)| (*rank, *since)).collect();
        missing.into_iter().filter(|(_, since)| self.is_time(now, *since + grace)).map(|(rank, _)| rank).collect()
    }

    /// Refreshes what has a time to live, and moves the point by which the guard ends the workers of a frozen agent.
    fn keep_up(&mut self, now: Time) {
        let ttl = self.ttl();
        let every = Duration::from_secs(ttl) / 3;
        if let Some(at) = self.run_at.filter(|_| !self.run_asked && self.mode != Mode::Over)
            && self.is_time(now, at)
        {
            self.run_asked = true;
            self.run_at = Some(now + RUN_UPKEEP);
            let request = Request::Refresh { key: self.setup.paths.run().to_owned(), dir: true, ttl: RUN_TTL };
            self.put(Output::Refresh(Upkeep::Run, request));
        }
        let Some((place, due, asked)) = self.key.as_ref().map(|key| (key.place.clone(), key.refresh_at, key.asked))
        else {
            return;
        };
        if self.mode == Mode::Over || !self.is_time(now, due) {
            return;
        }
        self.fence(now);
        if let Some(key) = &mut self.key {
            key.refresh_at = now + every;
            key.asked = true;
        }
        self.wake_at(now + every);
        if !asked {
            let key = self.setup.paths.rank(&place.version, place.rank);
            self.put(Output::Refresh(Upkeep::Rank, Request::Refresh { key, dir: false, ttl }));
        }
    }

    pub(super) fn fence(&mut self, now: Time) {
        if self.workers == Workers::None {
            return;
        }
        let timings = self.setup.spec.timings;
        let kept = self.key.as_ref().map_or(now, |key| key.kept);
        // A world can only be made again through etcd, so while it is away for all, work may continue.
        let from = if self.setup.spec.on_store_loss == OnStoreLoss::Fence { kept } else { now };
        let stopping = if self.workers == Workers::Stopping { timings.stop_grace } else { Duration::ZERO };
        let until = (from + Duration::from_secs(self.ttl()) + stopping).minus(timings.margin);
        self.put(Command::Fence(Some(until)));
    }

    fn refreshed(&mut self, now: Time, upkeep: Upkeep, sent: Time, result: Result<crate::etcd_v2::Answer, StoreError>) {
        match upkeep {
            Upkeep::Run => self.run_asked = false,
            Upkeep::Rank => {
                if let Some(key) = &mut self.key {
                    key.asked = false;
                }
            }
        }
        match result {
            Ok(answer) => match (upkeep, answer.outcome) {
                (Upkeep::Rank, Ok(_)) => {
                    if let Some(key) = &mut self.key {
                        key.kept = key.kept.max(sent);
                    }
                }
                (Upkeep::Rank, Err(Refusal::Missing)) => {
                    if let Some(place) = self.key.as_ref().map(|key| key.place.clone()) {
                        let file = crate::keys::rank_file(place.rank);
                        self.view.set_file(&place.version, &file, None);
                    }
                }
                _ => {}
            },
            Err(error) if error.is_transient() => {
                self.away = Some((now, error.to_string()));
                // The run directory lives for hours; the sign of life is due again soon in any case.
                if upkeep == Upkeep::Run {
                    self.run_at = Some(now + AGAIN * 40);
                }
            }
            Err(error) => self.lost(now, &error),
        }
    }

    fn ended(&mut self, now: Time, round: u64, outcome: Outcome) {
        let Mode::Member(place, _, stage) = &mut self.mode else { return };
        if super::number(&place.version) != round || *stage != Stage::Working {
            return;
        }
        match outcome {
            Outcome::Done => {
                *stage = Stage::Done { counted: None, tried: None, since: now };
                self.say("all workers here are done; waiting for the other nodes'");
            }
            Outcome::Failed(failure) if failure.class == FailureClass::Peer => {
                *stage = Stage::Blaming(Box::new(failure), now + BLAME);
            }
            Outcome::Failed(failure) => self.failed(now, failure),
        }
    }

    /// A worker failed: what is left of the budget decides.
    pub(super) fn failed(&mut self, now: Time, failure: elastic_rendezvous::job::Failure) {
        let reason = failure.message.clone();
        if failure.class == FailureClass::Lost || self.trouble(now).is_some() {
            self.seek(now, &reason, false);
            return;
        }
        let max = self.setup.spec.max_restarts;
        if self.restarts < max && !failure.permanent {
            self.restarts += 1;
            let left = max - self.restarts;
            self.seek(now, &format!("{reason}; {left} of {max} restarts are left"), false);
        } else {
            let reason = match max {
                0 => reason,
                _ if failure.permanent => format!("{reason}; {PERMANENT}"),
                max => format!("{reason}; all {max} restarts are used up"),
            };
            let failure = failure.bounded();
            let cause = Some(Box::new(failure.clone()));
            let close = JobEnd { failed: true, reason: reason.clone(), cause };
            self.end(now, End::Failed(Some(failure), reason), Some(close));
        }
    }

    /// Gives up its place in order to find another: its workers stop first.
    pub(super) fn seek(&mut self, now: Time, reason: &str, membership: bool) {
        if membership && self.setup.spec.restart_policy == RestartPolicy::All && self.workers == Workers::Alive {
            self.restarts += 1;
            if self.restarts > self.setup.spec.max_restarts {
                let reason = format!("{reason}, and all restarts are used up (--restart-policy=all)");
                let close = JobEnd { failed: true, reason: reason.clone(), cause: None };
                return self.end(now, End::Failed(None, reason), Some(close));
            }
        }
        let place = match std::mem::replace(&mut self.mode, Mode::Seeking) {
            Mode::Member(place, ..) | Mode::Joined(place, _) => Some(place),
            _ => None,
        };
        if let Some(place) = place {
            let next = super::number(&place.version) + 1;
            self.put(Command::Forming(next, reason.to_owned()));
            if let Some(round) = &mut self.round {
                round.state = elastic_rendezvous::job::RoundState::Forming;
                round.reason = reason.to_owned();
            }
        }
        self.idle_since.get_or_insert(now);
        // What follows may need no answer to come.
        self.wake_at(now);
        self.stop(self.setup.spec.timings.stop_grace);
        self.fence(now);
    }

    /// What cannot be read is not overwritten.
    pub(super) fn or_refuse(&mut self, now: Time, read: Result<(), String>) {
        if let Err(cause) = read {
            let key = self.setup.paths.active();
            let reason = format!(
                "the state at {key} is none of TorchElastic's rendezvous ({cause}): does something else use that \
                 prefix? choose another with --rdzv-conf etcd_prefix=/PATH on all nodes"
            );
            self.end(now, End::Refused(reason), None);
        }
    }

    /// The store will not get better by itself.
    pub(super) fn lost(&mut self, now: Time, error: &StoreError) {
        self.end(now, End::StoreLost(error.to_string()), None);
    }

    /// etcd does not answer: what was asked may have been done or not, so all is read again.
    pub(super) fn unanswered(&mut self, now: Time, error: &StoreError) {
        self.away = Some((now, error.to_string()));
        self.view.forget();
        self.retry_at = now + AGAIN + self.jitter(AGAIN);
        if !matches!(self.mode, Mode::Member(..)) {
            self.say(format!("{error}; trying again"));
        }
    }

    pub(super) fn outrun(&mut self, now: Time) {
        self.view.forget_active();
        self.retry_at = now + self.jitter(Duration::from_millis(10));
    }

    pub(super) fn ask(&mut self, call: Call, request: Request) {
        self.call = Some(call);
        self.put(Output::Ask(request));
    }

    pub(super) fn read_files(&mut self, version: &str) {
        let key = self.setup.paths.version(version);
        self.ask(Call::ReadFiles(version.to_owned()), Request::Read { key, recursive: true });
    }

    /// Writes the next state, if the store still has the one that is known.
    pub(super) fn swap(&mut self, why: Swap, next: &RendezvousState, ttl: Option<u64>) {
        let Some(Some(active)) = self.view.active() else { return };
        let (only, value) = (Only::Value(active.raw.clone()), next.text());
        let key = self.setup.paths.active();
        self.ask(Call::Swap(why, value.clone()), Request::Put { key, value, ttl, only });
    }

    /// Deletes the state, if the store still has it: who has a place in it looks for another.
    pub(super) fn free(&mut self) {
        let Some(Some(active)) = self.view.active() else { return };
        let only = Only::Value(active.raw.clone());
        let key = self.setup.paths.active();
        self.ask(Call::Free, Request::Delete { key, only });
    }

    pub(super) fn put_own_key(&mut self, place: &VersionRank) {
        let key = self.setup.paths.rank(&place.version, place.rank);
        let request = Request::Put { key, value: String::new(), ttl: Some(self.ttl()), only: Only::Always };
        self.ask(Call::OwnKey(place.clone()), request);
    }

    /// The next request, and what can be done without one.
    fn act(&mut self, now: Time) {
        if let Mode::Ending(ending) = &self.mode
            && self.workers == Workers::None
        {
            // An answer on its way may tell of a place after all.
            let nobody_to_tell = ending.place.is_none() && ending.close.is_none() && self.call.is_none();
            let by = ending.by.unwrap_or(if nobody_to_tell { now } else { now + FAREWELL });
            if let Mode::Ending(ending) = &mut self.mode {
                ending.by = Some(by);
            }
            if self.is_time(now, by) {
                self.over();
            }
        }
        if self.mode == Mode::Over {
            return;
        }
        self.out_of_time(now);
        self.act_without_asking(now);
        if self.call.is_some() || self.mode == Mode::Over || !self.is_time(now, self.retry_at) {
            return;
        }
        match self.mode.clone() {
            Mode::Opening(step) => self.open(step),
            Mode::Over => {}
            mode => {
                if self.view.active().is_none() {
                    let key = self.setup.paths.active();
                    self.ask(Call::ReadActive, Request::Read { key, recursive: false });
                    return;
                }
                match mode {
                    Mode::Seeking => self.find_place(now),
                    Mode::Making(setup, step) => self.make(&setup, step),
                    Mode::Joined(place, since) => self.joined(now, &place, since),
                    Mode::Member(place, size, stage) => self.member(now, &place, size, stage),
                    Mode::Ending(ending) => self.leave(now, &ending),
                    Mode::Opening(_) | Mode::Over => {}
                }
            }
        }
    }

    /// A group that does not come about has to fail at some time.
    fn out_of_time(&mut self, now: Time) {
        let seeking = matches!(self.mode, Mode::Opening(_) | Mode::Seeking | Mode::Making(..) | Mode::Joined(..));
        if !seeking {
            return;
        }
        // A spare waits for as long as the group works.
        let works = matches!(self.view.active(), Some(Some(active)) if active.state.status == RendezvousStatus::Final);
        if works && self.key.is_none() && self.missing.is_empty() {
            self.idle_since = None;
            return;
        }
        let since = *self.idle_since.get_or_insert(now);
        let limit = self.setup.spec.timings.join_timeout;
        if self.is_time(now, since + limit) {
            let (min, limit) = (self.setup.spec.min_nodes, format!("{limit:?}"));
            let away = self.away.as_ref().filter(|(at, _)| now.since(*at) < Duration::from_secs(30));
            let reason = match away {
                Some((_, words)) => format!("no group was formed within join_timeout ({limit}): {words}"),
                None => format!("no group of at least {min} nodes was formed within join_timeout ({limit})"),
            };
            self.end(now, End::Failed(None, reason), None);
        }
    }
}
