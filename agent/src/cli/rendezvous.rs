//! Which store a job meets through, from backend, endpoint, `--standalone` and `--rdzv-conf` together.

use elastic_rendezvous::job::Endpoint;

use super::conf::Conf;
use super::endpoint;
use super::error::{Refusal, UsageError};
use super::flags::{Setting, Settings};
use super::values::{self, NodeRange};
use crate::machine::address::NetworkOptions;
use crate::store::choice::{StoreChoice, StoreOptions, Tls};

const TODAY: &str = "use --rdzv-backend=etcd with an etcd, or --rdzv-backend=c10d --rdzv-endpoint=HOST without one";

/// What to do where the agent's own store is to speak TLS.
const TLS: &str = "give --peer-cert, --peer-key and --peer-ca for TLS";

/// What to do about a store for everybody.
const CLOSE: &str = "give every node --peer-cert FILE --peer-key FILE --peer-ca FILE (elasticctl certs makes the files), or \
                     --insecure where everybody on the network is trusted";

pub(super) fn resolve(
    settings: &Settings<'_>,
    nodes: NodeRange,
    conf: &Conf,
    network: &NetworkOptions,
    warnings: &mut Vec<String>,
) -> Result<StoreOptions, UsageError> {
    let prefix = conf.prefix.clone();
    let backend = settings.text("rdzv-backend")?;
    let endpoint = settings.text("rdzv-endpoint")?;
    if settings.switch("standalone")? {
        for flag in ["rdzv-backend", "rdzv-endpoint", "rdzv-id"] {
            if settings.on_command_line(flag) {
                warnings.push(format!("--{flag} has no effect with --standalone"));
            }
        }
        return Ok(StoreOptions { choice: standalone(nodes, conf)?, prefix, place: None, by_variables: false });
    }
    let name = backend.as_ref().map_or(settings.dialect.backend(), |backend| backend.value.as_str());
    if name != "static" {
        for flag in ["node-rank", "master-addr", "master-port"] {
            if settings.on_command_line(flag) {
                warnings.push(format!("--{flag} has no effect with --rdzv-backend={name}: it belongs to static"));
            }
        }
    }
    let mut place = None;
    let choice = match name {
        "etcd" => etcd(endpoint.as_ref(), conf, conf.v2)?,
        "etcd-v2" => etcd(endpoint.as_ref(), conf, true)?,
        "c10d" => hosted(endpoint.as_ref(), nodes, conf, network)?,
        // torchrun's rule: its default backend, without any address, means one node alone.
        "static" if endpoint.is_none() && nodes.max == 1 && settings.text("master-port")?.is_none() => {
            standalone(nodes, conf)?
        }
        "static" => {
            let (choice, own) = fixed(settings, endpoint.as_ref(), nodes, (conf, network), warnings)?;
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

fn hosted(
    endpoint: Option<&Setting>,
    nodes: NodeRange,
    conf: &Conf,
    network: &NetworkOptions,
) -> Result<StoreChoice, UsageError> {
    no_etcd_keys(conf)?;
    let Some(setting) = endpoint else {
        return Ok(StoreChoice::Hosted { endpoint: endpoint::localhost(endpoint::C10D_PORT), is_host: conf.is_host });
    };
    let list = setting.parse(|text| endpoint::list(text, endpoint::C10D_PORT))?;
    let [endpoint] = &list.endpoints[..] else {
        let cause = format!("it names {} hosts, and one agent serves the store", list.endpoints.len());
        return Err(Refusal::new(cause, "name the one, or use --rdzv-backend=etcd").of(setting));
    };
    if list.https == Some(true) {
        return Err(Refusal::new("the agent's own store does not speak https", TLS).of(setting));
    }
    if endpoint.port == 0 {
        if nodes.max == 1 {
            return Ok(StoreChoice::Standalone);
        }
        let advice = format!("give a port, {} is the default", endpoint::C10D_PORT);
        return Err(Refusal::new("other nodes cannot know which port 0 becomes", advice).of(setting));
    }
    // Which agent serves it is known only once names are resolved. All hear the same.
    if conf.is_host != Some(false) && network.leaves_open(endpoint) {
        return Err(Refusal::new(open(endpoint), CLOSE).of(format_args!("--rdzv-backend=c10d {setting}")));
    }
    Ok(StoreChoice::Hosted { endpoint: endpoint.clone(), is_host: conf.is_host })
}

/// What is wrong with a store for everybody.
fn open(store: &Endpoint) -> String {
    format!("any host that reaches port {} of {} could read and change the job's store", store.port, store.host)
}

/// Fixed nodes with fixed places, and this node's. The agent of node 0 serves the store.
fn fixed(
    settings: &Settings<'_>,
    endpoint: Option<&Setting>,
    nodes: NodeRange,
    (conf, network): (&Conf, &NetworkOptions),
    warnings: &mut Vec<String>,
) -> Result<(StoreChoice, Option<u32>), UsageError> {
    no_etcd_keys(conf)?;
    let place = settings.parsed("node-rank", |text| values::count(text, 0))?.unwrap_or(0);
    if place >= nodes.max {
        let cause = format!("{} nodes have the ranks 0 to {}", nodes.max, nodes.max - 1);
        let given = settings.text("node-rank")?.map_or("--node-rank".to_owned(), |setting| setting.to_string());
        return Err(Refusal::new(cause, "give each node its own, from 0 on, or raise --nnodes").of(given));
    }
    let endpoint = match endpoint.filter(|setting| !setting.value.trim().is_empty()) {
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
    // torchrun's commonest command line, whose workers open a port for everybody in any case: it is not refused.
    if place == 0 && network.leaves_open(&endpoint) {
        warnings.push(format!("--rdzv-backend=static: {}; {CLOSE}", open(&endpoint)));
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
