//! The program `elastic-trainer` on the doubles of the driver and of NCCL together: what it sums, what it logs, and how
//! it continues when NCCL fails. The same with agents is in `tests/tests/agents/nccl.rs`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::training::{SHORT, checksum, command, printed, refused};
use crate::worker::free_port;

/// Nothing in these tests takes this long.
const DEADLINE: Duration = Duration::from_secs(120);

const LACKS: &str = "gradients are summed over TCP, through the host";

const PLAIN: Variables<'_> = &[];

/// The double of NCCL, built beside this test.
fn fake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libfake_nccl.so")
}

pub(crate) fn with_nccl(flags: &str) -> String {
    format!("{flags} --device cuda:0 --nccl-library {}", fake().display())
}

/// A worker whose log is read as it grows.
pub(crate) struct Worker {
    pub(crate) child: Child,
    lines: Receiver<String>,
    logged: String,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    /// Starts one worker of a group on GPU 0, with its rank and the group's size.
    pub(crate) fn start(
        flags: &str,
        (rank, world_size): (usize, usize),
        port: u16,
        variables: Variables<'_>,
    ) -> Worker {
        let mut command = command(flags, "devices=1");
        let [rank, world_size] = [rank, world_size].map(|number| number.to_string());
        command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &world_size);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).envs(variables.iter().copied());
        let mut child = command.spawn().unwrap();
        let (sender, lines) = channel();
        let log = BufReader::new(child.stderr.take().unwrap());
        thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Worker { child, lines, logged: String::new() }
    }

    /// Kills it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Reads its log until it contains `text`.
    pub(crate) fn says(&mut self, text: &str) {
        while !self.logged.contains(text) {
            let line = self.lines.recv_timeout(DEADLINE);
            let line = line.unwrap_or_else(|_| panic!("it never says {text:?}: {}", self.logged));
            self.logged += &format!("{line}\n");
        }
    }

    /// Waits for its end. Returns whether it succeeded, what it printed, and its log.
    pub(crate) fn end(mut self) -> (bool, String, String) {
        loop {
            match self.lines.recv_timeout(DEADLINE) {
                Ok(line) => self.logged += &format!("{line}\n"),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {}", self.logged),
            }
        }
        let mut printed = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
        (self.child.wait().unwrap().success(), printed, std::mem::take(&mut self.logged))
    }
}

pub(crate) type Variables<'a> = &'a [(&'a str, &'a str)];

