//! etcd's KV service: reads, writes, transactions, compaction. The rules are in [`crate::embedded::mvcc`].

use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbKvService, PbPutRequest,
    PbPutResponse, PbRangeRequest, PbRangeResponse, PbRangeStreamResponse, PbTxnOpRequest, PbTxnOpResponse,
    PbTxnRequest, PbTxnRequestOp, PbTxnResponse,
};
use tonic::{Request, Response, Status};

use super::cluster::{RpcResult, Stream};
use super::command::{self, Answer};
use super::gate::Gate;
use super::status::{not_here, status};
use super::wire;

pub(super) struct KvService {
    pub(super) gate: Gate,
}

impl KvService {
    async fn run(&self, txn: &PbTxnRequest) -> RpcResult<PbTxnResponse> {
        match self.gate.run(command::txn(txn)).await? {
            (Answer::Txn(done), header) => Ok(wire::txn_response(header, done?)),
            _ => Err(mismatch()),
        }
    }

    /// Runs a single operation. Its answer has the full header, as it does not come inside a transaction's.
    async fn run_one(&self, request: PbTxnOpRequest) -> RpcResult<Option<PbTxnOpResponse>> {
        let success = vec![PbTxnRequestOp { request: Some(request) }];
        let one = PbTxnRequest { success, ..PbTxnRequest::default() };
        let PbTxnResponse { header, mut responses, .. } = self.run(&one).await?;
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

pub(super) fn mismatch() -> Status {
    Status::internal("the embedded store answered another request than was made")
}

#[tonic::async_trait]
impl PbKvService for KvService {
    async fn range(&self, request: Request<PbRangeRequest>) -> RpcResult<Response<PbRangeResponse>> {
        match self.run_one(PbTxnOpRequest::RequestRange(request.into_inner())).await? {
            Some(PbTxnOpResponse::ResponseRange(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    type RangeStreamStream = Stream<PbRangeStreamResponse>;

    async fn range_stream(&self, _: Request<PbRangeRequest>) -> RpcResult<Response<Self::RangeStreamStream>> {
        Err(not_here("streamed ranges"))
    }

    async fn put(&self, request: Request<PbPutRequest>) -> RpcResult<Response<PbPutResponse>> {
        match self.run_one(PbTxnOpRequest::RequestPut(request.into_inner())).await? {
            Some(PbTxnOpResponse::ResponsePut(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    async fn delete_range(&self, request: Request<PbDeleteRequest>) -> RpcResult<Response<PbDeleteResponse>> {
        match self.run_one(PbTxnOpRequest::RequestDeleteRange(request.into_inner())).await? {
            Some(PbTxnOpResponse::ResponseDeleteRange(response)) => Ok(Response::new(response)),
            _ => Err(mismatch()),
        }
    }

    async fn txn(&self, request: Request<PbTxnRequest>) -> RpcResult<Response<PbTxnResponse>> {
        Ok(Response::new(self.run(&request.into_inner()).await?))
    }

    async fn compact(&self, request: Request<PbCompactionRequest>) -> RpcResult<Response<PbCompactionResponse>> {
        match self.gate.run(command::compact(request.into_inner().revision)).await? {
            (Answer::Done(done), header) => {
                done.map_err(status)?;
                Ok(Response::new(PbCompactionResponse { header: Some(header) }))
            }
            _ => Err(mismatch()),
        }
    }
}
