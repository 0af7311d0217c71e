//! The addresses on which processes listen, as the kernel tells.

use elastic_tests::prelude::*;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};

/// The addresses on which a process, and all that it started, listen.
pub(crate) fn of_all_below(pid: u32) -> Vec<SocketAddr> {
    let parents: BTreeMap<u32, u32> = processes().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let is_below = |mut of: u32| {
        while of != pid {
            match parents.get(&of) {
                Some(parent) => of = *parent,
                None => return false,
            }
        }
        true
    };
    let sockets: BTreeSet<String> = processes().filter(|pid| is_below(*pid)).flat_map(descriptors).collect();
    let listening = ["/proc/net/tcp", "/proc/net/tcp6"].into_iter().flat_map(|path| listening(path, &sockets));
    listening.collect()
}

fn processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|parent| parent.trim().parse().ok())
}

/// The sockets of a process, as `socket:[1234]`.
fn descriptors(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_str()?.to_owned())).collect()
}

fn listening(table: &str, sockets: &BTreeSet<String>) -> Vec<SocketAddr> {
    const LISTEN: &str = "0A";
    let text = fs::read_to_string(table).unwrap_or_default();
    let lines = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = lines.filter(|fields| fields[3] == LISTEN && sockets.contains(&format!("socket:[{}]", fields[9])));
    own.map(|fields| address(fields[1])).collect()
}

/// Words of the host's byte order in hexadecimal, a colon, and the port.
fn address(text: &str) -> SocketAddr {
    let (ip, port) = text.split_once(':').unwrap();
    let words =
        ip.as_bytes().chunks(8).map(|word| u32::from_str_radix(std::str::from_utf8(word).unwrap(), 16).unwrap());
    let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
    let ip = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(v4) => IpAddr::from(v4),
        Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap()).into(),
    };
    SocketAddr::new(ip.to_canonical(), u16::from_str_radix(port, 16).unwrap())
}
