//! Barriers on etcd's v2 API, among the members of a version of TorchElastic's rendezvous. Nodes that run torchrun
//! never arrive.
//!
//! No transaction is needed. A version's ranks are never given again, so an arrival under one is its member's; and
//! arrivals only grow in number.

use std::time::Duration;

use tokio::sync::watch;

use crate::Paths;
use crate::etcd_v2::{Answer, Entry, EtcdV2, News, Only, Refusal, Request};
use elastic_node::requests::barrier::{BarrierError, bounded, check, insist};
use elastic_node::{Membership, Status};

const HINT: &str = "; nodes that run torchrun never do";

/// Meets the other members of the current version at `name`. A name serves once in a version. A version that has
/// torchrun's nodes in it ends in [`BarrierError::Timeout`].
pub async fn meet_on_v2(
    etcd: &EtcdV2,
    paths: &Paths,
    status: &watch::Receiver<Status>,
    name: &str,
    within: Duration,
) -> Result<(), BarrierError> {
    check(name)?;
    let mut status = status.clone();
    let Some(membership) = status.borrow_and_update().membership else {
        return Err(BarrierError::NotMember(name.to_owned()));
    };
    let barrier = BarrierOnV2 { etcd, paths, membership, name };
    let met = async {
        barrier.arrive().await?;
        while let Some(index) = barrier.missing_at().await? {
            barrier.change_after(index).await?;
        }
        Ok(())
    };
    let over = left(&mut status, membership);
    let passed = async { Ok(barrier.missing_at().await?.is_none()) };
    bounded(membership.version, name, (within, HINT), met, over, passed).await
}

/// Waits until the node has this place no more.
async fn left(status: &mut watch::Receiver<Status>, membership: Membership) {
    // An error means that there is no node any more.
    let _ = status.wait_for(|status| status.membership != Some(membership)).await;
}

struct BarrierOnV2<'a> {
    etcd: &'a EtcdV2,
    paths: &'a Paths,
    membership: Membership,
    name: &'a str,
}

impl BarrierOnV2<'_> {
    async fn arrive(&self) -> Result<(), BarrierError> {
        let key = self.paths.arrival(self.membership.version, self.name, self.membership.group_rank);
        let arrival = Request::Put { key, value: String::new(), ttl: None, only: Only::Always };
        self.ask(arrival).await?.outcome.map(drop).map_err(|refusal| self.refused(refusal))
    }

    /// The index of an answer that lacks some arrivals; none once all have arrived.
    async fn missing_at(&self) -> Result<Option<u64>, BarrierError> {
        let key = self.paths.barrier(self.membership.version, self.name);
        let Answer { index, outcome } = self.ask(Request::Read { key, recursive: false }).await?;
        let entries = match outcome {
            Ok(Entry { entries, .. }) => entries,
            Err(Refusal::Missing) => Vec::new(),
            Err(refusal) => return Err(self.refused(refusal)),
        };
        let all = entries.len() >= self.membership.group_world_size as usize;
        Ok((!all).then_some(index))
    }

    /// Waits for an arrival after that index, or for as good a reason to look again.
    async fn change_after(&self, index: u64) -> Result<(), BarrierError> {
        let directory = self.paths.barrier(self.membership.version, self.name);
        let wait = || async { Ok(self.etcd.wait(&directory, index + 1).await?) };
        while insist(wait).await? == News::Nothing {}
        Ok(())
    }

    async fn ask(&self, request: Request) -> Result<Answer, BarrierError> {
        insist(|| async { Ok(self.etcd.request(request.clone()).await?) }).await
    }

    fn refused(&self, refusal: Refusal) -> BarrierError {
        BarrierError::Refused { name: self.name.to_owned(), cause: refusal.to_string() }
    }
}
