//! etcd's gRPC codes and texts, which clients match on.

use tonic::Status;

use super::mvcc::Error;

pub(super) const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

/// As etcd would say it.
pub(super) fn status(error: Error) -> Status {
    match error {
        Error::Compacted { .. } => Status::out_of_range(COMPACTED),
        Error::FutureRevision { .. } => {
            Status::out_of_range("etcdserver: mvcc: required revision is a future revision")
        }
        Error::EmptyKey => Status::invalid_argument("etcdserver: key is not provided"),
        Error::KeyNotFound => Status::invalid_argument("etcdserver: key not found"),
        Error::DuplicateKey => Status::invalid_argument("etcdserver: duplicate key given in txn request"),
        Error::TooManyOps { .. } => Status::invalid_argument("etcdserver: too many operations in txn request"),
        Error::TooLarge { .. } => Status::invalid_argument("etcdserver: request is too large"),
        Error::LeaseNotFound => Status::not_found("etcdserver: requested lease not found"),
        Error::LeaseExists => Status::failed_precondition("etcdserver: lease already exists"),
        Error::TtlTooLarge { .. } => Status::out_of_range("etcdserver: too large lease TTL"),
        Error::NoSpace => Status::resource_exhausted("etcdserver: mvcc: database space exceeded"),
    }
}

pub(super) fn invalid_sort() -> Status {
    Status::invalid_argument("etcdserver: invalid sort option")
}

pub(super) fn auth_not_enabled() -> Status {
    Status::failed_precondition("etcdserver: authentication is not enabled")
}

/// What etcd has and this store has not.
pub(super) fn not_here(what: &str) -> Status {
    Status::unimplemented(format!("the embedded store has no {what}; use etcd for that"))
}
