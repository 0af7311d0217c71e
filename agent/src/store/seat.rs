//! The store that three agents hold together: this one's seat among them, where it has one.

use std::time::Duration;

use elastic_flags::written;
use elastic_rendezvous::job::Endpoint;
use elastic_store::embedded::{EmbeddedError, EmbeddedServer, Replicas};
use elastic_store::etcd::EtcdConfig;
use tokio::time::timeout;

use super::alone::each_itself;
use super::backend::{self, AGAIN, Backend, BackendError, Patience, Way};
use crate::machine::interfaces;

/// How long the names of other agents' hosts may be unknown before this agent takes none of them for its own.
const NAMES: Duration = Duration::from_secs(10);

/// Agents that come together agree on who serves within this time. One that waits for longer says so.
const AGREE: Duration = Duration::from_secs(6);

/// Opens the store that these agents hold together, as one of them if one of the endpoints is this machine's.
pub(super) async fn replicated(
    endpoints: &[Endpoint],
    way: Way<'_>,
    patience: Duration,
) -> Result<Backend, BackendError> {
    let begun = elastic_store::clock::now();
    let names: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
    let server = take_seat(endpoints, &names, way).await?;
    let group = server.as_ref().and_then(|(server, _)| server.group());
    if let Some((server, endpoint)) = server {
        if way.network.leaves_open(endpoint) {
            tracing::warn!("{}", backend::open_to_all(endpoint));
        }
        tokio::spawn(async move {
            if let Err(error) = server.serve(std::future::pending()).await {
                tracing::error!(%error, "this agent's part of the job's store has failed");
            }
        });
        if let Some(group) = &group
            && timeout(AGREE.min(patience), group.is_served()).await.is_err()
        {
            let (missing, hint) = (group.missing(), hint(endpoints).await);
            tracing::warn!("{missing}: waiting for another, up to join_timeout ({}){hint}", written(patience));
        }
    }
    let mut config = EtcdConfig::new(names.clone());
    config.peers = way.tls.cloned();
    let advice = "the store is served while two of the three agents at --rdzv-endpoint are there";
    let found = backend::etcd(config, None, &Patience::since(begun, patience, advice, way)).await?;
    let name = format!("the store held by the agents at {}", names.join(", "));
    Ok(Backend { name, serves: group.is_some(), hosts: endpoints.to_vec(), group, ..found })
}

/// Says where the endpoints themselves are why no other agent comes.
async fn hint(endpoints: &[Endpoint]) -> &'static str {
    for endpoint in endpoints {
        if each_itself(&backend::resolve(endpoint).await.unwrap_or_default()).is_none() {
            return "";
        }
    }
    ". The endpoints mean this machine on each machine: unless all agents run on this one, name three machines"
}

/// Takes the first of this machine's seats that no other agent has.
async fn take_seat<'a>(
    endpoints: &'a [Endpoint],
    names: &[String],
    way: Way<'_>,
) -> Result<Option<(EmbeddedServer, &'a Endpoint)>, BackendError> {
    let begun = elastic_store::clock::now();
    loop {
        let mut unknown = Vec::new();
        let mut taken = Vec::new();
        for (seat, endpoint) in endpoints.iter().enumerate() {
            let Ok(addresses) = backend::resolve(endpoint).await else {
                unknown.push(endpoint.to_string());
                continue;
            };
            if !backend::are_own(&addresses, &interfaces::all().unwrap_or_default()) {
                continue;
            }
            let replicas = Replicas { endpoints: names.to_vec(), seat };
            match backend::serve(endpoint, Some(replicas), way, NAMES).await {
                Ok(server) => return Ok(Some((server, endpoint))),
                // Another agent of this machine has it.
                Err(BackendError::Serve(EmbeddedError::InUse { .. })) => taken.push(endpoint.to_string()),
                Err(error) => return Err(error),
            }
        }
        if unknown.is_empty() || elastic_store::clock::now().since(begun) >= NAMES {
            if !unknown.is_empty() {
                let unknown = unknown.join(", ");
                tracing::warn!("the names in {unknown} are unknown here: if one is this machine's, it holds no store");
            }
            if !taken.is_empty() {
                let taken = taken.join(", ");
                tracing::warn!(
                    "{taken} is in use here: unless an agent of this job has it, no agent holds the store there"
                );
            }
            return Ok(None);
        }
        tokio::time::sleep(AGAIN).await;
    }
}
