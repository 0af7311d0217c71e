//! Which faults there are.

use std::time::Duration;

use rustix::process::Resource;

use super::{AT_ONCE, Action, Direction, Fault, LONG, Place, SHORT, Side, Which, Who};
use crate::hosts::Cut;
use crate::names::Answers;
use crate::nodes::Process;
use crate::secrets::Holder;

/// All faults.
pub fn all() -> Vec<Fault> {
    [processes(), machines(), networks(), disks(), store(), operators(), several(), coordinators(), secrets()].concat()
}

fn processes() -> Vec<Fault> {
    use Action::{Freeze, Inject, Kill, OutOfMemory, Starve};
    use Process::{Agent, Guard, Worker};
    use Who::{All, Follower, Leader, LeaderAndFollower};
    vec![
        Fault::new("a worker is killed", AT_ONCE, &[Kill(Worker, Follower)]).charges(1),
        Fault::new("the leader's worker is killed", AT_ONCE, &[Kill(Worker, Leader)]).charges(1),
        Fault::new("two workers are killed", AT_ONCE, &[Kill(Worker, LeaderAndFollower)]).charges(2),
        Fault::new("all workers are killed", AT_ONCE, &[Kill(Worker, All)]).charges(3),
        Fault::new("an agent is killed", AT_ONCE, &[Kill(Agent, Follower)]),
        Fault::new("the leading agent is killed", AT_ONCE, &[Kill(Agent, Leader)]),
        Fault::new("two agents are killed", AT_ONCE, &[Kill(Agent, LeaderAndFollower)]),
        Fault::new("all agents are killed", AT_ONCE, &[Kill(Agent, All)]),
        Fault::new("a guard is killed", AT_ONCE, &[Kill(Guard, Follower)]).charges(1),
        Fault::new("the leader's guard is killed", AT_ONCE, &[Kill(Guard, Leader)]).charges(1),
        Fault::new("a worker is frozen for 1.5 s", SHORT, &[Freeze(Worker, Follower)]),
        Fault::new("a worker is frozen for 12 s", Duration::from_secs(12), &[Freeze(Worker, Follower)]).charges(1),
        Fault::new("an agent is frozen for 1.5 s", SHORT, &[Freeze(Agent, Follower)]),
        Fault::new("an agent is frozen for 7 s", LONG, &[Freeze(Agent, Follower)]),
        Fault::new("the leading agent is frozen for 1.5 s", SHORT, &[Freeze(Agent, Leader)]),
        Fault::new("the leading agent is frozen for 7 s", LONG, &[Freeze(Agent, Leader)]),
        Fault::new("a guard is frozen for 7 s", LONG, &[Freeze(Guard, Follower)]),
        Fault::new("an agent is starved of CPU time", LONG, &[Starve(Agent, Follower)]),
        Fault::new("the leading agent is starved of CPU time", LONG, &[Starve(Agent, Leader)]),
        Fault::new("a worker is starved of CPU time", SHORT, &[Starve(Worker, Follower)]),
        Fault::new(
            "an agent has no file descriptors left",
            LONG,
            &[Action::Exhaust(Agent, Follower, Resource::Nofile)],
        )
        .charges(1),
        Fault::new(
            "the leading agent has no file descriptors left",
            LONG,
            &[Action::Exhaust(Agent, Leader, Resource::Nofile)],
        )
        .charges(1),
        Fault::new("a worker has no memory left", LONG, &[Action::Exhaust(Worker, Follower, Resource::As)]).charges(1),
        Fault::new("a worker is killed as memory runs out", SHORT, &[OutOfMemory(Worker, Follower)]).charges(1),
        Fault::new("all workers are killed as memory runs out", SHORT, &[OutOfMemory(Worker, All)]).charges(3),
        Fault::new("an agent is killed as memory runs out", LONG, &[OutOfMemory(Agent, Follower)]),
        Fault::new(
            "a worker is killed while a guard cannot fork",
            SHORT,
            &[Inject(Guard, Follower, "clone,clone3,fork,vfork:error=EAGAIN"), Kill(Worker, Follower)],
        )
        .charges(3),
        Fault::new(
            "a worker is killed while programs take 20 s to start",
            Duration::from_secs(25),
            &[Inject(Guard, Follower, "execve:delay_enter=20000000"), Kill(Worker, Follower)],
        )
        .charges(1),
        Fault::new(
            "a worker is killed while mkdir takes 20 s",
            Duration::from_secs(25),
            &[Inject(Agent, Follower, "mkdir,mkdirat:delay_enter=20000000"), Kill(Worker, Follower)],
        )
        .charges(1),
        Fault::new(
            "an agent sends everything 100 ms late",
            LONG,
            &[Inject(Agent, Follower, "sendto,sendmsg,writev:delay_enter=100000")],
        ),
        Fault::new(
            "a worker sends everything 20 ms late",
            SHORT,
            &[Inject(Worker, Follower, "sendto,sendmsg,write,writev:delay_enter=20000")],
        ),
    ]
}

