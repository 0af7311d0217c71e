//! The flags for how this agent and the others of its job reach each other: where it listens, TLS, and whether it may
//! serve a store to everybody.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use elastic_rendezvous::job::Endpoint;
use elastic_store::tls::TlsFiles;

use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::machine::address::names_loopback;

/// The flags of mutual TLS.
const FILES: [&str; 3] = ["peer-cert", "peer-key", "peer-ca"];

/// How other agents are reached, and reach this one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct PeerOptions {
    /// The address on which this agent listens for other nodes. None: a loopback address that it advertises, else all.
    pub bind: Option<IpAddr>,
    /// The port on which it listens for other agents. 0: the kernel picks one.
    pub port: u16,
    /// Mutual TLS with other agents and coordinators, and to the store that one of them serves.
    pub tls: Option<TlsFiles>,
    /// Whether a store may be served, without TLS, to every host that reaches it.
    pub insecure: bool,
}

pub(super) fn read(settings: &Settings<'_>) -> Result<PeerOptions, UsageError> {
    let (bind, port) = settings.parsed("peer-port", bound_port)?.unwrap_or_default();
    Ok(PeerOptions { bind, port, tls: tls(settings)?, insecure: settings.switch("insecure")? })
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

impl PeerOptions {
    /// Whether every host that reaches it can use a store that this agent serves there, and no flag allows that.
    pub(super) fn leaves_open(&self, store: &Endpoint) -> bool {
        let bound_here = self.bind.is_some_and(|ip| ip.is_loopback());
        self.tls.is_none() && !self.insecure && !bound_here && !names_loopback(&store.host)
    }

    /// The address that peers use, unless another is given.
    pub(super) fn advertised(&self) -> Option<String> {
        self.bind.filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_string())
    }
}
