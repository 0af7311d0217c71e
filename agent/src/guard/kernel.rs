//! The guard's system calls that need `unsafe`: fork, exec, signal masks, signalfd.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::process::Pid;

use super::wire;

/// Takes over the descriptor that the agent handed down under this number. It closes when another program is executed.
pub(super) fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers. It fails if the descriptor is not open.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: it is open, and nothing else in this process owns it: the caller takes it over once, before all else.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
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

/// Calls `f` while this thread blocks every signal that can be blocked. What `f` starts blocks them too.
pub(super) fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
    // SAFETY: sigfillset initialises the set that is then set, and the first pthread_sigmask the set that the second
    // sets again. Neither can fail: the operation is known, and the sets are ours.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let result = f();
    // SAFETY: see above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    result
}

/// Unblocks every signal.
fn unblock_signals() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set that sigprocmask then reads.
    check(unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut())
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
        // SAFETY: the guard calls this first, when nothing in it owns any of these descriptors.
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } < 0 {
            // Kernels before 5.9 and some sandboxes have no such call.
            return close_each_but(keep);
        }
    }
}

fn close_each_but(keep: RawFd) {
    let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<RawFd> = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in open.into_iter().filter(|number| *number > 2 && *number != keep) {
        // SAFETY: as in `close_others`. The descriptor of the listing is closed already, which is no harm.
        unsafe { libc::close(number) };
    }
}

/// What replaces the standard input, output and error of a program.
pub(super) type Stdio<'a> = [Option<BorrowedFd<'a>>; 3];

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
    /// Reads a request's body.
    pub(super) fn read(body: OwnedFd, arguments: usize, cpus: Vec<u64>) -> io::Result<Executable> {
        let mut strings = wire::read_body(body)?.into_iter();
        let directory = strings.next().ok_or(io::ErrorKind::UnexpectedEof)?;
        let arguments: Vec<CString> = strings.by_ref().take(arguments).collect();
        if arguments.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no program given"));
        }
        Ok(Executable { arguments, variables: strings.collect(), directory, cpus })
    }

    /// Forks and executes. On failure the child reports (step, errno) on `failure`, which closes on exec, and exits. On
    /// success `failure` ends without a report. `stdio`: its standard streams, where these are not the guard's.
    pub(super) fn start(&self, stdio: Stdio<'_>, failure: BorrowedFd<'_>) -> io::Result<Pid> {
        let arguments = pointers(&self.arguments);
        let variables = pointers(&self.variables);
        let guard = rustix::process::getpid();
        // SAFETY: the child allocates nothing and takes no lock before it executes or exits. (A preloaded library may
        // have started a thread, and a lock that the thread holds is held for ever in the child.)
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let (step, error) = self.become_worker(guard, &arguments, &variables, stdio);
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
        stdio: Stdio<'_>,
    ) -> (Step, io::Error) {
        if let Err(error) = prepare(guard, stdio) {
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

fn prepare(guard: Pid, stdio: Stdio<'_>) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The guard may have died before the line above. Then the signal will never come.
    if rustix::process::getppid() != Some(guard) {
        exit_now(127);
    }
    for (from, to) in stdio.into_iter().zip(0..) {
        if let Some(from) = from {
            // SAFETY: this replaces our own standard streams, in a child that is about to execute.
            check(unsafe { libc::dup2(from.as_raw_fd(), to) })?;
        }
    }
    reset_dispositions();
    // All else that the guard opened is close-on-exec.
    unblock_signals()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
