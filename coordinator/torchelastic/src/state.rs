//! The state of a rendezvous as all agents read and write it: the JSON value of `active_version`.
//!
//! ```text
//!             join             all joined, or     each member confirms        joins, leaves, deaths
//!  setup ─▶ joinable ─▶ … ─▶  the last call over ─▶ frozen ─▶ … ─▶ final ─────▶ deleted ─▶ setup
//! ```
//!
//! torchrun changes what it has read and writes the rest back, so members of ours can add to a state: who they are, and
//! why they closed it. It compares states as strings, and so do we.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use elastic_rendezvous::job::Failure;

/// How far a rendezvous is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RendezvousStatus {
    /// Somebody is making a version.
    Setup,
    /// Who comes is let in.
    Joinable,
    /// Those who came confirm.
    Frozen,
    /// All have confirmed: the group works.
    Final,
    /// No one may come any more, ever.
    Closed,
}

/// The state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousState {
    /// How far it is.
    pub status: RendezvousStatus,
    /// The version: a number, but a string on the wire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The group ranks that were given: always 0 and up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub participants: Option<Vec<u32>>,
    /// The keys of those who have confirmed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alives: Option<Vec<String>>,
    /// How often somebody asked to be let in since the version was made. Never falls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_workers_waiting: Option<u32>,
    /// Ours: which ranks are elastic agents, and who they are.
    #[serde(default, rename = "elastic_agents", skip_serializing_if = "BTreeMap::is_empty")]
    pub agents: BTreeMap<u32, String>,
    /// Ours: the elastic agents among those who wait.
    #[serde(default, rename = "elastic_waiting", skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<String>,
    /// Ours: who makes this version.
    #[serde(default, rename = "elastic_maker", skip_serializing_if = "Option::is_none")]
    pub maker: Option<String>,
    /// Ours: how the job ended.
    #[serde(default, rename = "elastic_end", skip_serializing_if = "Option::is_none")]
    pub end: Option<JobEnd>,
    /// Whatever else somebody wrote.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// How an elastic agent that closed the rendezvous saw the job end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEnd {
    /// Whether it failed.
    pub failed: bool,
    /// For people.
    pub reason: String,
    /// The root cause, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Box<Failure>>,
}

impl RendezvousState {
    /// A version that is being made, by `maker`.
    pub fn setup(maker: &str) -> RendezvousState {
        RendezvousState {
            status: RendezvousStatus::Setup,
            version: None,
            participants: None,
            keep_alives: None,
            num_workers_waiting: None,
            agents: BTreeMap::new(),
            waiting: Vec::new(),
            maker: Some(maker.to_owned()),
            end: None,
            rest: Map::new(),
        }
    }

    /// A version that can be joined.
    pub fn joinable(version: &str) -> RendezvousState {
        RendezvousState {
            status: RendezvousStatus::Joinable,
            version: Some(version.to_owned()),
            participants: Some(Vec::new()),
            maker: None,
            ..RendezvousState::setup("")
        }
    }

    /// Reads a state.
    pub fn parse(text: &str) -> Result<RendezvousState, String> {
        let state: RendezvousState = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let number = state.version.as_ref().is_some_and(|version| version.parse::<u64>().is_ok());
        match state.status {
            RendezvousStatus::Joinable | RendezvousStatus::Frozen | RendezvousStatus::Final if !number => {
                Err("it names no version".into())
            }
            _ => Ok(state),
        }
    }

