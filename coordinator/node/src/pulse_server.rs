//! The peer port: takes members' pulse streams, says who is here, and serves [`logs`] and
//! [`bandwidth`].
//!
//! Anybody may connect here, so connections, streams, messages and what is kept for a slow client are all bounded.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::net::TcpListener;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::pulse::pulse_server::{Pulse, PulseServer};
use elastic_proto::pulse::{Found, Hello, IdentifyReply, IdentifyRequest, LeaderMessage, MemberMessage};

use super::logs::{self, LogRequest};
use super::notes::{LeaderInbox, LeaderNote, PulseEvent};
use super::peer_port::PeerPort;
use super::pulse_proof::{NONCE, Nonces, Shown};
use super::{bandwidth, random_bytes};
use elastic_rendezvous::job::NodeId;
use elastic_store::listener::{Port, Share};
use elastic_store::tls::MutualTls;

/// Largest message. A hello is the longest: a job's id and a node's, of at most 255 and about 300 bytes.
const MESSAGE: usize = 1 << 10;

/// Streams of one connection. An agent opens one, and asks who is here on another.
const STREAMS: u32 = 4;

/// Bytes that one stream or connection may have under way: HTTP/2's smallest for a connection.
const WINDOW: u32 = (1 << 16) - 1;

/// Longest wait for a stream's first message, for the proof that follows it, or for a question.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// How often a silent client is asked whether it is there, and how long it may take to answer.
const CLIENT_CHECK: Duration = Duration::from_secs(10);

/// Notes for leaders under way at once, of all streams together. They take turns: a client that says much waits.
const NOTES: usize = 256;

/// Serves until the runtime ends. An agent's port has `logs`, where requests for workers' output go, and lets others
/// measure bandwidth.
pub async fn serve(
    listener: TcpListener,
    front: Arc<PeerPort>,
    logs: Option<mpsc::Sender<LogRequest>>,
    tls: Option<MutualTls>,
) {
    serve_checking(listener, front, logs, tls, CLIENT_CHECK).await;
}

async fn serve_checking(
    listener: TcpListener,
    front: Arc<PeerPort>,
    logs: Option<mpsc::Sender<LogRequest>>,
    tls: Option<MutualTls>,
    check: Duration,
) {
    let bandwidth = logs.is_some().then(|| bandwidth::service(Arc::clone(&front)));
    let logs = logs.map(|requests| logs::service(Arc::clone(&front), requests));
    let places = Arc::new(Semaphore::new(Share::Peers.connections().saturating_mul(STREAMS as usize)));
    let service = PulseService { front, next: Arc::default(), places, turns: Arc::new(Semaphore::new(NOTES)) };
    let service = PulseServer::new(service).max_decoding_message_size(MESSAGE);
    let serving = tonic::transport::Server::builder()
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_max_header_list_size(u32::try_from(MESSAGE * 8).unwrap_or(u32::MAX))
        .http2_keepalive_interval(Some(check))
        .http2_keepalive_timeout(Some(check))
        .timeout(FIRST_WORDS)
        .add_service(service)
        .add_optional_service(logs)
        .add_optional_service(bandwidth)
        .serve_with_incoming(Port::new(listener, Share::Peers).incoming(tls));
    if let Err(error) = serving.await {
        tracing::error!(%error, "the peer port failed; other nodes will find this one silent");
    }
}

struct PulseService {
    front: Arc<PeerPort>,
    next: Arc<AtomicU64>,
    /// For streams, until their end was reported.
    places: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

/// Where one stream's notes go: one at a time, each when its turn has come.
struct NoteSender {
    stream: u64,
    inbox: LeaderInbox,
    turns: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
}

struct Gone;

impl From<AcquireError> for Gone {
    fn from(_: AcquireError) -> Gone {
        Gone
    }
}

impl NoteSender {
    async fn say(&self, event: PulseEvent) -> Result<(), Gone> {
        let turn = Arc::clone(&self.turns).acquire_owned().await?;
        self.inbox.send(LeaderNote::Pulse { stream: self.stream, event, turn }).map_err(|_| Gone)
    }
}

#[tonic::async_trait]
impl Pulse for PulseService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<LeaderMessage, Status>> + Send>>;

