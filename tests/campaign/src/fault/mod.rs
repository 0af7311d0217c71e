//! The faults of the campaign, as data: what is done to whom, for how long, and what it may cost.

mod all;

use std::time::Duration;

use rustix::process::Resource;

use super::hosts::Cut;
use super::names::Answers;
use super::nodes::Process;
use super::scene::Stage;
use super::secrets::Holder;
use super::setting::Setting;

pub(crate) use self::all::all;

/// The nodes, or the members of etcd, that a fault is injected into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    Leader,
    Follower,
    /// All but the leader.
    Followers,
    LeaderAndFollower,
    All,
    /// The node whose agent serves the store.
    Serving,
}

impl Who {
    /// Those of `all`; some of `all` lead.
    pub(crate) fn of(self, all: Vec<usize>, leading: &[usize]) -> Vec<usize> {
        let mut following = all.iter().copied().filter(|at| !leading.contains(at));
        match self {
            Who::Leader => leading.to_vec(),
            Who::Follower => following.take(1).collect(),
            Who::Followers => following.collect(),
            Who::LeaderAndFollower => leading.iter().copied().chain(following.next()).collect(),
            Who::All => all,
            // Its place is asked for.
            Who::Serving => Vec::new(),
        }
    }
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

/// The key of a follower's record.
pub(crate) const A_NODE: &str = "a node";

/// How an operator ends an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Once,
    /// With several signals within a second.
    Again,
    /// With a signal to each process of its host, as a service manager or a batch system sends it.
    WithAll,
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
    /// SIGKILL. What is no node's is started again in the end.
    Kill(Process, Who),
    /// SIGSTOP, and SIGCONT in the end.
    Freeze(Process, Who),
    /// SIGSTOP for a guard and its workers, which only SIGKILL can end then. Its agent has a reason to do so.
    Hold(Who),
    /// It gets a processor for 5 ms in every 100.
    Starve(Process, Who),
    /// The host loses all its processes at once, and boots again.
    Reset(Who),
    /// The hosts are reset together, each time that one of them has started its workers, in so many rounds at most: until
    /// one is left out, or the job ends.
    ResetEachRound(Who, usize),
    /// The host falls silent and never comes back.
    Lose(Who),
    /// An operator ends its agent with SIGTERM, and starts it again later.
    Drain(Who, Told),
    /// System calls of a process fail or are slow, by `strace --inject`.
    Inject(Process, Who, &'static str),
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
    /// A member is cut off from the other members.
    CutMember(Who),
    /// A member is lost with its data, and another takes its place.
    ReplaceMember(Who),
    /// Members are restarted one after the other as the next release.
    Upgrade,
    Compact,
    /// Whether etcd takes no writes: its quota is used up.
    NoSpace(bool),
    MoveLeader,
    Defragment,
    RevokeLeases,
    /// The keys of the job that begin like this are deleted.
    Delete(&'static str),
    /// A key of the job holds this.
    Overwrite(&'static str, &'static str),
    /// The coordinator's ways to these are cut.
    CutCoordinator(Side),
    /// Certificates have expired, and etcd restarts, so that it checks them.
    Expire(Holder),
    /// Whether etcd's user of the job may do anything.
    Rights(bool),
    ForgetTokens,
    Wait(Duration),
    /// Nothing is done, once there is such a process.
    Await(Process, Who),
}

impl Action {
    /// Whether it leaves alone two of the three agents, which hold the store where they do.
    fn spares_two(&self) -> bool {
        let one = |who: &Who| matches!(who, Who::Leader | Who::Follower | Who::Serving);
        match self {
            Action::Kill(process, who) | Action::Freeze(process, who) | Action::Starve(process, who) => {
                one(who) && matches!(process, Process::Agent | Process::Guard | Process::Worker)
            }
            Action::Reset(who) | Action::Lose(who) | Action::Unplug(who) | Action::Drain(who, _) => one(who),
            Action::Cut(who, side, ..) => one(who) && *side != Side::Store,
            Action::Fill(_) | Action::ReadOnly(_) | Action::Stall(_) | Action::Wait(_) => true,
            _ => false,
        }
    }

    /// The processes that it is for. It is done once there is one of them.
    pub(crate) fn strikes(&self) -> Option<(Process, Who)> {
        match *self {
            Action::Hold(who) => Some((Process::Worker, who)),
            Action::Kill(process, who)
            | Action::Freeze(process, who)
            | Action::Starve(process, who)
            | Action::Inject(process, who, _)
            | Action::Exhaust(process, who, _)
            | Action::OutOfMemory(process, who)
            | Action::Await(process, who) => Some((process, who)),
            _ => None,
        }
    }
}

/// What a job keeps of what it has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeps {
    /// Perhaps nothing: the fault takes away what the job has committed.
    Nothing,
    Committed,
    /// Each step that was done: it is stopped as planned.
    All,
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
    pub(crate) keeps: Keeps,
    /// Flags of the job's agents, instead of those that each job has.
    pub(crate) flags: &'static [&'static str],
}