fn machines() -> Vec<Fault> {
    use Action::{Clock, Drain, Lose, Reset, Strobe};
    use Who::{All, Follower, Leader};
    vec![
        Fault::new("a host is reset", AT_ONCE, &[Reset(Follower)]),
        Fault::new("the leading host is reset", AT_ONCE, &[Reset(Leader)]),
        Fault::new("all hosts are reset", AT_ONCE, &[Reset(All)]),
        Fault::new("a host is lost permanently", AT_ONCE, &[Lose(Follower)]),
        Fault::new("the leading host is lost permanently", AT_ONCE, &[Lose(Leader)]),
        Fault::new("a node is drained", SHORT, &[Drain(Follower)]),
        Fault::new("the leading node is drained", SHORT, &[Drain(Leader)]),
        Fault::new("a wall clock is an hour ahead", SHORT, &[Clock(Follower, 3600)]),
        Fault::new("the leader's wall clock is a day behind", SHORT, &[Clock(Leader, -86_400)]),
        Fault::new("all wall clocks jump back and forth", SHORT, &[Strobe(All)]),
    ]
}

fn networks() -> Vec<Fault> {
    use Action::{Cut as Way, Flap, Names, Unplug};
    use Direction::{Both, Received, Sent};
    use Side::{Peers, Store, World};
    use Who::{All, Follower, Leader};
    let silent = Cut::Silent;
    vec![
        Fault::new("a node cannot reach etcd for 1.5 s", SHORT, &[Way(Follower, Store, Both, silent)]),
        Fault::new("a node cannot reach etcd for 7 s", LONG, &[Way(Follower, Store, Both, silent)]),
        Fault::new("the leader cannot reach etcd for 1.5 s", SHORT, &[Way(Leader, Store, Both, silent)]),
        Fault::new("the leader cannot reach etcd for 7 s", LONG, &[Way(Leader, Store, Both, silent)]),
        Fault::new("no node can reach etcd for 7 s", LONG, &[Way(All, Store, Both, silent)]),
        Fault::new("etcd is unreachable from a node for 7 s", LONG, &[Way(Follower, Store, Both, Cut::Refused)]),
        Fault::new("a node's packets to etcd are lost", LONG, &[Way(Follower, Store, Sent, silent)]),
        Fault::new("etcd's packets to a node are lost", LONG, &[Way(Follower, Store, Received, silent)]),
        Fault::new("etcd's packets to the leader are lost", LONG, &[Way(Leader, Store, Received, silent)]),
        Fault::new("a node cannot reach the others for 1.5 s", SHORT, &[Way(Follower, Peers, Both, silent)]),
        Fault::new("a node cannot reach the others for 7 s", LONG, &[Way(Follower, Peers, Both, silent)]).charges(1),
        Fault::new("the leader cannot reach the others for 7 s", LONG, &[Way(Leader, Peers, Both, silent)]).charges(1),
        Fault::new("a node's packets to the other nodes are lost", LONG, &[Way(Follower, Peers, Sent, silent)])
            .charges(1),
        Fault::new("the other nodes' packets to a node are lost", LONG, &[Way(Follower, Peers, Received, silent)])
            .charges(1),
        Fault::new("a node is isolated for 1.5 s", SHORT, &[Way(Follower, World, Both, silent)]),
        Fault::new("a node is isolated for 7 s", LONG, &[Way(Follower, World, Both, silent)]).charges(1),
        Fault::new("the leader is isolated for 7 s", LONG, &[Way(Leader, World, Both, silent)]).charges(1),
        Fault::new("the network of a node flaps", LONG, &[Flap(Follower, World)]).charges(1),
        Fault::new("the network to etcd flaps", LONG, &[Flap(All, Store)]),
        Fault::new("a network cable is unplugged for 1.5 s", SHORT, &[Unplug(Follower)]),
        Fault::new("a network cable is unplugged for 7 s", LONG, &[Unplug(Follower)]).charges(1),
        Fault::new("DNS fails while etcd restarts", SHORT, &[Names(Answers::Failure), Action::KillStore(Which::All)]),
        Fault::new(
            "DNS does not know etcd's names while etcd restarts",
            SHORT,
            &[Names(Answers::Unknown), Action::KillStore(Which::All)],
        ),
        Fault::new(
            "DNS does not answer while etcd restarts",
            SHORT,
            &[Names(Answers::None), Action::KillStore(Which::All)],
        ),
        Fault::new(
            "DNS answers 3 s late while etcd restarts",
            LONG,
            &[Names(Answers::Late(Duration::from_secs(3))), Action::KillStore(Which::Leader)],
        ),
        Fault::new(
            "DNS answers with wrong addresses while etcd restarts",
            SHORT,
            &[Names(Answers::Wrong), Action::KillStore(Which::All)],
        ),
    ]
}

