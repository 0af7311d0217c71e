//! Programs that end when the process that started them does. Workers are the guard's matter.

use std::io;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::process::Command;

/// Has the program get `signal` when this process ends, however it ends. (The kernel sends the signal when the *thread*
/// that started the program ends. The agent starts all programs from its main thread, see decision 0013.)
#[allow(unsafe_code)]
pub(crate) fn ends_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let bond = move || {
        set_parent_process_death_signal(Some(signal))?;
        // The parent may have died before the line above. Then the signal will never come.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: the closure makes two system calls and allocates nothing between fork and execute.
    unsafe { command.pre_exec(bond) };
}
