//! The agents of a run as processes: started, killed, started again, ended. Their descendants are found by a mark in
//! their environments, whichever process is their parent by then.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// How long agents have to leave in good order before they are killed.
const GRACE: Duration = Duration::from_secs(2);
/// How long the kernel and the guards may take to end what is left.
const GONE: Duration = Duration::from_secs(5);
/// The pause between two looks at processes that are ending.
const LOOK: Duration = Duration::from_millis(10);
/// The folder that agents make for their sockets and locks.
pub(crate) const RUNTIME: &str = "elastic-agent";
/// The variable that tells whose descendant a process is: children inherit it, orphans keep it.
const MARK: &str = "ELASTIC_DEMO";
/// Lines of a log that are shown when its agent has failed.
const LAST_LINES: usize = 12;

#[derive(Debug, Clone)]
pub(crate) struct Programs {
    pub(crate) agent: PathBuf,
    pub(crate) trainer: PathBuf,
}

impl Programs {
    /// Finds them beside this program.
    pub(crate) fn find() -> anyhow::Result<Programs> {
        let own = std::env::current_exe().context("find this program")?;
        let beside = |name: &str| {
            let path = own.with_file_name(name);
            match path.exists() {
                true => Ok(path),
                false => bail!("{} is missing: run `make demo`, or `cargo build --workspace --bins`", path.display()),
            }
        };
        Ok(Programs { agent: beside("elastic-agent")?, trainer: beside("elastic-trainer")? })
    }
}

/// What all agents of a run have in common.
#[derive(Debug, Clone)]
pub(crate) struct AgentOptions {
    pub(crate) programs: Programs,
    pub(crate) endpoint: String,
    pub(crate) job: String,
    pub(crate) folder: PathBuf,
    /// For the agents' sockets and locks. The path of a socket must be short.
    pub(crate) runtime: PathBuf,
    pub(crate) training: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    pub(crate) pid: u32,
    pub(crate) log: PathBuf,
    /// Found in the environment of all its descendants.
    pub(crate) mark: String,
    pub(crate) killed: bool,
    pub(crate) exit: Option<ExitStatus>,
}

/// The agents of a run, by node name.
#[derive(Debug)]
pub(crate) struct Agents {
    options: AgentOptions,
    pub(crate) by_node: BTreeMap<String, Agent>,
    starts: u32,
}

impl Agents {
    pub(crate) fn new(options: AgentOptions) -> Agents {
        Agents { options, by_node: BTreeMap::new(), starts: 0 }
    }

    pub(crate) fn start(&mut self, node: &str) -> anyhow::Result<()> {
        let options = &self.options;
        self.starts += 1;
        let mark = format!("{}/{node}/{}/", options.job, self.starts);
        let log = options.folder.join(format!("{node}.log"));
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let mut command = Command::new(&options.programs.agent);
        command
            .arg(format!("--rdzv-endpoint={}", options.endpoint))
            .arg(format!("--rdzv-id={}", options.job))
            .arg(format!("--node-name={node}"))
            .args(["--rdzv-backend=etcd", "--nnodes=2:3", "--nproc-per-node=1", "--local-addr=127.0.0.1"])
            .arg("--rdzv-conf=last_call_timeout=1,min_round_time=200ms")
            .args(["--log-dir=/dev/null", "--no-python"])
            .arg(&options.programs.trainer)
            .args(&options.training);
        // Variables that configure other jobs of this shell do not apply here.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PET_")) {
            command.env_remove(name);
        }
        command.env(MARK, &mark).env("XDG_RUNTIME_DIR", &options.runtime);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // This program handles a Ctrl-C at the terminal, and passes it on.
        command.process_group(0).kill_on_drop(true);
        // SAFETY: between fork and exec, prctl is async-signal-safe and touches only the child.
        unsafe {
            // So agents end also when this program is killed, and their guards then end the workers. The thread that
            // starts agents is the main one, so it lives as long as the process.
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().with_context(|| format!("start {}", options.programs.agent.display()))?;
        let pid = child.id().context("the agent ended at once")?;
        self.by_node.insert(node.to_owned(), Agent { child, pid, log, mark, killed: false, exit: None });
        Ok(())
    }

