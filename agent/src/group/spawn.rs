//! What a worker is started with, and starting workers that have no place yet. Not for workers that have one.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use elastic_proto::worker::{Assignment, WARM_UP_ENV};

use super::{Group, Running};
use crate::environment::{LocalPlace, NoDevice, NodeFacts, own_device, without_place, worker_env};
use crate::socket::WorkerSocket;
use crate::workers::{SpawnError, Stdio, WorkerSpec};

/// Why a worker was not started ahead of its round.
#[derive(Debug, thiserror::Error)]
pub enum AheadError {
    /// It would have no device.
    #[error(transparent)]
    Device(#[from] NoDevice),
    /// It cannot be run.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

impl Group {
    /// What a worker of a place is started with.
    pub(super) fn spec(
        &self,
        assignment: &Assignment,
        place: &LocalPlace<'_>,
        error_file: Option<&Path>,
        stdio: Stdio,
        socket: &WorkerSocket,
    ) -> Result<WorkerSpec, NoDevice> {
        let local_rank = place.local_rank;
        let signals = self.setup.signals.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let facts = NodeFacts {
            node: &self.setup.node,
            socket: socket.path(),
            max_restarts: self.setup.max_restarts,
            agent_store: self.master.is_agent(),
            signals: &signals,
        };
        let lookup = |name: &str| std::env::var_os(name);
        let mut env: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        // Perhaps this agent is a worker itself.
        env.remove(OsStr::new(WARM_UP_ENV));
        env.extend(worker_env(assignment, place, &facts, error_file, &lookup));
        if self.setup.virtual_local_rank {
            env.extend(own_device(local_rank, &lookup)?);
        }
        env.extend(self.setup.env.iter().map(|(name, value)| ((*name).into(), value.clone())));
        let mut argv = vec![self.setup.command.program.clone().into_os_string()];
        argv.extend(self.setup.command.args(local_rank, assignment.rank));
        let cpus = self.setup.cpus.get(local_rank as usize).cloned().unwrap_or_default();
        Ok(WorkerSpec { local_rank, argv, env, cwd: self.setup.directory.clone(), stdio, cpus })
    }

    /// Starts all workers before their places are known. How they end, until they have one, is no failure.
    ///
    /// # Errors
    /// One cannot be started; those before it run.
    pub async fn start_ahead(&mut self, socket: &WorkerSocket) -> Result<(), AheadError> {
        self.judged = true;
        socket.ahead();
        for local_rank in 0..self.setup.slots {
            // What is not known yet is taken out again below.
            let nowhere = Assignment {
                job: self.setup.job.clone(),
                round: 0,
                rank: local_rank,
                world_size: self.setup.slots,
                group_rank: 0,
                group_world_size: 1,
                master_addr: String::new(),
                master_port: 0,
                restart_count: 0,
                checkpoint: None,
            };
            let place = LocalPlace {
                local_rank,
                local_world_size: self.setup.slots,
                role: &self.setup.role,
                role_rank_base: 0,
                role_world_size: self.setup.slots,
            };
            let (stdio, logs) = self.logs.begin_ahead().worker(local_rank, local_rank);
            let mut spec = self.spec(&nowhere, &place, logs.error_file(), stdio, socket)?;
            without_place(&mut spec.env);
            let pid = self.supervisor.spawn(spec).await?;
            tracing::info!(local_rank, pid, "worker started ahead of its round");
            let (rank, role_rank, role_world_size) = (local_rank, local_rank, self.setup.slots);
            let worker = Running { pid, rank, role_rank, role_world_size, logs, exit: None, placed: false };
            self.workers.insert(local_rank, worker);
        }
        self.publish();
        Ok(())
    }
}
