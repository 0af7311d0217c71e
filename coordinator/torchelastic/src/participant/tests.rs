//! One node at a desk: a test plays etcd and the other nodes, and moves the clock.

use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::etcd_v2::{Entry, Only, Refusal};
use crate::{DEFAULT_PREFIX, RendezvousStatus};
use elastic_rendezvous::Outcome;
use elastic_rendezvous::job::{Endpoint, FailureClass, Timings, samples};

const RENDEZVOUS: &str = "/torchelastic/p2p/run_J/rdzv";

struct Desk {
    machine: Participant,
    now: Time,
    index: u64,
    keys: BTreeMap<String, (String, u64)>,
    watching: bool,
    /// What the machine wanted, except requests and watches.
    wanted: Vec<Output>,
    asked: Vec<Request>,
    /// A request is on its way and will not be answered.
    silent: bool,
}

fn desk(nodes: (u32, u32)) -> Desk {
    let endpoint = |port| Endpoint { host: "h".into(), port };
    let (peer, master) = (endpoint(1), Some(endpoint(2)));
    let record = NodeRecord { name: "own".into(), peer, master, ..samples::node("h") };
    let timings = Timings { last_call: Duration::from_secs(2), ..Timings::default() };
    let spec = Spec { max_restarts: 1, timings, ..samples::spec(nodes.0, nodes.1) };
    let setup = ParticipantSetup { record, spec, paths: Paths::new(DEFAULT_PREFIX, "J"), identical: false, seed: 1 };
    Desk {
        machine: Participant::new(setup),
        now: Time::from_millis(1_000),
        index: 10,
        keys: BTreeMap::new(),
        watching: false,
        wanted: Vec::new(),
        asked: Vec::new(),
        silent: false,
    }
}

impl Desk {
    /// Tells the machine, and calls it for as long as it wants to be at once.
    fn tell(&mut self, input: Input) {
        self.carry(input);
        for _ in 0..10 {
            if self.machine.deadline().is_none_or(|at| at > self.now) {
                return;
            }
            self.carry(Input::Tick);
        }
    }

    fn carry(&mut self, input: Input) {
        let mut outputs = self.machine.step(self.now, input);
        while !outputs.is_empty() {
            let mut answers = Vec::new();
            for output in outputs {
                match output {
                    Output::Ask(request) => {
                        self.asked.push(request.clone());
                        if !self.silent {
                            answers.push(Input::Answered(Ok(self.carry_out(&request))));
                        }
                    }
                    Output::Refresh(upkeep, request) if !self.silent => {
                        answers.push(Input::Refreshed(upkeep, self.now, Ok(self.carry_out(&request))));
                    }
                    Output::Watch(..) => self.watching = true,
                    output => self.wanted.push(output),
                }
            }
            outputs = answers.into_iter().flat_map(|answer| self.machine.step(self.now, answer)).collect();
        }
    }

    fn carry_out(&mut self, request: &Request) -> Answer {
        let found = self.keys.get(request.key()).cloned();
        let entry = |key: &str, (value, modified): (String, u64)| Entry {
            key: key.to_owned(),
            value,
            modified,
            ..Entry::default()
        };
        let outcome = match request {
            Request::Read { key, recursive: true } => {
                let below = format!("{key}/");
                let inside = self.keys.iter().filter(|(other, _)| other.starts_with(&below));
                let entries = inside.map(|(other, found)| entry(other, found.clone())).collect();
                Ok(Entry { key: key.clone(), dir: true, entries, ..Entry::default() })
            }
            Request::Read { key, .. } => found.map(|found| entry(key, found)).ok_or(Refusal::Missing),
            Request::Put { key, value, only, .. } => match (only, &found) {
                (Only::Absent, Some(_)) => Err(Refusal::Exists),
                (Only::Value(value), Some((old, _))) if value != old => Err(Refusal::Differs),
                (Only::Value(_) | Only::Index(_), None) => Err(Refusal::Missing),
                _ => Ok(entry(key, self.put(key, value))),
            },
            Request::MakeDir { key, .. } => Ok(entry(key, (String::new(), self.index))),
            Request::Refresh { key, dir, .. } => match found {
                None if !dir => Err(Refusal::Missing),
                found => Ok(entry(key, found.unwrap_or_default())),
            },
            Request::Delete { key, only } => match (only, found) {
                (_, None) => Err(Refusal::Missing),
                (Only::Value(value), Some((old, _))) if *value != old => Err(Refusal::Differs),
                (_, Some(old)) => {
                    self.keys.remove(key);
                    self.index += 1;
                    Ok(entry(key, (old.0, self.index)))
                }
            },
        };
        Answer { index: self.index, outcome }
    }

