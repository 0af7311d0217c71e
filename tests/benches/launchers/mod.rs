//! Jobs of elastic-agent and of torchrun whose workers write down when they were started, and sleep.

use std::fs;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, ensure};
use elastic_tests::prelude::*;

pub(crate) const WITHIN: Duration = Duration::from_secs(120);

/// Whose launcher is measured: torchrun's if there is a PyTorch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Launcher<'a> {
    Torchrun(&'a Torch),
    Ours,
}

impl Launcher<'_> {
    /// A command that runs the launcher, for its flags and the workers' program.
    pub(crate) fn command(self) -> Command {
        let mut command = match self {
            Launcher::Torchrun(torch) => torch.torchrun(),
            Launcher::Ours => Command::new(binary("elastic-agent")),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env("OMP_NUM_THREADS", "1");
        command
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Started {
    pub(crate) pid: u32,
    /// In nanoseconds since 1970.
    pub(crate) at: u128,
    pub(crate) world_size: usize,
}

/// The launchers of a job, and its workers' folder. Dropping it ends both: torchrun leaves its workers behind.
pub(crate) struct Sleepers {
    dir: TempDir,
    pub(crate) launchers: Vec<Process>,
}

impl Sleepers {
    pub(crate) fn new() -> Result<Sleepers> {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("worker.sh");
        let starts = dir.path().join("starts");
        let told = format!("#!/bin/sh\necho $$ $(date +%s%N) $WORLD_SIZE >> {}\nexec sleep 1000\n", starts.display());
        fs::write(&script, told)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        Ok(Sleepers { dir, launchers: Vec::new() })
    }

    pub(crate) fn start(&mut self, launcher: Launcher, flags: &[&str]) {
        let mut command = launcher.command();
        command.args(flags).arg("--no-python").arg(self.dir.path().join("worker.sh"));
        command.env("XDG_RUNTIME_DIR", self.dir.path());
        self.launchers.push(Process::spawn_as("launcher", command, Path::new("/dev/null")));
    }

    pub(crate) fn living(&self) -> Vec<Started> {
        let text = fs::read_to_string(self.dir.path().join("starts")).unwrap_or_default();
        let parse = |line: &str| -> Option<Started> {
            let mut fields = line.split(' ');
            let (pid, at) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            Some(Started { pid, at, world_size: fields.next()?.parse().ok()? })
        };
        let lives = |started: &Started| Path::new(&format!("/proc/{}/exe", started.pid)).read_link().is_ok();
        text.lines().filter_map(parse).filter(lives).collect()
    }

    /// Waits for a world of this size: its workers.
    pub(crate) fn whole(&self, world_size: usize) -> Result<Vec<Started>> {
        wait(&format!("{world_size} work together"), || {
            let all: Vec<_> = self.living().into_iter().filter(|started| started.world_size == world_size).collect();
            (all.len() == world_size).then_some(all)
        })
    }

    /// Milliseconds from `begun` until the last of `count` workers was started.
    pub(crate) fn started_since(&self, begun: u128, count: usize) -> Result<f64> {
        let last = wait("the workers are started", || {
            let later: Vec<u128> = self.living().iter().map(|started| started.at).filter(|at| *at > begun).collect();
            (later.len() >= count).then(|| later.iter().max().copied().unwrap_or_default())
        })?;
        Ok((last - begun) as f64 / 1e6)
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        self.launchers.clear();
        self.living().into_iter().for_each(|started| send(started.pid, Signal::KILL));
    }
}

pub(crate) fn wait<T>(what: &str, condition: impl Fn() -> Option<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        ensure!(begun.elapsed() < WITHIN, "not within {WITHIN:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn now() -> Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("the time")?.as_nanos())
}
