//! Ranks as processes: started, told what to do, and killed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Nothing here takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Process {
    child: Child,
    tasks: ChildStdin,
    answers: Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    pub(crate) fn start(library: &Path) -> Process {
        Process::start_with(library, &[])
    }

    /// Starts a rank with these variables.
    pub(crate) fn start_with(library: &Path, variables: &[(&str, &str)]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "rank::rank", "--nocapture"])
            .env("NCCL_OF_TEST", library)
            // A test in this process may have set another version.
            .env_remove("FAKE_NCCL_VERSION")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tasks, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix("> ") {
                    let _ = sender.send(answer.to_owned());
                }
            }
        });
        Process { child, tasks, answers }
    }

    /// Begins a task, without waiting for its answer.
    pub(crate) fn begin(&mut self, task: &str) {
        writeln!(self.tasks, "{task}").unwrap();
        assert_eq!(self.answer(), "begun");
    }

    pub(crate) fn answer(&mut self) -> String {
        self.answers.recv_timeout(DEADLINE).unwrap()
    }

    pub(crate) fn ask(&mut self, task: &str) -> String {
        self.begin(task);
        self.answer()
    }
}

pub(crate) fn start<const N: usize>(library: &Path) -> [Process; N] {
    std::array::from_fn(|_| Process::start(library))
}

/// A port that is reserved without a listener.
fn hold_port() -> (std::net::TcpListener, u16) {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port();
    (held, port)
}

/// Lets all do a task at the same time. Returns their answers.
pub(crate) fn all(processes: &mut [&mut Process], task: &str) -> Vec<String> {
    processes.iter_mut().for_each(|process| process.begin(task));
    processes.iter_mut().map(|process| process.answer()).collect()
}

/// Lets all join a round, with ranks in this order. `time` is what NCCL may take.
pub(crate) fn join(processes: &mut [&mut Process], round: u64, time: Duration) -> Vec<String> {
    let ranks = processes.len();
    let (held, port) = hold_port();
    drop(held);
    for (rank, process) in processes.iter_mut().enumerate() {
        process.begin(&format!("join {round} {rank} {ranks} {port} {}", time.as_millis()));
    }
    processes.iter_mut().map(|process| process.answer()).collect()
}

pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn every(answers: &[String], expected: &str) {
    assert!(answers.iter().all(|answer| answer == expected), "{answers:?} instead of {expected}");
}