    fn put(&mut self, key: &str, value: &str) -> (String, u64) {
        self.index += 1;
        self.keys.insert(key.to_owned(), (value.to_owned(), self.index));
        (value.to_owned(), self.index)
    }

    /// Another node writes, or etcd lets a key expire; the watch tells of it.
    fn change(&mut self, key: &str, value: Option<&str>) {
        let key = format!("{RENDEZVOUS}/{key}");
        match value {
            Some(value) => drop(self.put(&key, value)),
            None => {
                self.index += 1;
                self.keys.remove(&key);
            }
        }
        assert!(std::mem::take(&mut self.watching), "no watch is open");
        let entry = Entry { key, value: value.unwrap_or_default().into(), modified: self.index, ..Entry::default() };
        self.tell(Input::News(Ok(News::Change { gone: value.is_none(), entry })));
    }

    fn change_state(&mut self, change: impl FnOnce(RendezvousState) -> RendezvousState) {
        let text = change(self.state()).text();
        self.change("active_version", Some(&text));
    }

    fn state(&self) -> RendezvousState {
        RendezvousState::parse(&self.keys[&format!("{RENDEZVOUS}/active_version")].0).unwrap()
    }

    fn has(&self, key: &str) -> bool {
        self.keys.contains_key(&format!("{RENDEZVOUS}/{key}"))
    }

    /// Lets time pass, and calls the machine whenever it wants to be.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(at) = self.machine.deadline().filter(|at| *at <= until) {
            self.now = self.now.max(at) + Duration::from_millis(1);
            self.tell(Input::Tick);
        }
        self.now = self.now.max(until);
        self.tell(Input::Tick);
    }

    fn kv(&self, key: &str) -> String {
        format!("v_1/{}", super::super::keys::kv_file(key))
    }

    /// A member of torchrun's kind, of rank 1, joins, confirms and tells its part.
    fn torchrun_joins(&mut self) {
        self.change_state(|mut state| {
            state.participants.get_or_insert_default().push(1);
            state.frozen()
        });
        self.change("v_1/rank_1", Some(""));
        self.change_state(|state| state.confirmed(&format!("{RENDEZVOUS}/v_1/rank_1")));
        let info = super::super::keys::kv_value(r#"{"role": "default", "rank": 1, "local_world_size": 1}"#);
        self.change(&self.kv("torchelastic/role_info/1"), Some(&info));
    }

    fn start(&self) -> Option<&Start> {
        self.wanted
            .iter()
            .rev()
            .find_map(|output| if let Output::Agent(Command::Start(start)) = output { Some(&**start) } else { None })
    }

    fn stops(&self) -> usize {
        self.wanted.iter().filter(|output| matches!(output, Output::Agent(Command::Stop(_)))).count()
    }

    fn end(&self) -> Option<&End> {
        self.wanted.iter().find_map(|output| if let Output::End(end) = output { Some(end) } else { None })
    }

    fn ended(&mut self, outcome: Outcome) {
        self.tell(Input::Agent(GroupReport::Ended { round: 1, outcome }));
    }

    fn stopped(&mut self) {
        self.tell(Input::Agent(GroupReport::Stopped { master: Some(Endpoint { host: "h".into(), port: 3 }) }));
    }
}

/// At work with a torchrun node.
fn mixed() -> Desk {
    let mut desk = desk((2, 2));
    desk.tell(Input::Tick);
    desk.torchrun_joins();
    assert_eq!(desk.start().map(|start| (start.rank.group_rank, start.round.world_size)), Some((0, 2)));
    desk
}

