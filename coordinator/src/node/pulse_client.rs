//! A member's pulse stream to its leader: beats, answers, probes, and the hint that the leader died.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::wrappers::ReceiverStream;

use elastic_proto::pulse::{Beat, Hello, LeaderMessage, MemberMessage};

use super::{Inbox, dial};
use crate::job::{LeaderRecord, NodeId};
use crate::rendezvous::{MemberInput, Word};
use crate::store::Revision;
use crate::time::Time;

/// Pause before a stream is opened again.
const AGAIN: Duration = Duration::from_millis(100);

/// Messages that wait for the network.
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
    pub(super) inbox: Inbox,
}

impl PulseClient {
    /// Keeps a stream open for as long as it is not told to end.
    pub(super) async fn run(self) {
        loop {
            self.stream().await;
            // The end of a stream is a hint: the port knows.
            if dial::is_dead(&self.leader.peer, &self.leader.node, self.patience).await {
                let _ = self.inbox.send(MemberInput::LeaderDead(self.term));
                return;
            }
            sleep(AGAIN).await;
        }
    }

    async fn stream(&self) -> Option<()> {
        let mut client = dial::connect(&self.leader.peer).await?;
        let (beats, outgoing) = mpsc::channel(AHEAD);
        let hello = Hello { job: self.job.clone(), node: self.node.to_string() };
        beats.try_send(MemberMessage { hello: Some(hello), beat: None }).ok()?;
        let mut incoming = client.watch(ReceiverStream::new(outgoing)).await.ok()?.into_inner();

        let mut sent: VecDeque<(u64, Time)> = VecDeque::with_capacity(REMEMBERED);
        let (mut seq, mut probe, mut echo_ms) = (0, 0, None);
        let mut ticks = interval(self.beat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                message = incoming.message() => {
                    let LeaderMessage { answer, probe: asked } = message.ok()??;
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
            match beats.try_send(MemberMessage { hello: None, beat: Some(beat) }) {
                Ok(()) => {}
                // The leader reads slowly: the next beat says as much as this one would have.
                Err(TrySendError::Full(_)) => continue,
                Err(TrySendError::Closed(_)) => return None,
            }
            seq += 1;
            if sent.len() == REMEMBERED {
                sent.pop_front();
            }
            sent.push_back((seq, Time::now()));
        }
    }
}