fn disks() -> Vec<Fault> {
    use Action::{Fill, Inject, ReadOnly, Stall};
    use Place::{Checkpoints, Own};
    use Process::Worker;
    use Who::{All, Follower, Leader};
    vec![
        Fault::new("a node's disk is full", SHORT, &[Fill(Own(Follower))]),
        Fault::new("the leader's disk is full", SHORT, &[Fill(Own(Leader))]),
        Fault::new("a node's disk does not answer for 7 s", LONG, &[Stall(Own(Follower))]),
        Fault::new("the leader's disk does not answer for 7 s", LONG, &[Stall(Own(Leader))]),
        // A job that cannot write its first checkpoint at all fails, and says so.
        Fault::new("the checkpoint disk is full", SHORT, &[Fill(Checkpoints)]).charges(5).ends(&[0, 5]),
        Fault::new("the checkpoint folder is read-only", SHORT, &[ReadOnly(Checkpoints)]).charges(5).ends(&[0, 5]),
        Fault::new("the checkpoint disk does not answer for 7 s", LONG, &[Stall(Checkpoints)]).charges(1),
        Fault::new("fsync takes a second", LONG, &[Inject(Worker, All, "fsync,fdatasync:delay_enter=1000000")]),
        Fault::new("fsync fails", SHORT, &[Inject(Worker, All, "fsync,fdatasync:error=EIO")]),
        Fault::new(
            "mkdir and rename fail",
            SHORT,
            &[Inject(Worker, All, "mkdir,mkdirat,rename,renameat,renameat2:error=EIO")],
        )
        .charges(1),
    ]
}

