//! What a hung worker is doing, collected before the worker is ended: from `py-spy` if it is installed, and always from
//! `/proc`.
//!
//! Both may be refused (`kernel.yama.ptrace_scope`, a container without `CAP_SYS_PTRACE`), and both may hang if the
//! kernel itself does. So each has a time limit, and the text says what could not be learnt.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Pid;
use tokio::process::Command;
use tokio::time::timeout;

use crate::guard::tree::{self, Process};
use crate::machine::field;

/// The longest time for one process.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most processes of one worker, and the most threads of one process, whose stacks are read.
const MOST_PROCESSES: usize = 16;
const MOST_THREADS: usize = 256;

/// The most bytes of one process's stacks.
const MOST_TEXT: usize = 256 * 1024;

/// The longest excerpt, in bytes. The excerpt becomes part of a failure's message.
const EXCERPT: usize = 160;

#[derive(Debug)]
pub(super) struct Stacks {
    /// All stacks, for a file.
    pub(super) text: String,
    /// Where the worker's main thread is, in a few words. Empty if this is unknown.
    pub(super) excerpt: String,
}

/// Collects the stacks of a worker and of the processes that it started.
pub(super) async fn collect(worker: i32) -> Stacks {
    let mut text = String::new();
    let mut excerpt = String::new();
    for process in family(worker).await {
        let pid = process.pid.as_raw_pid();
        let _ = writeln!(text, "process {pid} ({}), state {}", process.name, process.state);
        let spied = if process.name.contains("python") { py_spy(pid).await } else { Err(String::new()) };
        match &spied {
            Ok(stacks) => text.push_str(stacks),
            Err(why) if !why.is_empty() => drop(writeln!(text, "  {why}")),
            Err(_) => {}
        }
        let kernel = in_time(move || threads(pid)).await;
        let kernel =
            kernel.unwrap_or_else(|| vec![Thread::unknown(format!("/proc/{pid} did not answer in {PATIENCE:?}"))]);
        kernel.iter().for_each(|thread| text.push_str(&thread.text));
        text.push('\n');
        if pid == worker {
            let kernel = kernel.first().map(|thread| thread.place.clone()).unwrap_or_default();
            excerpt = spied.ok().and_then(|stacks| main_thread(&stacks, pid)).unwrap_or(kernel);
        }
    }
    cut(&mut excerpt, EXCERPT);
    Stacks { text, excerpt }
}

/// Shortens a text to `most` bytes, or a few less so as not to split a character.
fn cut(text: &mut String, most: usize) {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}

/// Writes stacks to a file below `directory`, and returns the file's path.
pub(super) async fn write(directory: &Path, text: String) -> Option<PathBuf> {
    let path = directory.join("stacks.txt");
    let target = path.clone();
    match in_time(move || fs::write(target, text)).await? {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "cannot write a worker's stacks");
            None
        }
    }
}

/// Runs work that may hang outside the runtime. `None` if it takes too long.
pub(super) async fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    timeout(PATIENCE, tokio::task::spawn_blocking(work)).await.ok()?.ok()
}

async fn family(worker: i32) -> Vec<Process> {
    let find = move || {
        let Some(pid) = Pid::from_raw(worker) else { return Vec::new() };
        let below = tree::descendants(pid).unwrap_or_default();
        tree::process(pid).into_iter().chain(below).take(MOST_PROCESSES).collect()
    };
    in_time(find).await.unwrap_or_default()
}

/// The stacks of a Python process, or the reason why there are none. The reason is empty if py-spy is not installed.
async fn py_spy(pid: i32) -> Result<String, String> {
    let mut command = Command::new("py-spy");
    command.args(["dump", "--pid", &pid.to_string()]).stdin(Stdio::null()).kill_on_drop(true);
    match timeout(PATIENCE, command.output()).await {
        Ok(Ok(output)) if output.status.success() => {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            cut(&mut text, MOST_TEXT);
            Ok(text)
        }
        Ok(Ok(output)) => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(format!("py-spy: {}", why.lines().next().unwrap_or("it failed without a word")))
        }
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(String::new()),
        Ok(Err(error)) => Err(format!("py-spy: {error}")),
        Err(_) => Err(format!("py-spy took longer than {PATIENCE:?}")),
    }
}

