//! Ends of workers, and the failures that follow from them.

use super::*;

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_group_of_exceptions_and_a_panic_say_what_happened() {
    let group = "  + Exception Group Traceback (most recent call last):
  |   File \"t.py\", line 3, in <module>
  |     raise ExceptionGroup(\"loading failed\", errors)
  | ExceptionGroup: loading failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File \"t.py\", line 1, in load
    |     raise ValueError(\"shard 3\")
    | ValueError: shard 3
    +---------------- 2 ----------------
    | KeyError: 'x'
    +------------------------------------";
    let said = "ExceptionGroup: loading failed (2 sub-exceptions), the first: ValueError: shard 3";
    assert_eq!(thrown(&lines(group)).as_deref(), Some(said));
    let ranked: Vec<String> = lines(group).iter().map(|line| format!("[rank0]: {line}")).collect();
    assert_eq!(thrown(&ranked).as_deref(), Some(said));

    let panic = "loading\n\nthread 'main' (7) panicked at src/main.rs:2:5:\nindex out of bounds: the len is 3\nnote: run \
                 with `RUST_BACKTRACE=1` environment variable to display a backtrace";
    let said = "index out of bounds: the len is 3, panicked at src/main.rs:2:5";
    assert_eq!(thrown(&lines(panic)).as_deref(), Some(said));
    assert_eq!(thrown(&lines("thread 'main' panicked at src/main.rs:2:5:")), None, "cut off");
    assert_eq!(thrown(&lines(&format!("{panic}\n{group}"))).unwrap().split(':').next(), Some("ExceptionGroup"));
}

fn exited(exit: Exit) -> Evidence {
    Evidence {
        exit,
        told: None,
        recorded: None,
        stderr: Vec::new(),
        before: Victims::default(),
        after: Victims::default(),
        asked_to_stop: false,
    }
}

fn signal(signal: i32) -> Evidence {
    exited(Exit::Signal { signal, core_dumped: false })
}

fn stderr(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

fn victims(cgroup: Option<u64>, host: u64) -> Victims {
    Victims { cgroup: cgroup.map(|count| (count, "/sys/fs/cgroup/memory.events".into())), host: Some(host) }
}

fn killer(evidence: &Evidence) -> Option<Killer> {
    judge(evidence).killed_by.map(|killing| killing.by)
}

#[test]
fn the_best_word_wins() {
    let mut evidence = Evidence { stderr: stderr("noise\nan error\n\n"), ..exited(Exit::Code(3)) };
    assert_eq!(judge(&evidence).message, "an error (exit code 3)");
    evidence.recorded = Some(Recorded { message: "ValueError: boom\nmore".into(), traceback: Some("T".into()) });
    assert_eq!(judge(&evidence).message, "ValueError: boom (exit code 3)");
    assert_eq!(judge(&evidence).traceback.as_deref(), Some("T"));
    evidence.told = Some((Blame::Own, "step 7: loss is NaN".into()));
    assert_eq!(judge(&evidence).message, "step 7: loss is NaN (exit code 3)");
    assert!(!judge(&evidence).permanent);
    evidence.told = Some((Blame::Permanent, String::new()));
    let judged = judge(&evidence);
    assert_eq!((judged.class, judged.permanent), (FailureClass::Own, true));
    assert_eq!(judged.message, "ValueError: boom (exit code 3)", "who has no words has others' said");
    assert_eq!(judge(&exited(Exit::Code(3))).message, "exit code 3");
}

#[test]
fn the_exception_is_found_though_other_lines_follow() {
    let text = "epoch 1\n\
                Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    x()\n\
                KeyError: 'a'\n\
                \n\
                During handling of the above exception, another exception occurred:\n\
                \n\
                Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    y()\n\
                ValueError: boom\n\
                [W socket.cpp] destroyed without shutdown\n";
    let evidence = Evidence { stderr: stderr(text), ..exited(Exit::Code(1)) };
    assert_eq!(judge(&evidence).message, "ValueError: boom (exit code 1)");
    for prefix in ["[rank12]: ", "[rank0]: [rank0]: "] {
        let ranked: String = text.lines().map(|line| format!("{prefix}{line}\n")).collect();
        let evidence = Evidence { stderr: stderr(&ranked), ..exited(Exit::Code(1)) };
        assert_eq!(judge(&evidence).message, "ValueError: boom (exit code 1)");
    }
}

#[test]
fn a_last_line_counts_if_it_tells_why() {
    let bar = " 12%|#         | 3/40 [00:01<00:12,  2.92it/s]";
    for (text, code, message) in [
        ("the data is gone", 1, "the data is gone (exit code 1)"),
        ("epoch 3 begins", 4, "exit code 4"),
        (
            "usage: train.py\ntrain.py: error: unrecognized arguments: --lr",
            2,
            "train.py: error: unrecognized arguments: --lr (exit code 2)",
        ),
        (bar, 4, "exit code 4"),
        (bar, 1, "exit code 1"),
        (&format!("the data is gone\n{bar}"), 1, "the data is gone (exit code 1)"),
        (&format!("\r{bar}\r{bar}\rno such file: a.bin"), 2, "no such file: a.bin (exit code 2)"),
    ] {
        let evidence = Evidence { stderr: stderr(text), ..exited(Exit::Code(code)) };
        assert_eq!(judge(&evidence).message, message, "{text:?}");
        assert!(!judge(&evidence).stderr.is_empty(), "the report still has the lines");
    }
}

#[test]
fn what_a_program_was_at_does_not_explain_a_signal() {
    let at = |evidence: Evidence| judge(&Evidence { stderr: stderr("epoch 3: 10%"), ..evidence });
    assert_eq!(at(signal(libc::SIGKILL)).message, "signal 9 (SIGKILL) from outside");
    assert_eq!(at(signal(libc::SIGKILL)).stderr, ["epoch 3: 10%"], "but the report has it");
    assert_eq!(at(signal(libc::SIGSEGV)).message, "signal 11 (SIGSEGV)");
    let aborted = Evidence { stderr: stderr("  what():  std::bad_alloc"), ..signal(libc::SIGABRT) };
    assert_eq!(judge(&aborted).message, "what():  std::bad_alloc (signal 6 (SIGABRT))");
}

#[test]
fn the_cgroups_count_proves_the_out_of_memory_killer() {
    let told = |evidence: Evidence, before, after| Evidence { before, after, ..evidence };
    let (none, one) = (|| victims(Some(4), 9), || victims(Some(5), 10));
    let oom = judge(&told(signal(libc::SIGKILL), none(), one()));
    assert_eq!(oom.message, "killed by the kernel's out-of-memory killer (signal 9 (SIGKILL))");
    let evidence = oom.killed_by.unwrap();
    assert_eq!(evidence.by, Killer::OomKiller);
    assert!(evidence.evidence.contains("/sys/fs/cgroup/memory.events has grown by 1"), "{evidence}");

    // An unchanged count clears the killer, even if it took other processes of the host.
    let elsewhere = told(signal(libc::SIGKILL), none(), victims(Some(4), 10));
    assert_eq!(killer(&elsewhere), Some(Killer::Outside));
    // Where only the host is counted, nothing is proven.
    let unknown = told(signal(libc::SIGKILL), victims(None, 9), victims(None, 10));
    assert_eq!(killer(&unknown), Some(Killer::MaybeOomKiller));
    assert_eq!(killer(&told(signal(libc::SIGKILL), victims(None, 9), victims(None, 9))), Some(Killer::Outside));
    // A worker that fails because its child was killed was not killed itself.
    assert_eq!(killer(&told(exited(Exit::Code(1)), none(), one())), Some(Killer::OomKillerBeside));
    assert_eq!(killer(&told(exited(Exit::Code(1)), none(), none())), None);
    // The killer's victims do not explain another signal.
    assert_eq!(killer(&told(signal(libc::SIGSEGV), none(), one())), Some(Killer::Fault));
}

#[test]
fn who_was_asked_to_stop_is_weaker_than_who_broke_and_stronger_than_who_was_left() {
    let peer = Evidence {
        stderr: stderr("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711"),
        ..exited(Exit::Code(1))
    };
    let asked = Evidence { asked_to_stop: true, ..signal(libc::SIGTERM) };
    let classes = [peer, asked, exited(Exit::Code(1))].map(|evidence| judge(&evidence).class);
    assert_eq!(classes, [FailureClass::Peer, FailureClass::Signalled, FailureClass::Own]);
    assert!(classes.is_sorted());
    assert_eq!(judge(&signal(libc::SIGKILL)).class, FailureClass::Own);
    // A worker's own word about its class goes before what the agent concludes.
    let own = Evidence {
        told: Some((Blame::Own, "Connection reset by peer: the data server".into())),
        ..exited(Exit::Code(1))
    };
    assert_eq!(judge(&own).class, FailureClass::Own);
}

#[test]
fn nothing_that_a_worker_writes_can_paint_on_the_reports_terminal() {
    let evidence =
        Evidence { stderr: stderr("\u{1b}[31;1mred\u{1b}[0m\u{7}\u{8}\tend\u{1b}]0;title"), ..exited(Exit::Code(1)) };
    assert_eq!(judge(&evidence).stderr, ["red\tend]0;title"]);
}
