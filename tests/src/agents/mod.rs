//! Built agents as processes, and workers that write down their rank and node. Many nodes in one process are in
//! [`crate::in_process`].

mod worker;

pub use worker::{Round, Worker, started, worker_script};

/// An agent of a job.
pub use crate::processes::Process as Agent;
pub use crate::trace::json_lines;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use elastic_rendezvous::job::Keys;
use elastic_store::Store;
use elastic_store::etcd::{EtcdConfig, EtcdStore};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::etcd::{EtcdOptions, EtcdServer};
use crate::processes::{Process, binary, ctl, ctl_ok, remove_settings};
use crate::torch::{self, Torch};
use crate::wait::eventually;

/// Nothing in these tests takes longer, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The lease of every test's job. Waiting for one to lapse costs this.
pub const LEASE: Duration = Duration::from_secs(4);

/// Exit code of an agent that left as planned.
pub const LEFT: i32 = 3;

/// Exit code of an agent whose job has failed.
pub const JOB_FAILED: i32 = 5;

/// How soon a [`Job::prompt`] job reacts where it does not have to wait for the end of a lease.
pub const AT_ONCE: Duration = Duration::from_secs(10);

/// Agents of one machine meet on its loopback interface.
const LOCAL: &str = "--local-addr=127.0.0.1";

/// A job: the flags its agents share and a folder of its own. Dropping it checks what must hold for every job: the
/// rounds its workers saw, and that none of them is left.
pub struct Job {
    dir: TempDir,
    id: String,
    conf: BTreeMap<String, String>,
    flags: Vec<String>,
    env: BTreeMap<String, OsString>,
    program: Vec<String>,
    cgroup: Option<PathBuf>,
    /// The store, of a job whose store is etcd.
    address: Option<String>,
    /// An etcd of its own. It ends after the job's folder.
    etcd: Option<EtcdServer>,
}

impl Job {
    /// A job on an etcd of its own, whose workers only say where they are.
    pub async fn on_etcd(nnodes: &str) -> Job {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let mut job = Job::on(&etcd, nnodes);
        job.etcd = Some(etcd);
        job
    }

    /// A job on `etcd` whose workers only say where they are.
    pub fn on(etcd: &EtcdServer, nnodes: &str) -> Job {
        let address = etcd.address();
        let mut job = Job::met_by(&["--rdzv-backend=etcd", &format!("--rdzv-endpoint={address}")], nnodes);
        job.address = Some(address);
        job
    }

