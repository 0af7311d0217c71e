//! The faults of the campaign, as data: what is done to whom, for how long, and what it may cost.

mod all;

use std::time::Duration;

use rustix::process::Resource;

use super::hosts::Cut;
use super::names::Answers;
use super::nodes::Process;
use super::secrets::Holder;
use super::setting::Setting;

pub(crate) use self::all::all;

/// The nodes that a fault is injected into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    Leader,
    Follower,
    LeaderAndFollower,
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Store,
    Peers,
    World,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Those that the node sends, and those that it gets.
    Both,
    /// Those that it sends.
    Sent,
    Received,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Leader,
    Follower,
    Majority,
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A node's own, with logs and runtime files.
    Own(Who),
    /// That with the checkpoints, which all nodes share.
    Checkpoints,
}

/// Something that is done. What lasts is undone when the fault ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Action {
    Kill(Process, Who),
    Freeze(Process, Who),
    /// It gets a processor for 5 ms in every 100.
    Starve(Process, Who),
    /// The host loses all its processes at once, and boots again.
    Reset(Who),
    /// The host falls silent and never comes back.
    Lose(Who),
    /// An operator ends its agent with SIGTERM, and starts it again later.
    Drain(Who),
    /// System calls of a process fail or are slow, by `strace --inject`.
    Inject(Process, Who, &'static str),
    /// The same for a member of etcd.
    InjectStore(Which, &'static str),
    /// A process may have no more of this than it has.
    Exhaust(Process, Who, Resource),
    /// The kernel's out-of-memory killer ends a process, when it asks for more.
    OutOfMemory(Process, Who),
    Cut(Who, Side, Direction, Cut),
    /// A way is cut and restored five times a second.
    Flap(Who, Side),
    Unplug(Who),
    Fill(Place),
    /// Nothing new can be made on a disk.
    ReadOnly(Place),
    Stall(Place),
    Names(Answers),
    /// The wall clock is set ahead by these seconds.
    Clock(Who, i64),
    /// The wall clock jumps back and forth by an hour.
    Strobe(Who),
    /// SIGKILL for members of etcd, which are started again in the end.
    KillStore(Which),
    FreezeStore(Which),
    /// A member is cut off from the other members.
    CutMember(Which),
    /// A member is lost with its data, and another takes its place.
    ReplaceMember(Which),
    /// Members are restarted one after the other as the next release.
    Upgrade,
    Compact,
    /// etcd takes no writes: its quota is used up.
    NoSpace,
    MoveLeader,
    Defragment,
    RevokeLeases,
    /// The keys of the job that begin like this are deleted.
    Delete(&'static str),
    /// The record of a follower is deleted.
    DeleteNode,
    /// A key of the job holds this.
    Overwrite(&'static str, &'static str),
    /// The record of a follower holds this.
    OverwriteNode(&'static str),
    /// SIGKILL for the coordinator, which is started again in the end.
    KillCoordinator,
    /// SIGSTOP for the coordinator, and SIGCONT in the end.
    FreezeCoordinator,
    /// The coordinator's ways to these are cut.
    CutCoordinator(Side),
    /// Certificates have expired, and etcd restarts, so that it checks them.
    Expire(Holder),
    /// etcd's user of the job may do nothing.
    TakeRights,
    ForgetTokens,
    Wait(Duration),
}

#[derive(Debug, Clone)]
pub(crate) struct Fault {
    /// What it is, in a few words; also what `--fault` names.
    pub(crate) name: &'static str,
    /// What is done, one after the other.
    pub(crate) actions: Vec<Action>,
    pub(crate) lasts: Duration,
    /// Restarts that it may cost the job.
    pub(crate) charges: u32,
    /// Exit codes that the agents may end with, all with the same.
    pub(crate) ends: &'static [i32],
    /// Whether it takes away what the job has committed, so that it may begin again.
    pub(crate) forgets: bool,
}

/// The longest that a node may be silent before it is given up.
pub(crate) const LEASE: Duration = Duration::from_secs(4);

/// Well below a lease.
const SHORT: Duration = Duration::from_millis(1500);

/// Well over one.
const LONG: Duration = Duration::from_secs(7);

const AT_ONCE: Duration = Duration::ZERO;

/// A fault that costs nothing, after which the job succeeds.
fn fault(name: &'static str, lasts: Duration, actions: &[Action]) -> Fault {
    Fault { name, actions: actions.to_vec(), lasts, charges: 0, ends: &[0], forgets: false }
}

impl Fault {
    /// It may cost so many restarts. A cut between workers may cost one where it is longer than `--peer-timeout`.
    fn charges(self, charges: u32) -> Fault {
        Fault { charges, ..self }
    }

    /// Whether a coordinator has to lead the job.
    pub(crate) fn is_a_coordinators(&self) -> bool {
        let of_it = |action: &Action| {
            matches!(action, Action::KillCoordinator | Action::FreezeCoordinator | Action::CutCoordinator(_))
        };
        self.actions.iter().any(of_it)
    }

    /// Whether it can be injected into a job of this setting.
    pub(crate) fn applies_to(&self, setting: Setting) -> bool {
        self.actions.iter().all(|action| match action {
            Action::Expire(_) | Action::TakeRights | Action::ForgetTokens => setting == Setting::Secured,
            Action::Upgrade => setting != Setting::Etcd35,
            _ => true,
        })
    }

    fn ends(self, ends: &'static [i32]) -> Fault {
        Fault { ends, ..self }
    }

    fn forgets(self) -> Fault {
        Fault { forgets: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_fault_has_a_name_of_its_own_and_does_something() {
        let faults = all();
        let names: BTreeSet<&str> = faults.iter().map(|fault| fault.name).collect();
        assert_eq!(names.len(), faults.len());
        assert!(faults.len() >= 60, "{}", faults.len());
        assert!(faults.iter().all(|fault| !fault.actions.is_empty()));
    }
}
