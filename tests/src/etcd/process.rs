//! Free ports, and finding out which process listens on a port.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// A loopback port that was free a moment ago.
pub fn free_port() -> u16 {
    free_ports::<1>()[0]
}

/// Ports that were free a moment ago. They lie below those that the kernel gives to connections: of another test's
/// thousands none takes one of these before its server does. Nor does another test's server, while this one is down.
pub(super) fn free_ports<const N: usize>() -> [u16; N] {
    const TRIES: u16 = 1000;
    const LOWEST: u16 = 10_000;
    const PORTS: u64 = 32_768 - LOWEST as u64;
    let port = |_| LOWEST + (RandomState::new().hash_one("a port") % PORTS) as u16;
    let tried = (0..TRIES).map(port).filter(claim).filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
    let held: Vec<TcpListener> = tried.take(N).collect();
    assert_eq!(held.len(), N, "of {TRIES} ports not {N} are free");
    std::array::from_fn(|n| held[n].local_addr().expect("an address").port())
}

/// Takes a name that no other process can take until this one ends.
fn claim(port: &u16) -> bool {
    let name = SocketAddr::from_abstract_name(format!("a port of elastic's tests: {port}"));
    name.and_then(|name| UnixListener::bind_addr(&name)).map(std::mem::forget).is_ok()
}

/// Whether every thread of the process is stopped.
pub(super) fn is_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process's threads");
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in brackets and may hold anything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

/// Whether the process listens on this loopback port: its file descriptors are matched with the kernel's socket table.
pub(super) fn owns_port(pid: u32, port: u16) -> bool {
    let local = format!(":{port:04X}");
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default()
        + &std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    let inodes = table.lines().filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let listening = fields.get(3) == Some(&"0A") && fields.get(1)?.ends_with(&local);
        listening.then(|| format!("socket:[{}]", fields.get(9).unwrap_or(&"")))
    });
    let inodes: Vec<String> = inodes.collect();
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut targets = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.any(|target| inodes.iter().any(|inode| target.to_str() == Some(inode)))
}
