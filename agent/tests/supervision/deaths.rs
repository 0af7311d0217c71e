//! The ways in which an agent or its guard can end. Checks that no process survives them.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use elastic_agent::for_tests::{Event, GuardClientError, SpawnError};
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal};

use crate::scene::{self, Agent, Scene, gone};

pub(crate) fn scenes() -> Vec<Scene> {
    let mut scenes = crate::scenes![part: agent_with_strays_and_a_port, agent_with_a_deadline, process_1];
    scenes.extend(crate::scenes![alone:
        a_guard_that_is_killed_takes_its_workers_and_strays_along_and_the_agent_hears_of_it,
        a_guard_that_is_frozen_for_a_while_blocks_no_caller_and_loses_no_request,
        a_frozen_guard_that_confirms_no_kill_is_killed_with_all_below_it,
        a_frozen_guard_that_lets_its_deadline_pass_is_killed_with_all_below_it,
        a_frozen_guard_does_not_hold_up_the_end,
    ]);
    scenes
}

pub(crate) fn trials() -> Vec<Trial> {
    let test = |name: &str, run: fn()| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    };
    vec![
        test("a_killed_agent_leaves_nothing_and_its_port_closes_last", || dies_and_leaves_nothing(Signal::KILL)),
        test("an_agent_that_crashes_leaves_nothing", || dies_and_leaves_nothing(Signal::ABORT)),
        test("workers_die_with_the_guard_even_when_the_agent_is_frozen", workers_die_with_the_guard),
        test("a_frozen_agents_workers_end_at_the_deadline", a_frozen_agents_workers_end_at_the_deadline),
        test("an_agent_that_is_process_1_reaps_what_it_inherits", an_agent_that_is_process_1_reaps_what_it_inherits),
    ]
}

async fn agent_with_strays_and_a_port(mut agent: Agent) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    agent.guard.hold(&listener).unwrap();
    println!("port {}", listener.local_addr().unwrap().port());
    println!("guard {}", agent.guard_pid);
    for rank in 0..2 {
        let strays = "for n in 1 2 3 4 5 6 7 8 9 10; do (setsid sleep 1000 >/dev/null & echo stray$n $!); done";
        let pid = agent.spawn(rank, &format!("trap '' TERM; sleep 1000 & {strays}; echo up; wait")).await;
        println!("worker {pid}");
    }
    // The only event here is the loss of the guard, and it changes nothing.
    while !matches!(agent.next_event().await, Event::GuardLost { .. }) {}
    std::future::pending::<()>().await;
}