fn store() -> Vec<Fault> {
    use Action::{
        Compact, CutMember, Defragment, FreezeStore, InjectStore, KillStore, MoveLeader, NoSpace, ReplaceMember,
        RevokeLeases, Upgrade,
    };
    vec![
        Fault::new("etcd's leader is killed", SHORT, &[KillStore(Which::Leader)]),
        Fault::new("a member of etcd is killed", SHORT, &[KillStore(Which::Follower)]),
        Fault::new("two members of etcd are down for 7 s", LONG, &[KillStore(Which::Majority)]),
        Fault::new("etcd is down for 1.5 s", SHORT, &[KillStore(Which::All)]),
        Fault::new("etcd is down for 7 s", LONG, &[KillStore(Which::All)]),
        Fault::new("etcd is down for 20 s", Duration::from_secs(20), &[KillStore(Which::All)]),
        Fault::new("etcd's leader is frozen for 7 s", LONG, &[FreezeStore(Which::Leader)]),
        Fault::new("etcd is frozen for 1.5 s", SHORT, &[FreezeStore(Which::All)]),
        Fault::new("etcd is frozen for 7 s", LONG, &[FreezeStore(Which::All)]),
        Fault::new("etcd's leader is cut off from its members", LONG, &[CutMember(Which::Leader)]),
        Fault::new("a member of etcd is lost and replaced", AT_ONCE, &[ReplaceMember(Which::Follower)]),
        Fault::new("etcd's leader is lost and replaced", AT_ONCE, &[ReplaceMember(Which::Leader)]),
        Fault::new("etcd's disks are slow", LONG, &[InjectStore(Which::All, "fdatasync,fsync:delay_exit=150000")]),
        Fault::new("etcd is compacted", AT_ONCE, &[Compact]),
        Fault::new(
            "etcd is compacted while an agent is frozen",
            SHORT,
            &[Action::Freeze(Process::Agent, Who::Follower), Action::Wait(Duration::from_millis(500)), Compact],
        ),
        Fault::new("etcd has no space for 7 s", LONG, &[NoSpace]),
        Fault::new("another member of etcd leads", AT_ONCE, &[MoveLeader]),
        Fault::new("etcd is defragmented", AT_ONCE, &[Defragment]),
        Fault::new("all leases are revoked", AT_ONCE, &[RevokeLeases]),
        Fault::new("etcd is upgraded from 3.4 to 3.5", AT_ONCE, &[Upgrade]),
    ]
}