/// The innermost frame of the main thread in py-spy's text, which has `Thread 4711 (idle): "MainThread"` and then one
/// frame on each line. If Python has not named the thread, the main thread is the one whose number is the process id.
fn main_thread(stacks: &str, pid: i32) -> Option<String> {
    let number = format!("Thread {pid} ");
    let is_main =
        |line: &str| line.starts_with(&number) || (line.starts_with("Thread ") && line.contains("MainThread"));
    let mut lines = stacks.lines().skip_while(|line| !is_main(line));
    lines.next()?;
    let frame = lines.next()?.trim();
    (!frame.is_empty()).then(|| format!("in {frame}"))
}

struct Thread {
    /// Where the thread is, in a few words.
    place: String,
    text: String,
}

impl Thread {
    fn unknown(why: String) -> Thread {
        Thread { place: String::new(), text: format!("  {why}\n") }
    }
}

/// What `/proc` says about each thread, the main thread first.
fn threads(pid: i32) -> Vec<Thread> {
    let listed = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut ids: Vec<i32> = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable_by_key(|id| (*id != pid, *id));
    let left_out = ids.len().saturating_sub(MOST_THREADS);
    let mut threads: Vec<Thread> = ids.into_iter().take(MOST_THREADS).map(|id| thread(pid, id)).collect();
    if left_out > 0 {
        threads.push(Thread::unknown(format!("and {left_out} threads more")));
    }
    threads
}

fn thread(pid: i32, id: i32) -> Thread {
    // `cmdline`, `environ` and `maps` are not read, because reading them takes a lock that a stuck process may hold.
    let read = |name: &str| tree::text(format!("/proc/{pid}/task/{id}/{name}")).unwrap_or_default();
    let status = read("status");
    let (name, state) = (field(&status, "Name").unwrap_or("?"), field(&status, "State").unwrap_or("?"));
    let wait = read("wchan");
    let wait = if wait.is_empty() || wait == "0" { "" } else { wait.trim() };
    let call = read("syscall");
    let call = call.split_ascii_whitespace().next().filter(|call| call.parse::<u32>().is_ok());
    let call = call.map(|number| format!("system call {number}"));
    let place = [Some(wait.to_owned()).filter(|wait| !wait.is_empty()), call].into_iter().flatten();
    let place = place.collect::<Vec<_>>().join(", ");
    let place = if place.is_empty() { format!("state {state}") } else { format!("{state}, in {place}") };
    let mut text = format!("  thread {id} ({name}): {place}\n");
    for line in read("stack").lines() {
        let _ = writeln!(text, "    {line}");
    }
    Thread { place, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_main_threads_innermost_frame_is_found() {
        let stacks = "Process 7: python3 train.py\nPython v3.11\n\nThread 9 (idle): \"Thread-1\"\n    wait (threading.py:1)\n\
                      Thread 7 (active): \"MainThread\"\n    all_reduce (dist.py:20)\n    step (train.py:5)\n";
        assert_eq!(main_thread(stacks, 7).as_deref(), Some("in all_reduce (dist.py:20)"));
        // Older versions of py-spy number threads differently.
        assert_eq!(main_thread(stacks, 8).as_deref(), Some("in all_reduce (dist.py:20)"));
        let unnamed =
            "Process 7: python3 train.py\nThread 7 (idle)\n    step (train.py:3)\n    <module> (train.py:5)\n";
        assert_eq!(main_thread(unnamed, 7).as_deref(), Some("in step (train.py:3)"));
        assert_eq!(main_thread("no threads", 7), None);
    }

    #[tokio::test]
    async fn proc_tells_where_a_process_and_its_children_are() {
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let pid = child.id() as i32;
        let mut stacks = collect(pid).await;
        // The shell may not have forked yet, or not come to rest.
        for _ in 0..500 {
            if stacks.text.contains("(sleep)") && stacks.excerpt.starts_with('S') {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            stacks = collect(pid).await;
        }
        assert!(stacks.text.contains(&format!("process {pid} (sh)")), "{}", stacks.text);
        assert!(stacks.text.contains("(sleep)"), "{}", stacks.text);
        assert!(stacks.excerpt.starts_with("S (sleeping)"), "{}", stacks.excerpt);
        for process in family(pid).await {
            process.signal(rustix::process::Signal::KILL).unwrap();
        }
        child.wait().unwrap();
    }
}
