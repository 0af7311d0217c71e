//! Nodes: an agent on each host, started again as systemd would, and its processes.

use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use elastic_tests::prelude::*;
use elastic_tests::processes::Process as Running;

use super::disk::Disk;
use super::hosts::{Host, send};

/// Exit codes after which the agent is not started again, as its unit says (`deploy/systemd`): left as planned, closed,
/// failed for good.
const FINAL: [i32; 4] = [0, 3, 4, 5];

/// How long the service manager waits before it starts an agent again.
const RESTART_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Process {
    Agent,
    /// What ends the workers with the agent.
    Guard,
    Worker,
    /// What a DataLoader has forked.
    Loader,
    /// One of etcd's.
    Member,
    Coordinator,
}

/// A node of the job, with a disk for its logs and runtime files.
#[derive(Debug)]
pub(crate) struct Node {
    /// Its host; its name is the node's too.
    pub(crate) host: Host,
    pub(crate) disk: Disk,
    /// Words after `elastic-agent`.
    words: Vec<String>,
    clock: Option<(PathBuf, PathBuf)>,
    log: PathBuf,
    agent: Option<Running>,
    ended: Option<(i32, Instant)>,
    starts: u32,
    /// How often the service manager starts it again.
    restarts: u32,
    /// Whether it is to be started when its agent fails.
    wanted: bool,
}

impl Node {
    /// A node that is not started yet, and whose agent is started again so often. `clock` is the library that sets the
    /// wall clock of what runs there.
    pub(crate) fn new(
        host: Host,
        folder: &Path,
        words: Vec<String>,
        restarts: u32,
        clock: Option<&Path>,
    ) -> Result<Node> {
        let disk = Disk::new(&folder.join(format!("disk-{}", host.name)), 24)?;
        for name in ["run", "logs", "tmp"] {
            std::fs::create_dir_all(disk.path().join(name))?;
        }
        let log = folder.join(format!("agent-{}.log", host.name));
        let clock = clock.map(|library| (library.to_owned(), folder.join(format!("clock-{}", host.name))));
        if let Some((_, offset)) = &clock {
            std::fs::write(offset, 0_i64.to_ne_bytes())?;
        }
        Ok(Node { host, disk, words, clock, log, agent: None, ended: None, starts: 0, restarts, wanted: false })
    }

    /// Starts its agent, and from now on again when it fails.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.wanted = true;
        self.starts += 1;
        self.ended = None;
        let mut command = self.host.command();
        self.environment(&mut command);
        command.arg(binary("elastic-agent"));
        command.arg(format!("--node-name={}", self.host.name));
        command.arg(format!("--log-dir={}", self.disk.path().join("logs").display()));
        command.args(&self.words);
        self.agent = Some(Running::spawn(&self.host.name, command, &self.log));
        Ok(())
    }

    fn environment(&self, command: &mut Command) {
        remove_settings(command);
        command.env("XDG_RUNTIME_DIR", self.disk.path().join("run")).env("TMPDIR", self.disk.path().join("tmp"));
        command.env("OMP_NUM_THREADS", "1").env_remove("LOGLEVEL");
        if let Some((library, offset)) = &self.clock {
            command.env("LD_PRELOAD", library).env("CAMPAIGN_CLOCK", offset);
        }
    }

    /// Sets the wall clock of all that runs here so many seconds ahead.
    pub(crate) fn set_clock(&self, ahead: i64) -> Result<()> {
        let (_, offset) = self.clock.as_ref().context("a clock of its own")?;
        let file = std::fs::File::options().write(true).open(offset)?;
        Ok(file.write_all_at(&ahead.to_ne_bytes(), 0)?)
    }

    /// Does what a service manager does: sees that the agent has ended, and starts it again, but not for ever.
    pub(crate) fn tend(&mut self) -> Result<()> {
        if let Some(code) = self.agent.as_mut().and_then(Running::ended) {
            (self.agent, self.ended) = (None, Some((code, Instant::now())));
        }
        match self.ended {
            Some((code, at)) if self.wanted && !FINAL.contains(&code) && at.elapsed() >= RESTART_AFTER => {
                self.wanted = self.starts <= self.restarts;
                if self.wanted { self.start() } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Does what its operator's timer does: of the logs of its agents, one after the other, those of the last two stay.
    pub(crate) fn tidy(&self) -> Result<()> {
        let folders = std::fs::read_dir(self.disk.path().join("logs"))?;
        let dated = folders.map(|folder| folder.and_then(|folder| Ok((folder.metadata()?.created()?, folder.path()))));
        let mut dated = dated.collect::<std::io::Result<Vec<_>>>()?;
        dated.sort();
        dated.truncate(dated.len().saturating_sub(2));
        dated.iter().try_for_each(|(_, folder)| std::fs::remove_dir_all(folder)).context("remove old logs")
    }

    /// From now on it is not started again.
    pub(crate) fn forget(&mut self) {
        self.wanted = false;
    }

    /// The exit code of its agent, if that has ended for good.
    pub(crate) fn end(&self) -> Option<i32> {
        let (code, _) = self.ended?;
        (!self.wanted || FINAL.contains(&code)).then_some(code)
    }

    pub(crate) fn has_started(&self) -> bool {
        self.starts > 0
    }

    pub(crate) fn is_up(&self) -> bool {
        self.agent.is_some()
    }

    /// Ids of the node's processes of this kind.
    pub(crate) fn processes(&self, which: Process) -> Vec<u32> {
        let agent: Vec<u32> = self.agent.iter().map(Running::pid).collect();
        let below = |pids: Vec<u32>| pids.into_iter().flat_map(children).collect();
        match which {
            Process::Agent => agent,
            Process::Guard => below(agent),
            Process::Worker => below(below(agent)),
            Process::Loader => {
                let line = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let forked = |&worker: &u32| children(worker).into_iter().filter(move |&pid| line(pid) == line(worker));
                self.processes(Process::Worker).iter().flat_map(forked).collect()
            }
            Process::Member | Process::Coordinator => Vec::new(),
        }
    }

    pub(crate) fn signal(&self, which: Process, signal: Signal) {
        self.processes(which).into_iter().for_each(|pid| send(pid, signal));
    }

    /// Whether its agent, if it runs, handles SIGTERM already: one that has hardly begun just ends.
    pub(crate) fn hears_sigterm(&self) -> bool {
        self.processes(Process::Agent).into_iter().all(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
            caught & (1 << (Signal::TERM.as_raw() - 1)) != 0
        })
    }

    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.wanted = false;
        self.host.signal(Signal::KILL);
    }
}

fn children(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    found
}
