//! etcd's Lease service. The hub's task ends leases in time.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse, PbLeaseLeasesRequest,
    PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse, PbLeaseService, PbLeaseStatus,
    PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse,
};
use futures::StreamExt;
use tonic::{Request, Response, Streaming};

use super::Hub;
use super::cluster::{Closing, Cluster, RpcResult, Stream};
use super::status::status;
use crate::LeaseId;

pub(super) struct LeaseService {
    pub(super) hub: Arc<Hub>,
    pub(super) cluster: Cluster,
    pub(super) closing: Closing,
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[tonic::async_trait]
impl PbLeaseService for LeaseService {
    async fn lease_grant(&self, request: Request<PbLeaseGrantRequest>) -> RpcResult<Response<PbLeaseGrantResponse>> {
        let PbLeaseGrantRequest { ttl, id } = request.into_inner();
        let ttl = Duration::from_secs(u64::try_from(ttl).unwrap_or(0));
        let id = (id != 0).then_some(LeaseId(id));
        let granted = self.hub.with(|mvcc, now| Ok((mvcc.grant(now, id, ttl)?, mvcc.revision())));
        let ((id, ttl), revision) = granted.map_err(status)?;
        let header = Some(self.cluster.header(revision));
        Ok(Response::new(PbLeaseGrantResponse { header, id: id.0, ttl: seconds(ttl), error: String::new() }))
    }

    async fn lease_revoke(&self, request: Request<PbLeaseRevokeRequest>) -> RpcResult<Response<PbLeaseRevokeResponse>> {
        let id = LeaseId(request.into_inner().id);
        let revision = self.hub.with(|mvcc, now| mvcc.revoke(now, id).map(|()| mvcc.revision())).map_err(status)?;
        Ok(Response::new(PbLeaseRevokeResponse { header: Some(self.cluster.header(revision)) }))
    }

    type LeaseKeepAliveStream = Stream<PbLeaseKeepAliveResponse>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<PbLeaseKeepAliveRequest>>,
    ) -> RpcResult<Response<Self::LeaseKeepAliveStream>> {
        let (hub, cluster) = (self.hub.clone(), self.cluster);
        let answers = request.into_inner().map(move |request| {
            let id = request?.id;
            let (ttl, revision) = hub.with(|mvcc, now| (mvcc.keep_alive(now, LeaseId(id)), mvcc.revision()));
            // A lease that is gone is no error here: etcd answers with no time left.
            let ttl = ttl.map_or(0, seconds);
            Ok(PbLeaseKeepAliveResponse { header: Some(cluster.header(revision)), id, ttl })
        });
        Ok(Response::new(Box::pin(answers.take_until(self.closing.clone().closed()))))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<PbLeaseTimeToLiveRequest>,
    ) -> RpcResult<Response<PbLeaseTimeToLiveResponse>> {
        let PbLeaseTimeToLiveRequest { id, keys } = request.into_inner();
        let (lease, revision) = self.hub.with(|mvcc, now| (mvcc.lease(now, LeaseId(id)), mvcc.revision()));
        let header = Some(self.cluster.header(revision));
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
        let (leases, revision) = self.hub.with(|mvcc, _| (mvcc.leases(), mvcc.revision()));
        let leases = leases.into_iter().map(|id| PbLeaseStatus { id: id.0 }).collect();
        Ok(Response::new(PbLeaseLeasesResponse { header: Some(self.cluster.header(revision)), leases }))
    }
}