/// Parses the lines that `agent_with_strays_and_a_port` prints, by kind.
fn read_tree(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> BTreeMap<String, Vec<i32>> {
    let mut seen: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    let mut up = 0;
    while up < 2 || seen.get("worker").is_none_or(|workers| workers.len() < 2) {
        let line = lines.next().unwrap().unwrap();
        match line.split_once(' ') {
            Some((what, number)) => seen.entry(what.to_owned()).or_default().push(number.parse().unwrap()),
            None => up += 1,
        }
    }
    seen
}

pub(crate) fn ends_within_seconds(pid: i32) -> bool {
    let Ok(handle) = rustix::process::pidfd_open(Pid::from_raw(pid).unwrap(), rustix::process::PidfdFlags::empty())
    else {
        return true;
    };
    let mut fds = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
}

fn workers_die_with_the_guard() {
    // The agent is stopped and can do nothing.
    let (mut agent, mut lines) = scene::start("agent_with_strays_and_a_port");
    let tree = read_tree(&mut lines);
    let agent_pid = Pid::from_raw(agent.id() as i32).unwrap();
    rustix::process::kill_process(agent_pid, Signal::STOP).unwrap();
    // When the guard dies, the workers die with it.
    rustix::process::kill_process(Pid::from_raw(tree["guard"][0]).unwrap(), Signal::KILL).unwrap();
    assert!(tree["worker"].iter().all(|worker| ends_within_seconds(*worker)));
    // Once the agent runs again, it ends the strays too.
    rustix::process::kill_process(agent_pid, Signal::CONT).unwrap();
    let strays = tree.iter().filter(|(what, _)| what.starts_with("stray")).flat_map(|(_, pids)| pids);
    assert!(strays.copied().all(ends_within_seconds));
    agent.kill().unwrap();
    agent.wait().unwrap();
}

fn dies_and_leaves_nothing(signal: Signal) {
    // An agent with two workers, twenty strays in sessions of their own, and a port that its guard holds too.
    let (mut agent, mut lines) = scene::start("agent_with_strays_and_a_port");
    let mut tree = read_tree(&mut lines);
    let port = tree.remove("port").unwrap()[0] as u16;
    tree.remove("guard").unwrap();
    let pids: Vec<i32> = tree.into_values().flatten().collect();
    assert_eq!(pids.len(), 2 + 20);
    let mut queued = TcpStream::connect(("127.0.0.1", port)).unwrap();
    queued.set_read_timeout(Some(Duration::from_secs(10))).unwrap();

    // The agent dies.
    let start = Instant::now();
    rustix::process::kill_process(Pid::from_raw(agent.id() as i32).unwrap(), signal).unwrap();
    agent.wait().unwrap();

    // The queued connection breaks only when the port closes. At that time every worker and every stray is gone.
    let broken = queued.read(&mut [0]).unwrap_err();
    let took = start.elapsed();
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset);
    println!("agent's death to refused connections: {took:?}");
    assert!(pids.into_iter().all(gone));
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(TcpStream::connect(("127.0.0.1", port)).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
}

async fn agent_with_a_deadline(mut agent: Agent) {
    let deadline = elastic_store::clock::now() + Duration::from_secs(1);
    agent.guard.set_deadline(Some(deadline));
    let pid = agent.spawn(0, "exec sleep 1000 >/dev/null").await;
    println!("{pid}");
    // The outer test stops this process here, and continues it when the worker is gone.
    let Event::DeadlineKilled { at } = agent.next_event().await else { panic!("killed by the deadline") };
    println!("{}", (at - deadline).as_micros());
    // A renewal that comes too late revives nothing, but it lets the next round begin.
    assert_eq!(agent.exited().await.exit.number(), -9);
    assert_eq!(agent.next_event().await, Event::Stopped);
    println!("end");
}

fn a_frozen_agents_workers_end_at_the_deadline() {
    // A worker, and an agent that freezes before it renews the deadline.
    let (mut agent, mut lines) = scene::start("agent_with_a_deadline");
    let worker = lines.next().unwrap().unwrap().parse().unwrap();
    let agent_pid = Pid::from_raw(agent.id() as i32).unwrap();
    rustix::process::kill_process(agent_pid, Signal::STOP).unwrap();

    // When the deadline passes, the worker ends although the agent is stopped.
    assert!(ends_within_seconds(worker));
    let state = std::fs::read_to_string(format!("/proc/{}/stat", agent.id())).unwrap();
    assert!(state.contains(") T "), "the agent is frozen: {state}");

    // Once the agent is continued, it learns what happened and when.
    rustix::process::kill_process(agent_pid, Signal::CONT).unwrap();
    let late: u64 = lines.next().unwrap().unwrap().parse().unwrap();
    println!("killed {late} us after the deadline of a frozen agent");
    assert!(late < 2_000_000);
    assert_eq!(lines.next().unwrap().unwrap(), "end");
    assert!(agent.wait().unwrap().success());
}

async fn a_guard_that_is_killed_takes_its_workers_and_strays_along_and_the_agent_hears_of_it(mut agent: Agent) {
    let worker =
        agent.spawn(0, "trap '' TERM; (setsid sleep 1000 & echo $! > $DIR/stray); while :; do sleep 1; done").await;
    let stray = agent.pid_in("stray").await;
    let mut own_child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let start = Instant::now();
    let guard = Pid::from_raw(agent.guard_pid).unwrap();
    rustix::process::kill_process(guard, Signal::KILL).unwrap();
    let Event::GuardLost { cause, survivors } = agent.next_event().await else { panic!("the guard is lost") };
    println!("guard's death to a cleared tree: {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(cause.ends_with("ended by signal 9 (SIGKILL)"), "{cause}");
    assert!(survivors.is_empty());
    assert!(gone(worker) && gone(stray) && gone(guard.as_raw_pid()));
    assert!(own_child.try_wait().unwrap().is_none(), "what the agent started for itself is left alone");
    own_child.kill().unwrap();
    own_child.wait().unwrap();
    let spec = agent.script(0, "exit 0");
    let refused = agent.start(spec).await.unwrap_err();
    assert!(matches!(refused, SpawnError::GuardClient(GuardClientError::GuardLost)));
}

async fn a_guard_that_is_frozen_for_a_while_blocks_no_caller_and_loses_no_request(mut agent: Agent) {
    let guard = Pid::from_raw(agent.guard_pid).unwrap();
    rustix::process::kill_process(guard, Signal::STOP).unwrap();
    let later = |seconds| Some(elastic_store::clock::now() + Duration::from_secs(seconds));
    for n in 0..10_000 {
        agent.guard.set_deadline(later(100 + n));
    }
    for rank in 0..50 {
        let spec = agent.script(rank, "exit 0");
        agent.guard.begin_spawn(spec).unwrap();
    }
    // The guard continues where it was stopped.
    rustix::process::kill_process(guard, Signal::CONT).unwrap();
    let mut started = 0;
    while started < 50 {
        started += u32::from(matches!(agent.next_event().await, Event::Started { .. }));
    }
}

/// A worker that ignores SIGTERM, with a child and a process in a session of its own. Its guard is frozen.
async fn frozen(agent: &mut Agent) -> [i32; 3] {
    let worker =
        agent.spawn(0, "trap '' TERM; sleep 1000 & echo $! > child; (setsid sleep 1000 & echo $! > stray); wait").await;
    let below = [worker, agent.pid_in("child").await, agent.pid_in("stray").await];
    rustix::process::kill_process(Pid::from_raw(agent.guard_pid).unwrap(), Signal::STOP).unwrap();
    below
}

async fn a_frozen_guard_that_confirms_no_kill_is_killed_with_all_below_it(mut agent: Agent) {
    let below = frozen(&mut agent).await;
    let start = Instant::now();
    agent.guard.begin_stop(Signal::KILL, Duration::ZERO);
    let Event::GuardLost { cause, survivors } = agent.next_event().await else { panic!("the guard is lost") };
    println!("kill to the end of a frozen guard: {:?}", start.elapsed());
    assert!(cause.contains("did not confirm") && cause.contains("state T"), "{cause}");
    assert_eq!(survivors, [""; 0]);
    assert!(below.into_iter().all(gone));
    assert_eq!(agent.next_event().await, Event::Stopped, "only now is nothing left");
    agent.guard.begin_stop(Signal::TERM, Duration::from_secs(60));
    assert_eq!(agent.next_event().await, Event::Stopped, "what is known stays known");
}

async fn a_frozen_guard_that_lets_its_deadline_pass_is_killed_with_all_below_it(mut agent: Agent) {
    agent.guard.set_deadline(Some(elastic_store::clock::now() + Duration::from_secs(1)));
    let below = frozen(&mut agent).await;
    let Event::GuardLost { survivors, .. } = agent.next_event().await else { panic!("the guard is lost") };
    assert_eq!(survivors, [""; 0]);
    assert!(below.into_iter().all(gone));
    // A stop that is asked for later is over at once.
    agent.guard.begin_stop(Signal::TERM, Duration::from_secs(60));
    assert_eq!(agent.next_event().await, Event::Stopped);
}

async fn a_frozen_guard_does_not_hold_up_the_end(mut agent: Agent) {
    let below = frozen(&mut agent).await;
    let guard = agent.guard_pid;
    agent.guard.close().await;
    assert!(gone(guard) && below.into_iter().all(gone));
}

async fn process_1(_agent: Agent) {
    assert_eq!(std::process::id(), 1);
    let mut orphans = Vec::new();
    for _ in 0..3 {
        let shell = std::process::Command::new("sh").args(["-c", "sleep 0.1 >/dev/null & echo $!"]).output().unwrap();
        orphans.push(String::from_utf8(shell.stdout).unwrap().trim().parse().unwrap());
    }
    while !orphans.iter().copied().all(gone) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // What the agent waits for itself is not taken away from it.
    for _ in 0..20 {
        let ended = tokio::process::Command::new("sh").args(["-c", "sleep 0.02; exit 3"]).status().await.unwrap();
        assert_eq!(ended.code(), Some(3));
    }
}

fn an_agent_that_is_process_1_reaps_what_it_inherits() {
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    if !rustix::process::geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    let ended = unshare.arg(std::env::current_exe().unwrap()).env(scene::NAME, "process_1").status().unwrap();
    assert!(ended.success(), "{ended}");
}
