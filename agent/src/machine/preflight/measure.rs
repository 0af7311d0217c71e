//! Reads which nodes the job has, and measures from one after the other. What it means is judged elsewhere.

use std::sync::Arc;
use std::time::Duration;

use elastic_node::{bandwidth, random_bytes};
use elastic_rendezvous::job::{JobId, JobSecret, Keys, NodeRecord, Versioned};
use elastic_store::Store;
use elastic_store::tls::MutualTls;
use tokio::time::timeout;

use super::judge::Reading;
use super::peers::{self, BitRate, Peer, Tried};

/// Where the job's records are, and who asks.
pub(crate) struct Joining<'a> {
    pub store: &'a Arc<dyn Store>,
    pub job: &'a JobId,
    pub keys: &'a Keys,
    pub node: String,
    pub boot: &'a str,
    pub tls: Option<&'a MutualTls>,
}

impl Joining<'_> {
    /// The nodes that were asked within this time.
    pub(super) async fn try_peers(&self, needed: BitRate, limit: Duration) -> Reading<Vec<Tried>> {
        let mut tried = Vec::new();
        let trying = async {
            let peers = self.peers().await?;
            if peers.is_empty() {
                return Ok(());
            }
            let secret = self.secret().await?;
            for peer in peers {
                let rate = self.measure(&peer, &secret).await;
                if let Err(why) = &rate {
                    tracing::info!("preflight: {peer} was not measured: {why}");
                }
                tried.push((peer, rate));
                if peers::is_settled(&tried, needed) {
                    break;
                }
            }
            Ok::<_, String>(())
        };
        match timeout(limit, trying).await {
            Ok(Err(why)) => Err(why),
            Err(_) if tried.is_empty() => Err(format!("no answer within {limit:?}")),
            Ok(Ok(())) | Err(_) => Ok(tried),
        }
    }

    async fn peers(&self) -> Reading<Vec<Peer>> {
        let (nodes, _) = self.store.range(&self.keys.nodes()).await.map_err(|error| error.to_string())?;
        // The leader warns of an unreadable record.
        let records: Vec<NodeRecord> = nodes.iter().filter_map(|kv| Some(Versioned::parse(kv).ok()?.value)).collect();
        let turn = random_bytes().map(u64::from_ne_bytes).map_err(|error| error.to_string())?;
        Ok(peers::choose(&records, self.boot, turn))
    }

    async fn secret(&self) -> Reading<JobSecret> {
        let secret = self.store.get(&self.keys.secret()).await.map_err(|error| error.to_string())?;
        let secret = secret
            .ok_or("the job has no secret, which agents ask for before they measure: was its `secret` key deleted?")?;
        Ok(Versioned::parse(&secret)?.value)
    }

    async fn measure(&self, peer: &Peer, secret: &JobSecret) -> Reading<BitRate> {
        let poured = bandwidth::measure((self.job, &peer.node), &peer.at, secret, &self.node, self.tls).await;
        let poured = poured.map_err(|error| error.to_string())?;
        Ok(BitRate((poured.bytes as f64 * 8.0 / poured.within.as_secs_f64()) as u64))
    }
}

#[cfg(test)]
mod tests {
    use elastic_store::embedded::MemoryStore;
    use elastic_store::embedded::mvcc::Limits;
    use elastic_store::{Op, Txn};

    use super::*;
    use crate::machine::preflight::judge::State;

    const NEEDED: BitRate = BitRate(1000);

    #[tokio::test]
    async fn a_peer_that_cannot_be_measured_is_passed_over_and_keeps_no_node_away() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::start(Limits::default()));
        let job: JobId = "job".parse().unwrap();
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
        let joining = Joining { store: &store, job: &job, keys: &keys, node: "b:1".into(), boot: "own", tls: None };
        let find = async |limit| {
            let tried = joining.try_peers(NEEDED, limit).await;
            let found = peers::verdict(&tried, NEEDED);
            assert_eq!(found.state, State::Unknown, "{found}");
            (tried, found.to_string())
        };
        let minute = Duration::from_secs(60);
        assert_eq!(find(minute).await.0, Ok(Vec::new()));

        // One is unreadable, and the agent of the other is gone.
        let gone = r#"{"name":"a","incarnation":"1","machine":"m","boot":"other","host":"h",
            "peer":{"host":"127.0.0.1","port":1},"slots":1,"role":"default","phase":"running"}"#;
        let nodes = keys.nodes();
        let put = [Op::put(format!("{nodes}x:1"), "?"), Op::put(format!("{nodes}a:1"), gone)];
        store.txn(Txn::of(put)).await.unwrap();
        let (_, said) = find(minute).await;
        assert!(said.contains("the job has no secret"), "{said}");
        let secret = r#"{"key":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}"#;
        store.txn(Txn::of([Op::put(keys.secret(), secret)])).await.unwrap();
        let (tried, said) = find(minute).await;
        assert!(tried.is_ok_and(|tried| tried.len() == 1 && tried[0].1.is_err()), "{said}");

        // One that takes connections and says nothing.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = format!(r#""port":{}"#, silent.local_addr().unwrap().port());
        let there = gone.replace(r#""port":1"#, &port);
        store.txn(Txn::of([Op::put(format!("{nodes}a:1"), there)])).await.unwrap();
        let (_, said) = find(Duration::from_millis(100)).await;
        assert!(said.contains("no answer within 100ms"), "{said}");
    }
}
