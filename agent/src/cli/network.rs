//! The flags for how this agent and the others of its job reach each other: its address, where it listens, TLS, and
//! whether it may serve a store to everybody.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use elastic_store::tls::TlsFiles;

use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::list::variable;
use super::values;
use crate::machine::address::NetworkOptions;
use crate::store::choice::{StoreChoice, StoreOptions};

/// The flags of mutual TLS.
const FILES: [&str; 3] = ["peer-cert", "peer-key", "peer-ca"];

pub(super) fn read(settings: &Settings<'_>) -> Result<NetworkOptions, UsageError> {
    let (bind, port) = settings.parsed("peer-port", bound_port)?.unwrap_or_default();
    Ok(NetworkOptions {
        local_addr: settings.parsed("local-addr", values::address)?,
        pin_interface: settings.switch("pin-interface")?,
        bind,
        port,
        tls: tls(settings)?,
        insecure: settings.switch("insecure")?,
    })
}

/// The address that peers use, if the command line says it.
pub(super) fn local_addr(network: &NetworkOptions, store: &StoreOptions) -> Option<String> {
    // With static, node 0 is reached at the address that --master-addr gives.
    let named = match &store.choice {
        StoreChoice::Hosted { endpoint, .. } if store.place == Some(0) => Some(endpoint.host.clone()),
        _ => None,
    };
    let bound = network.bind.filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_string());
    network.local_addr.clone().or(named).or(bound)
}

/// Refuses a job of several nodes in plain where TLS among its nodes is required.
pub(super) fn check_tls(
    settings: &Settings<'_>,
    network: &NetworkOptions,
    store: &StoreChoice,
) -> Result<(), UsageError> {
    const REQUIRE: &str = "require-peer-tls";
    let in_plain = network.tls.is_none() && store.endpoints().iter().any(|store| !network.stays_here(store));
    if !(settings.switch(REQUIRE)? && in_plain) {
        return Ok(());
    }
    let name = if settings.on_command_line(REQUIRE) { format!("--{REQUIRE}") } else { variable(REQUIRE) };
    let advice = "give every node --peer-cert FILE --peer-key FILE --peer-ca FILE (elasticctl certs makes the files)";
    Err(Refusal::new("the nodes of this job would speak with each other without TLS", advice).of(name))
}

fn tls(settings: &Settings<'_>) -> Result<Option<TlsFiles>, UsageError> {
    let given = FILES.map(|flag| settings.path(flag).map(PathBuf::from));
    if let [Some(certificate), Some(key), Some(authority)] = &given {
        let (certificate, key, authority) = (certificate.clone(), key.clone(), authority.clone());
        return Ok(Some(TlsFiles { certificate, key, authority }));
    }
    let named = |there: bool| {
        let flags = FILES.iter().zip(&given).filter(|(_, given)| given.is_some() == there);
        flags.map(|(flag, _)| format!("--{flag}")).collect::<Vec<_>>()
    };
    match &named(true)[..] {
        [] => Ok(None),
        there => {
            let cause = format!("it comes without {}", named(false).join(" and "));
            Err(Refusal::new(cause, "give all three files, or none; elasticctl certs makes them")
                .of(there.join(" and ")))
        }
    }
}

/// Reads a port, with or without an address to listen on.
fn bound_port(text: &str) -> Result<(Option<IpAddr>, u16), Refusal> {
    match text.trim().parse::<SocketAddr>() {
        Ok(address) => Ok((Some(address.ip()), address.port())),
        Err(_) if text.contains(':') => {
            Err(Refusal::new("it is no address with a port", "write for example 10.0.0.1:7000 or [::1]:7000"))
        }
        Err(_) => Ok((None, values::port(text)?)),
    }
}
