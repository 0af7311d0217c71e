//! The network interface that workers are to use among each other, for libraries that would guess: gloo takes what the
//! host's name resolves to, NCCL the first interface that is up. Not for the address peers are told (`network.rs`).

use std::ffi::OsString;
use std::net::{IpAddr, ToSocketAddrs};

/// Names gloo's interface.
const GLOO: &str = "GLOO_SOCKET_IFNAME";
/// Names NCCL's interfaces: a list of prefixes, or with `=` of whole names.
const NCCL: &str = "NCCL_SOCKET_IFNAME";

/// An address of this machine, and the interface that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// `eth0`.
    pub name: String,
    /// One of its addresses.
    pub ip: IpAddr,
}

/// All addresses of this machine.
///
/// # Errors
/// The kernel's.
pub fn all() -> std::io::Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found.into_iter().map(|interface| Interface { ip: interface.ip(), name: interface.name }).collect())
}

/// The interface that has the address which peers are told; none if it is not this machine's, as behind a translated
/// address, or only reaches this machine. Resolves a name, which may take as long as the resolver does.
pub fn of(address: &str, interfaces: &[Interface]) -> Option<String> {
    let addresses: Vec<IpAddr> = match address.parse() {
        Ok(ip) => vec![ip],
        Err(_) => (address, 0).to_socket_addrs().ok()?.map(|address| address.ip()).collect(),
    };
    let ours = addresses.into_iter().filter(|ip| !ip.is_loopback());
    ours.filter_map(|ip| interfaces.iter().find(|interface| interface.ip == ip)).map(|found| found.name.clone()).next()
}

/// What workers get of it: each variable, unless the agent's own environment has it. On a single machine nothing is set.
pub fn env(interface: Option<&str>, inherited: &dyn Fn(&str) -> Option<OsString>) -> Vec<(&'static str, OsString)> {
    let Some(name) = interface else { return Vec::new() };
    let wanted = [(GLOO, name.to_owned()), (NCCL, format!("={name}"))];
    wanted.into_iter().filter(|(variable, _)| inherited(variable).is_none()).map(|(v, name)| (v, name.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Vec<Interface> {
        let interface = |name: &str, ip: &str| Interface { name: name.into(), ip: ip.parse().unwrap() };
        vec![
            interface("lo", "127.0.0.1"),
            interface("lo", "::1"),
            interface("eth0", "192.168.1.7"),
            interface("ib0", "10.1.0.7"),
            interface("ib0", "fd00::7"),
        ]
    }

    #[test]
    fn the_interface_is_the_one_that_has_the_address() {
        assert_eq!(of("10.1.0.7", &two()).as_deref(), Some("ib0"));
        assert_eq!(of("fd00::7", &two()).as_deref(), Some("ib0"));
        assert_eq!(of("203.0.113.5", &two()), None, "a translated address");
        assert_eq!(of("nowhere.invalid", &two()), None);
    }

    #[test]
    fn what_only_reaches_this_machine_is_nobodys_interface() {
        for address in ["127.0.0.1", "::1", "localhost"] {
            assert_eq!(of(address, &two()), None, "{address}");
        }
    }

    #[test]
    fn what_is_set_already_stays() {
        let set = |given: &'static str| move |name: &str| (name == given).then(|| OsString::from("eth9"));
        let names = |given| env(Some("ib0"), &set(given)).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names("OTHER"), [GLOO, NCCL]);
        assert_eq!(names(GLOO), [NCCL]);
        assert_eq!(names(NCCL), [GLOO]);
        assert_eq!(env(Some("ib0"), &set("OTHER")), [(GLOO, "ib0".into()), (NCCL, "=ib0".into())]);
        assert_eq!(env(None, &set("OTHER")), []);
    }

    #[test]
    fn this_machines_addresses_are_found() {
        assert!(all().unwrap().iter().any(|interface| interface.ip.is_loopback()));
    }
}