/// Starts a group of workers on GPU 0, each with its variables.
pub(crate) fn start(flags: &str, variables: &[Variables<'_>]) -> Vec<Worker> {
    let (port, all) = (free_port(), variables.len());
    let ranked = variables.iter().enumerate();
    ranked.map(|(rank, variables)| Worker::start(flags, (rank, all), port, variables)).collect()
}

/// Waits until all have succeeded. Returns what rank 0 printed, and all logs.
pub(crate) fn all_end(workers: Vec<Worker>) -> (String, Vec<String>) {
    let ends: Vec<_> = workers.into_iter().map(Worker::end).collect();
    assert!(ends.iter().all(|(well, ..)| *well), "{ends:#?}");
    assert!(ends[1..].iter().all(|(_, printed, _)| printed.is_empty()), "{ends:#?}");
    let printed = ends[0].1.clone();
    (printed, ends.into_iter().map(|(.., logged)| logged).collect())
}

#[test]
fn sums_over_nccl_have_the_bits_of_tcp_and_of_one_worker() {
    let alone = printed(&format!("{SHORT} --device cuda:0"), "");
    let plain: &[(&str, &str)] = &[];
    for variables in [&[plain; 2][..], &[plain; 3]] {
        for (transport, over_nccl) in [("auto", true), ("nccl", true), ("tcp", false)] {
            let flags = format!("{} --collectives {transport}", with_nccl(SHORT));
            let (printed, logs) = all_end(start(&flags, variables));
            assert_eq!(checksum(&printed), checksum(&alone), "{} workers, {transport}", variables.len());
            let made = logs.iter().filter(|logged| logged.contains("NCCL's communicator is made")).count();
            assert_eq!(made, if over_nccl { logs.len() } else { 0 }, "{logs:#?}");
            assert!(!logs.concat().contains("WARN"), "{logs:#?}");
        }
    }
}

#[test]
fn without_nccl_workers_sum_over_tcp_and_say_why_once() {
    let alone = printed(&format!("{SHORT} --device cuda:0"), "");
    let missing = format!("{SHORT} --device cuda:0 --nccl-library /nowhere/libnccl.so.2");
    let old: &[(&str, &str)] = &[("FAKE_NCCL_VERSION", "21602")];
    let refuses: &[(&str, &str)] = &[("FAKE_NCCL_FAIL", "ncclCommInitRankConfig:5")];
    // What each of the ranks says.
    let cases: [(&str, &[Variables<'_>], [&str; 2]); 4] = [
        (&missing, &[&[], &[]], ["/nowhere/libnccl.so.2: cannot open", "pip install nvidia-nccl-cu13"]),
        (&with_nccl(SHORT), &[&[], old], ["rank 1 cannot use NCCL", "is NCCL 2.16.2, and 2.17 or newer is needed"]),
        (&with_nccl(SHORT), &[refuses, refuses], ["ncclCommInitRankConfig failed with code 5"; 2]),
        // The worker that has NCCL waits only for the other's answer.
        (
            &with_nccl(SHORT),
            &[&[], refuses],
            [" cannot use NCCL; its log says why", "ncclCommInitRankConfig failed with code 5"],
        ),
    ];
    for (flags, variables, said) in cases {
        let (printed, logs) = all_end(start(flags, variables));
        assert_eq!(checksum(&printed), checksum(&alone), "{flags}");
        for (logged, why) in logs.iter().zip(said) {
            let lines: Vec<&str> = logged.lines().filter(|line| line.contains(LACKS)).collect();
            assert!(lines.len() == 1 && lines[0].contains("WARN"), "{logged}");
            assert!(lines[0].contains(why) || lines[0].contains("other ranks have been past joining"), "{logged}");
        }
    }
    // A worker alone does not need NCCL.
    assert_eq!(checksum(&printed(&missing, "")), checksum(&alone));
}

#[test]
fn ranks_that_have_another_id_of_their_communicator_sum_over_tcp() {
    let alone = printed(&format!("{SHORT} --device cuda:0"), "");
    let other: Variables<'_> = &[("FAKE_NCCL_WRONG_ID", "1")];
    for variables in [[PLAIN, other], [other, PLAIN], [other, other]] {
        // The worker that has the right id would wait for ever.
        let (printed, logs) = all_end(start(&with_nccl(SHORT), &variables));
        assert_eq!(checksum(&printed), checksum(&alone), "{variables:?}");
        assert!(logs.iter().all(|logged| logged.matches(LACKS).count() == 1), "{logs:#?}");
    }
}

#[test]
fn nccl_that_is_demanded_and_lacks_is_an_error() {
    for (flags, why) in [
        ("--device cuda:0 --nccl-library /nowhere/libnccl.so.2", "/nowhere/libnccl.so.2: cannot open"),
        ("--device cuda:0 --nccl-library /dev/null", "cannot load NCCL: /dev/null"),
        ("--device cuda:0 --nccl-library libc.so.6", "has no function ncclGetVersion: it is not NCCL 2.17 or newer"),
        ("--device cpu", "steps are computed on CPUs"),
    ] {
        let error = refused(&format!("{SHORT} {flags} --collectives nccl"), "");
        let what = "cannot use --collectives nccl: ";
        assert!(error.contains(what) && error.contains(why) && error.contains("--collectives auto"), "{error}");
    }
    // NCCL is found, but does not work
    let flags = format!("{} --collectives nccl", with_nccl(SHORT));
    for (well, _, logged) in
        start(&flags, &[&[("FAKE_NCCL_FAIL", "ncclCommInitRankConfig:5")][..]; 2]).into_iter().map(Worker::end)
    {
        assert!(!well && logged.contains("ERROR cannot use --collectives nccl: NCCL does not work"), "{logged}");
    }
}

#[test]
fn workers_of_different_versions_say_who_has_which_and_use_tcp_or_refuse() {
    let alone = printed(&format!("{SHORT} --device cuda:0"), "");
    // These calls would not return.
    let [old, new]: [Variables<'_>; 2] = [
        &[("FAKE_NCCL_VERSION", "22809"), ("FAKE_NCCL_BLOCK", "ncclCommInitRankConfig")],
        &[("FAKE_NCCL_VERSION", "23007"), ("FAKE_NCCL_BLOCK", "ncclCommInitRankConfig")],
    ];
    let why = "the workers have different versions of NCCL (2.28.9 on ranks 0, 2; 2.30.7 on rank 1); install the same \
               version on all nodes";
    let (printed, logs) = all_end(start(&with_nccl(SHORT), &[old, new, old]));
    assert_eq!(checksum(&printed), checksum(&alone));
    for logged in logs {
        let said: Vec<&str> = logged.lines().filter(|line| line.contains("WARN")).collect();
        assert!(said.len() == 1 && said[0].ends_with(&format!("{LACKS}: {why}")), "{logged}");
    }
    let flags = format!("{} --collectives nccl", with_nccl(SHORT));
    let ended: Vec<_> = start(&flags, &[old, new, old]).into_iter().map(Worker::end).collect();
    let refuses = |logged: &str| logged.contains(&format!("cannot use --collectives nccl: {why}"));
    assert!(ended.iter().any(|(_, _, logged)| refuses(logged)), "{ended:?}");
    for (well, _, logged) in ended {
        // A worker that refuses ends at once. Another may learn of that before it knows all versions.
        assert!(!well && (refuses(&logged) || logged.contains("ERROR lost rank")), "{logged}");
    }
}

#[test]
fn replicas_on_gpus_are_compared_before_each_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let flags = |name: &str| {
        format!("{} --checkpoint-every 3 --checkpoint-dir {}", with_nccl(SHORT), folder.path().join(name).display())
    };
    // Given a rank that gets a wrong bit of the second step's sum
    let wrong: Variables<'_> = &[("FAKE_NCCL_FLIP", "ncclGroupEnd#4")];
    // When others are right, then it takes their state before that of step 3 is saved
    let (printed_by_first, logs) = all_end(start(&flags("three"), &[PLAIN, wrong, PLAIN]));
    let differ = "these ranks differ from most after step 3, and take the majority's state: 1 (";
    assert!(logs[..2].iter().all(|logged| logged.contains(differ)) && !logs[2].contains(differ), "{logs:#?}");
    assert_eq!(checksum(&printed_by_first), checksum(&printed(&format!("{SHORT} --device cuda:0"), "")));
    // And when no one knows who is right, then nothing is saved
    for (well, _, logged) in start(&flags("two"), &[PLAIN, wrong]).into_iter().map(Worker::end) {
        assert!(!well && logged.contains("hold different states after step 3, and no majority agrees"), "{logged}");
    }
    let saved = fs::read_dir(folder.path().join("two")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(saved.filter(|name| name.to_string_lossy().starts_with("step-")).count(), 0);
}

/// A run long enough to be disturbed.
const LONGER: &str = "digits --epochs 12 --hidden 8 --batch 200 --shards 3 --peer-timeout 4";

#[test]
fn nccl_that_hangs_or_fails_is_replaced_and_no_step_is_lost() {
    let alone = printed(&format!("{LONGER} --device cuda:0"), "");
    for fault in ["FAKE_NCCL_HANG=ncclGroupEnd", "FAKE_NCCL_FAIL=ncclGroupEnd:3"] {
        let folder = tempfile::tempdir().unwrap();
        let (file, trace) = (folder.path().join("fault"), folder.path().join("trace"));
        let variables = [("FAKE_NCCL_FAULT", file.to_str().unwrap())];
        let flags = format!("{} --trace {}", with_nccl(LONGER), trace.display());
        let mut workers = start(&flags, &[&variables[..]; 3]);
        // Given a worker whose NCCL fails once, in the middle
        crate::worker::wait_for("some steps", || crate::worker::last_step(&trace, "step").filter(|step| *step > 20));
        fs::write(folder.path().join("part"), format!("{} {fault}\n", workers[1].child.id())).unwrap();
        fs::rename(folder.path().join("part"), &file).unwrap();
        workers[1].says("NCCL failed in a sum");
        // Then all continue over NCCL, in the same round, and nothing is lost.
        let (printed, logs) = all_end(workers);
        assert_eq!(checksum(&printed), checksum(&alone), "{fault}");
        for logged in logs {
            assert!(logged.matches("NCCL's communicator is made").count() == 2 && !logged.contains(LACKS), "{logged}");
            assert!(logged.matches("continues from memory").count() == 1, "{logged}");
        }
    }
}

#[test]
fn nccl_that_keeps_failing_is_left_alone_in_that_round() {
    let alone = printed(&format!("{LONGER} --device cuda:0"), "");
    let fails: &[(&str, &str)] = &[("FAKE_NCCL_FAIL", "ncclGroupEnd:3")];
    let (printed, logs) = all_end(start(&with_nccl(LONGER), &[&[], fails]));
    assert_eq!(checksum(&printed), checksum(&alone));
    assert!(logs[1].contains(&format!("{LACKS}: NCCL does not work for this worker")), "{}", logs[1]);
    assert!(logs[0].contains(LACKS), "{}", logs[0]);
    assert!(logs.iter().all(|logged| logged.contains("; NCCL is tried again in round 1\n")), "{logs:#?}");
}

#[test]
fn a_worker_whose_nccl_does_not_come_back_ends_and_says_so() {
    let blocks: &[(&str, &str)] = &[("FAKE_NCCL_BLOCK", "ncclGroupEnd")];
    let flags = with_nccl(&LONGER.replace("--peer-timeout 4", "--peer-timeout 1"));
    let mut workers = start(&flags, &[blocks, &[]]).into_iter();
    let (blocked, other) = (workers.next().unwrap().end(), workers.next().unwrap().end());
    assert!(!blocked.0 && blocked.2.contains("ERROR NCCL hangs in ordered sum"), "{}", blocked.2);
    assert!(!other.0, "{}", other.2);
}
