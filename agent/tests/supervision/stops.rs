//! Stopping workers: the signal, the grace, and what workers leave behind.

use std::time::{Duration, Instant};

use elastic_agent::for_tests::{Event, Exit};
use rustix::process::Signal;

use crate::scene::{Agent, Scene, gone};

const LONG: Duration = Duration::from_secs(60);

/// Shorter than any wait that a bug would cause, and ample for an operation that waits for nothing.
const SOON: Duration = Duration::from_secs(10);

pub(crate) fn scenes() -> Vec<Scene> {
    crate::scenes![alone:
        workers_that_obey_are_gone_in_milliseconds,
        a_worker_that_ignores_the_signal_is_killed_after_the_grace,
        a_later_stop_shortens_the_grace,
        a_zero_grace_kills_at_once,
        strays_in_their_own_sessions_get_the_signal_and_end_with_the_stop,
        strays_that_ignore_the_signal_are_killed_after_the_grace,
        a_child_that_outlives_its_shell_keeps_the_grace_and_hears_one_signal,
        a_stopped_process_is_woken_to_hear_the_signal,
        a_signal_to_one_worker_reaches_its_group_alone,
        a_signal_reaches_the_group_of_a_worker_that_has_died,
        a_stop_of_nothing_is_done,
        workers_can_start_again_after_a_stop,
        a_tree_that_forks_while_it_is_killed_ends_too,
    ]
}

async fn workers_that_obey_are_gone_in_milliseconds(mut agent: Agent) {
    let pids = [agent.spawn(0, "exec sleep 1000").await, agent.spawn(1, "exec sleep 1000").await];
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    let took = start.elapsed();
    println!("stop of 2 workers: {took:?}");
    assert!(took < SOON, "{took:?}");
    assert!(pids.into_iter().all(gone));
    for _ in 0..2 {
        assert_eq!(agent.exited().await.exit, Exit::Signal { signal: 15, core_dumped: false });
    }
}

async fn a_worker_that_ignores_the_signal_is_killed_after_the_grace(mut agent: Agent) {
    agent.spawn(0, "trap '' TERM; echo > $DIR/ready; while :; do sleep 1; done").await;
    agent.line_in("ready").await;
    let grace = Duration::from_millis(300);
    let start = Instant::now();
    agent.stop_all(Signal::TERM, grace).await.unwrap();
    let took = start.elapsed();
    assert!(took >= grace && took < grace + SOON, "{took:?}");
    assert_eq!(agent.exited().await.exit, Exit::Signal { signal: 9, core_dumped: false });
}

async fn a_later_stop_shortens_the_grace(mut agent: Agent) {
    agent.spawn(0, "trap '' TERM; echo > $DIR/ready; while :; do sleep 1; done").await;
    agent.line_in("ready").await;
    let start = Instant::now();
    agent.guard.begin_stop(Signal::TERM, LONG).unwrap();
    agent.stop_all(Signal::TERM, Duration::from_millis(100)).await.unwrap();
    assert!(start.elapsed() < SOON);
}

async fn a_zero_grace_kills_at_once(mut agent: Agent) {
    agent.spawn(0, "trap '' TERM; echo > $DIR/ready; while :; do sleep 1; done").await;
    agent.line_in("ready").await;
    agent.guard.begin_stop(Signal::TERM, LONG).unwrap();
    agent.guard.begin_stop(Signal::TERM, Duration::ZERO).unwrap();
    assert_eq!(agent.exited().await.exit.number(), -9);
    assert_eq!(agent.next_event().await, Event::Stopped);
}

async fn strays_in_their_own_sessions_get_the_signal_and_end_with_the_stop(mut agent: Agent) {
    // A worker leaves an orphan in another session and lives on.
    agent.spawn(0, "(setsid sleep 1000 & echo $! > $DIR/stray); exec sleep 1000").await;
    let stray = agent.pid_in("stray").await;
    assert!(!gone(stray));
    // When everything is stopped with a long grace, the orphan ends with the worker, at once.
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    println!("stop with a stray: {:?}", start.elapsed());
    assert!(start.elapsed() < SOON);
    assert!(gone(stray));
}

