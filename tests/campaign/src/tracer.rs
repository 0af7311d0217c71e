//! System calls that fail or are slow.

use std::fs::DirEntry;

use anyhow::{Context, Result, ensure};
use elastic_tests::prelude::*;

use super::hosts::send;

/// An `strace` that has system calls of a process do as it says, until it is dropped.
#[derive(Debug)]
pub(crate) struct Tracer(Child);

impl Tracer {
    /// Has system calls of this process, of its threads and of its children fail or be slow, as `strace --inject` takes
    /// it. There is none if the process has ended.
    pub(crate) async fn attach(pid: u32, what: &str) -> Result<Option<Tracer>> {
        let calls = what.split(':').next().unwrap_or_default();
        let mut command = Command::new("strace");
        command.args(["-q", "-q", "-f", "-p", &pid.to_string(), "-o", "/dev/null"]);
        command.arg("-e").arg(format!("trace={calls}")).arg("-e").arg(format!("inject={what}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut tracer = Tracer(command.spawn().context("start strace; install it")?);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_traced(pid) {
            if let Some(status) = tracer.0.try_wait()? {
                ensure!(has_ended(pid), "strace cannot trace process {pid}: {status}");
                return Ok(None);
            }
            ensure!(Instant::now() < deadline, "strace does not trace process {pid} within 10 s");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(Some(tracer))
    }
}

impl Drop for Tracer {
    /// Asked to end, it lets go of whom it traces; killed, it might not. But while a process of several threads is
    /// ending, it waits for the first of them to stop, for ever: that one is a zombie by then, and stays one until the
    /// others are let go, which are only ending too.
    fn drop(&mut self) {
        send(self.0.id(), Signal::INT);
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = self.0.try_wait() {
            if Instant::now() > deadline {
                let _ = self.0.kill();
                let _ = self.0.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Whether each thread of a process has a tracer.
fn is_traced(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let status = |thread: DirEntry| std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
    threads.map(status).all(|status| !status.contains("TracerPid:\t0\n"))
}

/// Whether a process is gone, or only waits for its parent to ask how it ended.
pub(super) fn has_ended(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}/exe")).read_link().is_err()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::opener::Opener;
    use elastic_tests::wait::eventually;

    #[tokio::test]
    async fn system_calls_fail_at_once_and_until_it_is_dropped() {
        let mut process = Opener::new();
        assert!(process.opens());
        let tracer = Tracer::attach(process.pid(), "open,openat:error=EIO").await.unwrap().unwrap();
        assert!(!process.opens());
        drop(tracer);
        assert!(process.opens());
    }

    #[tokio::test]
    async fn a_process_that_is_ending_thread_by_thread_is_let_go_as_well() {
        // Its first thread ends, and the other does not, once it reads that it may.
        let script = "import ctypes, threading, time\n\
                      threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n\
                      input()\n\
                      ctypes.CDLL(None).pthread_exit(None)";
        let mut process = Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
        let status = format!("/proc/{}/status", process.id());
        let becomes = async |wanted: &str| {
            let says = async || std::fs::read_to_string(&status).unwrap().contains(wanted).then_some(());
            eventually(wanted, Duration::from_secs(30), says).await;
        };
        becomes("Threads:\t2").await;
        let tracer = Tracer::attach(process.id(), "open:error=EIO").await.unwrap().unwrap();
        process.stdin.take().unwrap().write_all(b"\n").unwrap();
        becomes("State:\tZ").await;
        drop(tracer);
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
