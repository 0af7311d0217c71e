//! Workers as shell scripts that write down their rank and node, and wait for their exit code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// A worker first checks that no worker of another round is alive, since that must never happen. Then it writes down
/// its rank and node, and waits for its exit code. With the argument `strays` it also starts a process that leaves its
/// session and its parent.
const SCRIPT: &str = r#"#!/bin/bash
dir=${0%/*}
while read -r _ round _ _ _ _ _ _ _ pid _; do
  if [ "$round" != "$ELASTIC_ROUND" ] && [ -e "/proc/$pid/exe" ] &&
      grep -qzx "ELASTIC_ROUND=$round" "/proc/$pid/environ"; then
    echo "worker $pid of round $round is alive while round $ELASTIC_ROUND starts" >> "$dir/overlaps"
  fi
done 2>/dev/null < "$dir/starts"
mkfifo "$dir/control.$$"
exec 3<> "$dir/control.$$"
if [ "$1" = strays ]; then
  ( setsid bash -c 'echo "$BASHPID" >> "$0/strays"; exec sleep 1000' "$dir" & )
fi
# torchrun has neither node nor round.
echo "${ELASTIC_NODE:-$NODE} ${ELASTIC_ROUND:-0} $RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE \
$TORCHELASTIC_RESTART_COUNT $$ $MASTER_ADDR:$MASTER_PORT" >> "$dir/starts"
read -r code <&3
[ "$code" = 0 ] || echo "error: told to exit with $code" >&2
exit "$code"
"#;

/// What workers in Python can do: note to the job's folder, write down rank and node, and talk to their agent.
pub(super) const PRELUDE: &str = r#"
import ctypes, json, os, pathlib, signal, socket, sys, threading, time
e, folder = os.environ, pathlib.Path(sys.argv[1])
node, round, rank, local_rank = e["ELASTIC_NODE"], int(e["ELASTIC_ROUND"]), int(e["RANK"]), int(e["LOCAL_RANK"])
def note(name, line):
    with open(folder / name, "a") as file: file.write(line + "\n")
def here():
    names = "ELASTIC_NODE ELASTIC_ROUND RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    names += " TORCHELASTIC_RESTART_COUNT"
    master = e["MASTER_ADDR"] + ":" + e["MASTER_PORT"]
    note("starts", " ".join([e[name] for name in names.split()] + [str(os.getpid()), master]))
heard = []
def agent():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(e["ELASTIC_AGENT_SOCKET"])
    def listen():
        for line in connection.makefile():
            note(f"heard-{node}", line.strip())
            heard.append(json.loads(line))
    threading.Thread(target=listen, daemon=True).start()
    def say(**message): connection.sendall((json.dumps(message) + "\n").encode())
    say(type="register", local_rank=local_rank, pid=os.getpid())
    return say
"#;

/// Writes the script of workers that only say where they are into a folder; returns its path.
pub fn worker_script(dir: &Path) -> String {
    let path = dir.join("worker.sh");
    std::fs::write(&path, SCRIPT).expect("write the worker's script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("make it executable");
    std::fs::write(dir.join("starts"), "").expect("write the list of workers");
    path.to_str().expect("a path that is UTF-8").to_owned()
}

/// A worker, as it found itself in its environment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Worker {
    pub node: String,
    pub round: u64,
    pub rank: u32,
    pub world_size: u32,
    pub group_rank: u32,
    pub group_world_size: u32,
    pub local_rank: u32,
    pub local_world_size: u32,
    pub restarts: u32,
    pub pid: u32,
    pub master: String,
    dir: std::path::PathBuf,
}

impl Worker {
    fn parse(line: &str, dir: &Path) -> Option<Worker> {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        Some(Worker {
            node: (*fields.first()?).to_owned(),
            round: fields.get(1)?.parse().ok()?,
            rank: number(2)?,
            world_size: number(3)?,
            group_rank: number(4)?,
            group_world_size: number(5)?,
            local_rank: number(6)?,
            local_world_size: number(7)?,
            restarts: number(8)?,
            pid: number(9)?,
            master: (*fields.get(10)?).to_owned(),
            dir: dir.to_owned(),
        })
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        is_alive(self.pid, &self.dir)
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid as i32).expect("a pid");
        assert!(self.is_alive(), "worker {} is gone", self.pid);
        kill_process(pid, signal).expect("signal a worker");
    }

    /// Tells it to exit with `code`.
    pub fn exit(&self, code: u8) {
        let control = self.dir.join(format!("control.{}", self.pid));
        // Opened for reading too, so that opening does not wait for a reader.
        let mut pipe = std::fs::File::options().read(true).write(true).open(control).expect("the worker's pipe");
        writeln!(pipe, "{code}").expect("tell the worker");
        // The line is not lost when our end is closed: the worker holds an end of its own.
    }
}

/// The workers of a round, by rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Its number.
    pub number: u64,
    /// Those that have started.
    pub workers: Vec<Worker>,
}

impl Round {
    pub(super) fn newest(workers: Vec<Worker>) -> Option<Round> {
        let number = workers.iter().map(|worker| worker.round).max()?;
        let mut workers: Vec<Worker> = workers.into_iter().filter(|worker| worker.round == number).collect();
        workers.sort_by_key(|worker| worker.rank);
        Some(Round { number, workers })
    }

    /// Whether `world_size` workers have started and all live.
    pub fn is_whole(&self, world_size: u32) -> bool {
        self.workers.len() == world_size as usize
            && self.workers.iter().all(|worker| worker.world_size == world_size && worker.is_alive())
    }

    /// Which node has which group rank.
    pub fn nodes(&self) -> Vec<&str> {
        let by_rank: BTreeMap<u32, &str> = self.workers.iter().map(|w| (w.group_rank, w.node.as_str())).collect();
        by_rank.into_values().collect()
    }

    /// The first worker of a node.
    pub fn of(&self, node: &str) -> &Worker {
        self.workers.iter().find(|worker| worker.node == node).unwrap_or_else(|| panic!("{node} is not in {self:?}"))
    }

    /// Restarts charged, on which all must agree.
    pub fn restarts(&self) -> u32 {
        self.workers[0].restarts
    }

    /// Their pids, as a set: workers start at the same time, so pids are in the order of neither ranks nor starts.
    pub fn pids(&self) -> BTreeSet<u32> {
        self.workers.iter().map(|worker| worker.pid).collect()
    }

    /// Tells all to exit with `code`.
    pub fn exit(&self, code: u8) {
        self.workers.iter().for_each(|worker| worker.exit(code));
    }
}

/// Whether the process is alive and belongs to this job. Its environment tells, since pids are used again.
pub(super) fn is_alive(pid: u32, dir: &Path) -> bool {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let own = dir.as_os_str().as_encoded_bytes();
    environment.windows(own.len()).any(|window| window == own)
}

/// Every worker that the script has started in this folder, in order.
pub fn started(dir: &Path) -> Vec<Worker> {
    let text = std::fs::read_to_string(dir.join("starts")).unwrap_or_default();
    text.lines().filter_map(|line| Worker::parse(line, dir)).collect()
}

pub(super) fn strays(dir: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(dir.join("strays")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Workers of two rounds at once, as the later ones saw them.
pub(super) fn overlaps(dir: &Path) -> Option<String> {
    std::fs::read_to_string(dir.join("overlaps")).ok().filter(|text| !text.is_empty())
}

/// A round whose workers do not agree, or whose ranks are impossible.
pub(super) fn disagreement(workers: &[Worker]) -> Option<String> {
    let mut rounds: BTreeMap<u64, Vec<&Worker>> = BTreeMap::new();
    for worker in workers {
        rounds.entry(worker.round).or_default().push(worker);
    }
    rounds.into_iter().find_map(|(number, members)| {
        let shared: BTreeSet<_> =
            members.iter().map(|w| (w.world_size, w.group_world_size, w.restarts, w.master.as_str())).collect();
        let ranks: BTreeSet<u32> = members.iter().map(|w| w.rank).collect();
        let nodes: BTreeSet<&str> = members.iter().map(|w| w.node.as_str()).collect();
        let groups: BTreeSet<(u32, &str)> = members.iter().map(|w| (w.group_rank, w.node.as_str())).collect();
        let bounded = members.iter().all(|w| w.rank < w.world_size && w.group_rank < w.group_world_size);
        let contiguous = members.iter().all(|w| {
            let base = w.rank - w.local_rank;
            members.iter().all(|other| {
                (other.group_rank == w.group_rank) == (base..base + w.local_world_size).contains(&other.rank)
            })
        });
        let sound =
            shared.len() == 1 && ranks.len() == members.len() && groups.len() == nodes.len() && bounded && contiguous;
        (!sound).then(|| format!("round {number} is not one round: {members:#?}"))
    })
}
