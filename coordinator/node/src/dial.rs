//! Asks a port who is behind it: the only thing that confirms a death.
//!
//! An agent's listening socket is shared with its guard, which closes it only when the agent's whole process tree is
//! gone. So a connection that the host refuses, or another incarnation behind the port, means that nothing of it is left.
//! One that is accepted but not answered means that the guard is still at it, or the agent is frozen; one that a firewall
//! rejects means nothing.

use std::convert::identity;
use std::sync::Once;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tonic::transport::{self, Channel, Error};

use elastic_proto::pulse::pulse_client::PulseClient;
use elastic_proto::pulse::{Found, IdentifyRequest};

use super::knock::{Knock, knock};
use elastic_rendezvous::job::{Endpoint, NodeId};
use elastic_store::tls::MutualTls;

/// Longest wait for a connection or an answer.
pub(super) const ANSWER: Duration = Duration::from_secs(1);

const PAUSE: Duration = Duration::from_millis(200);

/// Between two HTTP/2 pings on an open stream, and how long an answer may take. TCP alone would notice a lost network
/// after a quarter of an hour. A leader that thousands dial at once is late with answers; if their streams ended for
/// that, all would dial again.
const PING: Duration = Duration::from_secs(2);
const PONG: Duration = Duration::from_secs(3);

/// Whether `node`, which listened at `peer`, is dead for certain: see [`find`].
pub(super) async fn is_dead(peer: &Endpoint, node: &NodeId, tls: Option<&MutualTls>, patience: Duration) -> bool {
    find(peer, node, tls, patience).await == Found::Another
}

/// Whether `node` is behind the port where it listened. Asks again while the answer is unclear, no longer than
/// `patience`. [`Found::Another`]: it is dead for certain; [`Found::Nobody`]: nothing is known.
pub async fn find(peer: &Endpoint, node: &NodeId, tls: Option<&MutualTls>, patience: Duration) -> Found {
    let begun = elastic_store::clock::now();
    let (mut pause, rejected) = (Duration::from_millis(2), Once::new());
    loop {
        let found = ask(peer, node, tls, &rejected).await;
        if found != Found::Nobody || elastic_store::clock::now().since(begun) >= patience {
            return found;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE);
    }
}

/// Asks once. A port that refuses is as good as another's; without an answer nothing is known.
async fn ask(peer: &Endpoint, node: &NodeId, tls: Option<&MutualTls>, rejected: &Once) -> Found {
    match timeout(ANSWER, knock(peer)).await {
        Ok(Knock::Accepted) => {}
        Ok(Knock::Refused) => return Found::Another,
        Ok(Knock::Rejected) => {
            rejected.call_once(|| {
                tracing::warn!(
                    %node, at = %peer,
                    "a firewall rejects connections to this node, which says nothing of its life: its lease decides; \
                     have nodes reach each other's ports"
                );
            });
            return Found::Nobody;
        }
        Ok(Knock::Unclear) | Err(_) => return Found::Nobody,
    }
    let identify = async {
        let mut client = connect(peer, tls).await.ok()?;
        client.identify(IdentifyRequest { node: node.to_string() }).await.ok().map(|reply| reply.into_inner().found())
    };
    timeout(ANSWER, identify).await.ok().flatten().unwrap_or(Found::Nobody)
}

/// Opens a channel to an agent, for pulses.
pub(super) async fn connect(peer: &Endpoint, tls: Option<&MutualTls>) -> Result<PulseClient<Channel>, Error> {
    Ok(PulseClient::new(channel(peer, tls, identity).await?))
}

/// Opens a channel to an agent, with `more` settings than the usual ones.
pub(super) async fn channel(
    peer: &Endpoint,
    tls: Option<&MutualTls>,
    more: impl FnOnce(transport::Endpoint) -> transport::Endpoint,
) -> Result<Channel, Error> {
    let endpoint = transport::Endpoint::from_shared(format!("http://{peer}"))?;
    let endpoint = endpoint.connect_timeout(ANSWER).tcp_nodelay(true);
    let endpoint = more(endpoint.http2_keep_alive_interval(PING).keep_alive_timeout(PONG));
    match tls {
        Some(tls) => endpoint.connect_with_connector(tls.connector()).await,
        None => endpoint.connect().await,
    }
}

/// The cause that says what happened: those around it say only that a connection failed.
pub(super) fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use elastic_proto::pulse::{Hello, MemberMessage};
    use futures::StreamExt;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;
    use crate::blackhole_proxy::BlackholeProxy;
    use crate::knock::tests::rejecting;
    use crate::peer_port::PeerPort;
    use crate::pulse_server::serve;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_stream_into_a_black_hole_ends() -> std::io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let hole = BlackholeProxy::before(listener.local_addr()?).await?;
        let front = Arc::new(PeerPort::default());
        let (inbox, _notes) = mpsc::unbounded_channel();
        front.open(&NodeId::from_text("a:1"), &"job".parse().unwrap(), inbox);
        tokio::spawn(serve(listener, front, None, None));
        let peer = Endpoint { host: hole.address.ip().to_string(), port: hole.address.port() };
        let often = Duration::from_millis(50);
        let often = |endpoint: transport::Endpoint| endpoint.http2_keep_alive_interval(often).keep_alive_timeout(often);
        let mut client = PulseClient::new(channel(&peer, None, often).await.expect("a channel"));
        let hello = Hello { job: "job".into(), node: "b:1".into(), nonce: Vec::new() };
        let hello = MemberMessage { hello: Some(hello), ..MemberMessage::default() };
        let words = futures::stream::iter([hello]).chain(futures::stream::pending());
        let mut answers = client.watch(words).await.expect("a stream").into_inner();
        hole.swallow();
        let ended = timeout(PATIENCE, answers.message()).await.expect("it is noticed");
        assert!(ended.is_err(), "{ended:?}");
        Ok(())
    }

    #[tokio::test]
    async fn a_port_that_a_firewall_rejects_confirms_no_death() {
        let Some((peer, _kept)) = rejecting() else { return };
        assert_eq!(knock(&peer).await, Knock::Rejected);
        assert_eq!(find(&peer, &NodeId::from_text("a:1"), None, Duration::ZERO).await, Found::Nobody);
    }

    #[tokio::test]
    async fn a_node_that_is_about_to_go_is_asked_until_it_is_gone() -> std::io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let peer = Endpoint { host: "127.0.0.1".to_owned(), port: listener.local_addr()?.port() };
        let front = Arc::new(PeerPort::default());
        let server = tokio::spawn(serve(listener, Arc::clone(&front), None, None));
        let (node, other) = (NodeId::from_text("a:1"), NodeId::from_text("a:2"));

        // While it is here no one asks twice, and its predecessor is known to be dead.
        front.introduce(&node);
        assert!(!is_dead(&peer, &node, None, PATIENCE).await);
        assert!(is_dead(&peer, &other, None, PATIENCE).await);

        // Once its part is over its port vouches for it no more, and its death is seen when the port closes.
        front.leave();
        assert!(!is_dead(&peer, &node, None, Duration::ZERO).await, "an open port confirms no death");
        let mut asked = tokio::spawn({
            let (peer, node) = (peer.clone(), node.clone());
            async move { is_dead(&peer, &node, None, PATIENCE).await }
        });
        assert!(timeout(Duration::from_millis(20), &mut asked).await.is_err(), "it was not asked again");
        server.abort();
        assert!(asked.await.is_ok_and(|dead| dead));
        Ok(())
    }
}
