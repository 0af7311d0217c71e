//! The name of a node that was given none: the host's name, and a code that no other machine or container of that host
//! name has. It is the same when the agent is started again. Agents that lock their names in one folder have one code:
//! the locks tell them apart.

use std::fs;
use std::path::Path;

use super::node_name;
use super::runtime::{Locks, fnv1a};

pub(super) fn here(host: &str, boot_id: &str, machine_id: Option<&str>, locks: &Locks) -> String {
    let hardware = hardware_address(Path::new("/sys/class/net")).filter(|_| !in_container());
    name(host, boot_id, machine_id.zip(hardware.as_deref()), locks)
}

/// A machine is known by its id and by a network address of its hardware, so its name outlives a reboot. Cloned machines
/// have one id, and not one address. A container is known by the boot and by its own file of the folder of locks.
pub(super) fn name(host: &str, boot_id: &str, machine: Option<(&str, &str)>, locks: &Locks) -> String {
    let known = match machine {
        Some((id, address)) => format!("{id} {address} {}", locks.path.display()),
        None => format!("{boot_id} {} {}", locks.device, locks.inode),
    };
    let hash = fnv1a(known.as_bytes());
    format!("{}-{:06x}", node_name(host), (hash ^ (hash >> 24) ^ (hash >> 48)) & 0xff_ffff)
}

/// The least of the permanent addresses of network devices. Virtual ones, as in containers, change with each start.
fn hardware_address(interfaces: &Path) -> Option<String> {
    let read = |path: &Path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let interfaces = fs::read_dir(interfaces).into_iter().flatten().flatten().map(|entry| entry.path());
    // 0 is NET_ADDR_PERM (linux/netdevice.h).
    let permanent = |path: &std::path::PathBuf| {
        path.join("device").exists() && read(&path.join("addr_assign_type")).as_deref() == Some("0")
    };
    interfaces.filter(permanent).filter_map(|path| read(&path.join("address"))).min()
}

/// Whether this process has a namespace of process ids that is not the machine's own, whose inode is fixed
/// (linux/proc_ns.h).
fn in_container() -> bool {
    fs::read_link("/proc/self/ns/pid").map_or(true, |namespace| namespace != Path::new("pid:[4026531836]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_machine_and_by_container() {
        let locks = |path: &str, inode| Locks { path: path.into(), device: 1, inode };
        let machine = |id, address, locks| name("h", "boot", Some((id, address)), &locks);
        let first = machine("id", "02:00", locks("/run/elastic-agent", 5));
        assert!(first.starts_with("h-") && first.len() == 8, "{first}");
        assert_eq!(first, name("h", "rebooted", Some(("id", "02:00")), &locks("/run/elastic-agent", 6)));
        assert_ne!(first, machine("id", "02:01", locks("/run/elastic-agent", 5)), "a clone");
        assert_ne!(first, machine("id", "02:00", locks("/tmp/elastic-agent-7", 5)), "another user");

        let container = |boot, inode| name("h", boot, None, &locks("/run/elastic-agent", inode));
        assert_eq!(container("boot", 5), container("boot", 5), "it is started again");
        assert_ne!(container("boot", 5), container("boot", 6), "another on the machine");
        assert_ne!(container("boot", 5), container("other", 5), "one on another machine");
    }

    #[test]
    fn a_machines_address_is_of_a_device_and_permanent() {
        let dir = tempfile::tempdir().unwrap();
        let interface = |name: &str, device: bool, assigned: &str, address: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(if device { path.join("device") } else { path.clone() }).unwrap();
            fs::write(path.join("addr_assign_type"), assigned).unwrap();
            fs::write(path.join("address"), address).unwrap();
        };
        assert_eq!(hardware_address(dir.path()), None);
        interface("lo", false, "0\n", "00:00\n");
        interface("wlan0", true, "1\n", "01:00\n");
        assert_eq!(hardware_address(dir.path()), None);
        interface("eth1", true, "0\n", "05:00\n");
        interface("eth0", true, "0\n", "03:00\n");
        assert_eq!(hardware_address(dir.path()).as_deref(), Some("03:00"));
    }
}
