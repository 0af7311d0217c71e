//! etcd's Maintenance and Cluster services as far as they mean something here. The members of a replicated store are
//! those that have a vote; they cannot be changed from outside.

use std::net::SocketAddr;

use etcd_client::proto::{
    PbAlarmRequest, PbAlarmResponse, PbClusterService, PbDefragmentRequest, PbDefragmentResponse, PbDowngradeRequest,
    PbDowngradeResponse, PbHashKvRequest, PbHashKvResponse, PbHashRequest, PbHashResponse, PbMaintenanceService,
    PbMember, PbMemberAddRequest, PbMemberAddResponse, PbMemberListRequest, PbMemberListResponse,
    PbMemberPromoteRequest, PbMemberPromoteResponse, PbMemberRemoveRequest, PbMemberRemoveResponse,
    PbMemberUpdateRequest, PbMemberUpdateResponse, PbMoveLeaderRequest, PbMoveLeaderResponse, PbResponseHeader,
    PbSnapshotRequest, PbSnapshotResponse, PbStatusRequest, PbStatusResponse,
};
use tonic::{Request, Response};

use super::cluster::{RpcResult, Stream};
use super::gate::Gate;
use super::mvcc::Mvcc;
use super::status::not_here;

/// The etcd release whose API and answers this store follows; what tells it from a real one comes after the plus.
const VERSION: &str = "3.6.9+embedded";

const MEMBER: &str = "embedded";

#[derive(Clone)]
pub(super) struct AdminService {
    pub(super) gate: Gate,
    pub(super) address: SocketAddr,
}

impl AdminService {
    async fn header(&self) -> RpcResult<PbResponseHeader> {
        Ok(self.gate.read(|_, _| ()).await?.1)
    }
}

#[tonic::async_trait]
impl PbMaintenanceService for AdminService {
    async fn status(&self, _: Request<PbStatusRequest>) -> RpcResult<Response<PbStatusResponse>> {
        let read = |mvcc: &Mvcc| (mvcc.size(), mvcc.limits().live_bytes);
        let ((size, quota), header) = self.gate.read(|mvcc, _| read(mvcc)).await?;
        Ok(Response::new(PbStatusResponse {
            header: Some(header),
            version: VERSION.to_owned(),
            db_size: size as i64,
            db_size_in_use: size as i64,
            db_size_quota: quota as i64,
            leader: header.member_id,
            raft_index: header.revision as u64,
            raft_applied_index: header.revision as u64,
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
        Ok(Response::new(PbAlarmResponse { header: Some(self.header().await?), alarms: Vec::new() }))
    }

    /// There is no file that could have holes.
    async fn defragment(&self, _: Request<PbDefragmentRequest>) -> RpcResult<Response<PbDefragmentResponse>> {
        Ok(Response::new(PbDefragmentResponse { header: Some(self.header().await?) }))
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
        let header = self.header().await?;
        let member = |(id, address): (u64, String)| PbMember {
            id,
            name: MEMBER.to_owned(),
            client_ur_ls: vec![format!("http://{address}")],
            ..PbMember::default()
        };
        let alone = || vec![(header.member_id, self.address.to_string())];
        let members = self.gate.voters().unwrap_or_else(alone).into_iter().map(member).collect();
        Ok(Response::new(PbMemberListResponse { header: Some(header), members }))
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
