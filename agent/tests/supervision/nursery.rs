//! Workers that are forked from a process which has imported their modules. They are as workers that were executed, and
//! that process is never in the way of a start, of a stop, or of the proof that nothing is left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use elastic_agent::for_tests::{Event, Exit, Stdio, WorkerSpec};
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal};

use crate::deaths::ends_within_seconds;
use crate::scene::{self, Agent, Scene, gone, spec};

pub(crate) fn scenes() -> Vec<Scene> {
    let mut scenes = crate::scenes![part: agent_with_a_nursery];
    scenes.extend(crate::scenes![alone:
        a_forked_worker_is_as_one_that_was_executed,
        a_forked_worker_ends_as_one_that_was_executed,
        forked_workers_share_no_chance_and_have_the_modules,
        a_start_that_fails_says_the_same_from_the_nursery,
        the_tree_is_gone_when_only_the_nursery_is_left_and_not_while_a_stray_lives,
        a_kill_and_a_deadline_end_the_nursery_too,
        a_nursery_that_dies_or_hangs_delays_no_start_for_long,
        nothing_comes_of_an_order_once_the_workers_are_stopped,
        what_no_fork_can_share_is_refused_by_name,
    ]);
    scenes
}

pub(crate) fn trial() -> Trial {
    Trial::test("a_killed_agent_leaves_no_nursery", || {
        let (mut agent, mut lines) = scene::start("agent_with_a_nursery");
        let pids: Vec<i32> = lines.next().unwrap()?.split(' ').map(|pid| pid.parse().unwrap()).collect();
        agent.kill()?;
        agent.wait()?;
        assert!(pids.len() == 3 && pids.into_iter().all(ends_within_seconds));
        Ok(())
    })
}

/// What a program finds, whichever way it was started. `stdin` is read, because a worker's is the agent's.
const FACTS: &str = r#"
import json, multiprocessing, os, pickle, sys

class Thing:
    pass

def double(number):
    return 2 * number

if __name__ == "__main__":
    status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "package": __package__,
        "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
        "globals": sorted(set(globals()) - {"__annotations__"}), "builtins": type(__builtins__).__name__,
        "thing": type(pickle.loads(pickle.dumps(Thing()))) is Thing, "environ": sorted(os.environ.items()),
        "cwd": os.getcwd(), "fds": sorted(os.listdir("/proc/self/fd")), "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "flags": str(sys.flags), "stdin": sys.stdin.read(),
        "status": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "Umask", "Threads")],
        "command": open("/proc/self/cmdline").read().rstrip("\0"), "encoding": [sys.stdin.encoding, sys.stdout.encoding],
    }
    if "spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            facts["doubled"] = pool.map(double, [4])
    print(json.dumps(facts, indent=1))
"#;

/// The Python itself, where `python3` is a script that finds it.
fn python() -> &'static str {
    static FOUND: LazyLock<String> = LazyLock::new(|| {
        let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
        String::from_utf8(found.stdout).unwrap().trim().to_owned()
    });
    &FOUND
}

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