/// The longest that a node may be silent before it is given up.
pub(crate) const LEASE: Duration = Duration::from_secs(4);

/// Well below a lease.
const SHORT: Duration = Duration::from_millis(1500);

/// Well over one.
const LONG: Duration = Duration::from_secs(7);

const AT_ONCE: Duration = Duration::ZERO;

/// More rounds than a job has that counts each loss.
pub(crate) const MANY: usize = 8;

/// A fault that costs nothing, after which the job succeeds.
fn fault(name: &'static str, lasts: Duration, actions: &[Action]) -> Fault {
    Fault { name, actions: actions.to_vec(), lasts, charges: 0, ends: &[0], keeps: Keeps::Committed, flags: &[] }
}

impl Fault {
    /// It may cost so many restarts. A cut between workers may cost one where it is longer than `--peer-timeout`.
    fn charges(self, charges: u32) -> Fault {
        Fault { charges, ..self }
    }

    /// Whether a coordinator has to lead the job.
    pub(crate) fn is_a_coordinators(&self) -> bool {
        let of_it = |action: &Action| match action {
            Action::CutCoordinator(_) => true,
            _ => action.strikes().is_some_and(|(process, _)| process == Process::Coordinator),
        };
        self.actions.iter().any(of_it)
    }

    /// Whether it can be injected into a job of this setting.
    pub(crate) fn applies_to(&self, setting: Setting) -> bool {
        if setting == Setting::Replicated {
            let strikes = self.actions.iter().filter(|action| !matches!(action, Action::Wait(_))).count();
            return strikes == 1 && self.actions.iter().all(Action::spares_two);
        }
        self.actions.iter().all(|action| match action {
            Action::Reset(Who::Serving) | Action::Lose(Who::Serving) => false,
            Action::Kill(_, Who::Serving) | Action::Freeze(_, Who::Serving) => false,
            Action::Expire(_) | Action::Rights(_) | Action::ForgetTokens => setting == Setting::Secured,
            Action::Upgrade => !matches!(setting, Setting::Etcd35 | Setting::Etcd36 | Setting::Etcd37),
            _ => setting == Setting::PyTorch || action.strikes().is_none_or(|(of, _)| of != Process::Loader),
        })
    }

    /// The same at this stage. Of the agents that hold the store one is still to come at first: none may be lost for
    /// good.
    pub(crate) fn applies_at(&self, setting: Setting, stage: Stage) -> bool {
        let is_lost = self.actions.iter().any(|action| matches!(action, Action::Lose(_)));
        setting != Setting::Replicated || stage != Stage::Joining || !is_lost
    }

    fn ends(self, ends: &'static [i32]) -> Fault {
        Fault { ends, ..self }
    }

    fn keeps(self, keeps: Keeps) -> Fault {
        Fault { keeps, ..self }
    }

    fn flags(self, flags: &'static [&'static str]) -> Fault {
        Fault { flags, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn where_agents_hold_the_store_two_of_them_are_spared() {
        let named = |name: &str| all().into_iter().find(|fault| fault.name == name).unwrap();
        for (name, applies) in [
            ("the store's host is reset", true),
            ("an agent is killed", true),
            ("two agents are killed", false),
            ("the leading agent is killed, and then the next", false),
            ("etcd is down for 7 s", false),
            ("all hosts are reset", false),
        ] {
            assert_eq!(named(name).applies_to(Setting::Replicated), applies, "{name}");
        }
        assert!(!named("the store's host is reset").applies_to(Setting::Plain));
        let lost = named("the store's host is lost permanently");
        assert!(!lost.applies_at(Setting::Replicated, Stage::Joining));
        assert!(lost.applies_at(Setting::Replicated, Stage::Quiescing));
    }

    #[test]
    fn each_fault_has_a_name_of_its_own_and_does_something() {
        let faults = all();
        let names: BTreeSet<&str> = faults.iter().map(|fault| fault.name).collect();
        assert_eq!(names.len(), faults.len());
        assert!(faults.len() >= 60, "{}", faults.len());
        assert!(faults.iter().all(|fault| !fault.actions.is_empty()));
    }
}