#[test]
fn alone_it_makes_a_version_and_starts_after_the_last_call() {
    let mut desk = desk((1, 2));
    desk.tell(Input::Tick);
    assert_eq!((desk.state().status, desk.start()), (RendezvousStatus::Joinable, None));
    desk.pass(Duration::from_secs(3));
    let start = desk.start().unwrap();
    assert_eq!((start.round.number, start.rank.first_rank, start.round.world_size), (1, 0, 1));
    assert_eq!(start.round.master.as_ref().unwrap().port, 2);
}

#[test]
fn a_failure_is_written_and_the_version_kept_until_torchruns_nodes_know() {
    let mut desk = mixed();
    desk.ended(Outcome::Failed(Failure::new(FailureClass::Own, "boom")));
    assert_eq!((desk.state().waits(), desk.state().waiting.len(), desk.stops()), (1, 1, 1));
    desk.stopped();
    // torchrun looks ten times a second
    desk.pass(Duration::from_millis(900));
    assert!(desk.has("v_1/rank_0"));
    // It has stopped, and waits as well
    desk.change_state(|mut state| {
        state.num_workers_waiting = Some(2);
        state
    });
    desk.pass(Duration::from_millis(200));
    assert!(!desk.has("v_1/rank_0"), "now a waiting torchrun node may continue at once");
    assert_eq!(desk.state().version.as_deref(), Some("2"));
}

