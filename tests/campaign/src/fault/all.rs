//! Which faults there are.

use std::time::Duration;

use rustix::process::Resource;

use super::Action::{Cut as Way, *};
use super::Direction::*;
use super::Keeps::Nothing;
use super::Place::*;
use super::Side::*;
use super::Told::*;
use super::Who::*;
use super::{A_NODE, AT_ONCE, Fault, Keeps, LONG, MANY, SHORT, fault};
use crate::hosts::Cut;
use crate::names::Answers;
use crate::nodes::Process::*;
use crate::secrets::Holder;

pub(crate) fn all() -> Vec<Fault> {
    [
        processes(),
        machines(),
        networks(),
        disks(),
        store(),
        operators(),
        several(),
        coordinators(),
        secrets(),
        agents_store(),
    ]
    .concat()
}

/// Longer than what takes 20 s.
const WHILE_SLOW: Duration = Duration::from_secs(25);

fn processes() -> Vec<Fault> {
    let [worker, leaders] = [Kill(Worker, Follower), Kill(Worker, Leader)];
    let isolated = Way(Follower, World, Both, Cut::Silent);
    let no_fork = Inject(Guard, Follower, "clone,clone3,fork,vfork:error=EAGAIN");
    let late_start = Inject(Guard, Follower, "execve:delay_enter=20000000");
    let late_mkdir = Inject(Agent, Follower, "mkdir,mkdirat:delay_enter=20000000");
    let late_agent = Inject(Agent, Follower, "sendto,sendmsg,writev:delay_enter=100000");
    let late_worker = Inject(Worker, Follower, "sendto,sendmsg,write,writev:delay_enter=20000");
    vec![
        fault("a worker is killed", AT_ONCE, &[worker]).charges(1),
        fault("the leader's worker is killed", AT_ONCE, &[leaders]).charges(1),
        fault("two workers are killed", AT_ONCE, &[Kill(Worker, LeaderAndFollower)]).charges(2),
        fault("all workers are killed", AT_ONCE, &[Kill(Worker, All)]).charges(3),
        fault("an agent is killed", AT_ONCE, &[Kill(Agent, Follower)]),
        fault("the leading agent is killed", AT_ONCE, &[Kill(Agent, Leader)]),
        fault("two agents are killed", AT_ONCE, &[Kill(Agent, LeaderAndFollower)]),
        fault("all agents are killed", AT_ONCE, &[Kill(Agent, All)]),
        fault("a guard is killed", AT_ONCE, &[Kill(Guard, Follower)]).charges(1),
        fault("the leader's guard is killed", AT_ONCE, &[Kill(Guard, Leader)]).charges(1),
        fault("a worker is frozen for 1.5 s", SHORT, &[Freeze(Worker, Follower)]),
        fault("a worker is frozen for 12 s", Duration::from_secs(12), &[Freeze(Worker, Follower)]).charges(1),
        fault("an agent is frozen for 1.5 s", SHORT, &[Freeze(Agent, Follower)]),
        fault("an agent is frozen for 7 s", LONG, &[Freeze(Agent, Follower)]),
        fault("the leading agent is frozen for 1.5 s", SHORT, &[Freeze(Agent, Leader)]),
        fault("the leading agent is frozen for 7 s", LONG, &[Freeze(Agent, Leader)]),
        fault("a guard is frozen for 7 s", LONG, &[Freeze(Guard, Follower)]),
        // Its agent must end it, since its workers must end and it does not confirm that.
        fault("a guard is frozen and another node's worker killed", LONG, &[Hold(Follower), leaders]).charges(1),
        fault("a guard is frozen and its node isolated", LONG, &[Hold(Follower), isolated]).charges(1),
        fault("a process of a DataLoader is killed", AT_ONCE, &[Kill(Loader, Follower)]).charges(1),
        fault("an agent is starved of CPU time", LONG, &[Starve(Agent, Follower)]),
        fault("the leading agent is starved of CPU time", LONG, &[Starve(Agent, Leader)]),
        fault("a worker is starved of CPU time", SHORT, &[Starve(Worker, Follower)]),
        fault("an agent has no file descriptors left", LONG, &[Exhaust(Agent, Follower, Resource::Nofile)]).charges(1),
        fault("the leading agent has no file descriptors left", LONG, &[Exhaust(Agent, Leader, Resource::Nofile)])
            .charges(1),
        fault("a worker has no memory left", LONG, &[Exhaust(Worker, Follower, Resource::As)]).charges(1),
        fault("a worker is killed as memory runs out", SHORT, &[OutOfMemory(Worker, Follower)]).charges(1),
        fault("all workers are killed as memory runs out", SHORT, &[OutOfMemory(Worker, All)]).charges(3),
        fault("an agent is killed as memory runs out", LONG, &[OutOfMemory(Agent, Follower)]),
        fault("a worker is killed while a guard cannot fork", SHORT, &[no_fork, worker]).charges(3),
        fault("a worker is killed while programs take 20 s to start", WHILE_SLOW, &[late_start, worker]).charges(1),
        fault("a worker is killed while mkdir takes 20 s", WHILE_SLOW, &[late_mkdir, worker]).charges(1),
        fault("an agent sends everything 100 ms late", LONG, &[late_agent]),
        fault("a worker sends everything 20 ms late", SHORT, &[late_worker]),
    ]
}

