//! torchrun 2.15 with its `etcd` backend, as its sources and our measurements say it behaves: the model that our
//! machine is mixed with. It follows the original step by step, with its delays, its polling, and its defects.

mod agent;

use std::time::Duration;

use elastic_torchelastic::etcd_v2::{Answer, Only, Refusal, Request};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::network::Client;
use crate::world::World;

const JOINABLE_TTL: u64 = 10;
const FROZEN_TTL: u64 = 10;
const SETUP_TTL: u64 = 5;
const KEEP_ALIVE_TTL: u64 = 10;

/// How an attempt at the barrier ends, if not with a place.
enum Failed {
    Immediately,
    Later,
    Closed,
    Timeout,
    /// "Worker needs to die."
    Fatal,
}

/// Any other exception: logged, and tried again after a second.
impl From<Refusal> for Failed {
    fn from(_: Refusal) -> Failed {
        Failed::Later
    }
}

impl From<elastic_store::StoreError> for Failed {
    fn from(_: elastic_store::StoreError) -> Failed {
        Failed::Later
    }
}

type Tried<T> = Result<T, Failed>;

/// A task that ends with its handle.
struct Thread(JoinHandle<()>);

impl Drop for Thread {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// `active_version`, as torchrun read it.
struct Active {
    raw: String,
    state: Value,
    index: u64,
}

impl Active {
    fn new(answer: Answer) -> Tried<Active> {
        let entry = answer.outcome?;
        let state = serde_json::from_str(&entry.value).map_err(|_| Failed::Later)?;
        Ok(Active { raw: entry.value, state, index: answer.index })
    }

    fn is(&self, status: &str, version: &str) -> bool {
        self.state["status"] == status && self.state["version"] == version
    }

    fn status(&self) -> &str {
        self.state["status"].as_str().unwrap_or_default()
    }

    fn size(&self) -> usize {
        self.state["participants"].as_array().map_or(0, Vec::len)
    }
}

/// One agent.
pub(crate) struct Torchrun {
    pub(crate) world: World,
    pub(crate) client: Client,
    pub(crate) name: String,
    pub(crate) slots: u32,
    refresher: Option<Thread>,
    deadline: Instant,
}

impl Torchrun {
    pub(crate) fn new(world: World, client: Client, name: String, slots: u32) -> Torchrun {
        let deadline = Instant::now();
        Torchrun { world, client, name, slots, refresher: None, deadline }
    }

    fn path(&self, rest: &str) -> String {
        format!("/torchelastic/p2p/run_job/rdzv{rest}")
    }

    async fn ask(&self, request: Request) -> Tried<Answer> {
        Ok(self.client.reliable(&request).await?)
    }

    async fn read(&self, key: String) -> Tried<Answer> {
        self.ask(Request::Read { key, recursive: true }).await
    }

    async fn state(&self) -> Tried<Active> {
        Active::new(self.read(self.path("/active_version")).await?)
    }

    async fn cas_delay(&self) {
        sleep(self.client.up_to(Duration::from_millis(100))).await;
    }

    /// `test_and_set`: whether it was this node.
    async fn test_and_set(&self, old: &Active, next: &Value, ttl: Option<u64>) -> Tried<Option<Active>> {
        let only = Only::Value(old.raw.clone());
        let answer =
            self.ask(Request::Put { key: self.path("/active_version"), value: next.to_string(), ttl, only }).await?;
        match answer.outcome {
            Err(Refusal::Differs) => Ok(None),
            Err(refusal) => Err(refusal.into()),
            Ok(entry) => Ok(Some(Active { raw: entry.value.clone(), state: next.clone(), index: answer.index })),
        }
    }

    async fn wait_for_change(&self, index: u64, timeout: Option<Duration>) -> Tried<Active> {
        let overall = self.deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let limit = timeout.map_or(overall, |timeout| timeout.min(overall));
        self.client.wait(&self.path("/active_version"), index, Some(limit)).await?;
        if Instant::now() > self.deadline {
            return Err(Failed::Timeout);
        }
        self.state().await
    }

    /// `EtcdRendezvous.__init__`.
    async fn set_up(&self) -> Tried<()> {
        let run = "/torchelastic/p2p/run_job".to_owned();
        for (key, ttl) in [("/torchelastic/p2p".to_owned(), None), (run.clone(), Some(7200)), (self.path(""), None)] {
            self.ask(Request::MakeDir { key, ttl }).await?;
        }
        let (key, value) = (self.path("/version_counter"), "0".to_owned());
        self.ask(Request::Put { key, value, ttl: None, only: Only::Absent }).await?;
        Ok(())
    }