fn operators() -> Vec<Fault> {
    use Action::{Delete, DeleteNode, Overwrite, OverwriteNode, Wait};
    let pause = |time| [Overwrite("desired", r#"{"paused":true}"#), Wait(time), Overwrite("desired", "{}")];
    vec![
        Fault::new("an operator deletes a node's record", AT_ONCE, &[DeleteNode]),
        Fault::new("an operator deletes the leader's record", AT_ONCE, &[Delete("leader")]),
        // What comes back later than the lease finds no job, and begins one.
        Fault::new("an operator deletes the round", AT_ONCE, &[Delete("round")]).ends(&[0, 1]).forgets(),
        Fault::new("an operator deletes the spec", AT_ONCE, &[Delete("spec")]).ends(&[0, 1]),
        Fault::new("an operator deletes the checkpoint's record", AT_ONCE, &[Delete("checkpoint")]).forgets(),
        Fault::new("an operator deletes all keys of the job", AT_ONCE, &[Delete("")]).ends(&[0, 1]).forgets(),
        Fault::new("a node's record is corrupt", AT_ONCE, &[OverwriteNode("{\"name\": 7")]),
        Fault::new("the leader's record is corrupt", AT_ONCE, &[Overwrite("leader", "rubbish")]).ends(&[0, 1]),
        Fault::new("the round is corrupt", AT_ONCE, &[Overwrite("round", "{}")]).ends(&[0, 1]),
        Fault::new("the spec is corrupt", AT_ONCE, &[Overwrite("spec", "[]")]).ends(&[0, 1]),
        Fault::new("the checkpoint's record is corrupt", AT_ONCE, &[Overwrite("checkpoint", "7")])
            .ends(&[0, 1, 5])
            .charges(5),
        Fault::new("an operator pauses the job for 1.5 s", AT_ONCE, &pause(SHORT)),
        Fault::new("an operator resumes a job that is still pausing", AT_ONCE, &pause(Duration::from_millis(50))),
        Fault::new("an operator closes the job", AT_ONCE, &[Overwrite("desired", r#"{"closed":true}"#)]).ends(&[0, 4]),
    ]
}

fn several() -> Vec<Fault> {
    use Action::{Cut as Way, Drain, Fill, Freeze, Kill, KillStore, Wait};
    use Process::{Agent, Worker};
    use Who::{All, Follower, Leader, LeaderAndFollower};
    let soon = Wait(Duration::from_millis(200));
    let silent = Cut::Silent;
    vec![
        Fault::new("a worker and etcd's leader are killed", SHORT, &[KillStore(Which::Leader), Kill(Worker, Follower)])
            .charges(1),
        Fault::new("a worker is killed while etcd is down", SHORT, &[KillStore(Which::All), Kill(Worker, Follower)])
            .charges(1),
        Fault::new("an agent is killed while etcd is down", LONG, &[KillStore(Which::All), Kill(Agent, Follower)]),
        Fault::new(
            "the leading agent is killed while etcd is frozen",
            SHORT,
            &[Action::FreezeStore(Which::All), Kill(Agent, Leader)],
        ),
        Fault::new("a node is drained while etcd is down", SHORT, &[KillStore(Which::All), Drain(Follower)]),
        Fault::new(
            "an agent is killed while another cannot reach etcd",
            LONG,
            &[Way(Leader, Side::Store, Direction::Both, silent), Kill(Agent, Follower)],
        ),
        Fault::new(
            "an agent is killed while the job recovers from a worker's death",
            AT_ONCE,
            &[Kill(Worker, Leader), soon, Kill(Agent, Follower)],
        )
        .charges(1),
        Fault::new(
            "the leading agent is killed, and then the next",
            AT_ONCE,
            &[Kill(Agent, Leader), soon, Kill(Agent, Leader)],
        ),
        Fault::new(
            "an agent is killed three times",
            AT_ONCE,
            &[
                Kill(Agent, Follower),
                Wait(Duration::from_secs(1)),
                Kill(Agent, Follower),
                Wait(Duration::from_secs(1)),
                Kill(Agent, Follower),
            ],
        ),
        Fault::new(
            "a worker is killed while another node is isolated",
            LONG,
            &[Way(Follower, Side::World, Direction::Both, silent), Kill(Worker, Leader)],
        )
        .charges(1),
        Fault::new("two nodes are frozen for 7 s", LONG, &[Freeze(Agent, LeaderAndFollower)]),
        Fault::new("all agents are frozen for 7 s", LONG, &[Freeze(Agent, All)]),
        Fault::new(
            "a worker is killed while the checkpoint disk is full",
            SHORT,
            &[Fill(Place::Checkpoints), Kill(Worker, Follower)],
        )
        .charges(5)
        .ends(&[0, 5]),
    ]
}

/// Jobs that a coordinator leads.
fn coordinators() -> Vec<Fault> {
    use Action::{CutCoordinator, FreezeCoordinator, Kill, KillCoordinator};
    use Process::{Agent, Worker};
    use Who::Follower;
    // Longer than agents leave the lead to another.
    let takeover = Duration::from_secs(20);
    vec![
        Fault::new("the coordinator is killed", SHORT, &[KillCoordinator]),
        Fault::new("the coordinator is down for 20 s", takeover, &[KillCoordinator]),
        Fault::new("the coordinator is frozen for 1.5 s", SHORT, &[FreezeCoordinator]),
        Fault::new("the coordinator is frozen for 7 s", LONG, &[FreezeCoordinator]),
        Fault::new("the coordinator cannot reach etcd for 7 s", LONG, &[CutCoordinator(Side::Store)]),
        Fault::new("the coordinator cannot reach the nodes for 7 s", LONG, &[CutCoordinator(Side::Peers)]),
        Fault::new("the coordinator is isolated for 20 s", takeover, &[CutCoordinator(Side::World)]),
        Fault::new(
            "a worker is killed while the coordinator is down",
            SHORT,
            &[KillCoordinator, Kill(Worker, Follower)],
        )
        .charges(1),
        Fault::new(
            "an agent is killed while the coordinator is frozen",
            LONG,
            &[FreezeCoordinator, Kill(Agent, Follower)],
        ),
    ]
}

/// Certificates, users and tokens.
fn secrets() -> Vec<Fault> {
    use Action::{Expire, ForgetTokens, Kill, TakeRights};
    let agent = Kill(Process::Agent, Who::Follower);
    vec![
        Fault::new("etcd's certificates have expired", LONG, &[Expire(Holder::Store)]),
        Fault::new("the nodes' certificates have expired", LONG, &[Expire(Holder::Nodes)]),
        Fault::new(
            "an agent is killed while the nodes' certificates have expired",
            SHORT,
            &[Expire(Holder::Nodes), agent],
        ),
        Fault::new("etcd revokes the job's permissions", SHORT, &[TakeRights]),
        Fault::new("etcd forgets all tokens", AT_ONCE, &[ForgetTokens]),
    ]
}
