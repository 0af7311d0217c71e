//! Checkpoints: which one counts, and what happens when one cannot be saved or committed.

use std::path::Path;

use elastic_proto::worker::{FailureClass, FromWorker, ToWorker};
use elastic_trainer::Environment;
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::disk::Host;
use elastic_trainer::random::mix;

use crate::agent::{Agent, Commits, start_group, start_member};
use crate::worker::{Worker, environment, last_step, trace, wait_for};

#[test]
fn a_disk_that_fails_does_not_stop_training_but_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoints, path) = (folder.path().join("checkpoints"), folder.path().join("trace"));
    let flags = format!(
        "--epochs 40 --checkpoint-every 5 --checkpoint-dir {} --trace {}",
        checkpoints.display(),
        path.display()
    );
    let worker = Worker::start(&flags, &environment(0, 1, 0, 0), None);
    wait_for("a commit", || last_step(&path, "committed"));
    std::fs::rename(&checkpoints, folder.path().join("elsewhere")).unwrap();
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(1), "{logged}");
    assert!(logged.contains("training continues") && logged.contains("is not saved"), "{logged}");
    assert!(logged.lines().count() < 20, "it repeats itself seldom:\n{logged}");
    assert_eq!(last_step(&path, "step"), Some(40 * 23));
}

#[test]
fn the_committed_checkpoint_wins_over_newer_ones() {
    // Given a folder with checkpoints of several steps; the job has committed the first.
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--hidden 16 --checkpoint-every 10 --keep 50 --checkpoint-dir {}", folder.path().display());
    let mut group = start_group(folder.path(), &format!("{flags} --epochs 4"), 1, 1, None);
    let (agent, worker) = group.remove(0);
    let (printed, _) = worker.succeeds();
    let commits = agent.commits();
    let steps: Vec<u64> = commits.iter().map(|commit| commit.step).collect();
    assert!(steps.len() > 1 && steps.is_sorted_by(|a, b| a < b) && steps.last() == Some(&92), "{steps:?}");

    // When a round resumes, then it does so from the committed one, and reaches the same end.
    let trace_path = folder.path().join("trace");
    let resumed = format!("{flags} --epochs 4 --trace {}", trace_path.display());
    for (_, worker) in start_group(folder.path(), &resumed, 2, 2, Some(&commits[0])) {
        let (out, _) = worker.succeeds();
        let told = |printed: &str, what: &str| printed.lines().find(|line| line.starts_with(what)).map(str::to_owned);
        for what in ["done: ", "parameters ", "test accuracy "] {
            assert!(out.is_empty() || told(&out, what) == told(&printed, what), "{out}, not {printed}");
        }
    }
    assert_eq!(trace(&trace_path)[0]["step"], steps[0]);

    // When the committed one is damaged, then no other is taken.
    let data = Path::new(&commits[0].path).with_file_name("rank0-of-1.safetensors");
    let mut bytes = std::fs::read(&data).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let (agent, worker) = start_group(folder.path(), &resumed, 3, 1, Some(&commits[0])).remove(0);
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(1));
    assert!(
        logged.contains(&format!("must resume from step {}", steps[0])) && logged.contains(&commits[0].path),
        "{logged}"
    );
    let (class, message) = agent.failure();
    assert_eq!(class, FailureClass::Own);
    assert!(message.contains("is damaged"), "{message}");
}

#[test]
fn a_job_leaves_anothers_checkpoints_alone() {
    // Given what a job has saved
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--hidden 16 --epochs 1 --checkpoint-every 10 --checkpoint-dir {}", folder.path().display());
    let (agent, worker) = start_group(folder.path(), &flags, 1, 1, None).remove(0);
    worker.succeeds();
    let committed = agent.last_commit();
    let saved = std::fs::read(&committed.path).unwrap();
    // When another is started by the same line, then it says so, and nothing is touched.
    let other = Environment { job: "other".to_owned(), ..environment(0, 1, 2, 0) };
    let (agent, worker) = start_member(folder.path(), &flags, other, None);
    let (status, _, logged) = worker.end();
    assert!(status.code() == Some(1) && logged.contains("job test, and job other would overwrite"), "{logged}");
    assert_eq!(agent.failure().0, FailureClass::Permanent);
    assert_eq!(std::fs::read(&committed.path).unwrap(), saved);
}

#[test]
fn training_continues_when_its_output_is_not_read_or_its_trace_is_full() {
    let environment = environment(0, 1, 1, 0);
    // A file that can be opened, but not written to.
    let (status, _, logged) = Worker::start("--epochs 2 --hidden 16 --trace /dev/full", &environment, None).end();
    assert!(status.success() && logged.contains("cannot write the trace /dev/full"), "{logged}");
    assert!(logged.matches("cannot write the trace").count() == 1, "{logged}");
    // A pipe whose reader has ended
    let (status, logged) = Worker::start("--epochs 2 --hidden 16", &environment, None).end_unread();
    assert!(status.success() && logged.contains("cannot print"), "{logged}");
}

/// Starts a short run of one worker that saves often. Its agent does not grant commits.
fn start_ungranted(folder: &Path, commits: Commits) -> (Agent, Worker) {
    let flags = format!(
        "--epochs 100 --hidden 16 --checkpoint-every 10 --keep 1 --checkpoint-dir {} --trace {}",
        folder.display(),
        folder.join("trace").display()
    );
    let mut environment = environment(0, 1, 1, 0);
    let agent = Agent::start(folder, &environment, None, commits);
    environment.agent = Some(agent.socket.clone());
    (agent, Worker::start(&flags, &environment, None))
}

fn saved_steps(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with("step-")).count()
}