#[test]
fn a_version_of_its_own_kind_is_given_up_at_once() {
    let mut desk = desk((2, 2));
    desk.tell(Input::Tick);
    desk.change_state(|state| state.joined("other:1", 2).0);
    desk.change("v_1/rank_1", Some(""));
    desk.change_state(|state| state.confirmed(&format!("{RENDEZVOUS}/v_1/rank_1")));
    let info = super::super::keys::kv_value(r#"{"role": "default", "rank": 1, "local_world_size": 1}"#);
    desk.change(&desk.kv("torchelastic/role_info/1"), Some(&info));
    desk.ended(Outcome::Failed(Failure::new(FailureClass::Own, "boom")));
    desk.stopped();
    // The other one is still stopping
    assert!(!desk.has("v_1/rank_0") && desk.state().version.as_deref() == Some("1"));
    desk.change("v_1/rank_1", None);
    assert_eq!(desk.state().version.as_deref(), Some("2"));
}

#[test]
fn a_spare_disturbs_no_worker() {
    let mut desk = desk((1, 1));
    let state = RendezvousState::joinable("1").joined("other:1", 1).0.confirmed(&format!("{RENDEZVOUS}/v_1/rank_0"));
    desk.put(&format!("{RENDEZVOUS}/active_version"), &state.text());
    desk.put(&format!("{RENDEZVOUS}/v_1/rank_0"), "");
    desk.tell(Input::Tick);
    desk.pass(Duration::from_secs(2_000));
    assert_eq!((desk.state(), desk.end()), (state, None));

    // When the member is gone, then it takes its place
    desk.change("v_1/rank_0", None);
    assert_eq!(desk.state().version.as_deref(), Some("1"));
    desk.pass(Duration::from_secs(1));
    assert_eq!(desk.start().map(|start| start.rank.group_rank), Some(0));
}

#[test]
fn a_dead_member_is_missed_while_the_group_works() {
    let mut desk = mixed();
    desk.change("v_1/rank_1", None);
    assert_eq!((desk.stops(), desk.state().waits()), (1, 1));
}

#[test]
fn after_an_outage_signs_of_life_have_time_to_come_back() {
    let mut desk = mixed();
    let away = StoreError::Unavailable { endpoints: "etcd".into(), cause: "refused".into() };
    desk.watching = false;
    desk.tell(Input::News(Err(away)));
    desk.pass(Duration::from_millis(500));
    desk.change("v_1/rank_1", None);
    desk.pass(Duration::from_millis(1_000));
    desk.change("v_1/rank_1", Some(""));
    desk.pass(Duration::from_secs(5));
    assert_eq!(desk.stops(), 0);
    // Its own it puts back
    desk.change("v_1/rank_0", None);
    assert!(desk.has("v_1/rank_0"));
    assert_eq!(desk.stops(), 0);
}

#[test]
fn a_version_that_was_replaced_is_left() {
    let mut desk = mixed();
    let other = RendezvousState::joinable("2").text();
    desk.change("active_version", Some(&other));
    assert_eq!(desk.stops(), 1);
    assert!(!desk.wanted.iter().any(|output| matches!(output, Output::End(_))));
    desk.stopped();
    assert_eq!(desk.state().rank_of("own:1"), Some(0), "it joins the new one");
}

#[test]
fn a_workers_error_about_a_peer_waits_for_news_of_that_peer() {
    let failure = || Outcome::Failed(Failure::new(FailureClass::Peer, "connection reset"));
    // Given a peer that restarts, it costs nothing
    let mut desk = mixed();
    desk.ended(failure());
    desk.pass(Duration::from_millis(500));
    assert_eq!(desk.stops(), 0);
    desk.change_state(|mut state| {
        state.num_workers_waiting = Some(1);
        state
    });
    assert_eq!((desk.stops(), desk.machine.restarts), (1, 0));
    // Given nothing of the kind, it does
    let mut desk = mixed();
    desk.ended(failure());
    desk.pass(Duration::from_millis(1_100));
    assert_eq!((desk.stops(), desk.machine.restarts), (1, 1));
}

#[test]
fn a_spent_budget_closes_the_job_with_its_cause() {
    let mut desk = mixed();
    desk.machine.restarts = 1;
    desk.ended(Outcome::Failed(Failure::new(FailureClass::Own, "boom")));
    let state = desk.state();
    assert_eq!((state.status, state.end.unwrap().cause.unwrap().message.as_str()), (RendezvousStatus::Closed, "boom"));
    desk.stopped();
    assert!(matches!(desk.end(), Some(End::Failed(Some(cause), _)) if cause.message == "boom"));
}

#[test]
fn who_closes_it_says_how_it_ends_for_the_others() {
    // By one of ours
    let mut desk = mixed();
    let cause = Some(Box::new(Failure::new(FailureClass::Own, "theirs")));
    desk.change_state(|state| state.closed(JobEnd { failed: true, reason: "x".into(), cause }));
    desk.stopped();
    assert!(matches!(desk.end(), Some(End::Failed(Some(cause), _)) if cause.message == "theirs"));
    // By a torchrun node that has failed
    let closed = |mut state: RendezvousState| {
        state.status = RendezvousStatus::Closed;
        state
    };
    let mut desk = mixed();
    desk.change_state(closed);
    desk.stopped();
    assert!(matches!(desk.end(), Some(End::Failed(None, _))));
    // By one that has waited long enough for the others' end
    let mut desk = mixed();
    desk.change(&desk.kv("torchelastic/agent/terminal_state/num_members"), Some("MQ=="));
    desk.change_state(closed);
    assert_eq!((desk.stops(), desk.end()), (0, None));
}

#[test]
fn the_last_one_at_the_exit_barrier_opens_it() {
    let mut desk = mixed();
    desk.change(&desk.kv("torchelastic/agent/terminal_state/num_members"), Some("MQ=="));
    desk.ended(Outcome::Done);
    assert!(desk.has(&desk.kv("torchelastic/agent/terminal_state/last_member")));
    desk.stopped();
    assert_eq!(desk.end(), Some(&End::Succeeded));
    assert_eq!(desk.state().status, RendezvousStatus::Closed);
}

#[test]
fn a_lost_answer_costs_a_read() {
    let mut desk = desk((2, 2));
    desk.tell(Input::Tick);
    // Given a version that it has begun to make without knowing
    desk.silent = true;
    desk.change("active_version", None);
    let Some(Request::Put { key, value, .. }) = desk.asked.last().cloned() else { panic!("{:?}", desk.asked) };
    desk.put(&key, &value);
    desk.silent = false;
    let lost = StoreError::Unknown { endpoints: "etcd".into(), cause: "time-out".into() };
    desk.tell(Input::Answered(Err(lost)));
    desk.pass(Duration::from_secs(1));
    assert_eq!((desk.state().version.as_deref(), desk.state().rank_of("own:1")), (Some("2"), Some(0)));
}

#[test]
fn a_member_that_dies_while_ranks_are_sent_keeps_no_other_waiting() {
    let mut desk = desk((3, 3));
    let confirmed = |state: RendezvousState, rank: u32| state.confirmed(&format!("{RENDEZVOUS}/v_1/rank_{rank}"));
    let mut state = RendezvousState::joinable("1");
    state.participants = Some(vec![0, 1]);
    desk.put(&format!("{RENDEZVOUS}/active_version"), &state.text());
    desk.tell(Input::Tick);
    assert_eq!(desk.state().rank_of("own:1"), Some(2));
    for rank in 0..2 {
        desk.change(&format!("v_1/rank_{rank}"), Some(""));
        desk.change_state(|state| confirmed(state, rank));
    }
    // When rank 0, a torchrun node, dies before it has told anything
    let info = super::super::keys::kv_value(r#"{"role": "default", "rank": 1, "local_world_size": 1}"#);
    desk.change(&desk.kv("torchelastic/role_info/1"), Some(&info));
    desk.change("v_1/rank_0", None);
    // Then rank 1, another one, gets all it waits for, and hears that somebody waits
    for key in ["MASTER_ADDR", "MASTER_PORT", "torchelastic/assigned_ranks/1"] {
        assert!(desk.has(&desk.kv(key)), "{key}");
    }
    assert_eq!((desk.state().waits(), desk.start()), (1, None));
}

#[test]
fn a_leave_makes_room_and_ends_in_time_without_etcd() {
    let mut desk = mixed();
    desk.tell(Input::Agent(GroupReport::Drain));
    assert_eq!((desk.state().waits(), desk.stops()), (1, 1));
    desk.stopped();
    assert!(desk.end().is_none() && desk.has("v_1/rank_0"), "torchrun's node gets its second");
    desk.pass(Duration::from_millis(1_100));
    assert_eq!(desk.end(), Some(&End::Drained));
    assert!(!desk.has("v_1/rank_0"));
    let mut desk = mixed();
    desk.silent = true;
    desk.tell(Input::Agent(GroupReport::Drain));
    desk.stopped();
    desk.pass(Duration::from_millis(2_100));
    assert_eq!(desk.end(), Some(&End::Drained));
}

#[test]
fn a_leave_before_the_group_is_whole_leaves_no_ghost() {
    let mut desk = desk((2, 2));
    desk.tell(Input::Tick);
    assert_eq!(desk.state().size(), 1);
    desk.tell(Input::Agent(GroupReport::Drain));
    assert_eq!((desk.has("active_version"), desk.end()), (false, Some(&End::Drained)));
}

#[test]
fn torchruns_other_protocol_is_named_and_not_read() {
    let mut desk = desk((1, 1));
    desk.put("/torch/elastic/rendezvous/J", "gASV");
    desk.tell(Input::Tick);
    assert!(matches!(desk.end(), Some(End::Refused(reason)) if reason.contains("/torch/elastic/rendezvous/J")));
    assert_eq!(desk.asked.len(), 1);
}

#[test]
fn a_closed_id_is_refused_to_newcomers() {
    let mut desk = desk((1, 1));
    let closed = RendezvousState::joinable("4").closed(JobEnd { failed: true, reason: "boom".into(), cause: None });
    desk.put(&format!("{RENDEZVOUS}/active_version"), &closed.text());
    desk.tell(Input::Tick);
    assert!(matches!(desk.end(), Some(End::Refused(reason)) if reason.contains("(boom)")));
}

#[test]
fn a_group_that_does_not_come_about_fails_in_time() {
    let mut desk = desk((2, 2));
    desk.tell(Input::Tick);
    desk.pass(Duration::from_secs(901));
    assert!(matches!(desk.end(), Some(End::Failed(None, reason)) if reason.contains("2 nodes")));
    assert!(!desk.has("active_version"));
}