    /// The written state.
    pub fn text(&self) -> String {
        // Nothing in it can fail to be JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// How many have a rank.
    pub fn size(&self) -> u32 {
        self.participants.as_ref().map_or(0, |participants| participants.len() as u32)
    }

    /// The rank that an elastic agent has.
    pub fn rank_of(&self, agent: &str) -> Option<u32> {
        self.agents.iter().find(|(_, id)| id.as_str() == agent).map(|(rank, _)| *rank)
    }

    /// Whether a member of this rank has confirmed with `key`.
    pub fn has_confirmed(&self, key: &str) -> bool {
        self.keep_alives.as_ref().is_some_and(|keys| keys.iter().any(|own| own == key))
    }

    /// How many asked to be let in.
    pub fn waits(&self) -> u32 {
        self.num_workers_waiting.unwrap_or(0)
    }

    /// With one more member: `agent`, who gets the next rank. At `max` members no one else can come.
    #[must_use]
    pub fn joined(mut self, agent: &str, max: u32) -> (RendezvousState, u32) {
        let rank = self.size();
        self.participants.get_or_insert_default().push(rank);
        self.agents.insert(rank, agent.to_owned());
        let state = if self.size() >= max { self.frozen() } else { self };
        (state, rank)
    }

    /// With no one else let in.
    #[must_use]
    pub fn frozen(mut self) -> RendezvousState {
        self.status = RendezvousStatus::Frozen;
        self.keep_alives = Some(Vec::new());
        self
    }

    /// With the confirmation of the member whose key this is: the last one makes it final.
    #[must_use]
    pub fn confirmed(mut self, key: &str) -> RendezvousState {
        let keys = self.keep_alives.get_or_insert_default();
        keys.push(key.to_owned());
        if keys.len() as u32 == self.size() {
            self.status = RendezvousStatus::Final;
            self.num_workers_waiting = Some(0);
        }
        self
    }

    /// With one more, `agent`, who asks to be let in.
    #[must_use]
    pub fn awaited_by(mut self, agent: &str) -> RendezvousState {
        self.num_workers_waiting = Some(self.waits() + 1);
        self.waiting.push(agent.to_owned());
        self
    }

    /// Closed for good.
    #[must_use]
    pub fn closed(mut self, end: JobEnd) -> RendezvousState {
        self.status = RendezvousStatus::Closed;
        self.end = Some(end);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As recorded from torch 2.15.
    const FINAL: &str = r#"{"status": "final", "version": "7", "participants": [0, 1],
        "keep_alives": ["/p/run_J/rdzv/v_7/rank_1", "/p/run_J/rdzv/v_7/rank_0"], "num_workers_waiting": 0}"#;

    #[test]
    fn torchruns_states_are_read() {
        let state = RendezvousState::parse(FINAL).unwrap();
        assert_eq!((state.status, state.version.as_deref(), state.size()), (RendezvousStatus::Final, Some("7"), 2));
        assert!(state.has_confirmed("/p/run_J/rdzv/v_7/rank_1") && state.agents.is_empty());
        assert_eq!(RendezvousState::parse(r#"{"status": "setup"}"#).unwrap().status, RendezvousStatus::Setup);
        for wrong in [r#"{"status": "odd"}"#, "", r#"{"status":"final","version":"x"}"#, r#"{"status":"joinable"}"#] {
            assert!(RendezvousState::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_others_added_is_kept() {
        let text = r#"{"status":"joinable","version":"3","participants":[0],"later":{"a":[1]}}"#;
        let (state, rank) = RendezvousState::parse(text).unwrap().joined("a", 4);
        let json: Value = serde_json::from_str(&state.text()).unwrap();
        assert_eq!((rank, &json["later"]["a"][0], &json["participants"]), (1, &1.into(), &serde_json::json!([0, 1])));
        assert_eq!(json["elastic_agents"], serde_json::json!({"1": "a"}));
    }

    #[test]
    fn a_state_goes_through_its_phases() {
        let (one, rank) = RendezvousState::joinable("1").joined("a", 2);
        assert_eq!((one.status, rank, one.rank_of("a")), (RendezvousStatus::Joinable, 0, Some(0)));
        let (two, rank) = one.joined("b", 2);
        assert_eq!((two.status, rank), (RendezvousStatus::Frozen, 1));
        let once = two.confirmed("k1");
        assert_eq!(once.status, RendezvousStatus::Frozen);
        let whole = once.confirmed("k0");
        assert_eq!((whole.status, whole.num_workers_waiting), (RendezvousStatus::Final, Some(0)));
        let awaited = whole.awaited_by("c");
        assert_eq!((awaited.waits(), awaited.waiting.as_slice()), (1, &["c".to_owned()][..]));
        let closed = awaited.closed(JobEnd { failed: false, reason: "over".into(), cause: None });
        assert_eq!(RendezvousState::parse(&closed.text()), Ok(closed));
    }

    #[test]
    fn a_state_without_elastic_agents_has_only_what_torchrun_knows() {
        let state = RendezvousState::joinable("1");
        assert_eq!(state.text(), r#"{"status":"joinable","version":"1","participants":[]}"#);
    }
}
