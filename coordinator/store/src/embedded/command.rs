//! What changes the store, as one message: the log of a replicated store is made of these. The same commands in the same
//! order make the same store.

use std::time::Duration;

use elastic_proto::replication::command::What;
use elastic_proto::replication::{Command, Grant, NewLeader, Tick};
use elastic_rendezvous::time::Time;
use etcd_client::proto::PbTxnRequest;
use prost::Message;
use tonic::Status;

use super::mvcc::{Error, Mvcc, TxnResponse};
use super::{status, wire};
use crate::{LeaseId, Revision};

/// What a command came to. A refused one changed nothing.
#[derive(Debug)]
pub(super) enum Answer {
    Txn(Result<TxnResponse, Status>),
    /// The lease, and its time.
    Granted(Result<(LeaseId, Duration), Error>),
    /// The lease's time; `None` if it does not exist.
    Renewed(Option<Duration>),
    /// Of what has no other answer.
    Done(Result<(), Error>),
}

/// A transaction. Its form is checked where it is carried out.
pub(super) fn txn(request: &PbTxnRequest) -> What {
    What::Txn(request.encode_to_vec())
}

pub(super) fn grant(id: i64, ttl: i64) -> What {
    What::Grant(Grant { id: id.cast_unsigned(), seconds: u64::try_from(ttl).unwrap_or(0) })
}

pub(super) fn keep_alive(id: i64) -> What {
    What::KeepAlive(id.cast_unsigned())
}

pub(super) fn revoke(id: i64) -> What {
    What::Revoke(id.cast_unsigned())
}

pub(super) fn compact(oldest: i64) -> What {
    What::Compact(oldest.cast_unsigned())
}

/// Ends the leases that are due, and says by its place in the log that all before it was carried out.
pub(super) fn tick() -> What {
    What::Tick(Tick {})
}

/// The first of each leader.
pub(super) fn new_leader() -> What {
    What::NewLeader(NewLeader {})
}

/// The command for the log.
pub(super) fn at(now: Time, what: What) -> Command {
    let now = u64::try_from(now.as_duration().as_nanos()).unwrap_or(u64::MAX);
    Command { now, what: Some(what) }
}

/// Carries out a command.
pub(super) fn carry_out(mvcc: &mut Mvcc, command: &Command) -> (Answer, Revision) {
    let now = Time::from_zero(Duration::from_nanos(command.now));
    let lease = |id: &u64| LeaseId(id.cast_signed());
    let answer = match command.what.as_ref().unwrap_or(&What::Tick(Tick {})) {
        What::Txn(request) => Answer::Txn(carry_out_txn(mvcc, now, request)),
        What::Grant(Grant { id, seconds }) => {
            let id = (*id != 0).then_some(lease(id));
            Answer::Granted(mvcc.grant(now, id, Duration::from_secs(*seconds)))
        }
        What::KeepAlive(id) => Answer::Renewed(mvcc.keep_alive(now, lease(id))),
        What::Revoke(id) => Answer::Done(mvcc.revoke(now, lease(id))),
        What::Compact(oldest) => {
            mvcc.expire(now);
            Answer::Done(mvcc.compact(Revision(oldest.cast_signed())))
        }
        What::Tick(Tick {}) => {
            mvcc.expire(now);
            Answer::Done(Ok(()))
        }
        What::NewLeader(NewLeader {}) => {
            mvcc.renew_all(now);
            Answer::Done(Ok(()))
        }
    };
    (answer, mvcc.revision())
}

fn carry_out_txn(mvcc: &mut Mvcc, now: Time, request: &[u8]) -> Result<TxnResponse, Status> {
    let malformed = |error: prost::DecodeError| Status::invalid_argument(error.to_string());
    let request = PbTxnRequest::decode(request).map_err(malformed)?;
    mvcc.txn(now, &wire::txn(request)?).map_err(status::status)
}
