//! How a leader's view comes to be: from one consistent read of the job, then from watches.

use super::super::decide::started;
use super::super::roster::{Evicted, Present, Roster, SealedMember};
use super::super::view::View;
use super::state::{Doing, Known, Stage};
use super::{Leader, LeaderOutput};
use crate::job::{
    Checkpoint, Desired, Fate, JobSecret, Keys, NodeId, NodeRecord, Phase, RankRecord, RoundRecord, RoundState, Spec,
    Tombstone, Versioned, history, to_json,
};
use crate::kv::{Event, Guard, KeyValue, Op, OpResult, Revision, Scope, StoreError, Txn, TxnResult, WatchUpdate};
use crate::time::Time;

impl Leader {
    /// One consistent read of the job, if this term still holds.
    pub(super) fn load_txn(&self) -> Txn {
        let keys = &self.keys;
        Txn::of([
            Op::get(keys.spec()),
            Op::get(keys.round()),
            Op::get(keys.desired()),
            Op::get(keys.checkpoint()),
            Op::range(keys.nodes()),
            Op::range(keys.evictions()),
            Op::range(keys.rounds()),
            Op::last(keys.events()),
            Op::get(keys.secret()),
        ])
        .guarded([Guard::modified(keys.leader(), self.term)])
    }

    pub(super) fn load(&mut self, now: Time, result: &TxnResult, out: &mut Vec<LeaderOutput>) {
        if let Some(lost) = self.went_back(result) {
            self.stage = Stage::Over;
            out.push(LeaderOutput::Broken(lost));
            return;
        }
        let mut strays = Vec::new();
        let view = self.view_of(now, result, &mut strays);
        for problem in &strays {
            self.warn(problem.clone(), out);
        }
        match view {
            Ok(view) => {
                self.told.warnings.retain(|line| strays.contains(line));
                let first = matches!(self.known, Known::Contacts(_));
                self.known = Known::Job(Box::new(view));
                self.news.loaded = result.revision;
                self.news.fresh = self.news.loaded >= self.news.behind;
                if first {
                    let from = result.revision.next();
                    out.push(LeaderOutput::Watch(Scope::Prefix(self.keys.nodes()), from));
                    for key in [self.keys.round(), self.keys.desired(), self.keys.checkpoint()] {
                        out.push(LeaderOutput::Watch(Scope::Key(key), from));
                    }
                }
                for event in std::mem::take(&mut self.news.meanwhile) {
                    self.tell(now, event, out);
                }
                self.suspect_absent(out);
            }
            Err(problem) => {
                self.warn(format!("this job cannot be led, so no failure is handled: {problem}"), out);
                self.stage = Stage::Pausing { until: now + super::RETRY * 10 };
                self.news.fresh = false;
            }
        }
    }

    /// That the store went back in history, if this read of it shows that: a record is older than it was known to be, at
    /// a revision at which it was there. A revision of its own tells it only until new writes have passed the old ones.
    fn went_back(&self, result: &TxnResult) -> Option<StoreError> {
        let old = self.known.view()?;
        let round = self.news.of_round.max(old.round.modified);
        let records = [(1, self.keys.round(), round), (3, self.keys.checkpoint(), self.read.pointer)];
        records.into_iter().find_map(|(at, key, known)| {
            let read = result.results.get(at).and_then(OpResult::value)?.mod_revision;
            // mutant a_leader_does_not_notice_a_restore: read < known && known <= result.revision => false
            (read < known && known <= result.revision).then(|| StoreError::went_back(&key, read, known))
        })
    }

    /// Members that have not opened a stream to this leader may have died with the one before: no stream will tell.
    pub(super) fn suspect_unheard(&self, out: &mut Vec<LeaderOutput>) {
        let Some(view) = self.known.view() else { return };
        for (node, _) in view.roster.members() {
            if view.roster.contact(node).is_none_or(|contact| contact.opened.is_none()) {
                self.suspect(node, out);
            }
        }
    }

