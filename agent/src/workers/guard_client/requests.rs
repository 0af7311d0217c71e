//! Requests to the guard, in order. Those that its socket has no room for wait in a queue: it takes about 280, and a
//! node may start more workers than that.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::guard::wire::{Channel, GuardRequest};

/// How long to wait when the system has no room for descriptors on their way.
const SHORTAGE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Requests(VecDeque<(GuardRequest, Vec<OwnedFd>)>);

impl Requests {
    pub(super) fn new() -> Requests {
        Requests(VecDeque::new())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sends a request, or lets it wait behind the others. If the guard is gone, the request is lost: the end of its
    /// socket says so.
    pub(super) fn send(&mut self, channel: &Channel, request: GuardRequest, descriptors: Vec<OwnedFd>) {
        let deadlines = self.0.back_mut().map(|(last, _)| last);
        if let (Some(GuardRequest::Deadline { until: last, .. }), GuardRequest::Deadline { until: Some(until), sent }) =
            (deadlines, &request)
            && last.is_some_and(|last| *sent < last)
        {
            // The one before was moved in time, so both are one that was sent then.
            *last = Some(*until);
            return;
        }
        self.0.push_back((request, descriptors));
        while !self.0.is_empty() && self.send_first(channel).is_ok() {}
    }

    /// Sends the first request. If that fails because the other end is gone, all are dropped.
    fn send_first(&mut self, channel: &Channel) -> io::Result<()> {
        let Some((request, descriptors)) = self.0.front() else { return Ok(()) };
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        match channel.send(request, &descriptors) {
            Ok(()) => drop(self.0.pop_front()),
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.0.clear();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Sends what waits, as the socket has room. The wait may be cancelled.
    pub(super) async fn pass_on(&mut self, socket: &AsyncFd<Channel>) {
        while !self.0.is_empty() {
            if socket.async_io(Interest::WRITABLE, |channel| self.send_first(channel)).await.is_err() {
                tokio::time::sleep(SHORTAGE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deadline(until: u64, sent: u64) -> GuardRequest {
        GuardRequest::Deadline { until: Some(Duration::from_secs(until)), sent: Duration::from_secs(sent) }
    }

    #[test]
    fn deadlines_that_were_moved_in_time_wait_as_one() {
        let (channel, _other) = Channel::pair().unwrap();
        let mut requests = Requests::new();
        while requests.is_empty() {
            requests.send(&channel, GuardRequest::Kill, Vec::new());
        }
        for (until, sent) in [(10, 1), (20, 9), (30, 19), (50, 31)] {
            requests.send(&channel, deadline(until, sent), Vec::new());
        }
        let waiting: Vec<String> = requests.0.iter().map(|(request, _)| format!("{request:?}")).collect();
        let expected = [GuardRequest::Kill, deadline(30, 1), deadline(50, 31)].map(|request| format!("{request:?}"));
        assert_eq!(waiting, expected, "the last was moved too late, and the guard must see that");
    }
}
