//! What a job of the campaign trains with, and what that shows when nothing disturbs it.

use anyhow::{Context, Result, bail};
use elastic_tests::prelude::*;

use super::checker::{self, Broken, Results};
use super::cluster::Reach;
use super::history::{Events, Observer};

#[derive(Debug, Clone)]
pub(crate) enum Training {
    /// `elastic-trainer`.
    Trainer,
    /// `tests/pytorch/trains_in_campaign.py`, by this Python.
    PyTorch(Torch),
}

/// Where a training writes, and for how long it trains.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) epochs: u32,
    pub(crate) trace: PathBuf,
    /// The folder with its checkpoints, if it is to have any.
    pub(crate) checkpoints: Option<PathBuf>,
}

impl Training {
    pub(crate) fn pytorch() -> Result<Training> {
        Ok(Training::PyTorch(Torch::find().context("no Python that has PyTorch")?))
    }

    /// Epochs of a job that comes to its end: enough for a node to come meanwhile, which takes PyTorch's longer.
    pub(crate) fn epochs(&self) -> u32 {
        match self {
            Training::Trainer => 5,
            Training::PyTorch(_) => 15,
        }
    }

    /// Further flags of agents: PyTorch's workers begin with seconds of imports, which `--warm-up` does ahead.
    pub(crate) fn flags(&self) -> Option<String> {
        matches!(self, Training::PyTorch(_)).then(|| "--warm-up=60".into())
    }

    /// The command line that an agent runs.
    pub(crate) fn words(&self, run: &Run) -> Vec<String> {
        let mut words = match self {
            Training::Trainer => {
                let of_snapshots = ["--snapshot-every=1", "--checkpoint-every=25", "--peer-timeout=6", "--device=cpu"];
                let mut words = vec![binary("elastic-trainer").display().to_string(), "digits".into()];
                words.push("--hidden=1024,256".into());
                words.extend(of_snapshots.map(str::to_owned));
                words
            }
            Training::PyTorch(torch) => {
                let mut words = torch.program(&script("trains_in_campaign.py"));
                let scratch = run.trace.parent().unwrap_or(Path::new("/")).display().to_string();
                words.insert(1, format!("TEST_DIR={scratch}"));
                words
            }
        };
        words.push(format!("--epochs={}", run.epochs));
        words.push(format!("--trace={}", run.trace.display()));
        words.extend(run.checkpoints.iter().map(|folder| format!("--checkpoint-dir={}", folder.display())));
        words
    }

    /// The results of one worker that nothing disturbs.
    pub(crate) async fn undisturbed(&self, folder: &Path) -> Result<Results> {
        let run = Run { epochs: self.epochs(), trace: folder.join("undisturbed"), checkpoints: None };
        let mut command = Command::new(binary("elastic-agent"));
        remove_settings(&mut command);
        command.args(["--standalone", "--no-python"]).args(self.words(&run)).env("OMP_NUM_THREADS", "1");
        command.env("XDG_RUNTIME_DIR", folder).stdout(Stdio::null()).stderr(Stdio::piped());
        let output = tokio::process::Command::from(command).output().await?;
        if !output.status.success() {
            bail!("the undisturbed training ends with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        let nowhere = Keys::new("/nowhere", &"none".parse().context("a job's id")?);
        let mut observer = Observer::new(Reach::default(), &nowhere, &run.trace);
        checker::results(observer.lines()).map_err(|Broken(text)| anyhow::anyhow!(text))
    }

    /// Checkpoints that are not whole. One of the trainer's whose save was cut short counts as none; of PyTorch's the
    /// committed one counts.
    pub(crate) fn spoilt(&self, folder: &Path, events: &Events) -> Option<Broken> {
        match self {
            Training::Trainer => {
                let verify = ["checkpoint", "verify"];
                let output = Command::new(binary("elastic-trainer")).args(verify).arg(folder).output().ok()?;
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let spoilt = said.lines().find(|line| line.contains(" bad: ") && !line.contains("cut short"))?;
                Some(Broken(spoilt.to_owned()))
            }
            Training::PyTorch(_) => {
                // An operator may have written something else there.
                let record: serde_json::Value = serde_json::from_str(events.get("checkpoint")?).ok()?;
                let (path, committed) = (record["path"].as_str()?, record["digest"].as_str()?);
                let output = Command::new("sha256sum").arg(path).output().ok()?;
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let found = format!("sha256:{}", said.split(' ').next().unwrap_or_default());
                (found != committed).then(|| Broken(format!("{path} was committed as {committed}, and is {found}")))
            }
        }
    }
}
