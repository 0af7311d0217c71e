//! The workers' environment: torchrun's variables (torch 2.15's, and the names that older versions read) and ours.
//! Workers also inherit the agent's own variables, which these override.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use elastic_proto::worker::{Assignment, SOCKET_ENV, WARM_UP_ENV};

/// The number of the round that a worker was started in.
pub(crate) const ROUND_ENV: &str = "ELASTIC_ROUND";
/// A worker's position on its node. It stays correct with `--virtual-local-rank`, which sets every `LOCAL_RANK` to 0.
pub(crate) const LOCAL_RANK_ENV: &str = "ELASTIC_LOCAL_RANK";
/// The name of the node that a worker runs on.
pub(crate) const NODE_ENV: &str = "ELASTIC_NODE";

/// Nodes that hold one replica of the model together, if several. A worker's `GROUP_RANK` divided by it is its replica.
const REPLICA_ENV: &str = "ELASTIC_REPLICA_NODES";

/// Whether the store at `MASTER_PORT` is served by an agent, so that workers are only its clients: `True` or `False`,
/// as Python spells them.
const AGENT_STORE_ENV: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// A worker's place on its node and in its role. The rest of its place is in its [`Assignment`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalPlace<'a> {
    pub local_rank: u32,
    pub local_world_size: u32,
    pub role: &'a str,
    /// The number of workers of the same role on nodes before this one.
    pub role_rank_base: u32,
    pub role_world_size: u32,
}

/// What is the same for every worker of this agent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeFacts<'a> {
    pub node: &'a str,
    pub socket: &'a Path,
    pub max_restarts: u32,
    /// Whether the agent of rank 0's node serves the store at `MASTER_PORT`. If not, worker rank 0 serves it.
    pub agent_store: bool,
    /// `--signals-to-handle`: signal names, separated by commas.
    pub signals: &'a str,
}

/// The variables that one worker gets in addition to the agent's environment. `assignment` is this worker's place.
/// `error_file` is the file to which it may write its exception, if files are wanted. `inherited` looks up the agent's
/// environment.
pub(crate) fn worker_env(
    assignment: &Assignment,
    place: &LocalPlace<'_>,
    facts: &NodeFacts<'_>,
    error_file: Option<&Path>,
    inherited: &dyn Fn(&str) -> Option<OsString>,
) -> Vec<(OsString, OsString)> {
    let number = |n: u32| OsString::from(n.to_string());
    let kept = |name: &str, default: &str| inherited(name).unwrap_or_else(|| default.into());
    let mut env: Vec<(&str, OsString)> = vec![
        ("LOCAL_RANK", number(place.local_rank)),
        ("RANK", number(assignment.rank)),
        ("GROUP_RANK", number(assignment.group_rank)),
        ("ROLE_RANK", number(place.role_rank_base + place.local_rank)),
        ("ROLE_NAME", place.role.into()),
        ("LOCAL_WORLD_SIZE", number(place.local_world_size)),
        ("WORLD_SIZE", number(assignment.world_size)),
        ("GROUP_WORLD_SIZE", number(assignment.group_world_size)),
        ("ROLE_WORLD_SIZE", number(place.role_world_size)),
        ("MASTER_ADDR", assignment.master_addr.clone().into()),
        ("MASTER_PORT", assignment.master_port.to_string().into()),
        ("TORCHELASTIC_RESTART_COUNT", number(assignment.restart_count)),
        ("TORCHELASTIC_MAX_RESTARTS", number(facts.max_restarts)),
        ("TORCHELASTIC_RUN_ID", assignment.job.clone().into()),
        (AGENT_STORE_ENV, if facts.agent_store { "True" } else { "False" }.into()),
        ("TORCHELASTIC_ERROR_FILE", error_file.map(Into::into).unwrap_or_default()),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", facts.signals.into()),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", kept("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")),
        // The name that torch read before 2.2.
        ("NCCL_ASYNC_ERROR_HANDLING", kept("NCCL_ASYNC_ERROR_HANDLING", "1")),
        (SOCKET_ENV, facts.socket.into()),
        (ROUND_ENV, assignment.round.to_string().into()),
        (NODE_ENV, facts.node.into()),
        (LOCAL_RANK_ENV, number(place.local_rank)),
    ];
    env.extend(assignment.nodes_per_replica.map(|nodes| (REPLICA_ENV, number(nodes))));
    if limits_threads(place.local_world_size, inherited) {
        env.push((OMP, "1".into()));
    }
    env.into_iter().map(|(name, value)| (name.into(), value)).collect()
}

