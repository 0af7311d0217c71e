//! Store endpoints, `host[:port]`.

use elastic_rendezvous::job::Endpoint;

use super::error::Refusal;

pub(super) const ETCD_PORT: u16 = 2379;
pub(super) const STATIC_PORT: u16 = 29500;
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

/// Reads a list of endpoints. As with torchrun, an empty text means `localhost`.
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
                return Err(Refusal::new(
                    format!("`{scheme}://` is not a protocol of the store"),
                    elastic_flags::ENDPOINT,
                ));
            }
            None => (None, item),
        };
        schemes.push(https);
        let (host, port) = elastic_flags::endpoint(rest.strip_suffix('/').unwrap_or(rest), default_port)?;
        endpoints.push(Endpoint { host, port });
    }
    if schemes.iter().any(|scheme| *scheme != schemes[0]) {
        return Err(Refusal::new("some endpoints say http and others https", "use one protocol for all"));
    }
    Ok(EndpointList { endpoints, https: schemes[0] })
}
