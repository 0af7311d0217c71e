//! Which store a job meets through, from backend, endpoint, `--standalone` and `--rdzv-conf` together.

use elastic_rendezvous::job::Endpoint;

use super::conf::Conf;
use super::endpoint;
use super::error::{Refusal, UsageError};
use super::flags::{Setting, Settings};
use super::values::{self, NodeRange};
use crate::store::choice::{StoreChoice, StoreOptions, Tls};

const TODAY: &str = "use --rdzv-backend=etcd with an etcd, or --rdzv-backend=c10d --rdzv-endpoint=HOST without one";

/// What to do where the agent's own store is to speak TLS.
const TLS: &str = "give --peer-cert, --peer-key and --peer-ca for TLS";

/// The name of the way to meet, as the user wrote it.
pub(super) fn backend(settings: &Settings<'_>) -> Result<String, UsageError> {
    let given = settings.text("rdzv-backend")?;
    Ok(given.map_or_else(|| settings.dialect.backend().to_owned(), |backend| backend.value))
}

/// torchrun's rule: one node without an address needs no store, and its id is a fresh one.
pub(super) fn is_unaddressed(settings: &Settings<'_>, nodes: NodeRange) -> Result<bool, UsageError> {
    let told = settings.text("rdzv-endpoint")?.is_some() || settings.text("master-port")?.is_some();
    Ok(nodes.max == 1 && !told && backend(settings)? == "static")
}

pub(super) fn resolve(
    settings: &Settings<'_>,
    nodes: NodeRange,
    conf: &Conf,
    warnings: &mut Vec<String>,
) -> Result<StoreOptions, UsageError> {
    let prefix = conf.prefix.clone();
    let endpoint = settings.text("rdzv-endpoint")?;
    if settings.switch("standalone")? {
        for flag in ["rdzv-backend", "rdzv-endpoint", "rdzv-id"] {
            if settings.on_command_line(flag) {
                warnings.push(format!("--{flag} has no effect with --standalone"));
            }
        }
        return Ok(StoreOptions { choice: standalone(nodes, conf)?, prefix, place: None, by_variables: false });
    }
    let name = backend(settings)?;
    if name != "static" {
        for flag in ["node-rank", "master-addr", "master-port"] {
            if settings.on_command_line(flag) {
                warnings.push(format!("--{flag} has no effect with --rdzv-backend={name}: it belongs to static"));
            }
        }
    }
    let mut place = None;
    let choice = match name.as_str() {
        "etcd" => etcd(endpoint.as_ref(), conf, conf.v2)?,
        "etcd-v2" => etcd(endpoint.as_ref(), conf, true)?,
        "c10d" => hosted(endpoint.as_ref(), nodes, conf)?,
        "static" if is_unaddressed(settings, nodes)? => standalone(nodes, conf)?,
        "static" => {
            let (choice, own) = fixed(settings, endpoint.as_ref(), nodes, conf)?;
            place = own;
            choice
        }
        other => {
            let cause = "no such backend; one of a Python package cannot be loaded, as no Python runs in the agent";
            let refusal = Refusal::new(cause, format!("{TODAY}, static, or --standalone for one node"));
            return Err(refusal.of(format_args!("--rdzv-backend={other}")));
        }
    };
    let by_variables = endpoint.is_some_and(|endpoint| !endpoint.on_command_line);
    Ok(StoreOptions { choice, prefix, place, by_variables })
}

fn standalone(nodes: NodeRange, conf: &Conf) -> Result<StoreChoice, UsageError> {
    if nodes.min > 1 {
        let cause = format!("one node alone cannot be {}", nodes.min);
        return Err(Refusal::new(cause, TODAY).of(format_args!("--nnodes={nodes}")));
    }
    no_etcd_keys(conf)?;
    Ok(StoreChoice::Standalone)
}

/// A store that one of the agents serves. If there is at most one node, no other node can come. So nothing is served,
/// and a second run with the same flags on the same machine is a job of its own. With torchrun it waits as a spare.
fn hosted(endpoint: Option<&Setting>, nodes: NodeRange, conf: &Conf) -> Result<StoreChoice, UsageError> {
    no_etcd_keys(conf)?;
    let choose = |endpoint| match nodes.max {
        1 => StoreChoice::Standalone,
        _ => StoreChoice::Hosted { endpoint, is_host: conf.is_host },
    };
    let Some(setting) = endpoint else { return Ok(choose(endpoint::localhost(endpoint::C10D_PORT))) };
    let list = setting.parse(|text| endpoint::list(text, endpoint::C10D_PORT))?;
    if list.https == Some(true) {
        return Err(Refusal::new("the agent's own store does not speak https", TLS).of(setting));
    }
    if nodes.max > 1 && list.endpoints.iter().any(|endpoint| endpoint.port == 0) {
        let advice = format!("give a port, {} is the default", endpoint::C10D_PORT);
        return Err(Refusal::new("other nodes cannot know which port 0 becomes", advice).of(setting));
    }
    match &list.endpoints[..] {
        [endpoint] => Ok(choose(endpoint.clone())),
        _ => {
            let choice = replicated(list.endpoints, conf).map_err(|refusal| refusal.of(setting))?;
            Ok(if nodes.max == 1 { StoreChoice::Standalone } else { choice })
        }
    }
}