fn machines() -> Vec<Fault> {
    let (tick, ahead) = (Wait(Duration::from_millis(100)), Clock(All, 3600));
    // Without both of them the job does not train.
    let nowhere = ResetEachRound(Followers, 2);
    vec![
        fault("a host is reset", AT_ONCE, &[Reset(Follower)]),
        fault("the leading host is reset", AT_ONCE, &[Reset(Leader)]),
        fault("all hosts are reset", AT_ONCE, &[Reset(All)]),
        fault("a host is lost permanently", AT_ONCE, &[Lose(Follower)]),
        fault("the leading host is lost permanently", AT_ONCE, &[Lose(Leader)]),
        // A node that never gets far costs restarts, and its place where enough others are there.
        fault("two hosts are reset in each round", AT_ONCE, &[ResetEachRound(Followers, MANY)])
            .flags(&["--max-restarts=2"])
            .charges(2)
            .ends(&[0, 5]),
        fault("a host is reset in each round", AT_ONCE, &[nowhere, ResetEachRound(Follower, MANY)])
            .flags(&["--exclude-after=1"])
            .charges(2),
        fault("a node is drained", SHORT, &[Drain(Follower, Once)]),
        fault("the leading node is drained", SHORT, &[Drain(Leader, Once)]),
        fault("all nodes are drained", SHORT, &[Drain(All, Once)]).keeps(Keeps::All),
        fault("all nodes are drained by several signals", SHORT, &[Drain(All, Again)]).keeps(Keeps::All),
        fault("all nodes are drained by signals to all processes", SHORT, &[Drain(All, WithAll)]).keeps(Keeps::All),
        fault("all nodes are drained while DataLoaders run", SHORT, &[Await(Loader, All), Drain(All, Once)])
            .keeps(Keeps::All),
        fault("a wall clock is an hour ahead", SHORT, &[Clock(Follower, 3600)]),
        fault("the leader's wall clock is a day behind", SHORT, &[Clock(Leader, -86_400)]),
        fault("all wall clocks jump back and forth", SHORT, &[ahead, tick, Clock(All, -3600), tick, ahead]),
    ]
}

