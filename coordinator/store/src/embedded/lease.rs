//! etcd's Lease service. The hub's task ends leases in time.

use std::time::Duration;

use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse, PbLeaseLeasesRequest,
    PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse, PbLeaseService, PbLeaseStatus,
    PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse,
};
use futures::StreamExt;
use tonic::{Request, Response, Streaming};

use super::cluster::{RpcResult, Stream};
use super::command::{self, Answer};
use super::gate::Gate;
use super::kv::mismatch;
use super::status::status;
use crate::LeaseId;

pub(super) struct LeaseService {
    pub(super) gate: Gate,
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[tonic::async_trait]
impl PbLeaseService for LeaseService {
    async fn lease_grant(&self, request: Request<PbLeaseGrantRequest>) -> RpcResult<Response<PbLeaseGrantResponse>> {
        let PbLeaseGrantRequest { ttl, id } = request.into_inner();
        let (Answer::Granted(granted), header) = self.gate.run(command::grant(id, ttl)).await? else {
            return Err(mismatch());
        };
        let (id, ttl) = granted.map_err(status)?;
        let header = Some(header);
        Ok(Response::new(PbLeaseGrantResponse { header, id: id.0, ttl: seconds(ttl), error: String::new() }))
    }

    async fn lease_revoke(&self, request: Request<PbLeaseRevokeRequest>) -> RpcResult<Response<PbLeaseRevokeResponse>> {
        let (Answer::Done(revoked), header) = self.gate.run(command::revoke(request.into_inner().id)).await? else {
            return Err(mismatch());
        };
        revoked.map_err(status)?;
        Ok(Response::new(PbLeaseRevokeResponse { header: Some(header) }))
    }

    type LeaseKeepAliveStream = Stream<PbLeaseKeepAliveResponse>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<PbLeaseKeepAliveRequest>>,
    ) -> RpcResult<Response<Self::LeaseKeepAliveStream>> {
        let gate = self.gate.clone();
        let closed = gate.reign().await?.closing.closed();
        let answers = request.into_inner().then(move |request| {
            let gate = gate.clone();
            async move {
                let id = request?.id;
                let (Answer::Renewed(ttl), header) = gate.run(command::keep_alive(id)).await? else {
                    return Err(mismatch());
                };
                // A lease that is gone is no error here: etcd answers with no time left.
                Ok(PbLeaseKeepAliveResponse { header: Some(header), id, ttl: ttl.map_or(0, seconds) })
            }
        });
        Ok(Response::new(Box::pin(answers.take_until(closed))))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<PbLeaseTimeToLiveRequest>,
    ) -> RpcResult<Response<PbLeaseTimeToLiveResponse>> {
        let PbLeaseTimeToLiveRequest { id, keys } = request.into_inner();
        let (lease, header) = self.gate.read(|mvcc, now| mvcc.lease(now, LeaseId(id))).await?;
        let header = Some(header);
        let response = match lease {
            Some(lease) => PbLeaseTimeToLiveResponse {
                header,
                id,
                ttl: seconds(lease.left),
                granted_ttl: seconds(lease.granted),
                keys: lease.keys.iter().filter(|_| keys).map(|key| key.to_vec()).collect(),
            },
            None => PbLeaseTimeToLiveResponse { header, id, ttl: -1, granted_ttl: 0, keys: Vec::new() },
        };
        Ok(Response::new(response))
    }

    async fn lease_leases(&self, _: Request<PbLeaseLeasesRequest>) -> RpcResult<Response<PbLeaseLeasesResponse>> {
        let (leases, header) = self.gate.read(|mvcc, _| mvcc.leases()).await?;
        let leases = leases.into_iter().map(|id| PbLeaseStatus { id: id.0 }).collect();
        Ok(Response::new(PbLeaseLeasesResponse { header: Some(header), leases }))
    }
}
