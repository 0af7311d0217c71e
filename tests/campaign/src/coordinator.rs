//! A coordinator that leads the job, on a host of its own.

use anyhow::Result;
use elastic_tests::prelude::*;

use super::hosts::Host;

/// Its process, and how it is started again.
#[derive(Debug)]
pub(crate) struct Coordinator {
    pub(crate) host: Host,
    process: Option<Process>,
    words: Vec<String>,
    log: PathBuf,
}

impl Coordinator {
    /// Starts it. `words` say which etcd it uses, and how.
    pub(crate) fn start(host: &Host, words: Vec<String>, log: &Path) -> Result<Coordinator> {
        let mut coordinator = Coordinator { host: host.clone(), process: None, words, log: log.to_owned() };
        coordinator.revive()?;
        Ok(coordinator)
    }

    /// Starts it again if it has ended. Whether it had.
    pub(crate) fn revive(&mut self) -> Result<bool> {
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

    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }
}
