//! Reads this machine, and runs the user's own command. What it means is judged elsewhere.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::statvfs;
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::Node;
use super::judge::{self, Ended, GpuReading, Reading, Readings};
use crate::machine::devices::shown;
use crate::machine::nvml::{Nvml, NvmlError};

/// How much of a command's output is kept, in bytes and lines.
const KEPT: usize = 4096;
const LINES: usize = 5;

/// How long output is waited for that processes of a command may still write after its end.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The most of the kernel's log that is read. Its buffer is smaller on most hosts.
const LOG: usize = 16 << 20;

pub(super) async fn readings(node: Node, limit: Duration) -> Readings {
    let late = || format!("no answer within {limit:?}");
    let asked = node.asked_gpus();
    let folders: Vec<String> = node.folders.iter().map(|folder| folder.display().to_string()).collect();
    let looked_at = [&folders[..], &["/dev/shm".to_owned()]].concat();
    let space = move || looked_at.iter().map(|folder| free(Path::new(folder))).collect::<Vec<_>>();
    // A file system or a driver that hangs holds up nothing but itself.
    let space = timeout(limit, spawn_blocking(space));
    let gpus = timeout(limit, spawn_blocking(move || gpus(&node)));
    let (space, gpus) = tokio::join!(space, gpus);
    let mut space = space.ok().and_then(Result::ok).unwrap_or_else(|| vec![Err(late()); folders.len() + 1]);
    let shared = space.pop().unwrap_or_else(|| Err(late()));
    let (needed_gpus, gpus) = gpus.ok().and_then(Result::ok).unwrap_or_else(|| (asked, Err(late())));
    Readings {
        folders: folders.into_iter().zip(space).collect(),
        shared,
        files: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
        needed_gpus,
        gpus,
    }
}

/// Free bytes where this folder is, or will be.
fn free(folder: &Path) -> Reading<u64> {
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
    let found = statvfs(there).map_err(|error| error.to_string())?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// How many GPUs the workers need, and those that they will use.
fn gpus(node: &Node) -> (u32, Reading<Vec<GpuReading>>) {
    let asked = node.asked_gpus();
    let looked = || {
        let nvml = Nvml::load()?;
        let chosen = shown(&nvml, node.visible.as_deref())?;
        Ok::<_, NvmlError>((nvml, chosen))
    };
    let (nvml, chosen) = match looked() {
        Ok(found) => found,
        Err(error) => return (asked, Err(error.to_string())),
    };
    if node.visible.as_ref().is_some_and(|list| list.starts_with("MIG-")) {
        return (0, Ok(Vec::new()));
    }
    let log = kernel_log().map_err(|error| format!("cannot read the kernel's log: {error}"));
    let readings = chosen.iter().map(|index| {
        let xids = match (&log, nvml.device(*index)) {
            (Ok(log), Ok(device)) => Ok(judge::xids(log, &device.pci)),
            (Ok(_), Err(error)) => Err(error.to_string()),
            (Err(why), _) => Err(why.clone()),
        };
        GpuReading { index: *index, health: nvml.health(*index).map_err(|error| error.to_string()), xids }
    });
    // On a machine with GPUs each worker is taken to need one, unless none is shown to it.
    let needed = if chosen.is_empty() { asked } else { node.workers };
    (needed, Ok(readings.collect()))
}

/// All of the kernel's log that there is, one record a line.
fn kernel_log() -> io::Result<String> {
    let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
    let (mut text, mut record) = (Vec::new(), [0; 8192]);
    while text.len() < LOG {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&record[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // The record was overwritten meanwhile: the next read continues.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Runs a command in the shell. It and its children end with this call.
pub(super) async fn run(command: &str, limit: Duration) -> Ended {
    let mut shell = Command::new("sh");
    // Both streams become one, so that their lines are in order.
    shell.args(["-c", r#"exec 2>&1; eval "$1""#, "sh", command]);
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = match shell.spawn() {
        Ok(child) => ProcessGroup(child),
        Err(error) => return Ended::NotStarted(error.to_string()),
    };
    match timeout(limit, child.end()).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(error)) => Ended::NotStarted(error.to_string()),
        Err(_) => Ended::Late(limit),
    }
}

/// A shell and its children, which are killed when this is dropped.
struct ProcessGroup(Child);

impl ProcessGroup {
    async fn end(&mut self) -> io::Result<Ended> {
        let mut kept = Vec::new();
        let stdout = self.0.stdout.take();
        let mut reading = Box::pin(read_end(stdout, &mut kept));
        let status = tokio::select! {
            status = self.0.wait() => {
                let _ = timeout(LAST_WORDS, reading).await;
                status?
            }
            () = &mut reading => {
                drop(reading);
                self.0.wait().await?
            }
        };
        let text = String::from_utf8_lossy(&kept);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines[lines.len().saturating_sub(LINES)..].iter().map(ToString::to_string).collect();
        Ok(match status.code() {
            Some(code) => Ended::Exited(code, last),
            None => Ended::Killed(status.signal().unwrap_or_default()),
        })
    }
}

/// Reads a command's output to its end, and keeps the last bytes.
async fn read_end(stdout: Option<ChildStdout>, kept: &mut Vec<u8>) {
    let (Some(mut stdout), mut chunk) = (stdout, [0; KEPT]) else { return };
    while let Ok(count @ 1..) = stdout.read(&mut chunk).await {
        kept.extend_from_slice(&chunk[..count]);
        kept.drain(..kept.len().saturating_sub(KEPT));
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // One that was waited for has no id any more, and its number may be another's.
        if let Some(pid) = self.0.id().and_then(|id| Pid::from_raw(id as i32)) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}
