//! What is behind a peer port: who takes part there, in which jobs, and who is admitted.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use elastic_rendezvous::job::{Claim, JobId, JobSecret, NodeId};
use tonic::Status;

use super::notes::LeaderInbox;

/// Who answers behind a peer port, and where the pulses of each job go. An agent takes part in one job; a coordinator's
/// replica leads many, under one node id.
#[derive(Default)]
pub struct PeerPort {
    inner: Mutex<Served>,
}

#[derive(Default)]
pub(super) struct Served {
    pub(super) node: String,
    pub(super) jobs: BTreeMap<String, LeaderInbox>,
    /// Of the job that an agent takes part in, once it has joined.
    pub(super) secret: Option<JobSecret>,
}

impl PeerPort {
    /// Takes pulses for `job` from now on, as `node`.
    pub fn open(&self, node: &NodeId, job: &JobId, inbox: LeaderInbox) {
        let mut served = self.lock();
        served.node = node.to_string();
        served.jobs.insert(job.to_string(), inbox);
    }

    /// Takes none for `job` any more.
    pub fn close(&self, job: &JobId) {
        self.lock().jobs.remove(job.as_ref());
    }

    /// Names no one any more: the node is about to go. If the port still named it, no one would ask a second time,
    /// though its stream and key end in the same moment.
    pub fn leave(&self) {
        self.lock().node.clear();
    }

    /// Says who is here before there is a job.
    pub fn introduce(&self, node: &NodeId) {
        self.lock().node = node.to_string();
    }

    /// From now on anyone who proves to know this secret is admitted. `None`: no one is.
    pub(super) fn trust(&self, secret: Option<JobSecret>) {
        self.lock().secret = secret;
    }

    /// Admits who proves to know the secret of a job that this node takes part in.
    pub(super) fn admit(&self, claim: &Claim<'_>, proof: &[u8]) -> Result<(), Status> {
        let served = self.lock();
        if served.node != claim.node || !served.jobs.contains_key(claim.job) {
            return Err(Status::failed_precondition("that node does not take part in that job here"));
        }
        let secret = served.secret.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "the job had no secret when this node joined, so no one can prove who may ask: was its `secret` key \
                 deleted?",
            )
        })?;
        secret.verify(claim, proof).then_some(()).ok_or_else(|| {
            Status::permission_denied("the proof does not fit: only who can read the job's secret in the store may")
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Served> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
