//! A job whose nodes run either launcher, and workers that write down their rank and node.

use std::ops::{Deref, DerefMut};

use elastic_tests::agents::{show_logs, started, worker_script};
use elastic_tests::prelude::*;

/// Long enough for several processes to import PyTorch on a busy machine, and for torchrun to wait for times to live of
/// ten seconds.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ours,
    Torchrun,
}

pub(crate) use Kind::{Ours, Torchrun};

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
        let script = worker_script(dir.path());
        let scene = Scene {
            etcd,
            dir,
            torch: torch.cloned(),
            nnodes: nnodes.to_owned(),
            flags: vec!["--max-restarts=3".into()],
            conf: BTreeMap::new(),
            env: BTreeMap::new(),
            program: vec!["--no-python".into(), script],
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

    pub(crate) fn start(&self, kind: Kind, name: &str) -> Agent {
        let backend = if kind == Ours { "etcd-v2" } else { "etcd" };
        self.start_with(kind, name, &[&format!("--rdzv-backend={backend}")])
    }

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

    pub(crate) fn living(&self) -> Vec<Worker> {
        started(self.dir.path()).into_iter().filter(Worker::is_alive).collect()
    }

    /// The group that all living workers are in, if it is whole and has `size` of them.
    pub(crate) fn group(&self, size: u32) -> Option<Round> {
        let mut workers = self.living();
        workers.sort_by_key(|worker| worker.rank);
        let master = workers.first()?.master.clone();
        let ranks: Vec<u32> = workers.iter().map(|worker| worker.rank).collect();
        let agree = workers.iter().all(|worker| (&worker.master, worker.world_size) == (&master, size));
        (agree && ranks == (0..size).collect::<Vec<_>>()).then_some(Round { number: 0, workers })
    }

    /// Waits until one group of this size works, and no one else; another one than `before`.
    pub(crate) async fn works(&self, size: u32, before: Option<&Round>) -> Round {
        self.works_within(size, before, LIMIT).await
    }

    /// As [`Scene::works`], with a limit of its own.
    pub(crate) async fn works_within(&self, size: u32, before: Option<&Round>, limit: Duration) -> Round {
        eventually(&format!("a group of {size} workers is at work"), limit, async || {
            self.group(size)
                .filter(|group| before.is_none_or(|before| before.workers[0].master != group.workers[0].master))
        })
        .await
    }

    /// Has all living workers end well, and all agents with them.
    pub(crate) async fn ends_well<'a>(&self, agents: impl IntoIterator<Item = &'a mut Agent>) {
        self.living().iter().for_each(|worker| worker.exit(0));
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
            show_logs(self.dir.path());
            eprintln!("--- trace\n{}", std::fs::read_to_string(self.path("trace")).unwrap_or_default());
        }
        // torchrun leaves its workers behind when it is killed.
        self.living().iter().for_each(|worker| send(worker.pid, Signal::KILL));
    }
}

pub(crate) struct Agent {
    pub(crate) kind: Kind,
    process: Process,
}

impl Agent {
    /// SIGKILL. torchrun leaves its workers behind; the test ends them when it kills it, as a container's end would.
    pub(crate) fn kill(&mut self, scene: &Scene) {
        self.process.kill();
        if self.kind == Torchrun {
            scene.living().iter().filter(|worker| worker.node == self.name).for_each(Worker::kill);
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
