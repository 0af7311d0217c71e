//! torchrun 2.15 with its `etcd` backend, as its sources and our measurements say it behaves: the model that our machine is
//! mixed with. It follows the original step by step, with its delays, its polling, and its defects. Not for what our
//! agents would do better.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use elastic_coordinator::etcd_v2::{Answer, Entry, Only, Refusal, Request};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::network::Client;
use crate::world::{Exit, Seat, Worker, World};

const JOINABLE_TTL: u64 = 10;
const FROZEN_TTL: u64 = 10;
const SETUP_TTL: u64 = 5;
const KEEP_ALIVE_TTL: u64 = 10;
const MONITOR: Duration = Duration::from_millis(100);
const STORE_TIMEOUT: Duration = Duration::from_secs(300);

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

impl From<elastic_coordinator::store::StoreError> for Failed {
    fn from(_: elastic_coordinator::store::StoreError) -> Failed {
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

/// `active_version` as it was read.
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

    fn kv(&self, version: &str, key: &str) -> String {
        self.path(&format!("/v_{version}/kv/{}", STANDARD.encode(key)))
    }

    async fn set(&self, version: &str, key: &str, value: &str) -> Tried<()> {
        let request =
            Request::Put { key: self.kv(version, key), value: STANDARD.encode(value), ttl: None, only: Only::Always };
        self.ask(request).await?.outcome?;
        Ok(())
    }

    /// Blocks until the key is there; fails after five minutes, and at once when etcd does not answer.
    async fn get(&self, version: &str, key: &str) -> Tried<String> {
        let until = Instant::now() + STORE_TIMEOUT;
        let directory = self.path(&format!("/v_{version}/kv"));
        loop {
            let answer = self.read(directory.clone()).await?;
            let index = answer.index;
            let wanted = self.kv(version, key);
            let found =
                answer.outcome.ok().and_then(|all| all.entries.into_iter().find(|entry: &Entry| entry.key == wanted));
            if let Some(entry) = found {
                let bytes = STANDARD.decode(entry.value).map_err(|_| Failed::Fatal)?;
                return String::from_utf8(bytes).map_err(|_| Failed::Fatal);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failed::Timeout);
            }
            self.client.wait(&directory, index + 1, Some(left)).await?;
        }
    }

    async fn add(&self, version: &str, key: &str) -> Tried<u32> {
        let path = self.kv(version, key);
        let put =
            |value: &str, only| Request::Put { key: path.clone(), value: STANDARD.encode(value), ttl: None, only };
        if self.ask(put("1", Only::Absent)).await?.outcome.is_ok() {
            return Ok(1);
        }
        loop {
            let old = self.read(path.clone()).await?.outcome?;
            let number: u32 = String::from_utf8(STANDARD.decode(&old.value).unwrap_or_default())
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or(Failed::Fatal)?;
            let next = number + 1;
            if self.ask(put(&next.to_string(), Only::Value(old.value))).await?.outcome.is_ok() {
                return Ok(next);
            }
            self.cas_delay().await;
        }
    }

    /// `next_rendezvous` and `_assign_worker_ranks`.
    async fn take_seat(&self, version: &str, rank: u32, size: u32) -> Tried<Seat> {
        if rank == 0 {
            self.set(version, "MASTER_ADDR", &self.name).await?;
            self.set(version, "MASTER_PORT", "29500").await?;
        }
        let host = self.get(version, "MASTER_ADDR").await?;
        let port = self.get(version, "MASTER_PORT").await?;
        let info = json!({"role": "default", "rank": rank, "local_world_size": self.slots});
        self.set(version, &format!("torchelastic/role_info/{rank}"), &info.to_string()).await?;
        if rank == 0 {
            let mut slots = Vec::new();
            for other in 0..size {
                let info = self.get(version, &format!("torchelastic/role_info/{other}")).await?;
                let info: Value = serde_json::from_str(&info).map_err(|_| Failed::Fatal)?;
                slots.push(info["local_world_size"].as_u64().unwrap_or(0));
            }
            let world: u64 = slots.iter().sum();
            let mut first = 0;
            for (other, own) in slots.iter().enumerate() {
                let assigned = json!([first, world, first, world]).to_string();
                self.set(version, &format!("torchelastic/assigned_ranks/{other}"), &assigned).await?;
                first += own;
            }
        }
        let assigned = self.get(version, &format!("torchelastic/assigned_ranks/{rank}")).await?;
        let [first, world_size, ..]: [u32; 4] = serde_json::from_str(&assigned).map_err(|_| Failed::Fatal)?;
        Ok(Seat {
            version: version.parse().map_err(|_| Failed::Fatal)?,
            group_rank: rank,
            size,
            first,
            slots: self.slots,
            world_size,
            master: format!("{host}:{port}"),
        })
    }

    /// The agent, from its start to its exit.
    pub(crate) async fn run(mut self) -> Exit {
        // Python's own imports.
        sleep(self.client.up_to(Duration::from_secs(2))).await;
        let exit = match self.invoke_run().await {
            Ok(()) => Exit::Succeeded,
            Err(Failed::Closed) => Exit::Closed,
            Err(Failed::Timeout) => Exit::Failed("a time-out"),
            Err(_) => Exit::Failed("an exception"),
        };
        self.world.stopped(&self.name);
        if self.set_closed().await.is_ok() && matches!(exit, Exit::Failed(_)) {
            self.world.closed_by_torchrun();
        }
        exit
    }

    async fn invoke_run(&mut self) -> Tried<()> {
        self.set_up().await?;
        loop {
            let (version, rank, size) = self.rendezvous_barrier().await?;
            self.ask(Request::MakeDir { key: self.path(&format!("/v_{version}/kv")), ttl: None }).await?;
            let seat = self.take_seat(&version, rank, size).await?;
            self.world.started(&self.name, seat, None);
            let mut next = Instant::now();
            loop {
                next = (next + MONITOR).max(Instant::now());
                sleep_until(next).await;
                match self.world.worker(&self.name) {
                    Worker::Done => return self.exit_barrier(&version, size).await,
                    Worker::Failed(_) => break,
                    Worker::Runs | Worker::None => {}
                }
                // No exception is caught here.
                let waiting = match self.state().await {
                    Ok(active) if active.status() == "final" => {
                        active.state["num_workers_waiting"].as_u64().unwrap_or(0)
                    }
                    Ok(_) => 0,
                    Err(_) if !self.world.etcd_is_away() => 0,
                    Err(failed) => return Err(failed),
                };
                if waiting > 0 {
                    break;
                }
            }
            sleep(self.client.up_to(Duration::from_millis(700))).await;
            self.world.stopped(&self.name);
        }
    }

    /// Whatever goes wrong in it is logged, and no more.
    async fn exit_barrier(&mut self, version: &str, size: u32) -> Tried<()> {
        const PREFIX: &str = "torchelastic/agent/terminal_state";
        let outcome = async {
            if self.add(version, &format!("{PREFIX}/num_members")).await? == size {
                self.set(version, &format!("{PREFIX}/last_member"), "<val_ignored>").await?;
            }
            self.get(version, &format!("{PREFIX}/last_member")).await
        };
        let _ = outcome.await;
        Ok(())
    }
}