    async fn watch(&self, request: Request<Streaming<MemberMessage>>) -> Result<Response<Self::WatchStream>, Status> {
        let full = |_| Status::resource_exhausted("this port has too many streams");
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(full)?;
        let mut messages = request.into_inner();
        let hello = messages
            .message()
            .await?
            .and_then(|message| message.hello)
            .ok_or_else(|| Status::invalid_argument("the first message must be a hello"))?;
        let inbox = self.front.lock().jobs.get(&hello.job).cloned();
        let inbox = inbox.ok_or_else(|| Status::failed_precondition("that job is not led from here"))?;
        let stream = self.next.fetch_add(1, Ordering::Relaxed);
        let notes = NoteSender { stream, inbox, turns: Arc::clone(&self.turns), _place: place };
        let nonces = nonces(&hello)?;
        let first = nonces.as_ref().map(|nonces| LeaderMessage { nonce: nonces.leaders(), ..LeaderMessage::default() });
        let (answers, words) = watch::channel(LeaderMessage::default());
        tokio::spawn(hear(messages, hello, nonces, notes, answers));
        Ok(Response::new(Box::pin(futures::stream::iter(first.map(Ok)).chain(newest(words)))))
    }

    async fn identify(&self, request: Request<IdentifyRequest>) -> Result<Response<IdentifyReply>, Status> {
        // Who does not know whom to ask for learns no name.
        let asked = request.into_inner().node;
        let served = self.front.lock();
        let found = match served.node.as_str() {
            "" => Found::Nobody,
            _ if asked.is_empty() => Found::Nobody,
            node if node == asked => Found::Here,
            _ => Found::Another,
        };
        Ok(Response::new(IdentifyReply { found: found.into() }))
    }
}

/// The nonces of a stream whose member proves who it is.
fn nonces(hello: &Hello) -> Result<Option<Nonces>, Status> {
    if hello.nonce.is_empty() {
        return Ok(None);
    }
    let own: [u8; NONCE] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
    let nonces = Nonces::of(&hello.nonce, &own);
    nonces.map(Some).ok_or_else(|| Status::invalid_argument(format!("a hello's nonce has {NONCE} bytes")))
}

/// Passes on what comes on a stream to the leader, once all is there that it must show. The leader judges that.
async fn hear(
    mut messages: Streaming<MemberMessage>,
    Hello { job, node, .. }: Hello,
    nonces: Option<Nonces>,
    notes: NoteSender,
    answers: watch::Sender<LeaderMessage>,
) {
    let shown = match nonces {
        None => None,
        Some(nonces) => match timeout(FIRST_WORDS, messages.message()).await {
            Ok(Ok(Some(MemberMessage { proof, .. }))) => Some(Shown { job, nonces, proof }),
            _ => return,
        },
    };
    let listened = answers.subscribe();
    if notes.say(PulseEvent::Opened { node: NodeId::from_text(&node), shown, answers }).await.is_err() {
        return;
    }
    while let Ok(Some(message)) = messages.message().await {
        // The leader has turned it away.
        if listened.has_changed().is_err() {
            return;
        }
        if let Some(beat) = message.beat
            && notes.say(PulseEvent::Beat(beat)).await.is_err()
        {
            return;
        }
    }
    let _ = notes.say(PulseEvent::Closed).await;
}