#[test]
fn what_is_not_committed_is_no_success_and_prunes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, worker) = start_ungranted(folder.path(), Commits::Refused);
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(1), "{logged}");
    assert!(logged.contains("a later round began") && logged.contains("would go back to step 0"), "{logged}");
    assert_eq!(agent.failure().0, FailureClass::Own);
    let asked = agent.commits().len();
    assert!(asked > 1);
    assert_eq!(saved_steps(folder.path()), asked, "nothing was pruned for a commit that failed");
    assert_eq!(last_step(&folder.path().join("trace"), "committed"), None);
}

#[test]
fn the_last_commit_is_asked_for_again_while_the_store_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, worker) = start_ungranted(folder.path(), Commits::AtTheThirdTry);
    let (status, _, logged) = worker.end();
    assert!(status.success() && logged.contains("the store is away"), "{logged}");
    let steps: Vec<u64> = agent.commits().iter().map(|commit| commit.step).collect();
    assert!(steps.ends_with(&[2300; 3]), "{steps:?}");
    assert_eq!(last_step(&folder.path().join("trace"), "committed"), Some(2300));
}

#[test]
fn while_commits_are_unanswered_training_continues_and_the_disk_does_not_fill() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, worker) = start_ungranted(folder.path(), Commits::Unanswered);
    wait_for("the last step", || last_step(&folder.path().join("trace"), "step").filter(|&step| step == 2300));
    assert_eq!(saved_steps(folder.path()), 4);
    // When the store comes back, then the answers come, and the last step is saved and asked for after all.
    for id in 1..=4 {
        agent.say(&ToWorker::Committed { id, step: 10 * id });
    }
    wait_for("the last commit", || Some(()).filter(|()| agent.last_commit().step == 2300));
    // And a worker that waits for its last commit still stops when told to.
    worker.signal(rustix::process::Signal::TERM);
    let (status, _, logged) = worker.end();
    assert!(status.code() == Some(143), "{status}, {logged}");
}

#[test]
fn a_checkpoint_that_was_due_while_commits_were_unanswered_is_made_as_soon_as_one_is() {
    const EVERY: u64 = 2000;
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let flags = format!(
        "--epochs 100000 --hidden 16 --checkpoint-every {EVERY} --checkpoint-dir {} --trace {}",
        folder.path().display(),
        trace.display()
    );
    let mut environment = environment(0, 1, 1, 0);
    let agent = Agent::start(folder.path(), &environment, None, Commits::Unanswered);
    environment.agent = Some(agent.socket.clone());
    let worker = Worker::start(&flags, &environment, None);
    // Given a worker that is stopped some steps after a checkpoint that was due, and was put off because four commits
    // have no answer yet
    wait_for("a step between two checkpoints", || {
        worker.signal(rustix::process::Signal::STOP);
        let step = last_step(&trace, "step").unwrap_or_default();
        if step > 5 * EVERY && (1..EVERY / 2).contains(&(step % EVERY)) {
            return Some(());
        }
        worker.signal(rustix::process::Signal::CONT);
        None
    });
    assert_eq!(agent.last_commit().step, 4 * EVERY);
    let first = agent.heard.lock().unwrap().iter().find_map(|word| match word {
        FromWorker::Commit { id, .. } => Some(*id),
        _ => None,
    });
    agent.say(&ToWorker::Committed { id: first.unwrap(), step: EVERY });
    worker.signal(rustix::process::Signal::CONT);
    let next = wait_for("the next commit", || Some(agent.last_commit().step).filter(|step| *step > 4 * EVERY));
    assert!(!next.is_multiple_of(EVERY), "step {next} was waited for");
}

#[test]
fn a_worker_that_is_killed_at_any_moment_of_a_save_leaves_one_that_loads() {
    // Given a worker that saves all the time, megabytes at a time
    let folder = tempfile::tempdir().unwrap();
    let flags = format!(
        "--epochs 100000 --hidden 512,512 --checkpoint-every 1 --keep 2 --checkpoint-dir {}",
        folder.path().display()
    );
    let whole = |path: &Path| path.join("manifest.json").exists();
    let folders = || -> Vec<std::path::PathBuf> {
        let paths = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut steps: Vec<_> = paths.filter(|path| path.is_dir()).collect();
        steps.sort();
        steps
    };
    let newest = || folders().into_iter().rev().find(|path| whole(path));
    let (mut last, mut cut_short) = (None, 0);
    for life in 0..10 {
        let worker = Worker::start(&flags, &environment(0, 1, life, 0), None);
        wait_for("a newer checkpoint", || newest().filter(|path| Some(path) > last.as_ref()));
        // When it is killed in the midst of a save, or at some moment later
        let mut looks = mix(life) % 16;
        wait_for("the moment", || {
            looks = looks.saturating_sub(1);
            let now = if life % 2 == 0 { folders().iter().any(|path| !whole(path)) } else { looks == 0 };
            now.then_some(())
        });
        let seen = newest().unwrap();
        worker.signal(rustix::process::Signal::KILL);
        worker.end();
        cut_short += usize::from(folders().iter().any(|path| !whole(path)));
        // Then the newest loads, and nothing that was whole is lost
        last = newest();
        assert!(last.as_ref() >= Some(&seen), "{last:?} after {}", seen.display());
        let loaded = Checkpoints::new(Host, folder.path()).newest().expect("one that loads");
        let name = format!("step-{:08}-r{}", loaded.manifest.step, loaded.manifest.round);
        assert_eq!(last.as_ref().unwrap().file_name().unwrap().to_string_lossy(), name, "life {life}");
    }
    assert!(cut_short > 0, "no save was under way at any kill");
}