    async fn rendezvous_barrier(&mut self) -> Tried<(String, u32, u32)> {
        self.deadline = Instant::now() + self.world.timeout;
        loop {
            if Instant::now() > self.deadline {
                return Err(Failed::Timeout);
            }
            self.refresher = None;
            match self.init_phase().await {
                Err(Failed::Immediately) => {}
                Err(Failed::Later) => sleep(Duration::from_secs(1)).await,
                other => return other,
            }
        }
    }

    async fn init_phase(&mut self) -> Tried<(String, u32, u32)> {
        let active = match self.try_create().await? {
            Some(active) => active,
            None => self.state().await?,
        };
        let version = active.state["version"].as_str().unwrap_or_default().to_owned();
        match active.status() {
            "closed" => Err(Failed::Closed),
            "joinable" => self.join_phase(&version).await,
            "final" => {
                self.handle_existing(&version).await?;
                Err(Failed::Immediately)
            }
            _ => {
                self.wait_for_change(active.index + 1, None).await?;
                Err(Failed::Later)
            }
        }
    }

    /// None: somebody else has.
    async fn try_create(&self) -> Tried<Option<Active>> {
        let setup = json!({"status": "setup"});
        let request = Request::Put {
            key: self.path("/active_version"),
            value: setup.to_string(),
            ttl: Some(SETUP_TTL),
            only: Only::Absent,
        };
        let answer = self.ask(request).await?;
        let active = match answer.outcome {
            Err(Refusal::Exists) => return Ok(None),
            Err(refusal) => return Err(refusal.into()),
            Ok(entry) => Active { raw: entry.value, state: setup, index: answer.index },
        };
        let counter = self.read(self.path("/version_counter")).await?.outcome.map_err(|_| Failed::Fatal)?;
        let version = (counter.value.parse::<u64>().map_err(|_| Failed::Fatal)? + 1).to_string();
        let only = Only::Index(counter.modified);
        let bump = Request::Put { key: counter.key, value: version.clone(), ttl: None, only };
        self.ask(bump).await?.outcome.map_err(|_| Failed::Fatal)?;
        self.ask(Request::MakeDir { key: self.path(&format!("/v_{version}")), ttl: None }).await?.outcome?;
        let joinable = json!({"status": "joinable", "version": version, "participants": []});
        match self.test_and_set(&active, &joinable, None).await? {
            Some(active) => Ok(Some(active)),
            None => Err(Failed::Later),
        }
    }

    async fn join_phase(&mut self, version: &str) -> Tried<(String, u32, u32)> {
        let (mut active, rank) = self.join(version).await?;
        if rank + 1 == self.world.min && active.status() == "joinable" {
            self.last_call(version, Instant::now() + self.world.last_call).await?;
            active = self.state().await?;
        } else {
            active = match active.status() {
                "joinable" => self.state().await?,
                _ => active,
            };
        }
        loop {
            if active.is("frozen", version) {
                break;
            } else if active.is("joinable", version) {
                active = self.wait_for_change(active.index + 1, None).await?;
            } else {
                return Err(Failed::Later);
            }
        }
        self.confirm(version, rank).await?;
        active = self.state().await?;
        loop {
            if active.is("final", version) {
                return Ok((version.to_owned(), rank, active.size() as u32));
            } else if active.is("frozen", version) {
                active = self.wait_for_change(active.index + 1, None).await?;
            } else {
                return Err(Failed::Later);
            }
        }
    }

    async fn join(&self, version: &str) -> Tried<(Active, u32)> {
        loop {
            self.cas_delay().await;
            let active = self.state().await?;
            if active.status() != "joinable" {
                return Err(Failed::Later);
            }
            if active.state["version"] != version {
                return Err(Failed::Immediately);
            }
            let rank = active.size() as u32;
            let mut next = active.state.clone();
            next["participants"].as_array_mut().expect("a list").push(rank.into());
            let size = rank + 1;
            let ttl = if size == self.world.max {
                next["status"] = "frozen".into();
                next["keep_alives"] = json!([]);
                Some(FROZEN_TTL)
            } else {
                (size >= self.world.min).then_some(JOINABLE_TTL)
            };
            if let Some(active) = self.test_and_set(&active, &next, ttl).await? {
                return Ok((active, rank));
            }
        }
    }

