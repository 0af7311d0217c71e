//! Kernels and sandboxes that lack system calls: scenes where the kernel refuses them.
#![allow(unsafe_code)]

use libtest_mimic::Trial;

use crate::scene::command;

/// Environment variable with the error that the calls end with.
const ERROR: &str = "SUPERVISION_DENY";

/// What the kernel did not have before 5.1, 5.3 and 5.9.
const CALLS: [libc::c_long; 3] = [libc::SYS_pidfd_send_signal, libc::SYS_pidfd_open, libc::SYS_close_range];

pub(crate) fn trials() -> Vec<Trial> {
    let scenes = [
        "strays_in_their_own_sessions_get_the_signal_and_end_with_the_stop",
        "a_tree_that_forks_while_it_is_killed_ends_too",
        "a_guard_that_is_killed_takes_its_workers_and_strays_along_and_the_agent_hears_of_it",
        "a_guard_keeps_nothing_that_the_agent_was_started_with",
        "a_worker_starts_with_a_clean_slate",
    ];
    let trial = |scene: &'static str, error: i32| {
        Trial::test(format!("{scene}_where_the_kernel_says_{error}"), move || {
            let status = command(scene).env(ERROR, error.to_string()).status().map_err(|e| e.to_string())?;
            if status.success() { Ok(()) } else { Err(format!("the scene ended with {status}").into()) }
        })
    };
    scenes.into_iter().flat_map(|scene| [libc::ENOSYS, libc::EPERM].map(|error| trial(scene, error))).collect()
}

/// Makes the kernel refuse the calls to this process and to all that it starts, if a test says so.
pub(crate) fn as_told() {
    let Some(error) = std::env::var(ERROR).ok().and_then(|error| error.parse::<u32>().ok()) else { return };
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    // Loads the call's number, compares it with each, and refuses a call that is equal to one.
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for (n, call) in CALLS.into_iter().enumerate() {
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, (CALLS.len() - n) as u8, 0, call as u32));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | error));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel reads the program, which lives until the call is over.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
    };
    assert!(!refused, "{}", std::io::Error::last_os_error());
}
