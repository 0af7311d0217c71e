//! A member's pulse stream to its leader. Where both ends can [prove who they are](super::pulse_proof), they do; a
//! leader that does not is ignored.

use std::collections::VecDeque;
use std::sync::Once;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use elastic_proto::pulse::{Beat, Hello, LeaderMessage, MemberMessage};

use super::pulse_proof::NONCE;
use super::pulse_proof::{Meeting, Nonces, Side};
use super::{Inbox, dial, random_bytes};
use elastic_rendezvous::job::{JobSecret, LeaderRecord, NodeId};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{MemberInput, Word};
use elastic_store::Revision;
use elastic_store::tls::{MutualTls, trouble_in};

/// Pauses before a further stream: each is twice as long as the one before, while no stream lasts.
const AGAIN: Duration = Duration::from_millis(100);
const SELDOM: Duration = Duration::from_secs(2);

const AHEAD: usize = 4;

/// Beats whose answers are still of interest.
const REMEMBERED: usize = 32;

pub(super) struct PulseClient {
    pub(super) job: String,
    pub(super) node: NodeId,
    pub(super) leader: LeaderRecord,
    pub(super) term: Revision,
    pub(super) beat: Duration,
    pub(super) patience: Duration,
    /// What both ends prove that they know; none where one of them cannot.
    pub(super) secret: Option<JobSecret>,
    pub(super) tls: Option<MutualTls>,
    pub(super) inbox: Inbox,
}

/// A stream on which the member has shown who it is.
struct Opened {
    beats: mpsc::Sender<MemberMessage>,
    incoming: Streaming<LeaderMessage>,
    /// Of a leader that has not proved yet who it is: its first word must.
    meeting: Option<Nonces>,
}

/// The pause after a stream that lasted so long. Where thousands follow one leader, those that it has no time for must
/// not come back at once.
fn pause_after(last: Duration, lasted: Duration, beat: Duration) -> Duration {
    if lasted >= beat * 2 { AGAIN } else { (last * 2).min(SELDOM).min(beat * 2) }
}

impl PulseClient {
    /// Keeps a stream open until it is to end.
    pub(super) async fn run(self) {
        let doubted = Once::new();
        let mut pause = AGAIN;
        loop {
            let begun = elastic_store::clock::now();
            self.stream(&doubted).await;
            pause = pause_after(pause, elastic_store::clock::now().since(begun), self.beat);
            // The end of a stream is a hint: the port knows.
            if dial::is_dead(&self.leader.peer, &self.leader.node, self.tls.as_ref(), self.patience).await {
                let _ = self.inbox.send(MemberInput::LeaderDead(self.term));
                return;
            }
            sleep(pause.mul_f64(rand::random_range(0.5..=1.0))).await;
        }
    }

