//! What a failed call proves: that nothing was sent, or that no one knows, or that etcd said no; and whether the
//! connection is to blame. What to do about it is decided in `rotation`.

use std::error::Error as _;

use etcd_client::Error;
use tonic::Code;

use crate::{Revision, StoreError};

/// What may be done when it is not known whether a request was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// Sending it again is harmless.
    Safe,
    /// It must not be sent twice.
    Never,
}

/// Why one attempt failed.
#[derive(Debug)]
pub enum Fault {
    /// The connection, or the member behind it, is of no use. The request did nothing, so it may be sent again
    /// elsewhere, whatever it was.
    NotSent(String),
    /// The connection, or the member behind it, is of no use. The request may have been carried out; the answer is
    /// missing.
    Unsure(String),
    /// There was no answer in time, or the member says that it took too long. The request may have been carried out.
    /// What it says of the connection is for [`judge`](super::rotation::Rotation::judge).
    Late(String),
    /// A member that is well answers that it cannot do it now. The connection is as good as before, and so are the
    /// watches on it.
    Later {
        /// Its words.
        cause: String,
        /// Whether it may have been carried out all the same.
        unsure: bool,
    },
    /// Our token is out of date. Nothing was done.
    StaleToken(String),
    /// The store answered, and another try would be answered the same.
    Refused(StoreError),
}

impl Fault {
    /// Whether the connection it came over is of no use any more.
    pub fn breaks_link(&self) -> bool {
        matches!(self, Fault::NotSent(_) | Fault::Unsure(_) | Fault::Late(_))
    }

    /// Whether the request may be sent again.
    pub fn may_repeat(&self, repeat: Repeat) -> bool {
        match self {
            Fault::NotSent(_) | Fault::Later { unsure: false, .. } => true,
            Fault::Unsure(_) | Fault::Late(_) | Fault::Later { unsure: true, .. } => repeat == Repeat::Safe,
            Fault::StaleToken(_) | Fault::Refused(_) => false,
        }
    }

    /// Judges an error of the client. `at` says where, for people.
    pub(super) fn of(error: &Error, at: &str) -> Fault {
        match error {
            Error::GRpcStatus(status) => of_status(status, at),
            Error::InvalidArgs(cause) | Error::EndpointError(cause) => {
                Fault::Refused(StoreError::Invalid(cause.clone()))
            }
            // A stream that ended: what was sent on it may have arrived.
            other => Fault::Unsure(other.to_string()),
        }
    }

    /// The error for the caller.
    pub fn into_error(self, write: bool, at: &str) -> StoreError {
        let endpoints = at.to_owned();
        match self {
            Fault::Refused(error) => error,
            Fault::StaleToken(cause) => StoreError::Denied { endpoints, cause },
            Fault::Unsure(cause) | Fault::Late(cause) | Fault::Later { cause, unsure: true } if write => {
                StoreError::Unknown { endpoints, cause }
            }
            Fault::NotSent(cause) | Fault::Unsure(cause) | Fault::Late(cause) | Fault::Later { cause, .. } => {
                StoreError::Unavailable { endpoints, cause }
            }
        }
    }
}

/// What etcd's own words mean: they are more stable than the codes that come with them, and where a watch is refused
/// there are only words. They are listed in etcd's `api/v3rpc/rpctypes/error.go`.
pub(super) fn of_words(words: &str, at: &str) -> Option<Fault> {
    let endpoints = at.to_owned();
    let says = |text: &str| words.contains(text);
    if says("requested lease not found") {
        return Some(Fault::Refused(StoreError::LeaseGone));
    }
    if says("database space exceeded") || says("etcdserver: no space") {
        return Some(Fault::Refused(StoreError::NoSpace { endpoints }));
    }
    if says("required revision has been compacted") {
        let compacted = StoreError::Compacted { requested: Revision::NONE, oldest: Revision::NONE };
        return Some(Fault::Refused(compacted));
    }
    // A token that etcd does not know any more; one from before a change of users or roles, in the words of 3.4 and of
    // 3.5; and none, where etcd got users after we connected.
    let stale =
        ["invalid auth token", "revision of auth store is old", "revision in header is old", "user name is empty"];
    if stale.iter().any(|text| says(text)) {
        return Some(Fault::StaleToken(words.to_owned()));
    }
    // 3.5 says the last of a certificate whose CN is no user's.
    if says("authentication failed") || says("permission denied") || says("user name not found") {
        return Some(Fault::Refused(StoreError::Denied { endpoints, cause: words.to_owned() }));
    }
    // Refused before anything was proposed to the cluster: by a member that is cut off from it, is still starting, or has
    // no vote yet...
    if says("etcdserver: no leader") || says("not capable") || says("not supported for learner") {
        return Some(Fault::NotSent(words.to_owned()));
    }
    // ...and by one that is well.
    if says("etcdserver: too many requests") {
        return Some(Fault::Later { cause: words.to_owned(), unsure: false });
    }
    // A new leader was elected while the request was under way; the member is part of the cluster.
    if says("etcdserver: leader changed") || says("not a primary lessor") {
        return Some(Fault::Later { cause: words.to_owned(), unsure: true });
    }
    if says("etcdserver: request timed out") {
        return Some(Fault::Late(words.to_owned()));
    }
    None
}

fn of_status(status: &tonic::Status, at: &str) -> Fault {
    if let Some(fault) = of_words(status.message(), at) {
        return fault;
    }
    let endpoints = at.to_owned();
    let cause = cause_of(status);
    match status.code() {
        Code::Unimplemented => Fault::Refused(StoreError::NotV3 { endpoints, cause }),
        Code::Unauthenticated | Code::PermissionDenied => Fault::Refused(StoreError::Denied { endpoints, cause }),
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            Fault::Refused(StoreError::Invalid(format!("the store at {at} refuses the request: {}", status.message())))
        }
        _ if never_connected(status) => Fault::NotSent(cause),
        _ => Fault::Unsure(cause),
    }
}

