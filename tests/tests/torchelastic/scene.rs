//! A job whose nodes run either launcher, and workers that write down their rank and node.

use std::ops::{Deref, DerefMut};

use elastic_tests::prelude::*;

/// Long enough for several processes to import PyTorch on a busy machine, and for torchrun to wait for times to live of
/// ten seconds.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// Writes down its rank and node, and waits for its exit code. A group is identified by the address of its rank 0.
const WORKER: &str = r#"#!/bin/bash
dir=${0%/*}
mkfifo "$dir/control.$$"
exec 3<> "$dir/control.$$"
echo "$NODE $MASTER_ADDR:$MASTER_PORT $RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE \
$TORCHELASTIC_RESTART_COUNT $$" >> "$dir/starts"
read -r code <&3
exit "$code"
"#;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ours,
    Torchrun,
}

pub(crate) use Kind::{Ours, Torchrun};

/// A worker, as it found itself in its environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    pub(crate) node: String,
    pub(crate) master: String,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) group_rank: u32,
    pub(crate) group_world_size: u32,
    pub(crate) local_rank: u32,
    pub(crate) restarts: u32,
    pub(crate) pid: u32,
}

impl Worker {
    fn parse(line: &str) -> Option<Worker> {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        Some(Worker {
            node: (*fields.first()?).to_owned(),
            master: (*fields.get(1)?).to_owned(),
            rank: number(2)?,
            world_size: number(3)?,
            group_rank: number(4)?,
            group_world_size: number(5)?,
            local_rank: number(6)?,
            restarts: number(8)?,
            pid: number(9)?,
        })
    }
}

/// All workers of one version, by rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) master: String,
    pub(crate) workers: Vec<Worker>,
}

impl Group {
    /// The first worker of a node.
    pub(crate) fn of(&self, node: &str) -> &Worker {
        self.workers.iter().find(|worker| worker.node == node).unwrap_or_else(|| panic!("{node} is not in {self:?}"))
    }

    pub(crate) fn nodes(&self) -> BTreeSet<&str> {
        self.workers.iter().map(|worker| worker.node.as_str()).collect()
    }
}

/// An etcd, and a job on it.
pub(crate) struct Scene {
    pub(crate) etcd: EtcdServer,
    dir: TempDir,
    torch: Option<Torch>,
    nnodes: String,
    flags: Vec<String>,
    conf: BTreeMap<String, String>,
    env: BTreeMap<String, String>,
    program: Vec<String>,
}

impl Scene {
    /// A job of our agents alone, if there is no `torch`.
    pub(crate) async fn new(torch: Option<&Torch>, nnodes: &str) -> Scene {
        let etcd = EtcdServer::start(EtcdOptions::with_v2()).await;
        let dir = tempfile::Builder::new().prefix("elastic-v2-").tempdir().expect("a temporary directory");
        let script = dir.path().join("worker.sh");
        std::fs::write(&script, WORKER).expect("write the worker's script");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("make it executable");
        let scene = Scene {
            etcd,
            dir,
            torch: torch.cloned(),
            nnodes: nnodes.to_owned(),
            flags: vec!["--max-restarts=3".into()],
            conf: BTreeMap::new(),
            env: BTreeMap::new(),
            program: vec!["--no-python".into(), script.to_str().expect("a path that is UTF-8").into()],
        };
        scene.conf("last_call_timeout", "2").conf("timeout", "120")
    }

    /// Sets a key of `--rdzv-conf`, for both kinds.
    #[must_use]
    pub(crate) fn conf(mut self, key: &str, value: &str) -> Scene {
        self.conf.insert(key.into(), value.into());
        self
    }

    /// Adds a flag, for both kinds.
    #[must_use]
    pub(crate) fn flag(mut self, flag: &str) -> Scene {
        self.flags.push(flag.into());
        self
    }

    /// Lets workers run a script of `tests/pytorch`.
    #[must_use]
    pub(crate) fn script(mut self, name: &str) -> Scene {
        let script = torch::script(name).into_os_string().into_string().expect("a path that is UTF-8");
        self.program = vec![script];
        let dir = self.dir.path().to_str().expect("a path that is UTF-8").to_owned();
        self.env.insert("TEST_DIR".into(), dir);
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a node.
    pub(crate) fn start(&self, kind: Kind, name: &str) -> Agent {
        let backend = if kind == Ours { "etcd-v2" } else { "etcd" };
        self.start_with(kind, name, &[&format!("--rdzv-backend={backend}")])
    }

    /// Starts a node with these further flags.
    pub(crate) fn start_with(&self, kind: Kind, name: &str, flags: &[&str]) -> Agent {
        let mut command = match kind {
            Ours => {
                let mut command = Command::new(binary("elastic-agent"));
                command.arg(format!("--node-name={name}"));
                command
            }
            Torchrun => self.torch.as_ref().expect("torchrun").torchrun(),
        };
        remove_settings(&mut command);
        if let Some(torch) = &self.torch {
            command.envs(torch.environment());
        }
        let conf: Vec<String> = self.conf.iter().map(|(key, value)| format!("{key}={value}")).collect();
        command
            .args(&self.flags)
            .arg(format!("--rdzv-endpoint={}", self.etcd.address()))
            .arg(format!("--nnodes={}", self.nnodes))
            .args(["--rdzv-id=job", "--local-addr=127.0.0.1"])
            .arg(format!("--log-dir={}", self.path(&format!("logs-{name}")).display()));
        if flags.iter().all(|flag| !flag.starts_with("--rdzv-conf")) {
            command.arg(format!("--rdzv-conf={}", conf.join(",")));
        }
        command.args(flags).args(&self.program).current_dir(self.dir.path());
        std::fs::create_dir_all(self.path("run")).expect("a runtime directory");
        command.env("NODE", name).env("XDG_RUNTIME_DIR", self.path("run")).env("OMP_NUM_THREADS", "1");
        command.env("LOGLEVEL", "INFO").envs(&self.env);
        Agent { kind, process: Process::spawn(name, command, &self.path(&format!("agent-{name}.log"))) }
    }

    /// Every worker that has started, in order.
    pub(crate) fn workers(&self) -> Vec<Worker> {
        let text = std::fs::read_to_string(self.path("starts")).unwrap_or_default();
        text.lines().filter_map(Worker::parse).collect()
    }

    /// Whether a worker of this job runs.
    pub(crate) fn is_alive(&self, worker: &Worker) -> bool {
        let environment = std::fs::read(format!("/proc/{}/environ", worker.pid)).unwrap_or_default();
        let own = self.dir.path().as_os_str().as_encoded_bytes();
        environment.windows(own.len()).any(|window| window == own)
    }

    pub(crate) fn living(&self) -> Vec<Worker> {
        self.workers().into_iter().filter(|worker| self.is_alive(worker)).collect()
    }

    /// The group that all living workers are in, if it is whole and has `size` of them.
    pub(crate) fn group(&self, size: u32) -> Option<Group> {
        let mut workers = self.living();
        workers.sort_by_key(|worker| worker.rank);
        let master = workers.first()?.master.clone();
        let ranks: Vec<u32> = workers.iter().map(|worker| worker.rank).collect();
        let agree = workers.iter().all(|worker| (&worker.master, worker.world_size) == (&master, size));
        (agree && ranks == (0..size).collect::<Vec<_>>()).then_some(Group { master, workers })
    }

    /// Waits until one group of this size works, and no one else; another one than `before`.
    pub(crate) async fn works(&self, size: u32, before: Option<&Group>) -> Group {
        self.works_within(size, before, LIMIT).await
    }

    /// As [`Scene::works`], with a limit of its own.
    pub(crate) async fn works_within(&self, size: u32, before: Option<&Group>, limit: Duration) -> Group {
        eventually(&format!("a group of {size} workers is at work"), limit, async || {
            self.group(size).filter(|group| before.is_none_or(|before| before.master != group.master))
        })
        .await
    }

    pub(crate) fn kill(&self, worker: &Worker) {
        assert!(self.is_alive(worker), "worker {} is gone", worker.pid);
        kill_process(Pid::from_raw(worker.pid as i32).expect("a pid"), Signal::KILL).expect("kill a worker");
    }

    /// Has all living workers end well, and all agents with them.
    pub(crate) async fn ends_well<'a>(&self, agents: impl IntoIterator<Item = &'a mut Agent>) {
        for worker in self.living() {
            use std::io::Write;
            let control = self.path(&format!("control.{}", worker.pid));
            // Opened for reading too, so that opening does not wait for a reader.
            let mut pipe = std::fs::File::options().read(true).write(true).open(control).expect("the worker's pipe");
            writeln!(pipe, "0").expect("tell the worker");
        }
        for agent in agents {
            assert_eq!(agent.exit(LIMIT).await, 0, "{} of {:?}:\n{}", agent.name, agent.kind, agent.output());
        }
    }

    /// What etcd has at a key of its v2 API.
    pub(crate) async fn read(&self, key: &str) -> Option<String> {
        use elastic_torchelastic::etcd_v2::{EtcdV2, Request};
        let client = EtcdV2::connect(self.etcd.config()).expect("a client");
        let request = Request::Read { key: key.to_owned(), recursive: false };
        client.request(request).await.expect("an answer").outcome.ok().map(|entry| entry.value)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for entry in std::fs::read_dir(self.dir.path()).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|extension| extension == "log") {
                    let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                    eprintln!("--- {}\n{text}", entry.file_name().display());
                }
            }
            for name in ["starts", "trace"] {
                eprintln!("--- {name}\n{}", std::fs::read_to_string(self.path(name)).unwrap_or_default());
            }
        }
        // torchrun leaves its workers behind when it is killed.
        for worker in self.living() {
            let _ = kill_process(Pid::from_raw(worker.pid as i32).expect("a pid"), Signal::KILL);
        }
    }
}

/// A node's launcher. Dropping it kills it.
pub(crate) struct Agent {
    pub(crate) kind: Kind,
    process: Process,
}

impl Agent {
    /// SIGKILL. torchrun leaves its workers behind; the test ends them when it kills it, as a container's end would.
    pub(crate) fn kill(&mut self, scene: &Scene) {
        self.process.kill();
        if self.kind == Torchrun {
            scene.living().iter().filter(|worker| worker.node == self.name).for_each(|worker| scene.kill(worker));
        }
    }
}

impl Deref for Agent {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}
