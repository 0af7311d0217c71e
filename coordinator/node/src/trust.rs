//! Whether a node and its job's leader take each other's certificates, checked before the node joins.

use elastic_proto::pulse::IdentifyRequest;
use tokio::time::timeout;

use super::dial;
use elastic_rendezvous::job::{Keys, LeaderRecord};
use elastic_store::tls::{MutualTls, refusal_in, trouble_in};
use elastic_store::{Result, Store};

/// Why the job's leader and this program cannot speak with each other. `None`: they can, or no leader answers.
pub async fn distrust(store: &dyn Store, keys: &Keys, tls: &MutualTls) -> Result<Option<String>> {
    let Some(record) = store.get(&keys.leader()).await? else { return Ok(None) };
    let Ok(leader) = LeaderRecord::held(&record) else { return Ok(None) };
    let LeaderRecord { node, peer, .. } = leader.value;
    let asked = async {
        let mut client = dial::connect(&peer, Some(tls)).await.map_err(|error| dial::innermost(&error))?;
        // A server refuses a certificate only after the client takes the connection for open.
        let question = IdentifyRequest { node: node.to_string() };
        client.identify(question).await.map(drop).map_err(|status| dial::innermost(&status))
    };
    let Ok(Err(cause)) = timeout(dial::ANSWER, asked).await else { return Ok(None) };
    let why = trouble_in(&cause).map(str::to_owned).or_else(|| refusal_in(&cause));
    Ok(why.map(|why| format!("the job's leader {node} at {peer} is not reached: {why}")))
}
