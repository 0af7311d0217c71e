//! Starting workers: their environment, which starts are refused, and how exits are reported.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use elastic_agent::for_tests::{CpuSet, Event, Exit, SpawnError, allowed_cpus};
use rustix::process::{Pid, Signal};

use crate::scene::{Agent, Scene, gone, spec};

pub(crate) fn scenes() -> Vec<Scene> {
    crate::scenes![alone:
        exit_codes_and_signals_are_reported,
        exits_are_reported_within_milliseconds,
        a_worker_starts_with_a_clean_slate,
        a_worker_runs_on_its_cpus_alone,
        what_cannot_start_is_explained,
        what_is_too_large_is_explained_and_what_is_large_works,
        a_passed_deadline_kills_and_refuses_until_it_is_moved,
        a_deadline_moved_in_time_does_nothing,
        hundreds_of_workers_start_at_once,
        a_guard_keeps_nothing_that_the_agent_was_started_with,
        start_up_is_quick_and_the_guard_small,
        closing_ends_everything_and_the_guard,
    ]
}

async fn exit_codes_and_signals_are_reported(mut agent: Agent) {
    let before = elastic_store::clock::now();
    let pid = agent.spawn(7, "exit 42").await;
    let exited = agent.exited().await;
    assert_eq!((exited.local_rank, exited.pid, exited.exit), (7, pid, Exit::Code(42)));
    assert!(before <= exited.at && exited.at <= elastic_store::clock::now());
    agent.spawn(0, "kill -SEGV $$").await;
    assert_eq!(agent.exited().await.exit.number(), -11);
}

async fn exits_are_reported_within_milliseconds(mut agent: Agent) {
    let mut latencies = Vec::new();
    for _ in 0..50 {
        let pid = agent.spawn(0, "exec sleep 1000").await;
        let start = Instant::now();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        agent.exited().await;
        latencies.push(start.elapsed());
    }
    latencies.sort();
    println!("SIGKILL to exit report: median {:?}, worst of 50 {:?}", latencies[25], latencies[49]);
    assert!(latencies[25] < Duration::from_millis(500));
}

async fn a_worker_starts_with_a_clean_slate(mut agent: Agent) {
    // The agent has a descriptor that any child would inherit.
    let leak = std::fs::File::open("/dev/null").unwrap();
    rustix::io::fcntl_setfd(&leak, rustix::io::FdFlags::empty()).unwrap();
    agent.guard.hold(&leak).unwrap();
    // A worker starts.
    let mut spec =
        agent.script(0, "cp /proc/self/status status; ls /proc/self/fd > fds; pwd > pwd; env > env; echo $$ > pid");
    spec.env.insert("ODD".into(), OsString::from_vec(b"\xff\xfe=\nx".to_vec()));
    let pid = agent.start(spec).await.unwrap();
    assert!(agent.exited().await.exit.success());
    // In the worker no signal is blocked or ignored. Only the standard streams are open (3 is `ls` reading).
    // Environment and directory are the requested ones.
    let status = agent.read("status");
    for mask in ["SigBlk", "SigIgn"] {
        let line = status.lines().find(|line| line.starts_with(mask)).unwrap();
        // Signals 32 and 33 belong to the C library, whose posix_spawn leaves them ignored.
        let signals = u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap() & !(0b11 << 31);
        assert_eq!(signals, 0, "{line}");
    }
    assert_eq!(agent.read("fds"), "0\n1\n2\n3\n");
    assert_eq!(agent.read("pid").trim().parse::<i32>().unwrap(), pid);
    assert_eq!(agent.read("pwd").trim(), agent.directory.path().to_str().unwrap());
    let env = std::fs::read(agent.directory.path().join("env")).unwrap();
    assert!(env.windows(10).any(|window| window == b"ODD=\xff\xfe=\nx\n"));
    assert!(!env.windows(5).any(|window| window == b"HOME="), "nothing else is inherited");
}

async fn a_worker_runs_on_its_cpus_alone(mut agent: Agent) {
    let allowed = allowed_cpus().unwrap();
    let one = CpuSet([*allowed.0.last().unwrap()].into());
    let mut spec = agent.script(0, "grep Cpus_allowed_list /proc/self/status > cpus; sh -c 'cat cpus > done'");
    spec.cpus = one.clone();
    agent.start(spec).await.unwrap();
    assert_eq!(agent.exited().await.exit, Exit::Code(0));
    assert_eq!(agent.line_in("done").await.split_whitespace().last(), Some(one.to_string().as_str()));
    // The next worker names no CPUs, and gets the agent's.
    agent.spawn(1, "grep Cpus_allowed_list /proc/self/status > all").await;
    assert_eq!(agent.line_in("all").await.split_whitespace().last(), Some(allowed.to_string().as_str()));
    agent.exited().await;
    // A CPU that no machine has.
    let mut spec = agent.script(2, "true");
    spec.cpus = "8191".parse().unwrap();
    let refused = agent.start(spec).await.unwrap_err().to_string();
    assert!(refused.contains("cannot bind a worker to CPUs 8191"), "{refused}");
}