fn networks() -> Vec<Fault> {
    let (silent, etcd) = (Cut::Silent, Kill(Member, All));
    let late = Names(Answers::Late(Duration::from_secs(3)));
    vec![
        fault("a node cannot reach etcd for 1.5 s", SHORT, &[Way(Follower, Store, Both, silent)]),
        fault("a node cannot reach etcd for 7 s", LONG, &[Way(Follower, Store, Both, silent)]),
        fault("the leader cannot reach etcd for 1.5 s", SHORT, &[Way(Leader, Store, Both, silent)]),
        fault("the leader cannot reach etcd for 7 s", LONG, &[Way(Leader, Store, Both, silent)]),
        fault("no node can reach etcd for 7 s", LONG, &[Way(All, Store, Both, silent)]),
        fault("etcd is unreachable from a node for 7 s", LONG, &[Way(Follower, Store, Both, Cut::Refused)]),
        fault("a node's packets to etcd are lost", LONG, &[Way(Follower, Store, Sent, silent)]),
        fault("etcd's packets to a node are lost", LONG, &[Way(Follower, Store, Received, silent)]),
        fault("etcd's packets to the leader are lost", LONG, &[Way(Leader, Store, Received, silent)]),
        fault("a node cannot reach the others for 1.5 s", SHORT, &[Way(Follower, Peers, Both, silent)]),
        fault("a node cannot reach the others for 7 s", LONG, &[Way(Follower, Peers, Both, silent)]).charges(1),
        fault("the leader cannot reach the others for 7 s", LONG, &[Way(Leader, Peers, Both, silent)]).charges(1),
        fault("a node's packets to the other nodes are lost", LONG, &[Way(Follower, Peers, Sent, silent)]).charges(1),
        fault("the other nodes' packets to a node are lost", LONG, &[Way(Follower, Peers, Received, silent)])
            .charges(1),
        fault("a node is isolated for 1.5 s", SHORT, &[Way(Follower, World, Both, silent)]),
        fault("a node is isolated for 7 s", LONG, &[Way(Follower, World, Both, silent)]).charges(1),
        fault("the leader is isolated for 7 s", LONG, &[Way(Leader, World, Both, silent)]).charges(1),
        fault("the network of a node flaps", LONG, &[Flap(Follower, World)]).charges(1),
        fault("the network to etcd flaps", LONG, &[Flap(All, Store)]),
        fault("a network cable is unplugged for 1.5 s", SHORT, &[Unplug(Follower)]),
        fault("a network cable is unplugged for 7 s", LONG, &[Unplug(Follower)]).charges(1),
        fault("DNS fails while etcd restarts", SHORT, &[Names(Answers::Failure), etcd]),
        fault("DNS does not know etcd's names while etcd restarts", SHORT, &[Names(Answers::Unknown), etcd]),
        fault("DNS does not answer while etcd restarts", SHORT, &[Names(Answers::None), etcd]),
        fault("DNS answers 3 s late while etcd restarts", LONG, &[late, Kill(Member, Leader)]),
        fault("DNS answers with wrong addresses while etcd restarts", SHORT, &[Names(Answers::Wrong), etcd]),
    ]
}

fn disks() -> Vec<Fault> {
    let no_rename = Inject(Worker, All, "mkdir,mkdirat,rename,renameat,renameat2:error=EIO");
    vec![
        fault("a node's disk is full", SHORT, &[Fill(Own(Follower))]),
        fault("the leader's disk is full", SHORT, &[Fill(Own(Leader))]),
        fault("a node's disk does not answer for 7 s", LONG, &[Stall(Own(Follower))]),
        fault("the leader's disk does not answer for 7 s", LONG, &[Stall(Own(Leader))]),
        // A job that cannot write its first checkpoint at all fails, and says so.
        fault("the checkpoint disk is full", SHORT, &[Fill(Checkpoints)]).charges(5).ends(&[0, 5]),
        fault("the checkpoint folder is read-only", SHORT, &[ReadOnly(Checkpoints)]).charges(5).ends(&[0, 5]),
        fault("the checkpoint disk does not answer for 7 s", LONG, &[Stall(Checkpoints)]).charges(1),
        fault("fsync takes a second", LONG, &[Inject(Worker, All, "fsync,fdatasync:delay_enter=1000000")]),
        // A worker tries its checkpoint folder as it starts.
        fault("fsync fails", SHORT, &[Inject(Worker, All, "fsync,fdatasync:error=EIO")]).charges(1),
        fault("mkdir and rename fail", SHORT, &[no_rename]).charges(1),
    ]
}