/// Variables that describe a place in a round.
const PLACE: [&str; 10] = [
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    ROUND_ENV,
];

/// Changes an environment into that of a worker without a place. The agent tells the worker its place later.
pub(crate) fn without_place(env: &mut BTreeMap<OsString, OsString>) {
    env.retain(|name, _| !PLACE.iter().any(|known| name == known));
    env.insert(WARM_UP_ENV.into(), "1".into());
}

/// Changes an environment into that of a process which is no worker, and which workers are forked from.
pub(crate) fn without_worker(env: &mut BTreeMap<OsString, OsString>) {
    without_place(env);
    for name in [WARM_UP_ENV, "LOCAL_RANK", LOCAL_RANK_ENV, "TORCHELASTIC_ERROR_FILE"] {
        env.remove(OsStr::new(name));
    }
}

const OMP: &str = "OMP_NUM_THREADS";

/// There are fewer visible devices than workers, and each worker needs its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "--virtual-local-rank: worker {local_rank} has no device of its own: {variable}={list} names {named}; start fewer \
     workers"
)]
pub(crate) struct NoDevice {
    pub local_rank: u32,
    pub variable: &'static str,
    pub list: String,
    pub named: usize,
}

/// Variables that `--virtual-local-rank` sets with the highest priority: a worker sees only its own device, as device
/// number 0. As in torch 2.15, a `HIP_VISIBLE_DEVICES` that is not empty takes precedence over `CUDA_VISIBLE_DEVICES`,
/// and then both are set.
pub(crate) fn own_device(
    local_rank: u32,
    inherited: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Vec<(OsString, OsString)>, NoDevice> {
    const CUDA: &str = "CUDA_VISIBLE_DEVICES";
    const HIP: &str = "HIP_VISIBLE_DEVICES";
    let hip = inherited(HIP).filter(|list| !list.is_empty());
    let (variable, list) = if hip.is_some() { (HIP, hip) } else { (CUDA, inherited(CUDA)) };
    let device = match list {
        None => local_rank.to_string(),
        Some(list) => {
            let list = list.to_string_lossy();
            let devices: Vec<&str> = list.split(',').map(str::trim).collect();
            match devices.get(local_rank as usize) {
                Some(device) => (*device).to_owned(),
                None => {
                    let named = devices.len();
                    return Err(NoDevice { local_rank, variable, list: list.into_owned(), named });
                }
            }
        }
    };
    let mut env: Vec<(OsString, OsString)> = vec![("LOCAL_RANK".into(), "0".into()), (CUDA.into(), (&device).into())];
    if variable == HIP {
        env.push((HIP.into(), device.into()));
    }
    Ok(env)
}

/// torchrun's rule: several workers on a machine, each with a thread for every CPU, would slow one another down.
fn limits_threads(local_world_size: u32, inherited: &dyn Fn(&str) -> Option<OsString>) -> bool {
    local_world_size > 1 && inherited(OMP).is_none()
}

/// A warning, to be shown once, if workers get `OMP_NUM_THREADS=1` without the user having asked for it.
pub(crate) fn threads_warning(local_world_size: u32, inherited: &dyn Fn(&str) -> Option<OsString>) -> Option<String> {
    limits_threads(local_world_size, inherited).then(|| {
        format!(
            "{OMP} is not set: each of the {local_world_size} workers gets {OMP}=1, so that they do not crowd one \
             another out; set it to tune CPU-heavy work"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn assignment() -> Assignment {
        Assignment {
            job: "J".into(),
            round: 7,
            rank: 5,
            world_size: 8,
            group_rank: 2,
            group_world_size: 3,
            master_addr: "10.0.0.1".into(),
            master_port: 45_123,
            restart_count: 1,
            nodes_per_replica: None,
            checkpoint: None,
        }
    }

    fn env(inherited: &[(&str, &str)], workers: u32, error_file: Option<&str>) -> BTreeMap<String, String> {
        let place = LocalPlace {
            local_rank: 1,
            local_world_size: workers,
            role: "trainer",
            role_rank_base: 2,
            role_world_size: 6,
        };
        let facts = NodeFacts {
            node: "node-a",
            socket: Path::new("/run/e/agent.sock"),
            max_restarts: 3,
            agent_store: true,
            signals: "SIGTERM,SIGUSR1",
        };
        let look = |name: &str| inherited.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        let pairs = worker_env(&assignment(), &place, &facts, error_file.map(Path::new), &look);
        let count = pairs.len();
        let text = |s: OsString| s.into_string().unwrap();
        let map: BTreeMap<_, _> = pairs.into_iter().map(|(name, value)| (text(name), text(value))).collect();
        assert_eq!(map.len(), count, "no variable is there twice");
        map
    }

    #[test]
    fn every_variable_of_torchrun_and_ours_is_there() {
        let expected = [
            ("ELASTIC_AGENT_SOCKET", "/run/e/agent.sock"),
            ("ELASTIC_LOCAL_RANK", "1"),
            ("ELASTIC_NODE", "node-a"),
            ("ELASTIC_ROUND", "7"),
            ("GROUP_RANK", "2"),
            ("GROUP_WORLD_SIZE", "3"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "45123"),
            ("NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("RANK", "5"),
            ("ROLE_NAME", "trainer"),
            ("ROLE_RANK", "3"),
            ("ROLE_WORLD_SIZE", "6"),
            ("TORCHELASTIC_ERROR_FILE", "/logs/error.json"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_RUN_ID", "J"),
            ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("WORLD_SIZE", "8"),
        ];
        let env = env(&[], 2, Some("/logs/error.json"));
        assert_eq!(env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_replica_of_several_nodes_is_in_the_environment() {
        let place = LocalPlace { local_rank: 0, local_world_size: 1, role: "r", role_rank_base: 0, role_world_size: 1 };
        let facts = NodeFacts { node: "a", socket: Path::new("/s"), max_restarts: 0, agent_store: true, signals: "" };
        let of = |nodes| {
            let assignment = Assignment { nodes_per_replica: nodes, ..assignment() };
            let env = worker_env(&assignment, &place, &facts, None, &|_| None);
            env.into_iter().find(|(name, _)| name == "ELASTIC_REPLICA_NODES").map(|(_, value)| value)
        };
        assert_eq!((of(None), of(Some(2))), (None, Some("2".into())));
    }

    #[test]
    fn what_the_user_set_for_nccl_stays_and_stale_ranks_do_not() {
        let set = env(&[("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"), ("RANK", "99"), ("MASTER_PORT", "1")], 1, None);
        assert_eq!(set["TORCH_NCCL_ASYNC_ERROR_HANDLING"], "3");
        assert_eq!((set["RANK"].as_str(), set["MASTER_PORT"].as_str()), ("5", "45123"));
    }

    #[test]
    fn a_worker_may_see_its_own_device_alone() {
        let device = |rank, inherited: &[(&str, &str)]| {
            let look = |name: &str| inherited.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            let text = |s: OsString| s.into_string().unwrap();
            own_device(rank, &look)
                .map(|env| env.into_iter().map(|(name, value)| (text(name), text(value))).collect::<BTreeMap<_, _>>())
        };
        let unset = device(1, &[]).unwrap();
        assert_eq!((unset["LOCAL_RANK"].as_str(), unset["CUDA_VISIBLE_DEVICES"].as_str()), ("0", "1"));
        assert_eq!(device(1, &[("CUDA_VISIBLE_DEVICES", "4, GPU-5")]).unwrap()["CUDA_VISIBLE_DEVICES"], "GPU-5");
        let both = device(0, &[("CUDA_VISIBLE_DEVICES", "4"), ("HIP_VISIBLE_DEVICES", "6,7")]).unwrap();
        assert_eq!((both["CUDA_VISIBLE_DEVICES"].as_str(), both["HIP_VISIBLE_DEVICES"].as_str()), ("6", "6"));
        let few = device(2, &[("CUDA_VISIBLE_DEVICES", "4,5")]).unwrap_err().to_string();
        assert!(few.contains("worker 2 has no device of its own: CUDA_VISIBLE_DEVICES=4,5 names 2"), "{few}");
    }

    #[test]
    fn without_log_files_the_error_file_is_empty() {
        assert_eq!(env(&[], 1, None)["TORCHELASTIC_ERROR_FILE"], "");
    }

    #[test]
    fn threads_are_limited_only_for_several_workers_and_only_if_unset() {
        let unset = |_: &str| None;
        let four = |name: &str| (name == OMP).then(|| "4".into());
        assert_eq!(env(&[], 2, None).get(OMP).map(String::as_str), Some("1"));
        assert_eq!(env(&[], 1, None).get(OMP), None);
        assert_eq!(env(&[(OMP, "4")], 2, None).get(OMP), None, "the inherited value stays");
        assert!(threads_warning(2, &unset).is_some_and(|text| text.contains("each of the 2 workers gets")));
        assert_eq!(threads_warning(1, &unset), None);
        assert_eq!(threads_warning(2, &four), None);
    }
}