async fn what_cannot_start_is_explained(mut agent: Agent) {
    let directory = agent.directory.path().to_owned();
    let write = |name: &str, text: &str, mode: u32| {
        std::fs::write(directory.join(name), text).unwrap();
        std::fs::set_permissions(directory.join(name), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    write("plain", "text", 0o644);
    write("stale", "#!/no/such/python\n", 0o755);
    let path = std::env::var("PATH").unwrap();
    for (argv, expected) in [
        (&["no-such-program"][..], format!("no such program: no-such-program (looked in PATH={path})")),
        (&["./missing"], format!("no such program: {}", directory.join("./missing").display())),
        (&["./plain"], "not executable: ./plain".to_owned()),
        (&["./stale"], "the interpreter in its first line".to_owned()),
        (&[], "no program given".to_owned()),
        (&["sh", "a\0b"], "argument 1".to_owned()),
    ] {
        let error = agent.start(spec(0, argv, &directory)).await.unwrap_err().to_string();
        assert!(error.contains(&expected), "{argv:?}: {error}");
    }
    let error = agent.start(spec(0, &["true"], "/no/such/dir".as_ref())).await.unwrap_err();
    assert!(error.to_string().starts_with("cannot enter the working directory /no/such/dir: No such file"), "{error}");
    // No event follows for a worker that was not started, so the next event is this exit.
    agent.spawn(5, "exit 5").await;
    assert_eq!(agent.exited().await.local_rank, 5);
}

async fn what_is_too_large_is_explained_and_what_is_large_works(mut agent: Agent) {
    let large = |count: usize, length: usize| {
        let variables = (0..count).map(move |n| (OsString::from(format!("V{n}")), OsString::from("x".repeat(length))));
        variables.collect::<Vec<_>>()
    };
    // An environment of 1.5 MB works, although no single packet can be that long.
    let mut spec = agent.script(0, "[ ${#V14} = 100000 ]");
    spec.env.extend(large(15, 100_000));
    agent.start(spec).await.unwrap();
    assert!(agent.exited().await.exit.success());
    // An environment larger than the kernel takes is refused and named, whether in total or in one string.
    let mut spec = agent.script(0, "true");
    spec.env.extend(large(80, 100_000));
    let error = agent.start(spec).await.unwrap_err();
    assert!(matches!(error, SpawnError::TooLarge { total, .. } if total > 8_000_000), "{error}");
    let mut spec = agent.script(0, "true");
    spec.argv.push("y".repeat(2 << 20).into());
    let error = agent.start(spec).await.unwrap_err().to_string();
    assert!(error.contains("2097153 of them in argument 3"), "{error}");
}

async fn a_passed_deadline_kills_and_refuses_until_it_is_moved(mut agent: Agent) {
    let deadline = elastic_store::clock::now() + Duration::from_secs(1);
    agent.guard.set_deadline(Some(deadline));
    agent.spawn(0, "trap '' TERM; (setsid sleep 1000 & echo $! > $DIR/stray); while :; do sleep 1; done").await;
    let Event::DeadlineKilled { at } = agent.next_event().await else { panic!("killed by the deadline") };
    println!("killed {:?} after the deadline", at - deadline);
    assert!(at >= deadline && at - deadline < Duration::from_secs(2));
    assert_eq!(agent.exited().await.exit.number(), -9);
    assert_eq!(agent.next_event().await, Event::Stopped);
    assert!(gone(agent.pid_in("stray").await));
    // After the deadline nothing starts.
    let spec = agent.script(0, "exit 0");
    assert!(matches!(agent.start(spec).await, Err(SpawnError::DeadlinePassed)));
    // With a new deadline, workers start again.
    agent.guard.set_deadline(Some(elastic_store::clock::now() + Duration::from_secs(60)));
    agent.spawn(0, "exit 0").await;
    assert!(agent.exited().await.exit.success());
}

async fn a_deadline_moved_in_time_does_nothing(mut agent: Agent) {
    agent.guard.set_deadline(Some(elastic_store::clock::now() + Duration::from_secs(1)));
    agent.spawn(0, "sleep 1.2").await;
    agent.guard.set_deadline(Some(elastic_store::clock::now() + Duration::from_secs(60)));
    assert!(agent.exited().await.exit.success());
}

async fn hundreds_of_workers_start_at_once(mut agent: Agent) {
    const MANY: u32 = 600;
    for rank in 0..MANY {
        let spec = agent.script(rank, "exit 7");
        agent.guard.begin_spawn(spec).unwrap();
    }
    let (mut started, mut exited) = (0, 0);
    while (started, exited) != (MANY, MANY) {
        match agent.next_event().await {
            Event::Started { .. } => started += 1,
            Event::Exited(end) if end.exit == Exit::Code(7) => exited += 1,
            other => panic!("{other:?}"),
        }
    }
}

async fn a_guard_keeps_nothing_that_the_agent_was_started_with(agent: Agent) {
    let holds = || {
        let held = std::fs::read_dir(format!("/proc/{}/fd", agent.guard_pid)).unwrap();
        held.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|file| file == agent.inherited))
    };
    // It may have just begun.
    while holds() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn start_up_is_quick_and_the_guard_small(mut agent: Agent) {
    let start = Instant::now();
    agent.spawn(0, "exit 0").await;
    let (first, since_main) = (start.elapsed(), agent.began.elapsed());
    agent.exited().await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.guard_pid)).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (rss, own) = (field("VmRSS"), field("RssAnon"));
    println!("start of the guard {:?}, first spawn {first:?}, main to first worker {since_main:?}", agent.guards_start);
    println!("guard: RSS {rss} KiB ({own} KiB its own), threads {}", field("Threads"));
    assert_eq!(field("Threads"), 1);
    assert!(own < 2048);
    assert!(status.starts_with("Name:\telastic-guard\n"));
}

async fn closing_ends_everything_and_the_guard(mut agent: Agent) {
    let worker = agent.spawn(0, "trap '' TERM; while :; do sleep 1; done").await;
    let guard = agent.guard_pid;
    agent.guard.close().await;
    assert!(gone(worker) && gone(guard));
}
