//! Finding and ending the processes below one process, from /proc. The caller waits for them.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// A process as /proc shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) parent: i32,
    /// Process group id.
    pub(crate) group: i32,
    /// Session id.
    pub(crate) session: i32,
    /// One letter: R running, S asleep, D waiting in the kernel, Z dead and not yet reaped, …
    pub(crate) state: char,
    /// Its program's name, 15 bytes at most. These may cut a letter in two.
    pub(crate) name: String,
    /// Clock ticks from boot to its start. This number and the pid together are never used twice.
    pub(crate) started: u64,
    /// Where its stack begins, which the kernel chooses by chance at each execution. So two processes with the same
    /// number are forks of one program. 0 if this process may not know it.
    pub(super) stack: u64,
}

/// The process that starts all kernel threads, outside containers.
const KTHREADD: i32 = 2;

/// The kernel's flag of its own threads (`include/linux/sched.h`).
const PF_KTHREAD: u32 = 0x0020_0000;

impl Process {
    /// Reads one process. `None` if it is gone.
    pub(super) fn read(pid: i32) -> Option<Process> {
        parse(&stat(pid)?)
    }

    /// Sends a signal to this very process, never to a later process with the same number. It is no error if the
    /// process is gone already.
    ///
    /// Kernels before 5.3 and some sandboxes have no pidfds. There a number that is used again between the last two
    /// calls would be taken for this process.
    pub(crate) fn signal(&self, signal: Signal) -> rustix::io::Result<()> {
        let handle = rustix::process::pidfd_open(self.pid, PidfdFlags::empty());
        // The handle pins the process that holds the number now. It is our process if the start time still agrees.
        if Process::read(self.pid.as_raw_pid()).is_none_or(|now| now.started != self.started) {
            return Ok(());
        }
        let by_handle = handle.and_then(|handle| rustix::process::pidfd_send_signal(&handle, signal));
        match by_handle {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(_) => match rustix::process::kill_process(self.pid, signal) {
                Err(Errno::SRCH) => Ok(()),
                other => other,
            },
        }
    }

    /// Sends a signal to this very process, and wakes it if it was stopped: else it would see the signal only when
    /// somebody continues it.
    pub(super) fn tell(&self, signal: Signal) {
        // A process of another user's is named once it outlives SIGKILL.
        let _ = self.signal(signal);
        if signal != Signal::STOP {
            let _ = self.signal(Signal::CONT);
        }
    }

    /// Whether it is dead and waits for its parent to reap it.
    pub(crate) fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Reads `/proc/<pid>/stat` by one call, which finds the whole text: it has 52 numbers and a name.
fn stat(pid: i32) -> Option<String> {
    let mut stat = [0; 2048];
    let length = File::open(format!("/proc/{pid}/stat")).ok()?.read(&mut stat).ok()?;
    Some(String::from_utf8_lossy(&stat[..length]).into_owned())
}

/// Reads a file of /proc. A process's name in it need not be UTF-8.
pub(crate) fn text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// A process, `None` if it is gone.
pub(crate) fn process(pid: Pid) -> Option<Process> {
    Process::read(pid.as_raw_pid())
}

/// The session of a process, `None` if it is gone. This is read from /proc, because the session is 0 if its leader
/// lives outside our process id namespace, as under `unshare --pid`. rustix's `getsid` takes 0 for impossible.
pub(crate) fn session(pid: Pid) -> Option<i32> {
    Process::read(pid.as_raw_pid()).map(|process| process.session)
}

/// Every process below `root`, without `root` itself: its children, their children, and so on.
pub(crate) fn descendants(root: Pid) -> io::Result<Vec<Process>> {
    descendants_but(root, None)
}

/// The same without `but` and what is below it.
pub(crate) fn descendants_but(root: Pid, but: Option<Pid>) -> io::Result<Vec<Process>> {
    let mut children: BTreeMap<i32, Vec<Process>> = BTreeMap::new();
    let kernel = kernel_threads();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if kernel.contains(&pid) {
            continue;
        }
        // A process may end between the listing and this.
        let Some(process) = Process::read(pid) else { continue };
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut open = vec![root.as_raw_pid()];
    while let Some(parent) = open.pop() {
        let below = children.remove(&parent).unwrap_or_default();
        for process in below.into_iter().filter(|process| Some(process.pid) != but) {
            open.push(process.pid.as_raw_pid());
            found.push(process);
        }
    }
    Ok(found)
}

/// The children of a process that the kernel lists. It may leave one out whose sibling is reaped meanwhile.
pub(super) fn children(pid: Pid) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{}/task", pid.as_raw_pid()))? {
        let listed = text(thread?.path().join("children"))?;
        found.extend(listed.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Ok(found)
}

/// The kernel's threads. No process is above them, and a machine has ten and more for each processor: reading each one
/// would delay a stop. Empty in a container, which sees none, and where the kernel does not list children.
fn kernel_threads() -> HashSet<i32> {
    let flags = stat(KTHREADD).and_then(|stat| stat.rsplit_once(") ")?.1.split(' ').nth(6)?.parse::<u32>().ok());
    if flags.is_none_or(|flags| flags & PF_KTHREAD == 0) {
        return HashSet::new();
    }
    let listed = text(format!("/proc/{KTHREADD}/task/{KTHREADD}/children")).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Parses `/proc/<pid>/stat`. Its second field is a name in parentheses, which may itself hold any character.
fn parse(stat: &str) -> Option<Process> {
    let (pid, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // `fields[n]` is field n + 3 of proc_pid_stat(5).
    let number = |n: usize| fields.get(n)?.parse::<i32>().ok();
    Some(Process {
        pid: Pid::from_raw(pid.parse().ok()?)?,
        parent: number(1)?,
        group: number(2)?,
        session: number(3)?,
        state: fields.first()?.chars().next()?,
        name: name.to_owned(),
        started: fields.get(19)?.parse().ok()?,
        stack: fields.get(25)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_confuse_the_parser() {
        let stat = "42 (a) b (c)) S 7 40 39 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 123456 9 9 1 2 3 777 8";
        let process = parse(stat).unwrap();
        assert_eq!((process.pid.as_raw_pid(), process.parent), (42, 7));
        assert_eq!((process.group, process.session, process.state), (40, 39, 'S'));
        assert_eq!((process.name.as_str(), process.started), ("a) b (c)", 123456));
        assert_eq!(process.stack, 777);
    }

    #[test]
    fn a_name_that_is_cut_inside_a_letter_hides_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("обучение-модели");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut child = std::process::Command::new(&program).arg("60").spawn().unwrap();
        let process = Process::read(child.id() as i32).expect("the process is seen");
        assert!(process.name.starts_with("обучени"), "{process:?}");
        process.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_children_of_the_kernels_own_process_are_passed_over() {
        let kernel = kernel_threads();
        assert!(!kernel.contains(&rustix::process::getpid().as_raw_pid()));
        // A thread may have ended since.
        assert!(kernel.iter().filter_map(|pid| Process::read(*pid)).all(|thread| thread.parent == KTHREADD));
    }

    #[test]
    fn a_child_is_found_below_its_parent_and_signalled_by_identity() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let me = rustix::process::getpid();
        let found = descendants(me).unwrap();
        let process = found.iter().find(|p| p.pid.as_raw_pid() == child.id() as i32).expect("the child is listed");
        let impostor = Process { started: process.started + 1, ..process.clone() };
        impostor.signal(Signal::KILL).unwrap();
        assert!(child.try_wait().unwrap().is_none(), "a later holder of the number is left alone");
        process.signal(Signal::KILL).unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