impl Agent {
    fn file(&self, name: &str, text: &str) {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A worker that runs `python -u WORDS`.
    fn python(&self, words: &[&str]) -> WorkerSpec {
        let mut spec = spec(0, &[&[python(), "-u"], words].concat(), self.directory.path());
        spec.env.insert("PYTHONPATH".into(), package().into());
        spec
    }

    /// Begins a nursery for these modules, and returns its process id, or why there is none.
    async fn nursery(&mut self, modules: &str) -> Result<i32, String> {
        let spec = self.python(&["-m", "elastic_agent.nursery", modules, python(), "-u", "facts.py"]);
        self.guard.begin_nursery(spec).unwrap();
        self.preloaded().await.map_err(|why| why.expect("it was not killed with the workers"))
    }

    async fn preloaded(&mut self) -> Result<i32, Option<String>> {
        loop {
            match self.guard.next_event().await {
                Event::Preloaded { pid } => return Ok(pid),
                Event::NotPreloaded { why } => return Err(why),
                other => self.earlier.push_back(other),
            }
        }
    }

    /// Runs a worker to its end, and returns its exit and what it wrote.
    async fn run(&mut self, words: &[&str]) -> (i32, String, String) {
        let mut spec = self.python(words);
        let open = |name: &str| Some(File::create(self.directory.path().join(name)).unwrap().into());
        spec.stdio = Stdio { stdout: open("out"), stderr: open("err") };
        let pid = self.start(spec).await.unwrap();
        let exited = self.exited().await;
        assert_eq!(exited.pid, pid);
        (exited.exit.number(), self.read("out"), self.read("err"))
    }
}

/// Runs each command line as a worker that is executed, then as one that is forked.
async fn are_the_same(agent: &mut Agent, commands: &[&[&str]]) {
    let mut executed = Vec::new();
    for words in commands {
        executed.push(agent.run(words).await);
        let runs = words.iter().any(|word| ["facts.py", "./folder", "package.deep"].contains(word));
        assert!(!runs || executed.last().is_some_and(|ended| ended.0 == 0), "{executed:?}");
    }
    agent.nursery("json,decimal").await.unwrap();
    for (words, executed) in commands.iter().zip(executed) {
        let forked = agent.run(words).await;
        assert_eq!(forked.0, executed.0, "{words:?}: {forked:?}");
        assert_eq!(forked.1.lines().collect::<Vec<_>>(), executed.1.lines().collect::<Vec<_>>(), "{words:?}");
        assert_eq!(forked.2, executed.2, "{words:?}");
    }
}

async fn a_forked_worker_is_as_one_that_was_executed(mut agent: Agent) {
    agent.file("facts.py", FACTS);
    agent.file("folder/__main__.py", FACTS);
    agent.file("package/deep.py", FACTS);
    agent.file("package/__init__.py", "");
    let commands: [&[&str]; 4] = [
        &["facts.py", "spawn", "0.1", ""],
        &["./folder", "a"],
        &["-m", "package.deep", "a", "b"],
        &["-c", "import sys; print(sys.argv, sys.path[0]); raise SystemExit(4)", "a"],
    ];
    are_the_same(&mut agent, &commands).await;
}

async fn a_forked_worker_ends_as_one_that_was_executed(mut agent: Agent) {
    agent.file("raises.py", "def fails():\n    raise ValueError('no loss')\n\nfails()");
    agent.file("wrong.py", "x = 1\ndef (:\n");
    agent.file("says.py", "import sys\nsys.exit('no more data')");
    agent.file("killed.py", "import os\nos.kill(os.getpid(), 11)");
    agent.file("hook.py", "import sys\nsys.excepthook = lambda *error: print(error[:2])\nraise KeyError(1)");
    agent.file(
        "late.py",
        "import atexit, threading, time\natexit.register(print, 'at exit')\n\
         threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n",
    );
    let commands: [&[&str]; 8] = [
        &["-m", "no_such_module"],
        &["missing.py"],
        &["raises.py"],
        &["wrong.py"],
        &["says.py"],
        &["killed.py"],
        &["hook.py"],
        &["late.py"],
    ];
    are_the_same(&mut agent, &commands).await;
    // A Python that SIGINT interrupts ends by SIGINT.
    agent.file("interrupted.py", "import os\nos.kill(os.getpid(), 2)");
    assert_eq!(agent.run(&["interrupted.py"]).await.0, -2);
}

async fn forked_workers_share_no_chance_and_have_the_modules(mut agent: Agent) {
    agent.file("beside.py", "import os\nos.environ['MADE_BY_AN_IMPORT'] = '1'\nos.environ['GIVEN'] = 'by an import'");
    agent.file(
        "draws.py",
        "import os, random, sys\nprint(random.random(), 'decimal' in sys.modules, 'beside' in sys.modules, \
         os.environ.get('MADE_BY_AN_IMPORT'), os.environ['GIVEN'], os.getppid())",
    );
    let nursery = agent.nursery("decimal,beside").await.unwrap();
    let mut drawn = Vec::new();
    for given in ["first", "second"] {
        let mut spec = agent.python(&["draws.py"]);
        spec.env.insert("GIVEN".into(), given.into());
        spec.stdio.stdout = Some(File::create(agent.directory.path().join("out")).unwrap().into());
        agent.start(spec).await.unwrap();
        assert_eq!(agent.exited().await.exit, Exit::Code(0));
        let out = agent.read("out");
        let (number, facts) = out.split_once(' ').unwrap();
        assert_eq!(facts.trim(), format!("True True 1 {given} {}", agent.guard_pid));
        drawn.push(number.to_owned());
    }
    assert_ne!(drawn[0], drawn[1]);
    // Forking takes no time.
    let start = Instant::now();
    let spec = agent.python(&["-c", "0"]);
    agent.start(spec).await.unwrap();
    println!("the start of a forked worker: {:?}", start.elapsed());
    agent.exited().await;
    assert!(!gone(nursery));
}

async fn a_start_that_fails_says_the_same_from_the_nursery(mut agent: Agent) {
    agent.nursery("json").await.unwrap();
    let mut spec = agent.python(&["-c", "0"]);
    spec.cwd = "/no/such/folder".into();
    let refused = agent.start(spec).await.unwrap_err().to_string();
    assert!(refused.contains("cannot enter the working directory /no/such/folder"), "{refused}");
    let mut spec = agent.python(&["-c", "0"]);
    spec.cpus = "8191".parse().unwrap();
    let refused = agent.start(spec).await.unwrap_err().to_string();
    assert!(refused.contains("cannot bind a worker to CPUs 8191"), "{refused}");
}

/// A worker that leaves a process in a session of its own, which ignores SIGTERM. Returns both, once the stray is up.
async fn worker_with_a_stray(agent: &mut Agent, then: &str) -> [i32; 2] {
    let stray = "trap '' TERM; echo $$ > stray; exec sleep 1000";
    let leave = format!("import subprocess; subprocess.Popen(['sh', '-c', \"{stray}\"], start_new_session=True)");
    let spec = agent.python(&["-c", &format!("{leave}; {then}")]);
    let worker = agent.start(spec).await.unwrap();
    [worker, agent.pid_in("stray").await]
}

fn kill(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

async fn the_tree_is_gone_when_only_the_nursery_is_left_and_not_while_a_stray_lives(mut agent: Agent) {
    let nursery = agent.nursery("json").await.unwrap();
    let [_, stray] = worker_with_a_stray(&mut agent, "0").await;
    assert_eq!(agent.exited().await.exit, Exit::Code(0));
    agent.guard.begin_end(Duration::from_secs(30), Signal::TERM, Duration::from_secs(30));
    let Event::Left { processes, .. } = agent.next_event().await else { panic!("the stray is left") };
    assert_eq!(processes, [stray], "the nursery is none of the workers' processes");
    // The stray ignores the signal, and as long as it lives the tree is not gone.
    agent.guard.begin_stop(Signal::TERM, Duration::from_secs(30));
    let more = tokio::time::timeout(Duration::from_secs(1), agent.guard.next_event()).await;
    assert!(more.is_err(), "{more:?}");
    kill(stray, Signal::KILL);
    assert_eq!(agent.next_event().await, Event::Stopped);

    // A stop of running workers passes the nursery over too.
    let spec = agent.python(&["-c", "import time; time.sleep(1000)"]);
    let second = agent.start(spec).await.unwrap();
    agent.stop_all(Signal::TERM, Duration::from_secs(30)).await.unwrap();
    assert!(gone(second) && !gone(nursery));
    assert_eq!(agent.exited().await.exit.number(), -15);
    agent.file("parent.py", "import decimal, os, sys\nprint('json.decoder' in sys.modules)");
    assert_eq!(agent.run(&["parent.py"]).await, (0, "True\n".to_owned(), String::new()));
}

async fn a_kill_and_a_deadline_end_the_nursery_too(mut agent: Agent) {
    for deadline in [false, true] {
        let nursery = agent.nursery("json").await.unwrap();
        let [worker, stray] = worker_with_a_stray(&mut agent, "import time; time.sleep(1000)").await;
        if deadline {
            agent.guard.set_deadline(Some(elastic_store::clock::now()));
        } else {
            agent.guard.begin_stop(Signal::KILL, Duration::ZERO);
        }
        let mut events = Vec::new();
        while events.last() != Some(&Event::Stopped) {
            events.push(agent.next_event().await);
        }
        assert!(events.contains(&Event::NotPreloaded { why: None }), "{events:?}");
        assert!([nursery, worker, stray].into_iter().all(gone));
        fs::remove_file(agent.directory.path().join("stray")).unwrap();
        agent.guard.set_deadline(None);
    }
}

async fn a_nursery_that_dies_or_hangs_delays_no_start_for_long(mut agent: Agent) {
    let nursery = agent.nursery("json").await.unwrap();
    kill(nursery, Signal::KILL);
    let why = agent.preloaded().await.unwrap_err().unwrap();
    assert!(why.contains("ended by signal 9 (SIGKILL)"), "{why}");
    assert_eq!(agent.run(&["-c", "print(1)"]).await.1, "1\n");

    // The order is in its socket when it dies.
    let nursery = agent.nursery("json").await.unwrap();
    kill(nursery, Signal::STOP);
    agent.guard.begin_spawn(agent.python(&["-c", "import time; time.sleep(1000)"])).unwrap();
    kill(nursery, Signal::KILL);
    // The end of the order's socket may be seen before the end of the process.
    let mut heard = [agent.next_event().await, agent.next_event().await];
    heard.sort_by_key(|event| matches!(event, Event::NotPreloaded { .. }));
    let [Event::Started { pid, .. }, Event::NotPreloaded { why: Some(_) }] = heard else { panic!("{heard:?}") };
    agent.stop_all(Signal::TERM, Duration::from_secs(30)).await.unwrap();
    assert!(gone(pid));
    agent.exited().await;

    let nursery = agent.nursery("json").await.unwrap();
    kill(nursery, Signal::STOP);
    let start = Instant::now();
    agent.guard.begin_spawn(agent.python(&["-c", "0"])).unwrap();
    let why = agent.preloaded().await.unwrap_err().unwrap();
    assert!(why.contains("forked no worker within 2s"), "{why}");
    assert!(matches!(agent.next_event().await, Event::Started { .. }));
    assert_eq!(agent.exited().await.exit, Exit::Code(0));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert!(ends_within_seconds(nursery));
}

async fn nothing_comes_of_an_order_once_the_workers_are_stopped(mut agent: Agent) {
    let nursery = agent.nursery("json").await.unwrap();
    kill(nursery, Signal::STOP);
    agent.guard.begin_spawn(agent.python(&["-c", "open('ran', 'w')"])).unwrap();
    agent.guard.begin_stop(Signal::TERM, Duration::from_secs(30));
    // The guard has read both once it has the descriptor that follows.
    let held = agent.directory.path().join("held");
    agent.guard.hold(File::create(&held).unwrap()).unwrap();
    let descriptors = format!("/proc/{}/fd", agent.guard_pid);
    let holds = |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|target| target == held);
    while !fs::read_dir(&descriptors).unwrap().flatten().any(holds) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    kill(nursery, Signal::CONT);
    assert!(matches!(agent.next_event().await, Event::NotStarted { .. }));
    assert_eq!(agent.next_event().await, Event::Stopped);
    // What it forked for that order ends by itself, and the next worker is forked from it.
    assert_eq!(agent.run(&["-c", "import sys; print('json' in sys.modules)"]).await.1, "True\n");
    assert!(!gone(nursery) && !agent.directory.path().join("ran").exists());
}

async fn what_no_fork_can_share_is_refused_by_name(mut agent: Agent) {
    agent.file(
        "chatty.py",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    );
    agent.file("broken.py", "import json\nraise ValueError('no GPU here')");
    agent.file("connected.py", "import socket\nheld = socket.socketpair()");
    agent.file("served.py", "import subprocess\nserver = subprocess.Popen(['sleep', '1000'])");
    for (modules, expected) in [
        ("json,chatty", "importing chatty started 1 thread"),
        ("broken", "importing broken failed: ValueError: no GPU here"),
        ("json,no_such_module", "importing no_such_module failed: ModuleNotFoundError: No module named"),
        ("connected", "importing connected opened a connection"),
        ("served", "importing served started a process"),
    ] {
        let why = agent.nursery(modules).await.unwrap_err();
        assert!(why.starts_with(expected), "{modules}: {why}");
        assert_eq!(agent.run(&["-c", "print(1)"]).await.1, "1\n");
    }
    // A Python without the package.
    let mut spec = agent.python(&["-m", "elastic_agent.nursery", "json", "python3", "-u", "facts.py"]);
    spec.env.remove(std::ffi::OsStr::new("PYTHONPATH"));
    agent.guard.begin_nursery(spec).unwrap();
    let why = agent.preloaded().await.unwrap_err().unwrap();
    assert!(why.contains("ended by exit code 1"), "{why}");
}

async fn agent_with_a_nursery(mut agent: Agent) {
    let nursery = agent.nursery("json").await.unwrap();
    let [worker, stray] = worker_with_a_stray(&mut agent, "import time; time.sleep(1000)").await;
    println!("{nursery} {worker} {stray}");
    std::future::pending::<()>().await;
}