async fn strays_that_ignore_the_signal_are_killed_after_the_grace(mut agent: Agent) {
    let stray = "trap \"\" TERM; echo $$ > $DIR/stray; while :; do sleep 1; done";
    agent.spawn(0, &format!("(setsid sh -c '{stray}' &); exec sleep 1000")).await;
    let stray = agent.pid_in("stray").await;
    let grace = Duration::from_millis(300);
    let start = Instant::now();
    agent.stop_all(Signal::TERM, grace).await.unwrap();
    assert!(start.elapsed() >= grace && start.elapsed() < grace + SOON);
    assert!(gone(stray));
}

async fn a_child_that_outlives_its_shell_keeps_the_grace_and_hears_one_signal(mut agent: Agent) {
    // A launch script. Its shell dies of the signal at once, and its child needs a moment to save.
    let child = "trap 'echo heard >> heard; saving=1' TERM; echo > ready; \
                 while [ -z $saving ]; do sleep 0.02; done; sleep 0.2; echo > saved";
    agent.spawn(0, &format!("({child}) & wait")).await;
    agent.line_in("ready").await;
    // When everything is stopped, the child gets its moment, and the signal only once. The stop ends with the child.
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(agent.read("saved"), "\n");
    assert_eq!(agent.read("heard"), "heard\n");
}

async fn a_stopped_process_is_woken_to_hear_the_signal(mut agent: Agent) {
    let pid = agent.spawn(0, "exec sleep 1000").await;
    agent.guard.signal(0, Signal::STOP).unwrap();
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ") {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(agent.exited().await.exit.number(), -15);
}

async fn a_signal_to_one_worker_reaches_its_group_alone(mut agent: Agent) {
    agent.spawn(0, "sleep 1000 & echo $! > $DIR/child; wait").await;
    let other = agent.spawn(1, "exec sleep 1000").await;
    let child = agent.pid_in("child").await;
    agent.guard.signal(0, Signal::KILL).unwrap();
    assert_eq!(agent.exited().await.local_rank, 0);
    assert!(!gone(other));
    while !gone(child) {
        tokio::task::yield_now().await;
    }
}

async fn a_signal_reaches_the_group_of_a_worker_that_has_died(mut agent: Agent) {
    agent.spawn(0, "sleep 1000 & echo $! > $DIR/child; exit 3").await;
    let other = agent.spawn(1, "exec sleep 1000").await;
    assert_eq!(agent.exited().await.exit, Exit::Code(3));
    let child = agent.pid_in("child").await;
    assert!(!gone(child));
    agent.guard.signal(0, Signal::KILL).unwrap();
    while !gone(child) {
        tokio::task::yield_now().await;
    }
    assert!(!gone(other));
}

async fn a_stop_of_nothing_is_done(mut agent: Agent) {
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    agent.spawn(0, "exit 0").await;
    assert!(agent.exited().await.exit.success());
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
}

async fn workers_can_start_again_after_a_stop(mut agent: Agent) {
    for round in 0..20 {
        let pid = agent.spawn(0, "exec sleep 1000").await;
        let refused = {
            agent.guard.begin_stop(Signal::TERM, LONG).unwrap();
            let spec = agent.script(1, "exit 0");
            agent.start(spec).await
        };
        assert!(refused.unwrap_err().to_string().contains("being stopped"), "round {round}");
        assert_eq!(agent.exited().await.pid, pid);
        assert_eq!(agent.next_event().await, Event::Stopped);
    }
}

async fn a_tree_that_forks_while_it_is_killed_ends_too(mut agent: Agent) {
    // A worker whose orphans start further orphans, each in a session of its own.
    let begetter = "#!/bin/sh\necho $$ >> $DIR/begotten\n[ $1 -gt 0 ] || exec sleep 1000\n\
                    setsid $DIR/beget $(($1 - 1)) &\nsleep 0.001\nsetsid $DIR/beget $(($1 - 1)) &\n";
    let file = agent.directory.path().join("beget");
    std::fs::write(&file, begetter).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    agent.spawn(0, "$DIR/beget 7 & exec sleep 1000").await;
    while agent.read("begotten").lines().count() < 30 {
        tokio::task::yield_now().await;
    }
    // When everything is killed in the middle of that, no process is left, and none is started later.
    let start = Instant::now();
    agent.stop_all(Signal::KILL, Duration::ZERO).await.unwrap();
    let begotten = agent.read("begotten");
    println!("kill of a tree of some {} processes: {:?}", begotten.lines().count(), start.elapsed());
    assert!(begotten.lines().all(|pid| gone(pid.parse().unwrap())));
}
