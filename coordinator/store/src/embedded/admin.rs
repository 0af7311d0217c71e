//! etcd's Maintenance and Cluster services as far as they mean something for a single process, and the answer to
//! clients that want to log in. There is always exactly one member.

use std::net::SocketAddr;
use std::sync::Arc;

use etcd_client::proto::{
    PbAlarmRequest, PbAlarmResponse, PbClusterService, PbDefragmentRequest, PbDefragmentResponse, PbDowngradeRequest,
    PbDowngradeResponse, PbHashKvRequest, PbHashKvResponse, PbHashRequest, PbHashResponse, PbMaintenanceService,
    PbMember, PbMemberAddRequest, PbMemberAddResponse, PbMemberListRequest, PbMemberListResponse,
    PbMemberPromoteRequest, PbMemberPromoteResponse, PbMemberRemoveRequest, PbMemberRemoveResponse,
    PbMemberUpdateRequest, PbMemberUpdateResponse, PbMoveLeaderRequest, PbMoveLeaderResponse, PbResponseHeader,
    PbSnapshotRequest, PbSnapshotResponse, PbStatusRequest, PbStatusResponse,
};
use tonic::{Request, Response};

use super::Hub;
use super::cluster::{Cluster, RpcResult, Stream};
use super::status::not_here;

/// The etcd release whose API and answers this store follows; what tells it from a real one comes after the plus.
const VERSION: &str = "3.6.9+embedded";

const MEMBER: &str = "embedded";

#[derive(Clone)]
pub(super) struct AdminService {
    pub(super) hub: Arc<Hub>,
    pub(super) cluster: Cluster,
    pub(super) address: SocketAddr,
}

impl AdminService {
    fn header(&self) -> PbResponseHeader {
        self.cluster.header(self.hub.with(|mvcc, _| mvcc.revision()))
    }
}

#[tonic::async_trait]
impl PbMaintenanceService for AdminService {
    async fn status(&self, _: Request<PbStatusRequest>) -> RpcResult<Response<PbStatusResponse>> {
        let (revision, size, quota) = self.hub.with(|mvcc, _| (mvcc.revision(), mvcc.size(), mvcc.limits().live_bytes));
        let header = self.cluster.header(revision);
        Ok(Response::new(PbStatusResponse {
            header: Some(header),
            version: VERSION.to_owned(),
            db_size: size as i64,
            db_size_in_use: size as i64,
            db_size_quota: quota as i64,
            leader: header.member_id,
            raft_index: revision.0 as u64,
            raft_applied_index: revision.0 as u64,
            raft_term: header.raft_term,
            ..PbStatusResponse::default()
        }))
    }

    /// No alarm is ever raised here: a full store refuses what does not fit and continues.
    async fn alarm(&self, request: Request<PbAlarmRequest>) -> RpcResult<Response<PbAlarmResponse>> {
        const ACTIVATE: i32 = 1;
        if request.into_inner().action == ACTIVATE {
            return Err(not_here("alarms"));
        }
        Ok(Response::new(PbAlarmResponse { header: Some(self.header()), alarms: Vec::new() }))
    }

    /// There is no file that could have holes.
    async fn defragment(&self, _: Request<PbDefragmentRequest>) -> RpcResult<Response<PbDefragmentResponse>> {
        Ok(Response::new(PbDefragmentResponse { header: Some(self.header()) }))
    }

    async fn hash(&self, _: Request<PbHashRequest>) -> RpcResult<Response<PbHashResponse>> {
        Err(not_here("hashes"))
    }

    async fn hash_kv(&self, _: Request<PbHashKvRequest>) -> RpcResult<Response<PbHashKvResponse>> {
        Err(not_here("hashes"))
    }

    type SnapshotStream = Stream<PbSnapshotResponse>;

    async fn snapshot(&self, _: Request<PbSnapshotRequest>) -> RpcResult<Response<Self::SnapshotStream>> {
        Err(not_here("snapshots"))
    }

    async fn move_leader(&self, _: Request<PbMoveLeaderRequest>) -> RpcResult<Response<PbMoveLeaderResponse>> {
        Err(not_here("second member"))
    }

    async fn downgrade(&self, _: Request<PbDowngradeRequest>) -> RpcResult<Response<PbDowngradeResponse>> {
        Err(not_here("other versions"))
    }
}

#[tonic::async_trait]
impl PbClusterService for AdminService {
    async fn member_list(&self, _: Request<PbMemberListRequest>) -> RpcResult<Response<PbMemberListResponse>> {
        let header = self.header();
        let member = PbMember {
            id: header.member_id,
            name: MEMBER.to_owned(),
            client_ur_ls: vec![format!("http://{}", self.address)],
            ..PbMember::default()
        };
        Ok(Response::new(PbMemberListResponse { header: Some(header), members: vec![member] }))
    }

    async fn member_add(&self, _: Request<PbMemberAddRequest>) -> RpcResult<Response<PbMemberAddResponse>> {
        Err(not_here("second member"))
    }

    async fn member_remove(&self, _: Request<PbMemberRemoveRequest>) -> RpcResult<Response<PbMemberRemoveResponse>> {
        Err(not_here("second member"))
    }

    async fn member_update(&self, _: Request<PbMemberUpdateRequest>) -> RpcResult<Response<PbMemberUpdateResponse>> {
        Err(not_here("second member"))
    }

    async fn member_promote(&self, _: Request<PbMemberPromoteRequest>) -> RpcResult<Response<PbMemberPromoteResponse>> {
        Err(not_here("second member"))
    }
}
