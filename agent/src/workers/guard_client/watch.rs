//! Watches a descriptor from the runtime.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::guard::wire::Channel;

/// A type that owns one descriptor, and always returns the same descriptor.
pub(crate) trait Owner: AsRawFd {}
impl Owner for OwnedFd {}
impl Owner for Channel {}

/// Registers a descriptor for readability.
pub(crate) fn readable<T: Owner>(owner: T) -> io::Result<AsyncFd<T>> {
    registered(owner, Interest::READABLE)
}

/// Registers a descriptor.
pub(super) fn registered<T: Owner>(owner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: an `Owner` keeps its descriptor open and unchanged until it is dropped.
    unsafe { AsyncFd::register_with_interest(owner, interest) }.map_err(io::Error::from)
}
