//! Stopping workers: the signal, the grace, and what workers leave behind.

use std::time::{Duration, Instant};

use elastic_agent::for_tests::{Event, Exit};
use rustix::process::{Pid, Signal};

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
        a_stopped_orphan_is_woken_to_hear_the_signal,
        helpers_of_a_python_that_saves_are_spared_the_signal,
        the_signal_reaches_a_script_below_whatever_started_it,
        helpers_that_outlive_their_parent_get_the_signal,
        what_succeeded_workers_left_has_time_to_end_and_is_named,
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
    agent.guard.begin_stop(Signal::TERM, LONG);
    agent.stop_all(Signal::TERM, Duration::from_millis(100)).await.unwrap();
    assert!(start.elapsed() < SOON);
}

async fn a_zero_grace_kills_at_once(mut agent: Agent) {
    agent.spawn(0, "trap '' TERM; echo > $DIR/ready; while :; do sleep 1; done").await;
    agent.line_in("ready").await;
    agent.guard.begin_stop(Signal::TERM, LONG);
    agent.guard.begin_stop(Signal::TERM, Duration::ZERO);
    assert_eq!(agent.exited().await.exit.number(), -9);
    assert_eq!(agent.next_event().await, Event::Stopped);
}

async fn strays_in_their_own_sessions_get_the_signal_and_end_with_the_stop(mut agent: Agent) {
    // A worker leaves an orphan in another session and lives on. The kernel cuts the orphan's name inside a letter.
    let named = "ln -s \"$(command -v sleep)\" обучение-модели";
    agent.spawn(0, &format!("{named}; (setsid ./обучение-модели 1000 & echo $! > $DIR/stray); exec sleep 1000")).await;
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
    agent.guard.signal(0, Signal::STOP);
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ") {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < SOON);
    assert_eq!(agent.exited().await.exit.number(), -15);
}

async fn a_stopped_orphan_is_woken_to_hear_the_signal(mut agent: Agent) {
    let orphan = "trap 'exit 0' TERM; echo $$ > stray; while :; do sleep 0.01; done";
    agent.spawn(0, &format!("(setsid sh -c \"{}\" &); exec sleep 1000", orphan.replace('$', "\\$"))).await;
    let stray = agent.pid_in("stray").await;
    rustix::process::kill_process(Pid::from_raw(stray).unwrap(), Signal::STOP).unwrap();
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < SOON);
    assert!(gone(stray));
}

/// Saves its shards with a pool of processes when it gets SIGTERM. Its argument names how the pool starts them.
const POOL: &str = r#"
import multiprocessing, os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor

told = []

def shard(number):
    time.sleep(0.05)
    with open(f"{os.environ['DIR']}/shards", "a") as file:
        file.write(f"{number}\n")

if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
        list(pool.map(abs, range(8)))
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        with open(f"{os.environ['DIR']}/ready", "a") as file:
            file.write("\n")
        while not told:
            time.sleep(0.02)
        list(pool.map(shard, range(4)))
    with open(f"{os.environ['DIR']}/saved", "a") as file:
        file.write("saved\n")
"#;

/// Runs `script` as a worker in a folder with `pool.py`, stops it when it is ready, and checks that all was saved.
async fn saves(agent: &mut Agent, script: &str) {
    std::fs::write(agent.directory.path().join("pool.py"), POOL).unwrap();
    for file in ["ready", "shards", "saved"] {
        let _ = std::fs::remove_file(agent.directory.path().join(file));
    }
    agent.spawn(0, script).await;
    agent.line_in("ready").await;
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < LONG, "{script}: ended by the grace");
    let mut shards: Vec<String> = agent.read("shards").lines().map(str::to_owned).collect();
    shards.sort();
    assert_eq!(
        (shards, agent.read("saved")),
        (["0", "1", "2", "3"].map(str::to_owned).to_vec(), "saved\n".to_owned()),
        "{script}"
    );
    agent.earlier.clear();
}

async fn helpers_of_a_python_that_saves_are_spared_the_signal(mut agent: Agent) {
    for kind in ["fork", "spawn", "forkserver"] {
        saves(&mut agent, &format!("exec python3 pool.py {kind}")).await;
    }
}

async fn the_signal_reaches_a_script_below_whatever_started_it(mut agent: Agent) {
    for wrapper in [
        "bash -c 'python3 pool.py fork | cat > log; echo'",
        "bash -c 'trap \"echo caught >> caught\" TERM; python3 pool.py fork & wait; wait'",
        "bash -c 'trap : TERM; (python3 pool.py spawn; echo) & wait; wait'",
        "bash -c 'trap : TERM; (trap : TERM; python3 pool.py fork; echo) & wait; wait'",
        "sh -c 'python3 pool.py fork; echo'",
        "python3 -c 'import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, lambda *_: None)\n\
         subprocess.run([sys.executable, \"pool.py\", \"fork\"])'",
    ] {
        saves(&mut agent, wrapper).await;
    }
}

async fn helpers_that_outlive_their_parent_get_the_signal(mut agent: Agent) {
    // Both handle the signal. The parent ends of it, and its helper would wait for ever.
    let script = r#"exec python3 -c '
import os, signal, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
child = os.fork() == 0
open(os.environ["DIR"] + ("/child" if child else "/ready"), "w").write("\n")
while not heard:
    time.sleep(0.02)
open(os.environ["DIR"] + ("/heard" if child else "/saved"), "w").write(f"{time.monotonic()}\n")
'"#;
    agent.spawn(0, script).await;
    agent.line_in("ready").await;
    agent.line_in("child").await;
    let start = Instant::now();
    agent.stop_all(Signal::TERM, LONG).await.unwrap();
    assert!(start.elapsed() < SOON);
    let at = |file: &str| agent.read(file).trim().parse::<f64>().unwrap();
    assert!(at("saved") < at("heard"));
}

async fn what_succeeded_workers_left_has_time_to_end_and_is_named(mut agent: Agent) {
    // An upload that would die of the signal.
    agent.spawn(0, "setsid sh -c 'echo $$ > pid; sleep 1; echo > uploaded' & exit 0").await;
    let upload = agent.pid_in("pid").await;
    assert!(agent.exited().await.exit.success());
    agent.guard.begin_end(LONG, Signal::TERM, LONG);
    let Event::Left { processes, .. } = agent.next_event().await else { panic!("what was left is named") };
    assert!(processes.contains(&upload), "{processes:?}");
    assert_eq!(agent.next_event().await, Event::Stopped);
    assert_eq!(agent.read("uploaded"), "\n");
    // What does not end gets the signal.
    agent.spawn(0, "setsid sleep 1000 & echo $! > stray; exit 0").await;
    let stray = agent.pid_in("stray").await;
    assert!(agent.exited().await.exit.success());
    agent.guard.begin_end(Duration::from_millis(500), Signal::TERM, LONG);
    assert!(matches!(agent.next_event().await, Event::Left { .. }));
    assert_eq!(agent.next_event().await, Event::Stopped);
    assert!(gone(stray));
}

async fn a_signal_to_one_worker_reaches_its_group_alone(mut agent: Agent) {
    agent.spawn(0, "sleep 1000 & echo $! > $DIR/child; wait").await;
    let other = agent.spawn(1, "exec sleep 1000").await;
    let child = agent.pid_in("child").await;
    agent.guard.signal(0, Signal::KILL);
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
    agent.guard.signal(0, Signal::KILL);
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
            agent.guard.begin_stop(Signal::TERM, LONG);
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
