//! The last word of a node in its job: what its workers have left in memory is saved, and committed, where nobody goes on
//! with it. Not for what lies in the memory, which the workers' own program alone can read, nor for who may commit:
//! that is [`elastic_coordinator::workers::checkpoint`].

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use elastic_coordinator::job::{Checkpoint, Keys, NodeId, Sealed};
use elastic_coordinator::rendezvous::End;
use elastic_coordinator::store::Store;
use elastic_coordinator::workers::checkpoint::{self, CommitError, LastWord};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::workers::snapshot_memory::Left;

/// How long the workers' program may take to save it. What is larger than a disk takes in that time is lost.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Most bytes of what it prints.
const PRINTED: u64 = 64 * 1024;

/// What there is to save, and where it is to count.
pub struct FinalSave {
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// Its keys.
    pub keys: Keys,
    /// This node.
    pub node: NodeId,
    /// The last round that it had a place in.
    pub seat: Sealed,
    /// What is in memory.
    pub left: Left,
}

/// Why it is not saved.
#[derive(Debug, thiserror::Error)]
enum SaveError {
    #[error("{program} cannot be started: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("{program} ended with {status}: {last}")]
    Failed { program: String, status: ExitStatus, last: String },
    #[error("{program} took longer than {} s and was ended", LIMIT.as_secs())]
    Slow { program: String },
    #[error("{program} printed no checkpoint but {printed:?}")]
    Printed { program: String, printed: String },
    #[error("its output cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A final save under way; dropped, it is given up, and the program that saves is ended.
pub struct Saving(JoinHandle<()>);

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Whether a part in a job that ends like this may leave something that is nowhere else.
pub fn may_matter(end: &End) -> bool {
    matches!(end, End::Failed(..) | End::Drained)
}

/// Waits until nothing is left to be done. May be cancelled.
pub async fn done(Saving(task): &mut Saving) {
    // Whatever came of it was said.
    drop(task.await);
}

impl FinalSave {
    /// Begins, and says what comes of it.
    pub fn begin(self) -> Saving {
        Saving(tokio::spawn(async move {
            let word = checkpoint::last_word(&*self.store, &self.keys, &self.node, self.seat).await;
            let committed = match word {
                Ok(LastWord::After(committed)) => committed,
                Ok(LastWord::Nothing(why)) => {
                    return tracing::info!("the snapshots in memory are not saved by this node: {why}");
                }
                Err(error) => return tracing::warn!("the snapshots in memory are not saved: {error}"),
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
        }))
    }

    /// Saves and commits what is newer than `step`.
    async fn save(&self, step: u64) -> Result<Option<Checkpoint>, SaveError> {
        let program = self.left.command.first().cloned().unwrap_or_default();
        let slow = |_| SaveError::Slow { program: program.clone() };
        let printed = tokio::time::timeout(LIMIT, self.run(&program, step)).await.map_err(slow)??;
        if printed.trim().is_empty() {
            return Ok(None);
        }
        let Ok(saved) = serde_json::from_str::<Checkpoint>(printed.trim()) else {
            return Err(SaveError::Printed { program, printed });
        };
        checkpoint::commit_last(&*self.store, &self.keys, &self.node, self.seat, saved.clone()).await?;
        Ok(Some(saved))
    }

    /// Runs the program to its end: what it printed. What it writes to its standard error goes to the log.
    async fn run(&self, program: &str, step: u64) -> Result<String, SaveError> {
        let start = || {
            let mut command = Command::new(program);
            command.args(self.left.command.iter().skip(1)).args(["--after", &step.to_string()]);
            command.stdin(Stdio::from(self.left.file.try_clone()?)).stdout(Stdio::piped()).stderr(Stdio::piped());
            // Away from the terminal's Ctrl-C, which is for the agent to act on; and that file is the agent's own.
            command.process_group(0).kill_on_drop(true).env_remove("TORCHELASTIC_ERROR_FILE");
            end_with(getpid(), &mut command);
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

/// Has the program die with its agent, however that dies: what it saves later nobody commits, and the next agent of this
/// node may save the same. (The signal comes when the *thread* ends that started it. All of an agent's programs are
/// started by its main thread, see decision 0013.)
#[allow(unsafe_code)]
fn end_with(agent: Pid, command: &mut Command) {
    let bond = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have died before the line above; then no signal will ever come.
        if getppid() == Some(agent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: two system calls and no allocation between fork and execute.
    unsafe { command.pre_exec(bond) };
}