    /// Members whose keys are gone, or whose name another node bears, may be dead: their ports can tell.
    fn suspect_absent(&self, out: &mut Vec<LeaderOutput>) {
        let Some(view) = self.known.view() else { return };
        for (node, member) in view.roster.members() {
            if member.absent.is_some() || member.evicted.is_some() {
                self.suspect(node, out);
            }
        }
        for (node, present) in view.roster.nodes() {
            let member = view.roster.member(node).is_some();
            if !member && present.record.phase == Phase::Waiting {
                view.namesakes(node).iter().for_each(|other| self.suspect(other, out));
            }
        }
    }

    /// What the store holds, as a view; a record that is not one of ours counts as absent and goes to `strays`, where
    /// the job can be led without it.
    fn view_of(&mut self, now: Time, result: &TxnResult, strays: &mut Vec<String>) -> Result<View, String> {
        let one = |at: usize| result.results.get(at).and_then(OpResult::value);
        let many = |at: usize| result.results.get(at).map_or(&[] as &[KeyValue], OpResult::values);
        let round: Versioned<RoundRecord> =
            Versioned::parse(one(1).ok_or("its round is gone: was the store emptied?")?)?;
        let spec = self.spec_of(one(0), strays)?;
        self.read.desired_at = one(2).map_or(Revision::NONE, |kv| kv.mod_revision);
        let desired = one(2).map(Versioned::<Desired>::parse).transpose();
        let desired = desired.map(|desired| desired.map(|it| it.value)).unwrap_or_else(|problem| {
            strays.push(format!("{problem} What was desired before holds: delete it, and ask again with elasticctl"));
            self.known.view().map(|old| old.desired.clone())
        });
        let read = self.checkpoint_read(one(3), self.known.view().is_some(), &round.value, strays);
        // Where no round was sealed no one is at work: the job can end with that. Else it is not led, and works on.
        let unreadable_checkpoint = match read {
            Err(problem) if round.value.sealed.is_none() => Some(problem),
            read => read.map(|()| None)?,
        };
        self.secret_read(one(8), strays);
        let last = one(7).map(|kv| history::number(&self.keys, &kv.key));
        self.read.uncounted = last == Some(None);
        self.read.next_event = last.flatten().map_or(0, |last| last.saturating_add(1));

        // What this leader has observed is kept.
        let old = self.known.view();
        let same_state = |old: &View| old.round.value.stage() == round.value.stage();
        let seen = self.seen.filter(|(stage, _)| *stage == round.value.stage()).map(|(_, since)| since);
        let mut view = View {
            spec,
            desired: desired.unwrap_or_default(),
            planned_here: old.is_some_and(|old| old.planned_here && old.round.modified == round.modified),
            elected: self.elected,
            awake: self.awake,
            former: self.former.clone(),
            since: old.filter(|old| same_state(old)).map_or(now, |old| old.since),
            begun: match old {
                Some(old) if same_state(old) => old.begun,
                Some(_) => Some(now),
                None => seen,
            },
            committed: self.read.checkpoint.as_ref().map(|checkpoint| checkpoint.step),
            roster: Roster::new(self.node.clone()),
            quick: old.map_or_else(Default::default, |old| old.quick),
            probe: old.and_then(|old| old.probe),
            stale_rounds: Default::default(),
            tombstones: Default::default(),
            strays: Default::default(),
            unreadable_checkpoint,
            faults: old.map(|old| old.faults.clone()).unwrap_or_default().read(now, &round.value.faults),
            round,
        };
        for (node, contact) in self.known.contacts() {
            view.roster.change_contact(node, |new| *new = *contact);
        }
        let read = Reading { keys: &self.keys, old, now };
        read.nodes(&mut view, many(4), strays);
        read.seats(&mut view, many(6), strays);
        read.tombstones(&mut view, many(5), strays);
        Ok(view)
    }