fn store() -> Vec<Fault> {
    let (frozen, soon) = (Freeze(Agent, Follower), Wait(Duration::from_millis(500)));
    vec![
        fault("etcd's leader is killed", SHORT, &[Kill(Member, Leader)]),
        fault("a member of etcd is killed", SHORT, &[Kill(Member, Follower)]),
        fault("two members of etcd are down for 7 s", LONG, &[Kill(Member, LeaderAndFollower)]),
        fault("etcd is down for 1.5 s", SHORT, &[Kill(Member, All)]),
        fault("etcd is down for 7 s", LONG, &[Kill(Member, All)]),
        fault("etcd is down for 20 s", Duration::from_secs(20), &[Kill(Member, All)]),
        fault("etcd's leader is frozen for 7 s", LONG, &[Freeze(Member, Leader)]),
        fault("etcd is frozen for 1.5 s", SHORT, &[Freeze(Member, All)]),
        fault("etcd is frozen for 7 s", LONG, &[Freeze(Member, All)]),
        fault("etcd's leader is cut off from its members", LONG, &[CutMember(Leader)]),
        fault("a member of etcd is lost and replaced", AT_ONCE, &[ReplaceMember(Follower)]),
        fault("etcd's leader is lost and replaced", AT_ONCE, &[ReplaceMember(Leader)]),
        fault("etcd's disks are slow", LONG, &[Inject(Member, All, "fdatasync,fsync:delay_exit=150000")]),
        fault("etcd is compacted", AT_ONCE, &[Compact]),
        fault("etcd is compacted while an agent is frozen", SHORT, &[frozen, soon, Compact]),
        fault("etcd has no space for 7 s", AT_ONCE, &[NoSpace(true), Wait(LONG), NoSpace(false)]),
        fault("another member of etcd leads", AT_ONCE, &[MoveLeader]),
        fault("etcd is defragmented", AT_ONCE, &[Defragment]),
        fault("all leases are revoked", AT_ONCE, &[RevokeLeases]),
        fault("etcd is upgraded from 3.4 to 3.5", AT_ONCE, &[Upgrade]),
    ]
}