    /// SIGKILL for the agent of a node, and for nothing else.
    pub(crate) fn kill(&mut self, node: &str) -> anyhow::Result<()> {
        let agent = self.by_node.get_mut(node).with_context(|| format!("there is no agent {node}"))?;
        agent.killed = true;
        agent.signal(Signal::KILL).with_context(|| format!("kill agent {node}"))
    }

    /// Notes which agents have ended. One that failed is an error with the end of its log.
    pub(crate) fn look(&mut self) -> anyhow::Result<()> {
        for (node, agent) in &mut self.by_node {
            if agent.exit.is_none() {
                agent.exit = agent.child.try_wait()?;
                if let Some(status) = agent.exit.filter(|status| !status.success() && !agent.killed) {
                    bail!(
                        "agent {node} failed ({status}); the end of {}:\n{}",
                        agent.log.display(),
                        agent.last_lines()
                    );
                }
            }
        }
        Ok(())
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.by_node.values().all(|agent| agent.exit.is_some())
    }

    /// Asks all agents to end, and kills them after a grace, or as soon as `hurry` completes. Returns what is left of
    /// them, which is nothing unless something is wrong.
    pub(crate) async fn end(&mut self, hurry: impl Future<Output = ()>) -> Vec<u32> {
        self.signal_all(Signal::TERM);
        tokio::select! {
            () = self.ended() => {}
            () = sleep(GRACE) => {}
            () = hurry => {}
        }
        self.signal_all(Signal::KILL);
        self.ended().await;
        gone(&format!("{}/", self.options.job)).await
    }

    async fn ended(&mut self) {
        for agent in self.by_node.values_mut() {
            // This fails only if the agent was waited for already.
            if let Ok(status) = agent.child.wait().await {
                agent.exit = Some(status);
            }
        }
    }

    fn signal_all(&mut self, signal: Signal) {
        for agent in self.by_node.values_mut().filter(|agent| agent.exit.is_none()) {
            agent.killed = true;
            // An agent that has just ended needs no signal.
            let _ = agent.signal(signal);
        }
    }
}

impl Agent {
    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        // There is no id once the agent was waited for: another process may have it by then.
        let Some(pid) = self.child.id().and_then(|id| Pid::from_raw(id as i32)) else { return Ok(()) };
        Ok(kill_process(pid, signal)?)
    }

    fn last_lines(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().map(|line| format!("  | {line}")).collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }
}

/// Waits until no process has the mark. Returns those that do not end in time.
pub(crate) async fn gone(mark: &str) -> Vec<u32> {
    let deadline = Instant::now() + GONE;
    loop {
        let left = marked(mark);
        if left.is_empty() || Instant::now() >= deadline {
            return left;
        }
        sleep(LOOK).await;
    }
}

/// The ids of all live processes whose mark begins with `mark`.
pub(crate) fn marked(mark: &str) -> Vec<u32> {
    let wanted = format!("{MARK}={mark}");
    let is_marked = |pid: &u32| {
        // Another user's environment cannot be read, and a zombie has none.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(wanted.as_bytes()))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_marked).collect()
}

/// Whether `pid` is an agent's guard. It ends last: a moment after it let go of the agent's port.
pub(crate) fn is_guard(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "elastic-guard")
}

/// The lines that these agents, and their workers, have printed to the logs in `folder`.
pub(crate) fn printed(folder: &Path, nodes: &[&str]) -> Vec<String> {
    let log = |node: &&str| std::fs::read_to_string(folder.join(format!("{node}.log"))).unwrap_or_default();
    nodes.iter().map(log).flat_map(|log| log.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}