/// A store that three agents hold together. All of them have the endpoints in one order.
fn replicated(mut endpoints: Vec<Endpoint>, conf: &Conf) -> Result<StoreChoice, Refusal> {
    if conf.is_host.is_some() {
        let cause = "it names several hosts, and each finds its own by its addresses";
        return Err(Refusal::new(cause, "leave --rdzv-conf is_host out"));
    }
    endpoints.sort_by(|one, other| (&one.host, one.port).cmp(&(&other.host, other.port)));
    let twice = endpoints.windows(2).find(|two| two[0] == two[1]).map(|two| two[0].to_string());
    if endpoints.len() != 3 || twice.is_some() {
        let named = twice.map_or(format!("{} hosts", endpoints.len()), |twice| format!("{twice} twice"));
        let cause = format!("it names {named}, and the store is served by one agent or held by three");
        return Err(Refusal::new(cause, "name one or three, or use --rdzv-backend=etcd"));
    }
    Ok(StoreChoice::Replicated { endpoints })
}

/// Fixed nodes with fixed places, and this node's. The agent of node 0 serves the store.
fn fixed(
    settings: &Settings<'_>,
    endpoint: Option<&Setting>,
    nodes: NodeRange,
    conf: &Conf,
) -> Result<(StoreChoice, Option<u32>), UsageError> {
    no_etcd_keys(conf)?;
    let place = settings.parsed("node-rank", |text| values::count(text, 0))?.unwrap_or(0);
    if place >= nodes.max {
        let cause = format!("{} nodes have the ranks 0 to {}", nodes.max, nodes.max - 1);
        let given = settings.text("node-rank")?.map_or("--node-rank".to_owned(), |setting| setting.to_string());
        return Err(Refusal::new(cause, "give each node its own, from 0 on, or raise --nnodes").of(given));
    }
    let endpoint = match endpoint {
        Some(setting) => match &setting.parse(|text| endpoint::list(text, endpoint::STATIC_PORT))?.endpoints[..] {
            [endpoint] => endpoint.clone(),
            _ => {
                return Err(Refusal::new("it names several hosts, and node 0 serves the store", "name one").of(setting));
            }
        },
        None => Endpoint {
            host: settings.parsed("master-addr", values::address)?.unwrap_or_else(|| "127.0.0.1".into()),
            port: settings.parsed("master-port", values::port)?.unwrap_or(endpoint::STATIC_PORT),
        },
    };
    if nodes.max == 1 {
        // No other node will come, so nothing has to be served, and the port stays free.
        return Ok((StoreChoice::Standalone, None));
    }
    if endpoint.port == 0 {
        let advice = format!("give a port, {} is the default", endpoint::STATIC_PORT);
        return Err(Refusal::new("other nodes cannot know which port 0 becomes", advice).of("--master-port=0"));
    }
    Ok((StoreChoice::Hosted { endpoint, is_host: Some(place == 0) }, Some(place)))
}

fn etcd(endpoint: Option<&Setting>, conf: &Conf, v2: bool) -> Result<StoreChoice, UsageError> {
    let (what, text) = match endpoint {
        Some(setting) => (setting.to_string(), setting.value.as_str()),
        None => ("--rdzv-endpoint".to_owned(), ""),
    };
    let list = endpoint::list(text, endpoint::ETCD_PORT).map_err(|refusal| refusal.of(&what))?;
    if let Some(endpoint) = list.endpoints.iter().find(|endpoint| endpoint.port == 0) {
        let cause = format!("{endpoint} has port 0");
        return Err(Refusal::new(cause, format!("{} is etcd's port", endpoint::ETCD_PORT)).of(&what));
    }
    let certificates = conf.tls != Tls::default();
    let https = match (conf.https, list.https) {
        (Some(conf), Some(scheme)) if conf != scheme => {
            return Err(Refusal::new("it and --rdzv-conf protocol disagree", "keep one of them").of(&what));
        }
        (Some(https), _) | (None, Some(https)) => https,
        (None, None) => certificates,
    };
    if certificates && !https {
        let cause = "certificates are given for plain http";
        return Err(Refusal::new(cause, "say protocol=https, or leave them out").of("--rdzv-conf"));
    }
    Ok(StoreChoice::Etcd {
        endpoints: list.endpoints,
        tls: https.then(|| conf.tls.clone()),
        credentials: conf.credentials.clone(),
        v2,
    })
}

/// Refuses keys that are meant to protect the store. They must not be dropped in silence.
fn no_etcd_keys(conf: &Conf) -> Result<(), UsageError> {
    let key = if conf.https == Some(true) {
        "protocol=https"
    } else if conf.tls != Tls::default() {
        "certificates"
    } else if conf.credentials.is_some() {
        "user"
    } else {
        return Ok(());
    };
    let cause = format!("{key}: that is for etcd, and the store here is an agent's own");
    Err(Refusal::new(cause, format!("{TLS}; users are for --rdzv-backend=etcd alone")).of("--rdzv-conf"))
}
