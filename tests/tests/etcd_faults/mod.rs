//! What the etcd store does when etcd or the network fails. Not for the contract of a healthy store.

mod access;
mod failures;
mod identity;
mod refusing_proxy;
mod watches;