/// Whether the connection itself failed, so that the request cannot have left.
fn never_connected(status: &tonic::Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// The status's words and all that is behind them, without repetition: that TLS failed is only there.
pub(crate) fn cause_of(status: &tonic::Status) -> String {
    let mut text = match status.message() {
        "" => status.code().description().to_owned(),
        message => message.to_owned(),
    };
    append_sources(&mut text, status.source());
    text
}

/// An error's words and all that is behind them.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    append_sources(&mut text, error.source());
    text
}

fn append_sources(text: &mut String, mut source: Option<&(dyn std::error::Error + 'static)>) {
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = error.source();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(code: Code, message: &str) -> Fault {
        Fault::of(&Error::GRpcStatus(tonic::Status::new(code, message)), "here")
    }

    fn error(code: Code, message: &str, write: bool) -> StoreError {
        fault(code, message).into_error(write, "here")
    }

    #[test]
    fn a_write_without_an_answer_is_unknown_and_a_read_is_not() {
        for (code, message) in [
            (Code::Unavailable, "etcdserver: request timed out"),
            (Code::Unavailable, "etcdserver: request timed out, possibly due to previous leader failure"),
            (Code::Unavailable, "etcdserver: leader changed"),
            (Code::Unavailable, "transport is closing"),
            (Code::DeadlineExceeded, ""),
            (Code::Cancelled, ""),
            (Code::Unknown, "h2 protocol error"),
        ] {
            assert!(error(code, message, true).outcome_unknown(), "{message}");
            assert!(matches!(error(code, message, false), StoreError::Unavailable { .. }), "{message}");
        }
    }

    #[test]
    fn a_connection_is_given_up_for_faults_of_its_own_and_of_its_member_alone() {
        use Code::*;
        for (code, message, breaks) in [
            // The connection, or what is at its other end.
            (Unavailable, "transport is closing", true),
            (Unknown, "h2 protocol error", true),
            (Internal, "h2 protocol error", true),
            (Cancelled, "", true),
            (DeadlineExceeded, "", true),
            (Unavailable, "", true),
            // A member without its cluster: another may have one.
            (Unavailable, "etcdserver: no leader", true),
            (Unavailable, "etcdserver: request timed out", true),
            (Unavailable, "etcdserver: request timed out, possibly due to previous leader failure", true),
            (Unavailable, "etcdserver: server stopped", true),
            (FailedPrecondition, "etcdserver: not capable", true),
            (FailedPrecondition, "etcdserver: rpc not supported for learner", true),
            // Answers.
            (Unavailable, "etcdserver: leader changed", false),
            (Unknown, "lease: not a primary lessor", false),
            (ResourceExhausted, "etcdserver: too many requests", false),
            // etcd sheds load in these words with this code, to 3.7.
            (Unknown, "etcdserver: too many requests", false),
            (ResourceExhausted, "etcdserver: mvcc: database space exceeded", false),
            (NotFound, "etcdserver: requested lease not found", false),
            (OutOfRange, "etcdserver: mvcc: required revision has been compacted", false),
            (InvalidArgument, "etcdserver: too many operations in txn request", false),
            (InvalidArgument, "etcdserver: duplicate key given in txn request", false),
            (FailedPrecondition, "etcdserver: authentication failed", false),
            (InvalidArgument, "etcdserver: authentication failed, invalid user ID or password", false),
            (Unauthenticated, "etcdserver: invalid auth token", false),
            (PermissionDenied, "etcdserver: permission denied", false),
            (Unimplemented, "unknown service etcdserverpb.KV", false),
        ] {
            assert_eq!(fault(code, message).breaks_link(), breaks, "{code:?}: {message}");
        }
    }

    #[test]
    fn what_was_never_proposed_is_known_not_to_have_happened() {
        for (code, message) in [
            (Code::Unavailable, "etcdserver: no leader"),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            (Code::ResourceExhausted, "etcdserver: too many requests"),
            (Code::Unknown, "etcdserver: too many requests"),
        ] {
            assert!(fault(code, message).may_repeat(Repeat::Never), "{message}");
            assert!(matches!(error(code, message, true), StoreError::Unavailable { .. }), "{message}");
        }
    }

    #[test]
    fn the_stores_own_refusals_are_distinguished() {
        let of = |code, message| error(code, message, true);
        assert_eq!(of(Code::NotFound, "etcdserver: requested lease not found"), StoreError::LeaseGone);
        assert!(matches!(
            of(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            StoreError::NoSpace { .. }
        ));
        assert!(matches!(of(Code::PermissionDenied, "etcdserver: permission denied"), StoreError::Denied { .. }));
        for message in ["etcdserver: user name is empty", "etcdserver: user name not found"] {
            assert!(matches!(of(Code::InvalidArgument, message), StoreError::Denied { .. }), "{message}");
        }
        assert!(matches!(of(Code::Unimplemented, "unknown service etcdserverpb.KV"), StoreError::NotV3 { .. }));
        assert!(matches!(
            of(Code::InvalidArgument, "etcdserver: duplicate key given in txn request"),
            StoreError::Invalid(_)
        ));
        for (code, message) in [
            (Code::Unauthenticated, "etcdserver: invalid auth token"),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old"),
            (Code::Unknown, "auth: revision in header is old"),
            (Code::InvalidArgument, "etcdserver: user name is empty"),
        ] {
            assert!(matches!(fault(code, message), Fault::StaleToken(_)), "{message}");
        }
    }
}
