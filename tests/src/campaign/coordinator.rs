//! A coordinator that leads the job, on a host of its own.

use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::hosts::{Host, send};
use crate::binaries::{binary, remove_settings};

/// Its process, and how it is started again.
#[derive(Debug)]
pub struct Coordinator {
    /// Where it runs.
    pub host: Host,
    child: Option<Child>,
    words: Vec<String>,
    log: PathBuf,
}

impl Coordinator {
    /// Starts it. `words` say which etcd it uses, and how.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(host: &Host, words: Vec<String>, log: &Path) -> Result<Coordinator> {
        let mut coordinator = Coordinator { host: host.clone(), child: None, words, log: log.to_owned() };
        coordinator.revive()?;
        Ok(coordinator)
    }

    /// Starts it again if it has ended. Whether it had.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn revive(&mut self) -> Result<bool> {
        if self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            return Ok(false);
        }
        let log = std::fs::File::options().create(true).append(true).open(&self.log)?;
        let mut command = self.host.command();
        remove_settings(&mut command);
        command.arg(binary("elastic-coordinator")).args(&self.words);
        command.args(["--peer-listen=0.0.0.0:29410", "--http=127.0.0.1:29411", "--lease-ttl=4"]);
        self.child = Some(command.stdout(log.try_clone()?).stderr(log).spawn().context("start a coordinator")?);
        Ok(true)
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Freezes it, or lets it go on.
    pub fn freeze(&self, yes: bool) {
        if let Some(pid) = self.pid() {
            send(pid, if yes { Signal::STOP } else { Signal::CONT });
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.kill();
    }
}