    async fn last_call(&self, version: &str, deadline: Instant) -> Tried<()> {
        let mut active = self.state().await?;
        loop {
            if active.is("frozen", version) {
                return Ok(());
            }
            if !active.is("joinable", version) {
                return Err(Failed::Later);
            }
            if Instant::now() >= deadline {
                let mut next = active.state.clone();
                next["status"] = "frozen".into();
                next["keep_alives"] = json!([]);
                if self.test_and_set(&active, &next, Some(FROZEN_TTL)).await?.is_some() {
                    return Ok(());
                }
                self.cas_delay().await;
                active = self.state().await?;
                continue;
            }
            // The very string that was read, so that only its time to live changes.
            let request = Request::Put {
                key: self.path("/active_version"),
                value: active.raw.clone(),
                ttl: Some(JOINABLE_TTL),
                only: Only::Value(active.raw.clone()),
            };
            let answer = self.ask(request).await?;
            match answer.outcome {
                Ok(_) => {
                    let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
                    let limit = left.min(Duration::from_secs(JOINABLE_TTL / 2));
                    active = self.wait_for_change(answer.index + 1, Some(limit)).await?;
                }
                Err(Refusal::Differs) => {
                    self.cas_delay().await;
                    active = self.state().await?;
                }
                Err(refusal) => return Err(refusal.into()),
            }
        }
    }

    async fn confirm(&mut self, version: &str, rank: u32) -> Tried<()> {
        loop {
            self.cas_delay().await;
            let active = self.state().await?;
            if active.status() != "frozen" || active.state["version"] != version {
                return Err(Failed::Immediately);
            }
            let key = self.path(&format!("/v_{version}/rank_{rank}"));
            let put =
                Request::Put { key: key.clone(), value: String::new(), ttl: Some(KEEP_ALIVE_TTL), only: Only::Always };
            self.ask(put).await?.outcome?;
            let mut next = active.state.clone();
            let keys = next["keep_alives"].as_array_mut().expect("a list");
            keys.push(key.clone().into());
            let last = keys.len() == active.size();
            if last {
                next["status"] = "final".into();
                next["num_workers_waiting"] = 0.into();
            }
            let ttl = (!last).then_some(FROZEN_TTL);
            if self.test_and_set(&active, &next, ttl).await?.is_some() {
                self.refresher = Some(self.refresh(key));
                return Ok(());
            }
        }
    }

    /// The thread that keeps a key alive, until it is gone or etcd does not answer.
    fn refresh(&self, key: String) -> Thread {
        let client = self.client.clone();
        Thread(tokio::task::spawn_local(async move {
            loop {
                let refresh = Request::Refresh { key: key.clone(), dir: false, ttl: KEEP_ALIVE_TTL };
                if client.reliable(&refresh).await.is_ok_and(|answer| answer.outcome.is_ok()) {
                    sleep(Duration::from_secs(KEEP_ALIVE_TTL) / 2).await;
                } else {
                    return;
                }
            }
        }))
    }

    async fn handle_existing(&self, version: &str) -> Tried<()> {
        loop {
            self.cas_delay().await;
            let active = self.state().await?;
            if !active.is("final", version) {
                return Err(Failed::Immediately);
            }
            let mut next = active.state.clone();
            next["num_workers_waiting"] = (active.state["num_workers_waiting"].as_u64().unwrap_or(0) + 1).into();
            if self.test_and_set(&active, &next, None).await?.is_some() {
                break;
            }
        }
        let mut active = self.state().await?;
        loop {
            if !active.is("final", version) {
                return Ok(());
            }
            let alive = self.read(self.path(&format!("/v_{version}"))).await?.outcome?;
            let alive: Vec<&str> = alive.entries.iter().map(|entry| entry.key.as_str()).collect();
            let keys = active.state["keep_alives"].as_array().cloned().unwrap_or_default();
            if keys.iter().any(|key| !alive.contains(&key.as_str().unwrap_or_default())) {
                let only = Only::Value(active.raw.clone());
                self.ask(Request::Delete { key: self.path("/active_version"), only }).await?.outcome?;
                return Ok(());
            }
            let limit = self.deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
            self.client.wait(&self.path(""), active.index + 1, Some(limit)).await?;
            if Instant::now() > self.deadline {
                return Err(Failed::Timeout);
            }
            active = self.state().await?;
        }
    }

    async fn set_closed(&self) -> Tried<()> {
        loop {
            let active = self.state().await?;
            if active.status() == "closed" {
                return Ok(());
            }
            let mut next = active.state.clone();
            next["status"] = "closed".into();
            if self.test_and_set(&active, &next, None).await?.is_some() {
                return Ok(());
            }
            self.cas_delay().await;
        }
    }
}
