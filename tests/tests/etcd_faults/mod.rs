//! What the etcd store does when etcd or the network fails.

mod access;
mod failures;
mod identity;
mod refusing_proxy;
mod tokens;
mod watches;
