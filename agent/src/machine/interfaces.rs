//! The network interface that gloo and NCCL use among workers. It is set where the user asks for one, or where gloo
//! would take a wrong one. `address.rs` finds the address that peers use.
//!
//! NCCL finds its interfaces by itself, and uses several at once. Naming one would keep NCCL from the others, and would
//! override `/etc/nccl.conf`. Gloo takes the first address of this host's own name that it can listen on.

use std::ffi::OsString;
use std::net::{IpAddr, ToSocketAddrs};

use elastic_store::embedded::names_loopback;

/// The variable that names gloo's interface.
const GLOO: &str = "GLOO_SOCKET_IFNAME";
/// The variable that names NCCL's interfaces: a list of prefixes, or after `=` a list of whole names.
const NCCL: &str = "NCCL_SOCKET_IFNAME";

/// An address of this machine, and the interface that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub name: String,
    pub ip: IpAddr,
}

pub(crate) fn all() -> std::io::Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found.into_iter().map(|interface| Interface { ip: interface.ip(), name: interface.name }).collect())
}

/// Whether an address is of one network link alone, so that others cannot route to it.
pub(crate) fn is_of_one_link(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The interface that has the address which peers use. None if this machine does not have the address (it may be a
/// translated one), or if the address only reaches this machine. Resolves a name, which may take as long as the
/// resolver does.
pub(crate) fn of(address: &str, interfaces: &[Interface]) -> Option<String> {
    let addresses: Vec<IpAddr> = match address.parse() {
        Ok(ip) => vec![ip],
        Err(_) => (address, 0).to_socket_addrs().ok()?.map(|address| address.ip()).collect(),
    };
    let ours = addresses.into_iter().filter(|ip| !ip.is_loopback());
    ours.filter_map(|ip| interfaces.iter().find(|interface| interface.ip == ip)).map(|found| found.name.clone()).next()
}

/// The variables that workers get in their environment, if peers use `address` and this host is called `hostname`.
/// If `pinned`, both libraries are to use the interface that has this address. May take as long as the resolver does.
pub(crate) fn variables(
    address: &str,
    hostname: &str,
    pinned: bool,
    inherited: &dyn Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let interfaces = all().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot list this machine's network interfaces; gloo and NCCL choose one themselves");
        Vec::new()
    });
    let Some(interface) = of(address, &interfaces) else {
        if pinned && !names_loopback(address) {
            tracing::warn!("--pin-interface: no interface of this machine has the address of {address}");
        }
        return Vec::new();
    };
    let own: Vec<IpAddr> = (hostname, 0).to_socket_addrs().into_iter().flatten().map(|address| address.ip()).collect();
    let misled = misleads(&own, &interfaces);
    if misled && !pinned && inherited(GLOO).is_none() {
        tracing::info!("{hostname} resolves to this host only, so the agent makes gloo use {interface}");
    }
    env(&interface, misled, pinned, inherited)
}

/// Whether gloo would listen where no other host reaches it. That is so if the first usable address of this host's name
/// is a loopback address, which Debian gives to a host's name, or if the name has no address of this machine.
fn misleads(own_name: &[IpAddr], interfaces: &[Interface]) -> bool {
    let ours = |ip: &&IpAddr| ip.is_loopback() || interfaces.iter().any(|interface| interface.ip == **ip);
    own_name.iter().find(ours).is_none_or(IpAddr::is_loopback)
}

/// The variables to set. A variable that the agent's own environment has is left out.
fn env(
    interface: &str,
    misled: bool,
    pinned: bool,
    inherited: &dyn Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let gloo = (misled || pinned).then(|| (GLOO, interface.to_owned()));
    let nccl = pinned.then(|| (NCCL, format!("={interface}")));
    let wanted = gloo.into_iter().chain(nccl).filter(|(variable, _)| inherited(variable).is_none());
    wanted.map(|(variable, value)| (variable, value.into())).collect()
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
    fn what_only_reaches_this_machine_is_no_interface_for_peers() {
        for address in ["127.0.0.1", "::1", "localhost"] {
            assert_eq!(of(address, &two()), None, "{address}");
        }
    }

    #[test]
    fn gloo_is_misled_by_a_name_that_leads_to_this_host_alone_or_nowhere() {
        let misled = |own: &[&str]| {
            let own: Vec<IpAddr> = own.iter().map(|ip| ip.parse().unwrap()).collect();
            misleads(&own, &two())
        };
        assert!(misled(&["127.0.1.1"]) && misled(&[]) && misled(&["::1", "10.1.0.7"]));
        assert!(misled(&["203.0.113.5"]), "an address of another machine cannot be listened on");
        assert!(!misled(&["10.1.0.7"]) && !misled(&["203.0.113.5", "192.168.1.7"]));
    }

    #[test]
    fn only_what_is_asked_for_or_misled_is_set_and_what_is_set_already_stays() {
        let set = |given: &'static str| move |name: &str| (name == given).then(|| OsString::from("eth9"));
        let pinned = |given| env("ib0", true, true, &set(given));
        assert_eq!(pinned("OTHER"), [(GLOO, "ib0".into()), (NCCL, "=ib0".into())]);
        assert_eq!(pinned(GLOO), [(NCCL, "=ib0".into())]);
        assert_eq!(pinned(NCCL), [(GLOO, "ib0".into())]);
        assert_eq!(env("ib0", true, false, &set("OTHER")), [(GLOO, "ib0".into())]);
        assert_eq!(env("ib0", true, false, &set(GLOO)), []);
        assert_eq!(env("ib0", false, false, &set("OTHER")), []);
    }

    #[test]
    fn this_machines_addresses_are_found() {
        assert!(all().unwrap().iter().any(|interface| interface.ip.is_loopback()));
    }
}
