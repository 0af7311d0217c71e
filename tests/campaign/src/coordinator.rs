//! A coordinator that leads the job, on a host of its own.

use std::path::{Path, PathBuf};

use anyhow::Result;
use elastic_tests::processes::{Process, binary, remove_settings};
use rustix::process::Signal;

use super::hosts::{Host, send};

/// Its process, and how it is started again.
#[derive(Debug)]
pub struct Coordinator {
    /// Where it runs.
    pub host: Host,
    process: Option<Process>,
    words: Vec<String>,
    log: PathBuf,
}

impl Coordinator {
    /// Starts it. `words` say which etcd it uses, and how.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(host: &Host, words: Vec<String>, log: &Path) -> Result<Coordinator> {
        let mut coordinator = Coordinator { host: host.clone(), process: None, words, log: log.to_owned() };
        coordinator.revive()?;
        Ok(coordinator)
    }

    /// Starts it again if it has ended. Whether it had.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn revive(&mut self) -> Result<bool> {
        if self.process.as_mut().is_some_and(|process| !process.is_gone()) {
            return Ok(false);
        }
        let mut command = self.host.command();
        remove_settings(&mut command);
        command.arg(binary("elastic-coordinator")).args(&self.words);
        command.args(["--peer-listen=0.0.0.0:29410", "--http=127.0.0.1:29411", "--lease-ttl=4"]);
        self.process = Some(Process::spawn("coordinator", command, &self.log));
        Ok(true)
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Freezes it, or lets it continue.
    pub fn freeze(&self, yes: bool) {
        if let Some(pid) = self.pid() {
            send(pid, if yes { Signal::STOP } else { Signal::CONT });
        }
    }
}
