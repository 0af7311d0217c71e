//! etcd's KV service: reads, writes, transactions, compaction. The rules are in [`crate::embedded::mvcc`].

use std::sync::Arc;

use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbKvService, PbPutRequest,
    PbPutResponse, PbRangeRequest, PbRangeResponse, PbRangeStreamResponse, PbTxnOpResponse, PbTxnRequest,
    PbTxnResponse,
};
use tonic::{Request, Response, Status};

use super::cluster::{Cluster, RpcResult, Stream};
use super::mvcc::{MvccRequest, MvccTxn};
use super::status::{not_here, status};
use super::{Hub, wire};
use crate::Revision;

pub(super) struct KvService {
    pub(super) hub: Arc<Hub>,
    pub(super) cluster: Cluster,
}

impl KvService {
    fn run(&self, txn: &MvccTxn) -> RpcResult<PbTxnResponse> {
        let done = self.hub.with(|mvcc, now| mvcc.txn(now, txn)).map_err(status)?;
        Ok(wire::txn_response(self.cluster.header(done.revision), done))
    }

    /// Runs a single operation. Its answer has the full header, as it does not come inside a transaction's.
    fn run_one(&self, request: MvccRequest) -> RpcResult<Option<PbTxnOpResponse>> {
        let PbTxnResponse { header, mut responses, .. } = self.run(&MvccTxn::one(request))?;
        let mut response = responses.pop().and_then(|response| response.response);
        match &mut response {
            Some(PbTxnOpResponse::ResponseRange(response)) => response.header = header,
            Some(PbTxnOpResponse::ResponsePut(response)) => response.header = header,
            Some(PbTxnOpResponse::ResponseDeleteRange(response)) => response.header = header,
            Some(PbTxnOpResponse::ResponseTxn(_)) | None => {}
        }
        Ok(response)
    }
}

fn mismatch() -> Status {
    Status::internal("the embedded store answered another request than was made")
}

#[tonic::async_trait]
impl PbKvService for KvService {
    async fn range(&self, request: Request<PbRangeRequest>) -> RpcResult<Response<PbRangeResponse>> {
        match self.run_one(MvccRequest::Range(wire::range(request.into_inner())?))? {
            Some(PbTxnOpResponse::ResponseRange(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    type RangeStreamStream = Stream<PbRangeStreamResponse>;

    async fn range_stream(&self, _: Request<PbRangeRequest>) -> RpcResult<Response<Self::RangeStreamStream>> {
        Err(not_here("streamed ranges"))
    }

    async fn put(&self, request: Request<PbPutRequest>) -> RpcResult<Response<PbPutResponse>> {
        match self.run_one(MvccRequest::Put(wire::put(request.into_inner())?))? {
            Some(PbTxnOpResponse::ResponsePut(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    async fn delete_range(&self, request: Request<PbDeleteRequest>) -> RpcResult<Response<PbDeleteResponse>> {
        match self.run_one(MvccRequest::Delete(wire::delete(request.into_inner())))? {
            Some(PbTxnOpResponse::ResponseDeleteRange(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    async fn txn(&self, request: Request<PbTxnRequest>) -> RpcResult<Response<PbTxnResponse>> {
        Ok(Response::new(self.run(&wire::txn(request.into_inner())?)?))
    }

    async fn compact(&self, request: Request<PbCompactionRequest>) -> RpcResult<Response<PbCompactionResponse>> {
        let oldest = Revision(request.into_inner().revision);
        let revision = self.hub.with(|mvcc, _| mvcc.compact(oldest).map(|()| mvcc.revision())).map_err(status)?;
        Ok(Response::new(PbCompactionResponse { header: Some(self.cluster.header(revision)) }))
    }
}