    /// The spec as the leader saw it when it proved its term. Newcomers need it, so one that is lost is written again.
    pub(super) fn spec_seen(&mut self, result: &TxnResult) {
        let lost = |read: &OpResult| read.value().is_none_or(|kv| Versioned::parse_spec(kv).is_err());
        if result.results.first().is_some_and(lost) {
            self.reload(false);
        }
    }

    /// What the job agreed on. Where that record is lost, the leader still knows it and writes it again, since
    /// newcomers need it.
    fn spec_of(&mut self, kv: Option<&KeyValue>, strays: &mut Vec<String>) -> Result<Spec, String> {
        let key = self.keys.spec();
        let gone = || format!("the record at {key} is gone: was the store emptied?");
        let problem = match kv.map_or_else(|| Err(gone()), Versioned::parse_spec) {
            Ok(spec) => return Ok(spec.value),
            Err(problem) => problem,
        };
        let Some(spec) = self.known.view().map(|old| old.spec.clone()).or_else(|| self.known_spec.clone()) else {
            return Err(problem);
        };
        strays.push(format!("{problem} The leader writes it again, as it knows it"));
        let as_read = kv.map_or(Revision::NONE, |kv| kv.mod_revision);
        let guards = [Guard::modified(self.keys.leader(), self.term), Guard::modified(&key, as_read)];
        self.read.mend = Some(Txn::of([Op::put(&key, to_json(&spec))]).guarded(guards));
        Ok(spec)
    }

    /// Where training resumes. Where that record is not ours, what this leader knows holds, or what the running round
    /// began with. A leader that knows neither seals no round: training would begin from nothing.
    fn checkpoint_read(
        &mut self,
        kv: Option<&KeyValue>,
        read_before: bool,
        round: &RoundRecord,
        strays: &mut Vec<String>,
    ) -> Result<(), String> {
        match kv.map(Versioned::<Checkpoint>::parse).transpose() {
            Ok(read) => self.read.checkpoint = read.map(|read| read.value),
            Err(problem) => {
                let known = self.read.checkpoint.clone().or_else(|| round.checkpoint.clone());
                if known.is_none() && !read_before {
                    return Err(problem);
                }
                let holds = match &known {
                    Some(known) => format!("step {}", known.step),
                    None => "the beginning".to_owned(),
                };
                strays.push(format!(
                    "{problem} Training resumes from {holds}, as before, and no checkpoint is committed: delete it"
                ));
                self.read.checkpoint = known;
            }
        }
        self.read.pointer = kv.map_or(Revision::NONE, |kv| kv.mod_revision);
        Ok(())
    }

    /// What members prove that they know. It is written with a generation's round, so it is that of the round just read.
    /// Where the record is lost, what was known holds: members know it too.
    fn secret_read(&mut self, kv: Option<&KeyValue>, strays: &mut Vec<String>) {
        match kv.map(Versioned::<JobSecret>::parse) {
            Some(Ok(read)) => self.secret = Some(read.value),
            Some(Err(problem)) => strays.push(format!(
                "{problem} Where no other was known before, pulses count without a proof of who sent them, until the \
                 job starts again"
            )),
            None => {}
        }
    }

    pub(super) fn watched(&mut self, now: Time, update: WatchUpdate, out: &mut Vec<LeaderOutput>) {
        match update {
            // A snapshot takes the place of what was known in one scope only: reading all is as cheap and simpler.
            WatchUpdate::Snapshot { revision, .. } => {
                self.news.behind = self.news.behind.max(revision);
                self.reload(false);
            }
            WatchUpdate::Broken(error) => {
                self.stage = Stage::Over;
                out.push(LeaderOutput::Broken(error));
            }
            WatchUpdate::Events(events) => {
                for event in events {
                    if matches!(&self.stage, Stage::Busy(doing) if matches!(**doing, Doing::Load)) {
                        // mutant news_forgotten: self.news.meanwhile.push(event.clone()) => {}
                        self.news.meanwhile.push(event.clone());
                    }
                    self.tell(now, event, out);
                }
            }
        }
    }

