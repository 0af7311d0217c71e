//! The guard's system calls that need `unsafe`: fork, exec, signal masks, signalfd.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::process::Pid;

/// Forks this process. Returns `None` in the child.
///
/// Refused if the process has several threads, because a child of such a process may find any lock held for ever.
pub(super) fn fork_alone() -> io::Result<Option<Pid>> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!("{threads} threads are running already")));
    }
    // SAFETY: the process is single-threaded, so the child's copy of memory is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Pid::from_raw(pid)),
    }
}

/// Ends the process at once, without the destructors and exit handlers that belong to the process it was forked from.
pub(super) fn exit_now(code: i32) -> ! {
    // SAFETY: the call takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}

/// Gives every signal its default action. A parent may have left some signals ignored. An ignored SIGCHLD would even
/// lose exit statuses.
pub(super) fn reset_dispositions() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL needs no handler. SIGKILL, SIGSTOP and the C library's own signals are refused, harmlessly.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Gives SIGCHLD its default action.
pub(super) fn reset_child_disposition() {
    // SAFETY: SIG_DFL needs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Blocks every signal that can be blocked, or none.
pub(super) fn block_signals(all: bool) -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let fill = if all { libc::sigfillset } else { libc::sigemptyset };
    // SAFETY: `fill` initialises the set that sigprocmask then reads.
    check(unsafe {
        fill(set.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), ptr::null_mut())
    })
}

/// A descriptor that is readable while a SIGCHLD is pending.
pub(super) fn child_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialised before signalfd reads it. The new descriptor has no other owner.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Closes every descriptor above 2 except `keep`. The guard must not hold open what the agent was started with.
pub(super) fn close_others(keep: RawFd) {
    let ranges = [(3, keep.saturating_sub(1)), (keep + 1, RawFd::MAX)];
    for (first, last) in ranges.into_iter().filter(|(first, last)| first <= last) {
        // SAFETY: called right after the fork, when nothing in this process owns any of these descriptors.
        // Kernels before 5.9 refuse, which leaves them open.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// A program that is ready to run. Everything that needs memory is allocated before the fork.
pub(super) struct Executable {
    /// The first is the program.
    pub(super) arguments: Vec<CString>,
    /// Each is `NAME=value`.
    pub(super) variables: Vec<CString>,
    pub(super) directory: CString,
    /// A mask, which is empty for no change.
    pub(super) cpus: Vec<u64>,
}

impl Executable {
    /// Forks and executes. On failure the child reports (step, errno) on `failure`, a close-on-exec pipe, and exits. On
    /// success the pipe ends without a report.
    pub(super) fn start(
        &self,
        stdout: Option<BorrowedFd<'_>>,
        stderr: Option<BorrowedFd<'_>>,
        failure: BorrowedFd<'_>,
    ) -> io::Result<Pid> {
        let arguments = pointers(&self.arguments);
        let variables = pointers(&self.variables);
        let guard = rustix::process::getpid();
        // SAFETY: the guard is single-threaded.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let (step, error) = self.become_worker(guard, &arguments, &variables, stdout, stderr);
                let mut report = [0; 5];
                report[0] = step as u8;
                report[1..].copy_from_slice(&error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
                // The guard may be gone. Then no process can be informed.
                let _ = rustix::io::write(failure, &report);
                exit_now(127)
            }
            pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process id")),
        }
    }

    /// Returns only on failure.
    fn become_worker(
        &self,
        guard: Pid,
        arguments: &[*const c_char],
        variables: &[*const c_char],
        stdout: Option<BorrowedFd<'_>>,
        stderr: Option<BorrowedFd<'_>>,
    ) -> (Step, io::Error) {
        if let Err(error) = prepare(guard, stdout, stderr) {
            return (Step::Prepare, error);
        }
        if !self.cpus.is_empty() {
            let bytes = size_of_val(self.cpus.as_slice());
            // SAFETY: the kernel reads this many bytes. This is the raw system call, because libc's type holds 1024
            // CPUs at most.
            if unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, bytes, self.cpus.as_ptr()) } < 0 {
                return (Step::Cpus, io::Error::last_os_error());
            }
        }
        // SAFETY: the directory is a valid C string.
        if let Err(error) = check(unsafe { libc::chdir(self.directory.as_ptr()) }) {
            return (Step::Directory, error);
        }
        unsafe extern "C" {
            static mut environ: *const *const c_char;
        }
        // SAFETY: both arrays end in a null pointer and point to strings that `self` owns. execvp searches the PATH of
        // `environ`, which is the worker's own by now.
        unsafe {
            environ = variables.as_ptr();
            libc::execvp(arguments[0], arguments.as_ptr());
        }
        (Step::Execute, io::Error::last_os_error())
    }
}

/// How far a worker's start came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Step {
    /// Session, signals, descriptors.
    Prepare,
    /// Entering the working directory.
    Directory,
    /// Executing the program.
    Execute,
    /// Binding to CPUs.
    Cpus,
}

impl Step {
    /// Reads the report that [`Executable::start`]'s child wrote.
    pub(super) fn from_report(report: &[u8; 5]) -> (Step, i32) {
        let steps = [Step::Prepare, Step::Directory, Step::Execute, Step::Cpus];
        let step = steps.into_iter().find(|step| *step as u8 == report[0]).unwrap_or(Step::Prepare);
        (step, i32::from_ne_bytes([report[1], report[2], report[3], report[4]]))
    }
}

fn prepare(guard: Pid, stdout: Option<BorrowedFd<'_>>, stderr: Option<BorrowedFd<'_>>) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The guard may have died before the line above. Then the signal will never come.
    if rustix::process::getppid() != Some(guard) {
        exit_now(127);
    }
    for (from, to) in [(stdout, 1), (stderr, 2)] {
        if let Some(from) = from {
            // SAFETY: this replaces our own standard streams, in a child that is about to execute.
            check(unsafe { libc::dup2(from.as_raw_fd(), to) })?;
        }
    }
    reset_dispositions();
    block_signals(false)?;
    // SAFETY: the call only sets flags. Kernels before 5.11 refuse it. What the guard opens is close-on-exec anyway.
    unsafe { libc::syscall(libc::SYS_close_range, 3, RawFd::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    Ok(())
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