    async fn stream(&self, doubted: &Once) -> Option<()> {
        let Opened { beats, mut incoming, mut meeting } = self.open(doubted).await?;
        let mut sent: VecDeque<(u64, Time)> = VecDeque::with_capacity(REMEMBERED);
        let (mut seq, mut probe, mut echo_ms) = (0, 0, None);
        let mut ticks = interval(self.beat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                message = incoming.message() => {
                    let LeaderMessage { answer, probe: asked, proof, .. } = message.ok()??;
                    if let Some(nonces) = meeting.take() && !self.is_leaders(&nonces, &proof) {
                        return self.doubt(doubted);
                    }
                    if let Some(answer) = answer {
                        echo_ms = Some(answer.sent_ms);
                        let at = sent.iter().find(|(seq, _)| *seq == answer.seq)?.1;
                        let word = Word {
                            round: answer.round,
                            revision: Revision(answer.round_revision),
                            running: answer.running,
                            proof_age: Duration::from_millis(answer.proof_age_ms),
                            all_heard: answer.all_heard_ms.map(Duration::from_millis),
                        };
                        let input = MemberInput::Word { sent: at, term: Revision(answer.term), word };
                        self.inbox.send(input).ok()?;
                    }
                    match asked {
                        Some(asked) => probe = asked.number,
                        None => continue,
                    }
                }
            }
            let beat = Beat { seq: seq + 1, probe, echo_ms };
            match beats.try_send(MemberMessage { beat: Some(beat), ..MemberMessage::default() }) {
                Ok(()) => {}
                // The leader reads slowly: the next beat says as much as this one would have.
                Err(TrySendError::Full(_)) => continue,
                Err(TrySendError::Closed(_)) => return None,
            }
            seq += 1;
            if sent.len() == REMEMBERED {
                sent.pop_front();
            }
            sent.push_back((seq, elastic_store::clock::now()));
        }
    }

    /// Opens a stream, and shows who opens it.
    async fn open(&self, doubted: &Once) -> Option<Opened> {
        let mut client = match dial::connect(&self.leader.peer, self.tls.as_ref()).await {
            Ok(client) => client,
            Err(error) => return self.unreached(doubted, &dial::innermost(&error)),
        };
        let (beats, outgoing) = mpsc::channel(AHEAD);
        let nonce = match &self.secret {
            Some(_) => random_bytes::<NONCE>().ok()?.to_vec(),
            None => Vec::new(),
        };
        let hello = Hello { job: self.job.clone(), node: self.node.to_string(), nonce: nonce.clone() };
        beats.try_send(MemberMessage { hello: Some(hello), ..MemberMessage::default() }).ok()?;
        let mut incoming = client.watch(ReceiverStream::new(outgoing)).await.ok()?.into_inner();
        let Some(secret) = &self.secret else { return Some(Opened { beats, incoming, meeting: None }) };
        let Some(nonces) = Nonces::of(&nonce, &incoming.message().await.ok()??.nonce) else {
            return self.doubt(doubted);
        };
        let proof = self.meeting(&nonces).prove(Side::Member, secret);
        beats.try_send(MemberMessage { proof, ..MemberMessage::default() }).ok()?;
        Some(Opened { beats, incoming, meeting: Some(nonces) })
    }

    fn meeting<'a>(&'a self, nonces: &'a Nonces) -> Meeting<'a> {
        Meeting { job: &self.job, leader: &self.leader.node, member: &self.node, nonces }
    }

    fn is_leaders(&self, nonces: &Nonces, proof: &[u8]) -> bool {
        self.secret.as_ref().is_none_or(|secret| self.meeting(nonces).verify(Side::Leader, secret, proof))
    }

    /// The leader's port cannot be reached: that passes, unless one of both ends does not trust the other.
    fn unreached<T>(&self, doubted: &Once, cause: &str) -> Option<T> {
        if let Some(trouble) = trouble_in(cause) {
            let (leader, at) = (&self.leader.node, &self.leader.peer);
            doubted.call_once(|| tracing::warn!(%leader, %at, "the leader is not reached: {trouble}"));
        }
        None
    }

    /// Anyone who is there is not listened to, and not for dead either: it may be the leader, and the secret another.
    fn doubt<T>(&self, doubted: &Once) -> Option<T> {
        doubted.call_once(|| {
            tracing::warn!(
                leader = %self.leader.node, at = %self.leader.peer,
                "who answers where this leader takes pulses does not prove that it knows the job's secret, and is not \
                 listened to: somebody else is there, or the `secret` in the store was changed after this node had joined"
            );
        });
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use elastic_proto::pulse::Answer;
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;
    use crate::notes::{LeaderNote, PulseEvent};
    use crate::peer_port::PeerPort;
    use crate::pulse_server::serve;
    use crate::tasks::AbortOnDrop;
    use elastic_rendezvous::job::Endpoint;

    const WITHIN: Duration = Duration::from_secs(20);

    /// A port where somebody speaks as the leader, knowing this secret or none, and a member that knows `member`'s. What
    /// the leader is shown goes to `shown`: whether it was a proof by its own secret.
    struct Scene {
        words: mpsc::UnboundedReceiver<MemberInput>,
        shown: mpsc::UnboundedReceiver<bool>,
        _tasks: [AbortOnDrop; 3],
    }

    impl Scene {
        async fn of(leader: Option<JobSecret>, member: Option<JobSecret>) -> Scene {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let peer = Endpoint { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
            let (front, id) = (Arc::new(PeerPort::default()), NodeId::from_text("l:1"));
            let (inbox, notes) = mpsc::unbounded_channel();
            front.open(&id, &"job".parse().unwrap(), inbox);
            let serving = AbortOnDrop(tokio::spawn(serve(listener, front, None, None)));
            let (tell, shown) = mpsc::unbounded_channel();
            let leading = AbortOnDrop(tokio::spawn(answer_all(notes, leader, id.clone(), tell)));
            let (inbox, words) = mpsc::unbounded_channel();
            let client = PulseClient {
                job: "job".into(),
                node: NodeId::from_text("m:1"),
                leader: LeaderRecord::new(id, peer, false),
                term: Revision(1),
                beat: Duration::from_millis(20),
                patience: Duration::from_secs(1),
                secret: member,
                tls: None,
                inbox,
            };
            Scene { words, shown, _tasks: [serving, leading, AbortOnDrop(tokio::spawn(client.run()))] }
        }

        /// Whether the next stream shows a proof by the leader's secret.
        async fn next_shown(&mut self) -> bool {
            timeout(WITHIN, self.shown.recv()).await.expect("a stream").expect("the leader is there")
        }
    }

    /// Answers every beat on every stream, whatever was shown on it.
    async fn answer_all(
        mut notes: mpsc::UnboundedReceiver<LeaderNote>,
        secret: Option<JobSecret>,
        id: NodeId,
        tell: mpsc::UnboundedSender<bool>,
    ) {
        let mut streams = std::collections::BTreeMap::new();
        while let Some(note) = notes.recv().await {
            let LeaderNote::Pulse { stream, event, .. } = note else { continue };
            match event {
                PulseEvent::Opened { node, shown, answers } => {
                    let proof = secret.as_ref().zip(shown).and_then(|(secret, shown)| shown.answer(secret, &id, &node));
                    let _ = tell.send(proof.is_some());
                    answers.send_modify(|word| word.proof = proof.unwrap_or_else(|| vec![7; 32]));
                    streams.insert(stream, answers);
                }
                PulseEvent::Beat(Beat { seq, .. }) => {
                    if let Some(answers) = streams.get(&stream) {
                        answers.send_modify(|word| word.answer = Some(Answer { seq, ..Answer::default() }));
                    }
                }
                PulseEvent::Closed => drop(streams.remove(&stream)),
            }
        }
    }

    #[test]
    fn a_member_comes_back_less_and_less_often_while_no_stream_lasts() {
        let (beat, short) = (Duration::from_secs(1), Duration::from_millis(20));
        let mut pauses = vec![AGAIN];
        for lasted in [short, short, short, short, short, short, beat * 3, short] {
            pauses.push(pause_after(*pauses.last().unwrap(), lasted, beat));
        }
        let millis: Vec<u128> = pauses.iter().map(Duration::as_millis).collect();
        assert_eq!(millis, [100, 200, 400, 800, 1600, 2000, 2000, 100, 200]);
    }

    #[tokio::test]
    async fn a_member_listens_to_a_leader_that_proves_who_it_is_or_whose_job_has_no_secret() {
        let secret = |byte| Some(JobSecret::of([byte; JobSecret::LENGTH]));
        for (what, leader, member, proved) in
            [("both know it", secret(7), secret(7), true), ("the job has none", None, None, false)]
        {
            let mut scene = Scene::of(leader, member).await;
            assert_eq!(scene.next_shown().await, proved, "{what}");
            let word = timeout(WITHIN, scene.words.recv()).await.expect(what);
            assert!(matches!(word, Some(MemberInput::Word { .. })), "{what}: {word:?}");
        }
        for (what, leader) in [("it knows none", None), ("it knows another", secret(8))] {
            let mut scene = Scene::of(leader, secret(7)).await;
            // It is tried again and again, and its answers to beats are not heard.
            for _ in 0..3 {
                assert!(!scene.next_shown().await, "{what}");
            }
            assert!(scene.words.try_recv().is_err(), "{what}: neither its words nor its death");
        }
    }
}