    fn tell(&mut self, now: Time, event: Event, out: &mut Vec<LeaderOutput>) {
        if event.revision() > self.news.loaded
            && let Err(problem) = self.event(now, event, out)
        {
            self.warn(problem, out);
        }
    }

    fn event(&mut self, now: Time, event: Event, out: &mut Vec<LeaderOutput>) -> Result<(), String> {
        let put = match &event {
            Event::Put(kv) => Some(kv),
            Event::Delete { .. } => None,
        };
        if event.key() == self.keys.checkpoint() {
            return self.checkpoint_changed(put);
        }
        if event.key() == self.keys.round() {
            // Its own writes come back too. Of another's, only the next generation's first record counts.
            self.news.of_round = self.news.of_round.max(event.revision());
            return Ok(());
        }
        if event.key() == self.keys.desired() {
            return self.desired_changed(put);
        }
        match Keys::node_of(&self.keys.nodes(), event.key()) {
            Some(node) => self.node_changed(now, &node, event, out),
            None => Ok(()),
        }
    }

    fn checkpoint_changed(&mut self, put: Option<&KeyValue>) -> Result<(), String> {
        let mut strays = Vec::new();
        if let Some(view) = self.known.view() {
            let round = view.round.value.clone();
            self.checkpoint_read(put, true, &round, &mut strays)?;
        }
        let committed = self.read.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
        if let Some(view) = self.known.view_mut().filter(|_| strays.is_empty()) {
            (view.unreadable_checkpoint, view.committed) = (None, committed);
        }
        strays.into_iter().next().map_or(Ok(()), Err)
    }

    fn desired_changed(&mut self, put: Option<&KeyValue>) -> Result<(), String> {
        let Some(view) = self.known.view_mut() else { return Ok(()) };
        self.read.desired_at = put.map_or(Revision::NONE, |kv| kv.mod_revision);
        view.desired = put.map(Versioned::<Desired>::parse).transpose()?.map(|it| it.value).unwrap_or_default();
        // Its line of history came with it. Otherwise our next one would have its number.
        if view.desired.asked.as_ref().is_some_and(|asked| asked.event == self.read.next_event) {
            self.read.next_event += 1;
        }
        Ok(())
    }

    fn node_changed(
        &mut self,
        now: Time,
        node: &NodeId,
        event: Event,
        out: &mut Vec<LeaderOutput>,
    ) -> Result<(), String> {
        let Some(view) = self.known.view_mut() else { return Ok(()) };
        match event {
            Event::Put(kv) => {
                let known = view.roster.node(node);
                if known.is_some_and(|known| known.modified >= kv.mod_revision) {
                    return Ok(());
                }
                let present = present(&kv, known, now)?;
                let newcomer = known.is_none();
                view.roster.put(node, present);
                view.roster.change_contact(node, |contact| contact.heard = Some(now));
                let sealed = view.round.value.sealed.map_or(0, |sealed| sealed.number);
                let started = started(view.phase_for(node, sealed));
                view.roster.change_member(node, |member| {
                    member.absent = None;
                    member.left = false;
                    member.started |= started;
                });
                if newcomer {
                    // A successor's arrival hints at a predecessor's death.
                    let namesakes = view.namesakes(node);
                    namesakes.iter().for_each(|other| self.suspect(other, out));
                }
            }
            Event::Delete { revision, .. } => {
                if view.roster.node(node).is_some_and(|known| known.modified > revision) {
                    return Ok(());
                }
                // While a round runs, `waiting` means that it has not said it started: that proves nothing.
                let forming = view.round.value.state == RoundState::Forming;
                let phase = view.phase_for(node, view.round.value.number);
                let stopped = forming && matches!(phase, Some(Phase::Waiting | Phase::Stopped));
                view.roster.remove(node);
                view.roster.change_member(node, |member| {
                    member.absent = Some(now);
                    member.left = stopped;
                });
                self.suspect(node, out);
            }
        }
        Ok(())
    }
}