fn operators() -> Vec<Fault> {
    let pause = |time| [Overwrite("desired", r#"{"paused":true}"#), Wait(time), Overwrite("desired", "{}")];
    vec![
        fault("an operator deletes a node's record", AT_ONCE, &[Delete(A_NODE)]),
        fault("an operator deletes the leader's record", AT_ONCE, &[Delete("leader")]),
        // What comes back later than the lease finds no job, and begins one.
        fault("an operator deletes the round", AT_ONCE, &[Delete("round")]).ends(&[0, 1]).keeps(Nothing),
        fault("an operator deletes the spec", AT_ONCE, &[Delete("spec")]).ends(&[0, 1]),
        fault("an operator deletes the checkpoint's record", AT_ONCE, &[Delete("checkpoint")]).keeps(Nothing),
        fault("an operator deletes all keys of the job", AT_ONCE, &[Delete("")]).ends(&[0, 1]).keeps(Nothing),
        fault("a node's record is corrupt", AT_ONCE, &[Overwrite(A_NODE, "{\"name\": 7")]),
        fault("the leader's record is corrupt", AT_ONCE, &[Overwrite("leader", "rubbish")]).ends(&[0, 1]),
        fault("the round is corrupt", AT_ONCE, &[Overwrite("round", "{}")]).ends(&[0, 1]),
        fault("the spec is corrupt", AT_ONCE, &[Overwrite("spec", "[]")]).ends(&[0, 1]),
        fault("the checkpoint's record is corrupt", AT_ONCE, &[Overwrite("checkpoint", "7")])
            .ends(&[0, 1, 5])
            .charges(5),
        fault("an operator pauses the job for 1.5 s", AT_ONCE, &pause(SHORT)).keeps(Keeps::All),
        fault("an operator resumes a job that is still pausing", AT_ONCE, &pause(Duration::from_millis(50))),
        fault("an operator closes the job", AT_ONCE, &[Overwrite("desired", r#"{"closed":true}"#)]).ends(&[0, 4]),
    ]
}

fn several() -> Vec<Fault> {
    let [soon, second] = [200, 1000].map(|ms| Wait(Duration::from_millis(ms)));
    let [agent, leader, worker] = [Kill(Agent, Follower), Kill(Agent, Leader), Kill(Worker, Follower)];
    let (etcd, leaders_worker) = (Kill(Member, All), Kill(Worker, Leader));
    let cut = |who, from| Way(who, from, Both, Cut::Silent);
    vec![
        fault("a worker and etcd's leader are killed", SHORT, &[Kill(Member, Leader), worker]).charges(1),
        fault("a worker is killed while etcd is down", SHORT, &[etcd, worker]).charges(1),
        fault("an agent is killed while etcd is down", LONG, &[etcd, agent]),
        fault("the leading agent is killed while etcd is frozen", SHORT, &[Freeze(Member, All), leader]),
        fault("a node is drained while etcd is down", SHORT, &[etcd, Drain(Follower, Once)]),
        fault("an agent is killed while another cannot reach etcd", LONG, &[cut(Leader, Store), agent]),
        fault(
            "an agent is killed while the job recovers from a worker's death",
            AT_ONCE,
            &[leaders_worker, soon, agent],
        )
        .charges(1),
        fault("the leading agent is killed, and then the next", AT_ONCE, &[leader, soon, leader]),
        fault("an agent is killed three times", AT_ONCE, &[agent, second, agent, second, agent]).charges(2),
        fault("a worker is killed while another node is isolated", LONG, &[cut(Follower, World), leaders_worker])
            .charges(1),
        fault("two nodes are frozen for 7 s", LONG, &[Freeze(Agent, LeaderAndFollower)]),
        fault("all agents are frozen for 7 s", LONG, &[Freeze(Agent, All)]),
        fault("a worker is killed while the checkpoint disk is full", SHORT, &[Fill(Checkpoints), worker])
            .charges(5)
            .ends(&[0, 5]),
    ]
}

fn coordinators() -> Vec<Fault> {
    // Longer than agents leave the lead to another.
    let takeover = Duration::from_secs(20);
    let (killed, frozen) = (Kill(Coordinator, All), Freeze(Coordinator, All));
    vec![
        fault("the coordinator is killed", SHORT, &[killed]),
        fault("the coordinator is down for 20 s", takeover, &[killed]),
        fault("the coordinator is frozen for 1.5 s", SHORT, &[frozen]),
        fault("the coordinator is frozen for 7 s", LONG, &[frozen]),
        fault("the coordinator cannot reach etcd for 7 s", LONG, &[CutCoordinator(Store)]),
        fault("the coordinator cannot reach the nodes for 7 s", LONG, &[CutCoordinator(Peers)]),
        fault("the coordinator is isolated for 20 s", takeover, &[CutCoordinator(World)]),
        fault("a worker is killed while the coordinator is down", SHORT, &[killed, Kill(Worker, Follower)]).charges(1),
        fault("an agent is killed while the coordinator is frozen", LONG, &[frozen, Kill(Agent, Follower)]),
    ]
}

/// Of the agent that serves the store, where agents hold it.
fn agents_store() -> Vec<Fault> {
    vec![
        fault("the store's host is reset", AT_ONCE, &[Reset(Serving)]),
        fault("the store's host is lost permanently", AT_ONCE, &[Lose(Serving)]),
        fault("the store's agent is killed", AT_ONCE, &[Kill(Agent, Serving)]),
        fault("the store's agent is frozen for 7 s", LONG, &[Freeze(Agent, Serving)]),
    ]
}

fn secrets() -> Vec<Fault> {
    let agent = Kill(Agent, Follower);
    vec![
        fault("etcd's certificates have expired", LONG, &[Expire(Holder::Store)]),
        fault("the nodes' certificates have expired", LONG, &[Expire(Holder::Nodes)]),
        fault("an agent is killed while the nodes' certificates have expired", SHORT, &[Expire(Holder::Nodes), agent]),
        fault("etcd revokes the job's permissions", AT_ONCE, &[Rights(false), Wait(SHORT), Rights(true)]),
        fault("etcd forgets all tokens", AT_ONCE, &[ForgetTokens]),
    ]
}
