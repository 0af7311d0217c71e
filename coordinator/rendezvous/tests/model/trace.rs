//! A path as sentences that people can follow.

use std::fmt;

use crate::state::{Body, Txn};
use crate::steps::Step;

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Join(id) => write!(f, "{id} joins as a newcomer"),
            Step::Campaign(id) => write!(f, "{id} takes the vacant leader key"),
            Step::Replace(id) => write!(f, "{id} puts itself over the dead leader's key"),
            Step::HandOver(id) => write!(f, "the leader hands over to {id}"),
            Step::Lapse(id) => write!(f, "{id}'s lease is lost, and its keys with it"),
            Step::Crash(id) => write!(f, "{id}'s agent dies; its guard has not killed the workers yet"),
            Step::Send(txn) => write!(f, "{} sends: {txn}", txn.from),
            Step::Arrive(txn) => write!(f, "{}'s transaction commits: {txn}", txn.from),
            Step::Read(id) => write!(f, "{id} reads its place in the running round"),
            Step::Start(id) => write!(f, "{id} starts its workers"),
            Step::Fence(id) => write!(f, "{id}'s fence point passes; nothing of it works"),
            Step::SayWaiting(id) => write!(f, "{id} stops its workers and says that it waits"),
            Step::Reclaim(id) => write!(f, "{id} reclaims its key"),
            Step::Leave(id) => write!(f, "{id} sees the job failed and leaves"),
            Step::Regenerate(id) => write!(f, "{id} begins a new generation"),
        }
    }
}

impl fmt::Display for Txn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.body {
            Body::Form { number, evict: None, .. } => write!(f, "round {number} forming"),
            Body::Form { number, evict: Some(id), confirmed, .. } => {
                let kind = if confirmed { "confirmed dead" } else { "unconfirmed" };
                write!(f, "round {number} forming, {id} evicted ({kind})")
            }
            Body::Ranks { order, .. } => write!(f, "rank keys {order}"),
            Body::Run { number, order, step, .. } => write!(f, "round {number} running {order} from step {step}"),
            Body::Fail { .. } => write!(f, "round failed"),
            Body::Commit { step, number, .. } => write!(f, "checkpoint step {step} of round {number}"),
        }
    }
}