/// The leader's newest word as a stream: a slow client misses those in between. Each answer, each probe and the proof
/// are sent once.
fn newest(words: watch::Receiver<LeaderMessage>) -> impl Stream<Item = Result<LeaderMessage, Status>> + Send {
    futures::stream::unfold((words, LeaderMessage::default()), |(mut words, told)| async move {
        words.changed().await.ok()?;
        let now = words.borrow_and_update().clone();
        let news = LeaderMessage {
            answer: now.answer.filter(|_| now.answer != told.answer),
            probe: now.probe.filter(|_| now.probe != told.probe),
            proof: if now.proof == told.proof { Vec::new() } else { now.proof.clone() },
            nonce: Vec::new(),
        };
        Some((Ok(news), (words, now)))
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use elastic_proto::pulse::pulse_client::PulseClient;
    use elastic_proto::pulse::{Answer, Beat, Hello, Probe};
    use futures::StreamExt;
    use tokio::sync::mpsc;

    use super::*;
    use crate::blackhole_proxy::BlackholeProxy;

    const WITHIN: Duration = Duration::from_secs(20);

    fn beats() -> impl Stream<Item = MemberMessage> + Send {
        let hello = Hello { job: "job".into(), node: "a:1".into(), nonce: Vec::new() };
        let beat = |seq| Beat { seq, probe: 0, echo_ms: None };
        let beats = (1..).map(move |seq| MemberMessage { beat: Some(beat(seq)), ..MemberMessage::default() });
        let hello = MemberMessage { hello: Some(hello), ..MemberMessage::default() };
        futures::stream::iter([hello].into_iter().chain(beats))
    }

    /// A port with a leader that takes notes when it is to.
    async fn port(check: Duration) -> (SocketAddr, mpsc::UnboundedReceiver<LeaderNote>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let front = Arc::new(PeerPort::default());
        let (inbox, notes) = mpsc::unbounded_channel();
        front.open(&NodeId::from_text("a:1"), &"job".parse().unwrap(), inbox);
        tokio::spawn(serve_checking(listener, front, None, None, check));
        (address, notes)
    }

    #[tokio::test]
    async fn a_client_in_a_black_hole_is_given_up() {
        let (address, mut notes) = port(Duration::from_millis(50)).await;
        let hole = BlackholeProxy::before(address).await.unwrap();
        let mut client = PulseClient::connect(format!("http://{}", hole.address)).await.unwrap();
        let silent = beats().take(1).chain(futures::stream::pending());
        let _stream = client.watch(silent).await.unwrap();
        let said =
            async |notes: &mut mpsc::UnboundedReceiver<LeaderNote>| match tokio::time::timeout(WITHIN, notes.recv())
                .await
                .expect("a note")
            {
                Some(LeaderNote::Pulse { event, .. }) => event,
                _ => panic!("no pulse"),
            };
        assert!(matches!(said(&mut notes).await, PulseEvent::Opened { .. }));
        hole.swallow();
        assert!(matches!(said(&mut notes).await, PulseEvent::Closed));
    }

    #[tokio::test]
    async fn a_leader_s_inbox_is_bounded_and_each_stream_has_its_turn() {
        let (address, mut notes) = port(CLIENT_CHECK).await;
        for _ in 0..8 {
            let url = format!("http://{address}");
            tokio::spawn(async move {
                let _unread = PulseClient::connect(url).await.unwrap().watch(beats()).await;
                std::future::pending::<()>().await;
            });
        }
        // More never come than there are turns, however long no one looks.
        let full = async {
            while notes.len() < NOTES {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WITHIN, full).await.expect("the flood arrives");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(notes.len(), NOTES);
        let mut heard = std::collections::BTreeSet::new();
        while heard.len() < 8 {
            match tokio::time::timeout(WITHIN, notes.recv()).await {
                Ok(Some(LeaderNote::Pulse { stream, .. })) => heard.insert(stream),
                _ => panic!("only {heard:?} were heard"),
            };
        }
    }

    #[tokio::test]
    async fn a_stream_that_the_leader_turns_away_is_read_no_further() {
        let (address, mut notes) = port(CLIENT_CHECK).await;
        let (open, mut ended) = mpsc::channel::<()>(1);
        let words = beats().inspect(move |_| {
            let _open = &open;
        });
        let mut client = PulseClient::connect(format!("http://{address}")).await.unwrap();
        let _answers = client.watch(words).await.unwrap();
        // The leader lets go of each note, and so of the stream.
        let lets_go = async { while notes.recv().await.is_some() {} };
        tokio::select! {
            () = lets_go => panic!("the port is there"),
            end = tokio::time::timeout(WITHIN, ended.recv()) => assert_eq!(end.expect("it is ended"), None),
        }
    }

    #[tokio::test]
    async fn who_does_not_read_is_kept_the_newest_word_alone() {
        let (words, heard) = watch::channel(LeaderMessage::default());
        for seq in 1..=1000 {
            words.send_modify(|word| word.answer = Some(Answer { seq, ..Answer::default() }));
        }
        words.send_modify(|word| word.probe = Some(Probe { number: 7 }));
        drop(words);
        let told: Vec<_> = newest(heard).map(Result::unwrap).collect().await;
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].answer.map(|answer| answer.seq), Some(1000));
        assert_eq!(told[0].probe, Some(Probe { number: 7 }));
    }

    #[tokio::test]
    async fn each_answer_and_each_probe_is_reported_once() {
        let (words, heard) = watch::channel(LeaderMessage::default());
        let mut told = Box::pin(newest(heard));
        words.send_modify(|word| word.probe = Some(Probe { number: 7 }));
        assert!(told.next().await.unwrap().unwrap().probe.is_some());
        words.send_modify(|word| word.answer = Some(Answer { seq: 1, ..Answer::default() }));
        assert_eq!(told.next().await.unwrap().unwrap().probe, None, "a member would answer it again and again");
    }
}