    /// A job whose nodes meet as `flags` say.
    pub fn met_by(flags: &[&str], nnodes: &str) -> Job {
        let dir = tempfile::Builder::new().prefix("elastic-job-").tempdir().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("run")).expect("a runtime directory");
        let program = worker_script(dir.path());
        let mut job = Job {
            dir,
            id: "job".into(),
            conf: BTreeMap::new(),
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            program: vec!["--no-python".into(), program],
            env: BTreeMap::new(),
            cgroup: None,
            address: None,
            etcd: None,
        };
        job.flags.push(format!("--nnodes={nnodes}"));
        job.flags.push("--shutdown-timeout=3".into());
        let quick = [("lease_ttl", "4"), ("last_call_timeout", "300ms"), ("min_round_time", "200ms")];
        for (key, value) in quick.into_iter().chain([("join_timeout", "30s"), ("takeover_delay", "15s")]) {
            job = job.conf(key, value);
        }
        job
    }

    /// Gives the job a lease that is longer than [`AT_ONCE`]: what happens within that time is not the end of a lease.
    #[must_use]
    pub fn prompt(self) -> Job {
        self.conf("lease_ttl", "20").conf("takeover_delay", "40s")
    }

    /// Has the first round wait for as many nodes as the job takes, however long the agents take to start.
    #[must_use]
    pub fn gathers(self) -> Job {
        self.conf("last_call_timeout", "30s")
    }

    /// Gives the job another id, where several share a store.
    #[must_use]
    pub fn named(mut self, id: &str) -> Job {
        self.id = id.into();
        self
    }

    /// Sets a key of `--rdzv-conf`.
    #[must_use]
    pub fn conf(mut self, key: &str, value: &str) -> Job {
        self.conf.insert(key.into(), value.into());
        self
    }

    /// Adds a flag for all agents.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Job {
        self.flags.push(flag.into());
        self
    }

    /// Has workers run this program instead of the script.
    #[must_use]
    pub fn program<A: Into<String>>(mut self, program: impl IntoIterator<Item = A>) -> Job {
        self.program = std::iter::once("--no-python".into()).chain(program.into_iter().map(Into::into)).collect();
        self
    }

    /// Has workers run this Python script. Its argument is the job's folder.
    #[must_use]
    pub fn python_script(self, text: &str) -> Job {
        self.write("worker.py", text);
        let (script, folder) = (self.path("worker.py"), self.path(""));
        self.program(["python3".to_owned(), script.display().to_string(), folder.display().to_string()])
    }

    /// The same, with what most such workers do: note, say where they are, talk to their agent.
    #[must_use]
    pub fn python(self, text: &str) -> Job {
        self.python_script(&format!("{}{text}", worker::PRELUDE))
    }

    /// Has workers be `elastic-trainer` with these words, which traces to the job's folder.
    #[must_use]
    pub fn trainer<A: Into<String>>(self, words: impl IntoIterator<Item = A>) -> Job {
        let trace = format!("--trace={}", self.path("trace").display());
        let trainer = binary("elastic-trainer").display().to_string();
        self.program(std::iter::once(trainer).chain(words.into_iter().map(Into::into)).chain([trace]))
    }

    /// Lets workers run a script of `tests/pytorch` on a Python that has PyTorch.
    #[must_use]
    pub fn script(mut self, torch: &Torch, name: &str, args: &[&str]) -> Job {
        self.env.extend(torch.environment().into_iter().map(|(name, value)| (name.to_owned(), value)));
        self.plain_script(name, args)
    }

    /// Lets workers run a script that needs no PyTorch, on the Python that the agent finds.
    #[must_use]
    pub fn plain_script(mut self, name: &str, args: &[&str]) -> Job {
        let script = torch::script(name).into_os_string().into_string().expect("a path that is UTF-8");
        self.program = std::iter::once(script).chain(args.iter().map(ToString::to_string)).collect();
        let dir = self.dir.path().to_owned();
        self.env("TEST_DIR", dir).env("PYTHONPATH", torch::python_path())
    }

    /// Adds to the agents' environment, which their workers inherit.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Job {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Starts agents in the cgroup of this directory.
    #[must_use]
    pub fn within(mut self, cgroup: &Path) -> Job {
        self.cgroup = Some(cgroup.to_owned());
        self
    }

    /// A path in the job's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The job's own etcd.
    pub fn etcd(&self) -> &EtcdServer {
        self.etcd.as_ref().expect("a job on an etcd of its own")
    }

    /// The job's own etcd, to kill it or start it again.
    pub fn etcd_mut(&mut self) -> &mut EtcdServer {
        self.etcd.as_mut().expect("a job on an etcd of its own")
    }

    /// Runs `elasticctl` on the job's store: whether it succeeded, and what it said.
    pub async fn ctl(&self, args: &[&str]) -> (bool, String) {
        ctl(self.store_address(), args).await
    }

    /// The same, which must succeed.
    pub async fn ctl_ok(&self, args: &[&str]) -> String {
        ctl_ok(self.store_address(), args).await
    }

    /// Where the job's etcd is.
    pub fn store_address(&self) -> &str {
        self.address.as_deref().expect("a job on etcd")
    }

    /// A client of the job's store.
    pub fn store(&self) -> EtcdStore {
        EtcdStore::connect(EtcdConfig::new([self.store_address()])).expect("a valid configuration")
    }

    /// The job's keys in its store.
    pub fn keys(&self) -> Keys {
        Keys::new(Keys::DEFAULT_PREFIX, &self.id.parse().expect("a job's id"))
    }

    /// Writes a file into the job's folder.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("write a file");
    }

    /// What is in a file of the job's folder; nothing if it is not there.
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// The whole lines of JSON in a file of the job's folder.
    pub fn lines(&self, name: &str) -> Vec<serde_json::Value> {
        json_lines(&self.path(name))
    }

    /// Waits until a file of the job's folder is there.
    pub async fn appears(&self, name: &str) {
        eventually(name, LIMIT, async || self.path(name).exists().then_some(())).await;
    }

    /// Starts the agent of node `name`.
    pub fn start(&self, name: &str) -> Agent {
        self.start_with(name, &[])
    }

    /// Starts agents of several nodes.
    pub fn start_all<const N: usize>(&self, names: [&str; N]) -> [Agent; N] {
        names.map(|name| self.start(name))
    }

    /// Starts an agent with further flags, which win over the job's.
    pub fn start_with(&self, name: &str, flags: &[&str]) -> Agent {
        let command = self.command(self.launcher(), name, &[&[LOCAL], flags].concat());
        self.spawn(name, command)
    }

    /// Starts an agent that is this program: one of another build.
    pub fn start_program(&self, program: &Path, name: &str) -> Agent {
        let command = self.command(Command::new(program), name, &[LOCAL]);
        self.spawn(name, command)
    }

    /// Starts an agent by way of `launcher`, a program and its first arguments, and lets it find its address by itself.
    pub fn start_through<A: AsRef<OsStr>>(&self, launcher: &[A], name: &str, flags: &[&str]) -> Agent {
        let (program, args) = launcher.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(args).arg(binary("elastic-agent"));
        let command = self.command(command, name, flags);
        self.spawn(name, command)
    }

    /// Starts an agent whose standard output and error go into a pipe. Returns the pipe's other end too.
    pub fn start_into_pipe(&self, name: &str) -> (Agent, std::io::PipeReader) {
        let mut command = self.command(self.launcher(), name, &[LOCAL]);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let log = self.path(&format!("agent-{name}.log"));
        command.stdout(writer.try_clone().expect("a pipe")).stderr(writer);
        self.environment(&mut command);
        (Process::spawn_as(name, command, &log), reader)
    }

    /// Starts a spare host of the jobs whose files lie in `folder`.
    pub fn start_spare(&self, name: &str, folder: &Path) -> Agent {
        let mut command = Command::new(binary("elastic-agent"));
        command.args(["spare", "--node-name", name]).arg(folder);
        self.spawn(name, command)
    }

    /// Writes the job's file for spare hosts into `folder`.
    pub fn write_file(&self, folder: &Path) {
        let words: Vec<String> =
            self.words(&[LOCAL]).iter().map(|word| format!("'{}'", word.to_string_lossy())).collect();
        std::fs::write(folder.join(format!("{}.job", self.id)), words.join("\n")).expect("write a job's file");
    }

    /// Runs an agent, in the job's cgroup if it has one.
    fn launcher(&self) -> Command {
        let agent = binary("elastic-agent");
        let Some(cgroup) = &self.cgroup else { return Command::new(agent) };
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(cgroup.join("cgroup.procs")).arg(agent);
        command
    }

    /// `command` runs an agent; the flags and the program of node `name` follow.
    fn command(&self, mut command: Command, name: &str, flags: &[&str]) -> Command {
        let name = format!("--node-name={name}");
        command.args(self.words(&[&[name.as_str()], flags].concat())).current_dir(self.dir.path());
        command
    }

    /// What follows `elastic-agent` on any node, with these flags after the job's own.
    fn words(&self, flags: &[&str]) -> Vec<OsString> {
        let conf: Vec<String> = self.conf.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let own = [
            format!("--rdzv-id={}", self.id),
            format!("--rdzv-conf={}", conf.join(",")),
            format!("--log-dir={}", self.path("logs").display()),
        ];
        let flags = flags.iter().map(ToString::to_string);
        self.flags.iter().cloned().chain(own).chain(flags).chain(self.program.iter().cloned()).map(Into::into).collect()
    }

    fn spawn(&self, name: &str, mut command: Command) -> Agent {
        self.environment(&mut command);
        Process::spawn(name, command, &self.path(&format!("agent-{name}.log")))
    }

    fn environment(&self, command: &mut Command) {
        remove_settings(command);
        command.env("XDG_RUNTIME_DIR", self.path("run")).env("OMP_NUM_THREADS", "1").env_remove("LOGLEVEL");
        command.envs(&self.env);
    }

    /// Every worker that has started, in order.
    pub fn workers(&self) -> Vec<Worker> {
        started(self.dir.path())
    }

    /// Waits until a round of number `at_least` or more runs with `world_size` workers, all of them alive.
    pub async fn runs(&self, at_least: u64, world_size: u32) -> Round {
        self.runs_within(at_least, world_size, LIMIT).await
    }

    /// As [`Job::runs`], with a limit of its own.
    pub async fn runs_within(&self, at_least: u64, world_size: u32, limit: Duration) -> Round {
        let what = format!("round {at_least} or later runs with {world_size} workers");
        eventually(&what, limit, async || self.round().filter(|r| r.number >= at_least && r.is_whole(world_size))).await
    }

    /// The job's first record whose key, below the job's, begins with `name`: for example `leader`.
    pub async fn record(&self, name: &str) -> Option<serde_json::Value> {
        self.records(name).await.into_iter().next()
    }

    /// All records whose key begins with `name`, by key.
    pub async fn records(&self, name: &str) -> Vec<serde_json::Value> {
        let (records, _) = self.store().range(&format!("{}{name}", self.keys().root())).await.expect("read records");
        records.iter().map(|record| serde_json::from_slice(&record.value).expect("a record of JSON")).collect()
    }

    /// Waits until someone leads: the name of the node.
    pub async fn leader(&self) -> String {
        let record = eventually("a node leads", LIMIT, || self.record("leader")).await;
        let node = record["node"].as_str().expect("a node's id");
        node.split(':').next().unwrap_or_default().to_owned()
    }

    /// Has the workers of the newest round end well, and sees all agents do so.
    pub async fn succeeds<'a>(&self, agents: impl IntoIterator<Item = &'a mut Agent>) {
        self.round().expect("a round").exit(0);
        self.ended(agents, 0).await;
    }

    /// Asks all agents to leave, and sees them do so.
    pub async fn leaves<'a>(&self, agents: impl IntoIterator<Item = &'a mut Agent>) {
        let agents: Vec<&mut Agent> = agents.into_iter().collect();
        agents.iter().for_each(|agent| agent.signal(Signal::TERM));
        self.ended(agents, LEFT).await;
    }

    /// Waits for the end of agents, all with this exit code.
    pub async fn ended<'a>(&self, agents: impl IntoIterator<Item = &'a mut Agent>, code: i32) {
        for agent in agents {
            assert_eq!(agent.exit(LIMIT).await, code, "{}: {}", agent.name, agent.output());
        }
    }

    /// The newest round that any worker has seen.
    pub fn round(&self) -> Option<Round> {
        Round::newest(self.workers())
    }

    /// The ids of processes that left their worker's group and session, as the workers wrote them down.
    pub fn strays(&self) -> Vec<u32> {
        worker::strays(self.dir.path())
    }

    /// Waits until no worker and no stray of this job is left.
    pub async fn none_is_left(&self, limit: Duration) {
        eventually("no worker is left", limit, async || self.living().is_empty().then_some(())).await;
    }

    /// Workers and strays that are alive.
    pub fn living(&self) -> BTreeSet<u32> {
        let workers = self.workers().into_iter().map(|worker| worker.pid);
        workers.chain(self.strays()).filter(|&pid| worker::is_alive(pid, self.dir.path())).collect()
    }

    fn show_logs(&self) {
        show_logs(self.dir.path());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return self.show_logs();
        }
        // The agents are gone by now, so their workers go too.
        let begun = Instant::now();
        while !self.living().is_empty() && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let wrong = worker::overlaps(self.dir.path())
            .or_else(|| worker::disagreement(&self.workers()))
            .or_else(|| (!self.living().is_empty()).then(|| format!("left behind: {:?}", self.living())));
        if let Some(wrong) = wrong {
            self.show_logs();
            panic!("{wrong}");
        }
    }
}

/// Prints the logs and the list of workers in a job's folder.
pub fn show_logs(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "log") || path.ends_with("starts") {
            eprintln!("--- {}\n{}", entry.file_name().display(), std::fs::read_to_string(path).unwrap_or_default());
        }
    }
}

/// Waits for the end of several agents: their exit codes.
pub async fn exits<'a>(agents: impl IntoIterator<Item = &'a mut Agent>) -> Vec<i32> {
    exits_within(LIMIT, agents).await
}

/// As [`exits`], with a limit for each.
pub async fn exits_within<'a>(limit: Duration, agents: impl IntoIterator<Item = &'a mut Agent>) -> Vec<i32> {
    let mut codes = Vec::new();
    for agent in agents {
        codes.push(agent.exit(limit).await);
    }
    codes
}
