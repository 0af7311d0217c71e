//! The final save: when a node's part in its job ends and no other node continues, the snapshots that its workers left
//! in memory are saved and committed. Only the workers' own program can read that memory. The rules for who may commit
//! are in [`elastic_node::requests::checkpoint`].

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use elastic_node::requests::checkpoint::{self, CommitError, LastWord};
use elastic_rendezvous::End;
use elastic_rendezvous::job::{Checkpoint, Keys, NodeId, Sealed};
use elastic_store::Store;
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::machine::parent::ends_with_parent;
use crate::workers::checkpoints::record_of;
use crate::workers::snapshot_memory::Left;

/// How long the workers' program may take to save the snapshots. If the disk is too slow for that, they are lost.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The most bytes that are read of the program's output.
const PRINTED: u64 = 64 * 1024;

/// The snapshots to save, and the job that they belong to.
pub(crate) struct FinalSave {
    pub store: Arc<dyn Store>,
    pub keys: Keys,
    pub node: NodeId,
    /// The last round in which this node had a place.
    pub seat: Sealed,
    pub left: Left,
}

#[derive(Debug, thiserror::Error)]
enum SaveError {
    #[error("cannot start {program}: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("{program} ended with {status}: {last}")]
    Failed { program: String, status: ExitStatus, last: String },
    #[error("{program} took longer than {} s and was ended", LIMIT.as_secs())]
    Slow { program: String },
    #[error("{program} printed no checkpoint but {printed:?}")]
    Printed { program: String, printed: String },
    #[error("cannot read its output: {0}")]
    Read(#[from] io::Error),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A final save under way. Dropping it gives the save up and ends the program that saves.
#[derive(Default)]
pub(crate) struct Saving(JoinSet<()>);

/// Whether a node whose part ends like this may hold snapshots that exist nowhere else.
pub(crate) fn may_matter(end: &End) -> bool {
    matches!(end, End::Failed(..) | End::Drained)
}

/// Waits until the final save is over. The wait may be cancelled.
pub(crate) async fn done(Saving(task): &mut Saving) {
    // The result has been logged.
    task.join_next().await;
}

impl FinalSave {
    /// Begins the final save, and logs its result.
    pub(crate) fn begin(self) -> Saving {
        let mut task = JoinSet::new();
        task.spawn(async move {
            let word = checkpoint::last_word(&*self.store, &self.keys, &self.node, self.seat).await;
            let committed = match word {
                Ok(LastWord::After(committed)) => committed,
                Ok(LastWord::Nothing(why)) => {
                    return tracing::info!("this node does not save the snapshots in memory: {why}");
                }
                Err(error) => return tracing::warn!("cannot save the snapshots in memory: {error}"),
            };
            let step = committed.as_ref().map_or(0, |committed| committed.step);
            match self.save(step).await {
                Ok(Some(Checkpoint { step, path, .. })) => {
                    tracing::info!(step, path, "saved step {step} from memory to {path}: the job resumes from there");
                }
                Ok(None) if committed.is_none() => tracing::info!("there is no snapshot in memory to save"),
                Ok(None) => tracing::info!(step, "nothing in memory is newer than the checkpoint of step {step}"),
                Err(error) => {
                    let from = committed.map_or("its beginning".to_owned(), |committed| {
                        format!("step {}, {}", committed.step, committed.path)
                    });
                    tracing::warn!("the newest snapshot in memory is not saved: {error}; the job resumes from {from}");
                }
            }
        });
        Saving(task)
    }

    /// Saves and commits the snapshot if it is newer than `step`.
    async fn save(&self, step: u64) -> Result<Option<Checkpoint>, SaveError> {
        let program = self.left.command.first().cloned().unwrap_or_default();
        let slow = |_| SaveError::Slow { program: program.clone() };
        let printed = tokio::time::timeout(LIMIT, self.run(&program, step)).await.map_err(slow)??;
        if printed.trim().is_empty() {
            return Ok(None);
        }
        let Ok(saved) = serde_json::from_str(printed.trim()).map(record_of) else {
            return Err(SaveError::Printed { program, printed });
        };
        checkpoint::commit_last(&*self.store, &self.keys, &self.node, self.seat, saved.clone()).await?;
        Ok(Some(saved))
    }

    /// Runs the program to its end and returns what it printed. Its standard error goes to the log.
    async fn run(&self, program: &str, step: u64) -> Result<String, SaveError> {
        let start = || {
            let mut command = Command::new(program);
            command.args(self.left.command.iter().skip(1)).args(["--after", &step.to_string()]);
            command.stdin(Stdio::from(self.left.file.try_clone()?)).stdout(Stdio::piped()).stderr(Stdio::piped());
            // The program runs in its own process group, so that the terminal's Ctrl-C reaches only the agent. It does
            // not get the error file, which belongs to the agent.
            command.process_group(0).kill_on_drop(true).env_remove("TORCHELASTIC_ERROR_FILE");
            // No one would commit what the program saves after the agent's end, and the next agent of this node may save
            // the same.
            ends_with_parent(&mut command, Signal::KILL);
            command.spawn()
        };
        let mut child = start().map_err(|cause| SaveError::Start { program: program.to_owned(), cause })?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let print = async {
            let mut printed = String::new();
            if let Some(stdout) = stdout {
                stdout.take(PRINTED).read_to_string(&mut printed).await?;
            }
            io::Result::Ok(printed)
        };
        let log = async {
            let mut last = String::new();
            let Some(stderr) = stderr else { return Ok(last) };
            let mut lines = BufReader::new(stderr).lines();
            while let Some(line) = lines.next_line().await? {
                tracing::info!("saving from memory: {line}");
                last = line;
            }
            io::Result::Ok(last)
        };
        let (printed, last, status) = tokio::try_join!(print, log, child.wait())?;
        if status.success() {
            return Ok(printed);
        }
        Err(SaveError::Failed { program: program.to_owned(), status, last })
    }
}