/// What the keys of a job are read with.
struct Reading<'a> {
    keys: &'a Keys,
    /// What was known before: what this leader has observed is kept.
    old: Option<&'a View>,
    now: Time,
}

impl Reading<'_> {
    /// Takes in the keys under `nodes/`.
    fn nodes(&self, view: &mut View, values: &[KeyValue], strays: &mut Vec<String>) {
        let Reading { keys, old, now } = *self;
        for kv in values {
            if let Some(node) = Keys::node_of(&keys.nodes(), &kv.key) {
                let known = old.and_then(|old| old.roster.node(&node));
                match present(kv, known, now) {
                    Ok(present) => {
                        if known.is_some_and(|known| known.modified < present.modified) {
                            view.roster.change_contact(&node, |contact| contact.heard = Some(now));
                        }
                        view.roster.put(&node, present);
                    }
                    Err(problem) => {
                        view.strays.insert(node, kv.mod_revision);
                        strays.push(left_out(&problem));
                    }
                }
            }
        }
    }

    /// Takes in the members of the last sealed round, and which older rounds still have keys.
    fn seats(&self, view: &mut View, values: &[KeyValue], strays: &mut Vec<String>) {
        let Reading { keys, old, now } = *self;
        let sealed = view.round.value.sealed;
        for kv in values {
            let Some((number, plan, node)) = keys.rank_of(&kv.key) else { continue };
            if sealed.is_some_and(|sealed| (sealed.number, sealed.plan) == (number, plan)) {
                let known = old.and_then(|old| old.roster.member(&node));
                let absent =
                    view.roster.node(&node).is_none().then(|| known.and_then(|known| known.absent).unwrap_or(now));
                let rank = match Versioned::<RankRecord>::parse(kv) {
                    Ok(rank) => rank.value,
                    Err(problem) => {
                        strays.push(left_out(&problem));
                        continue;
                    }
                };
                let left = absent.is_some() && known.is_some_and(|known| known.left);
                let started = known.is_some_and(|known| known.started) || started(view.phase_for(&node, number));
                view.roster.seat(&node, SealedMember { rank, started, absent, left, evicted: None });
            } else if number < view.round.value.number && sealed.is_none_or(|sealed| sealed.number != number) {
                view.stale_rounds.insert(number);
            }
        }
    }

    /// Takes in who was evicted.
    fn tombstones(&self, view: &mut View, values: &[KeyValue], strays: &mut Vec<String>) {
        let Reading { keys, old, now } = *self;
        for kv in values {
            let Some(node) = Keys::node_of(&keys.evictions(), &kv.key) else { continue };
            let since = old.and_then(|old| old.tombstones.get(&node)).copied().unwrap_or(now);
            view.tombstones.insert(node.clone(), since);
            if view.roster.member(&node).is_none() {
                continue;
            }
            // That the record is there proves that the node was evicted. What it says about the workers cannot be read.
            let fate = Versioned::<Tombstone>::parse(kv).map_or_else(
                |problem| {
                    strays.push(left_out(&problem));
                    Fate::Unknown
                },
                |stone| stone.value.fate,
            );
            let known = old.and_then(|old| old.roster.member(&node)?.evicted);
            let evicted = Evicted { at: known.map_or(now, |known| known.at), fate };
            view.roster.change_member(&node, |member| member.evicted = Some(evicted));
        }
    }
}

/// What a record that is not ours counts as, where the job can be led without it.
fn left_out(problem: &str) -> String {
    format!("{problem} It counts as absent: delete it, or write it again")
}

fn present(kv: &KeyValue, known: Option<&Present>, now: Time) -> Result<Present, String> {
    let Versioned { value, created, modified } = Versioned::<NodeRecord>::parse(kv)?;
    let arrived = known.map_or(now, |known| known.arrived);
    let said = known.filter(|known| known.record == value).map_or(now, |known| known.said);
    Ok(Present { record: value, created, modified, arrived, said })
}
