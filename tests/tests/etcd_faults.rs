//! What the etcd store does when etcd or the network fails. Not for the contract of a healthy store.

// Helpers of tests panic like tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod etcd_faults {
    mod access;
    mod failures;
    mod identity;
    mod watches;
}
