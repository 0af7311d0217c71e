use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::pulse_server::serve;

struct Scene {
    job: JobId,
    node: NodeId,
    peer: Endpoint,
    secret: JobSecret,
}

impl Scene {
    /// The port of an agent in a job.
    async fn of() -> Scene {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Endpoint { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
        let scene = Scene {
            job: "job".parse().unwrap(),
            node: NodeId::from_text("a:1"),
            peer,
            secret: JobSecret::of([7; JobSecret::LENGTH]),
        };
        let front = Arc::new(PeerPort::default());
        let (inbox, _) = mpsc::unbounded_channel();
        front.open(&scene.node, &scene.job, inbox);
        front.trust(Some(scene.secret.clone()));
        tokio::spawn(serve(listener, front, Some(mpsc::channel(1).0), None));
        scene
    }

    async fn measure(&self) -> Result<Poured, BandwidthError> {
        measure((&self.job, &self.node), &self.peer, &self.secret, "a test", None).await
    }
}

#[tokio::test]
async fn who_knows_the_secret_has_bytes_poured_one_at_once_and_again_later() {
    let scene = Scene::of().await;
    let (first, second) = tokio::join!(scene.measure(), scene.measure());
    let (poured, refused) = match (first, second) {
        (Ok(poured), Err(refused)) | (Err(refused), Ok(poured)) => (poured, refused.to_string()),
        both => panic!("{both:?}"),
    };
    assert!(poured.bytes >= CHUNK as u64 && poured.within >= TAKEN, "{poured:?}");
    assert!(refused.contains("another node measures"), "{refused}");
    let again = scene.measure().await;
    assert!(again.as_ref().is_ok_and(|poured| poured.bytes > 0), "{again:?}");
}

#[tokio::test]
async fn a_stranger_gets_nothing_and_takes_no_place() {
    let scene = Scene::of().await;
    let stranger = Scene { secret: JobSecret::of([8; JobSecret::LENGTH]), ..Scene::of().await };
    let stranger = Scene { peer: scene.peer.clone(), ..stranger };
    let elsewhere = Scene { node: NodeId::from_text("a:2"), secret: scene.secret.clone(), ..Scene::of().await };
    for (who, why) in [(&stranger, "the proof does not fit"), (&elsewhere, "does not take part")] {
        let (refused, poured) = tokio::join!(who.measure(), scene.measure());
        assert!(refused.as_ref().is_err_and(|error| error.to_string().contains(why)), "{refused:?}");
        assert!(poured.is_ok(), "{poured:?}");
    }
}

#[tokio::test]
async fn an_agent_that_is_gone_is_not_reached() {
    let nobody = Endpoint { host: "127.0.0.1".to_owned(), port: 1 };
    let scene = Scene { peer: nobody, ..Scene::of().await };
    assert!(matches!(scene.measure().await, Err(BandwidthError::Unreached(_))));
}

#[tokio::test]
async fn a_client_that_never_has_enough_is_let_go() {
    use elastic_proto::bandwidth::bandwidth_client::BandwidthClient;
    use futures::StreamExt;

    let scene = Scene::of().await;
    let (requests, outgoing) = mpsc::channel(1);
    let outgoing = tokio_stream::wrappers::ReceiverStream::new(outgoing);
    let mut client = BandwidthClient::connect(format!("http://{}", scene.peer)).await.unwrap();
    let mut replies = client.measure(outgoing).await.unwrap().into_inner();
    let nonce = replies.message().await.unwrap().unwrap().nonce;
    let (job, node) = (scene.job.to_string(), scene.node.to_string());
    let mut request = MeasureRequest { job, node, client: "endless".to_owned(), proof: Vec::new() };
    request.proof = scene.secret.prove(&request.claim(&nonce));
    requests.send(request).await.unwrap();
    let all = tokio::time::timeout(Duration::from_secs(60), replies.by_ref().count()).await;
    assert!(all.expect("it ends") > 0);
    assert!(scene.measure().await.is_ok(), "and its place is free");
}
