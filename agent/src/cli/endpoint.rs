//! Store endpoints, `host[:port]`.

use std::net::Ipv6Addr;

use elastic_coordinator::job::Endpoint;

use super::error::Refusal;

/// etcd's client port.
pub(super) const ETCD_PORT: u16 = 2379;
/// torchrun's default port for static.
pub(super) const STATIC_PORT: u16 = 29500;
/// torchrun's default port for c10d.
pub(super) const C10D_PORT: u16 = 29400;

pub(super) fn localhost(port: u16) -> Endpoint {
    Endpoint { host: "localhost".into(), port }
}

/// A list of endpoints, and their protocol if they have a scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndpointList {
    pub(super) endpoints: Vec<Endpoint>,
    /// `Some(true)`: the endpoints begin with `https://`.
    pub(super) https: Option<bool>,
}

const ADVICE: &str = "write HOST[:PORT], [IPV6][:PORT], or several with commas";

/// Reads a list of endpoints. As with torchrun, an empty text stands for `localhost`.
pub(super) fn list(text: &str, default_port: u16) -> Result<EndpointList, Refusal> {
    if text.trim().is_empty() {
        return Ok(EndpointList { endpoints: vec![localhost(default_port)], https: None });
    }
    let mut endpoints = Vec::new();
    let mut schemes = Vec::new();
    for item in text.split(',') {
        let item = item.trim();
        let (https, rest) = match item.split_once("://") {
            Some(("http", rest)) => (Some(false), rest),
            Some(("https", rest)) => (Some(true), rest),
            Some((scheme, _)) => {
                return Err(Refusal::new(format!("`{scheme}://` is not a protocol of the store"), ADVICE));
            }
            None => (None, item),
        };
        schemes.push(https);
        endpoints.push(one(rest.strip_suffix('/').unwrap_or(rest), default_port)?);
    }
    if schemes.iter().any(|scheme| *scheme != schemes[0]) {
        return Err(Refusal::new("some endpoints say http and others https", "use one protocol for all"));
    }
    Ok(EndpointList { endpoints, https: schemes[0] })
}

fn one(text: &str, default_port: u16) -> Result<Endpoint, Refusal> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((host, after)) = rest.split_once(']') else {
                return Err(Refusal::new(format!("`{text}` lacks the closing `]`"), ADVICE));
            };
            if host.parse::<Ipv6Addr>().is_err() {
                return Err(Refusal::new(format!("`{host}` is not an IPv6 address"), ADVICE));
            }
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err(Refusal::new(format!("`{after}` follows the `]`"), ADVICE)),
            }
        }
        None if text.parse::<Ipv6Addr>().is_ok() => {
            let advice = format!("write [{text}]:{default_port}");
            return Err(Refusal::new("an IPv6 address without brackets cannot be told from a port", advice));
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err(Refusal::new("a host is missing", ADVICE));
    }
    // Host names have no underscores, but many container names do.
    if let Some(c) = host.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-:".contains(*c))) {
        return Err(Refusal::new(format!("{c:?} cannot be part of a host name"), ADVICE));
    }
    let port = match port {
        None => default_port,
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
            digits.parse().map_err(|_| Refusal::new(format!("{digits} is not a port"), "ports go from 1 to 65535"))?
        }
        Some(other) => return Err(Refusal::new(format!("`{other}` is not a port"), ADVICE)),
    };
    Ok(Endpoint { host: host.to_owned(), port })
}
