//! torchrun's agent on top of its rendezvous: ranks through the version's key-value store, workers, the exit barrier.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use elastic_torchelastic::etcd_v2::{Entry, Only, Request};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::{Failed, Torchrun, Tried};
use crate::world::{Exit, Seat, Worker};

const MONITOR: Duration = Duration::from_millis(100);
const STORE_TIMEOUT: Duration = Duration::from_secs(300);

impl Torchrun {
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
