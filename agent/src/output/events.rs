//! torchrun's events about workers, as lines of JSON on standard error: `--event-log-handler=console`. The job's
//! history is in the store.
//!
//! Names and fields are those of torch 2.15 (`torch.distributed.elastic.events`), so that a program which reads
//! torchrun's events can read these too. As there, `metadata` is a text of JSON within the JSON, and a worker's numbers
//! in it are lists of one element.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::output::logs::{Console, ConsoleStream};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EventHandler {
    #[default]
    Null,
    Console,
}

/// The facts that are the same for all events of one agent.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The console that events go to, if they go anywhere.
    pub console: Option<Console>,
    pub run_id: String,
    pub role: String,
    pub hostname: String,
    /// The backend that nodes meet through: `etcd`, `c10d`, `static`.
    pub backend: &'static str,
    pub entry_point: String,
}

/// This node's place in the round that an event is about.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeInRound {
    pub group_rank: Option<u32>,
    pub group_world_size: Option<u32>,
    pub restarts: u32,
}

/// The worker that an event is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub local_rank: u32,
    pub rank: u32,
    pub role_rank: u32,
    pub role_world_size: u32,
    pub pid: i32,
    /// How it ended, if it failed: the exit code and the message.
    pub failure: Option<(i32, &'a str)>,
}

/// What has happened, in torch's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventState {
    Rendezvous,
    Start,
    /// The worker, or the agent's whole part, has succeeded.
    Succeeded,
    Failed,
    /// It was stopped because something else failed, or the node left.
    Terminated,
}

impl EventState {
    fn name(self) -> &'static str {
        match self {
            EventState::Rendezvous => "RENDEZVOUS",
            EventState::Start => "START",
            EventState::Succeeded => "SUCCEEDED",
            EventState::Failed => "FAILED",
            EventState::Terminated => "TERMINATED",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Events {
    source: Source,
    begun: Instant,
    seeking: Instant,
    place: NodeInRound,
}

impl Events {
    /// Events of an agent that begins now.
    pub(crate) fn new(source: Source) -> Events {
        Events { source, begun: Instant::now(), seeking: Instant::now(), place: NodeInRound::default() }
    }

    /// Records that the node looks for a round from now on.
    pub(crate) fn seeking(&mut self) {
        self.seeking = Instant::now();
    }

    /// Records that the node has found its place in a round, and writes an event.
    pub(crate) fn placed(&mut self, place: NodeInRound) {
        self.place = place;
        self.write(EventState::Rendezvous, None, Some(self.seeking.elapsed()), None);
    }

    pub(crate) fn worker(&self, state: EventState, subject: &Subject<'_>) {
        self.write(state, Some(subject), None, None);
    }

    /// Writes the event of the end of the agent's own part.
    pub(crate) fn agent(&self, state: EventState, error: Option<&str>) {
        self.write(state, None, None, error);
    }

    fn write(&self, state: EventState, subject: Option<&Subject<'_>>, took: Option<Duration>, error: Option<&str>) {
        if let Some(console) = &self.source.console {
            let event = self.event(state, subject, took, error, self.begun.elapsed());
            console.say(ConsoleStream::Stderr, format!("{event}\n").into_bytes());
        }
    }

    fn event(
        &self,
        state: EventState,
        subject: Option<&Subject<'_>>,
        took: Option<Duration>,
        error: Option<&str>,
        running: Duration,
    ) -> Value {
        let Events { source, place, .. } = self;
        let mut metadata =
            json!({"group_world_size": place.group_world_size, "entry_point": source.entry_point.as_str()});
        if let Some(subject) = subject {
            let failure = subject.failure;
            metadata["local_rank"] = json!([subject.local_rank]);
            metadata["role_rank"] = json!([subject.role_rank]);
            metadata["role_world_size"] = json!([subject.role_world_size]);
            metadata["exit_code"] = json!([failure.map(|(code, _)| code)]);
            metadata["worker_pid"] = json!([failure.map(|_| subject.pid)]);
        }
        let raw_error = subject.and_then(|subject| subject.failure).map(|(_, message)| message).or(error);
        json!({
            "name": format!("torchelastic.worker.status.{}", state.name()),
            "source": if subject.is_some() { "WORKER" } else { "AGENT" },
            // The wall clock, for people. torch leaves this field at zero.
            "timestamp": elastic_store::clock::epoch_ms(),
            "metadata": {
                "run_id": source.run_id,
                "global_rank": subject.map(|subject| subject.rank),
                "group_rank": place.group_rank,
                "worker_id": subject.map(|subject| subject.pid.to_string()),
                "role": source.role,
                "hostname": source.hostname,
                "state": state.name(),
                "total_run_time": running.as_secs(),
                "rdzv_backend": source.backend,
                "raw_error": raw_error,
                "metadata": metadata.to_string(),
                "agent_restarts": place.restarts,
                "duration_ms": took.map(|took| took.as_secs_f64() * 1000.0),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_torchs_fields() {
        let source = Source {
            console: None,
            run_id: "J".into(),
            role: "default".into(),
            hostname: "h".into(),
            backend: "etcd",
            entry_point: "train.py".into(),
        };
        let mut events = Events::new(source);
        events.place = NodeInRound { group_rank: Some(1), group_world_size: Some(2), restarts: 3 };
        let subject = Subject {
            local_rank: 0,
            rank: 4,
            role_rank: 4,
            role_world_size: 8,
            pid: 77,
            failure: Some((-9, "SIGKILL")),
        };
        let event = events.event(EventState::Failed, Some(&subject), None, None, Duration::from_secs(12));
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(keys(&event), "metadata name source timestamp");
        let metadata = &event["metadata"];
        assert_eq!(
            keys(metadata),
            "agent_restarts duration_ms global_rank group_rank hostname metadata raw_error rdzv_backend role run_id \
             state total_run_time worker_id"
        );
        assert_eq!((&event["name"], &event["source"]), (&json!("torchelastic.worker.status.FAILED"), &json!("WORKER")));
        assert_eq!((&metadata["worker_id"], &metadata["total_run_time"]), (&json!("77"), &json!(12)));
        let inner: Value = serde_json::from_str(metadata["metadata"].as_str().unwrap()).unwrap();
        let expected = json!({"group_world_size": 2, "entry_point": "train.py", "local_rank": [0], "role_rank": [4],
            "role_world_size": [8], "exit_code": [-9], "worker_pid": [77]});
        assert_eq!(inner, expected);

        let agent = events.event(EventState::Rendezvous, None, Some(Duration::from_millis(1500)), None, Duration::ZERO);
        assert_eq!((&agent["source"], &agent["metadata"]["duration_ms"]), (&json!("AGENT"), &json!(1500.0)));
        assert_eq!(agent["metadata"]["global_rank"], Value::Null);
    }
}
