//! Where a job begins that has committed nothing: at what its folder holds, or not at all.

use std::path::{Path, PathBuf};

use elastic_trainer::Environment;

use crate::agent::{Agent, Commits, assignment, start_group, start_member};
use crate::worker::{Worker, checksum, environment, free_port, places, trace, train, wait_for};

/// Only the last step is saved: a slow disk may skip others.
const FLAGS: &str = "--hidden 16 --checkpoint-every 1000000 --keep 50";

/// Flags of a run of so many epochs, of 23 steps each.
fn flags(epochs: u64, folder: &Path) -> String {
    format!("{FLAGS} --epochs {epochs} --checkpoint-dir {}", folder.display())
}

/// A life of the job, whose agent, with its store, begins again.
struct Life {
    folder: tempfile::TempDir,
}

impl Life {
    fn new() -> Life {
        Life { folder: tempfile::tempdir().unwrap() }
    }

    fn start(&self, flags: &str, environment: Environment) -> (Agent, Worker) {
        let flags = format!("{flags} --trace {}", self.folder.path().join("trace").display());
        start_member(self.folder.path(), &flags, environment, None)
    }

    /// Trains to the end in round 1. What rank 0 printed.
    fn train(&self, flags: &str, environment: Environment) -> String {
        let (_agent, worker) = self.start(flags, environment);
        worker.succeeds().0
    }

    /// Must be refused: why.
    fn refused(&self, flags: &str, environment: Environment) -> String {
        let (_agent, worker) = self.start(flags, environment);
        let (status, _, logged) = worker.end();
        assert_eq!(status.code(), Some(1), "{logged}");
        logged
    }

    /// The step that it began after.
    fn begun(&self) -> u64 {
        trace(&self.folder.path().join("trace"))[0]["step"].as_u64().unwrap()
    }
}

fn first_place() -> Environment {
    environment(0, 1, 1, 0)
}

fn undisturbed(epochs: u64) -> String {
    format!("{:08x}", train(&format!("--hidden 16 --epochs {epochs}"), 1, 0).checksum())
}

/// What is in a folder: names and contents.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match entry.is_dir() {
            true => found.extend(contents(&entry)),
            false => found.push((entry.clone(), std::fs::read(&entry).unwrap())),
        }
    }
    found.sort();
    found
}

fn flip(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}

fn data(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}-r1/rank0-of-1.safetensors"))
}

#[test]
fn a_job_whose_store_has_forgotten_it_resumes_from_its_folder_and_overwrites_nothing() {
    // Given what a job has saved in round 1
    let folder = tempfile::tempdir().unwrap();
    Life::new().train(&flags(2, folder.path()), first_place());
    let saved = contents(folder.path());
    // When a store that knows nothing of it begins with round 1 again
    let life = Life::new();
    let printed = life.train(&flags(4, folder.path()), first_place());
    // Then it continues
    assert_eq!((life.begun(), checksum(&printed)), (46, undisturbed(4).as_str()));
    let kept = contents(folder.path());
    let steps = saved.iter().filter(|(path, _)| path.to_string_lossy().contains("step-"));
    assert!(steps.clone().count() > 1 && steps.clone().all(|file| kept.contains(file)));
}

#[test]
fn the_only_node_that_has_the_newest_checkpoint_gives_it_to_all() {
    let (mine, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Life::new().train(&flags(1, mine.path()), first_place());
    Life::new().train(&flags(2, theirs.path()), first_place());
    let (life, places) = (Life::new(), places(1, 3));
    let start = |rank: usize, folder: &Path| life.start(&flags(4, folder), places[rank].clone());
    let nothing = tempfile::tempdir().unwrap();
    let workers = [start(0, mine.path()), start(1, theirs.path()), start(2, nothing.path())];
    let printed: String = workers.into_iter().map(|(_agent, worker)| worker.succeeds().0).collect();
    assert_eq!((life.begun(), checksum(&printed)), (46, undisturbed(4).as_str()));
}

#[test]
fn a_damaged_copy_fails_no_resume_that_another_can_serve() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // The same bytes, since each step has one result
    for folder in [&first, &second] {
        Life::new().train(&flags(2, folder.path()), first_place());
    }
    // The state is one chunk, which is in the last reader's share.
    flip(&data(second.path(), 46));
    let (life, places) = (Life::new(), places(1, 2));
    let start = |rank: usize, folder: &Path| life.start(&flags(4, folder), places[rank].clone());
    let workers = [start(0, first.path()), start(1, second.path())];
    let ended = workers.map(|(_agent, worker)| worker.succeeds());
    assert_eq!((life.begun(), checksum(&ended[0].0)), (46, undisturbed(4).as_str()));
    assert!(
        ended[1].1.contains("left out a damaged checkpoint") && ended[1].1.contains("in chunk 0"),
        "{}",
        ended[1].1
    );
}

/// A folder with steps 23 and 46.
fn with_two() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    (1..3).for_each(|epochs| drop(Life::new().train(&flags(epochs, folder.path()), first_place())));
    folder
}

#[test]
fn of_damaged_checkpoints_an_older_one_is_taken_and_if_there_is_none_it_is_an_error() {
    let folder = with_two();
    flip(&data(folder.path(), 46));
    let life = Life::new();
    life.train(&flags(2, folder.path()), first_place());
    assert_eq!(life.begun(), 23);
    for step in [23, 46] {
        flip(&data(folder.path(), step));
    }
    // With an agent, and without
    let logged = Life::new().refused(&flags(4, folder.path()), first_place());
    assert!(logged.contains("no checkpoint can be read") && logged.contains("move step-*"), "{logged}");
    let (status, _, logged) = Worker::start(&flags(4, folder.path()), &environment(0, 1, 0, 0), None).end();
    assert!(status.code() == Some(1) && logged.contains("no checkpoint can be read"), "{logged}");
}

#[test]
fn a_run_that_is_to_begin_elsewhere_needs_a_folder_of_its_own() {
    let (folder, other) = (with_two(), tempfile::tempdir().unwrap());
    let saved = contents(folder.path());
    for resume in ["never".to_owned(), format!("{}@23", folder.path().display())] {
        let logged = Life::new().refused(&format!("{} --resume {resume}", flags(4, folder.path())), first_place());
        assert!(logged.contains("holds step 46") && logged.contains("--resume auto"), "{logged}");
    }
    assert_eq!(contents(folder.path()), saved);
    // When it has one, then it begins at the step that it names
    let life = Life::new();
    let resume = format!("{} --resume {}@23", flags(4, &other.path().join("new")), folder.path().display());
    let printed = life.train(&resume, Environment { job: "another".to_owned(), ..first_place() });
    assert_eq!((life.begun(), checksum(&printed)), (23, undisturbed(4).as_str()));
    let logged = Life::new().refused(&format!("{} --resume /nowhere", flags(4, other.path())), first_place());
    assert!(logged.contains("/nowhere holds no checkpoint"), "{logged}");
}

#[test]
fn what_was_begun_by_hand_belongs_to_the_job_that_continues_it() {
    let folder = tempfile::tempdir().unwrap();
    let by_hand = Environment { job: String::new(), ..environment(0, 1, 0, 0) };
    Worker::start(&flags(1, folder.path()), &by_hand, None).succeeds();
    let life = Life::new();
    life.train(&flags(2, folder.path()), first_place());
    assert_eq!(life.begun(), 23);
    let other = Environment { job: "other".to_owned(), ..first_place() };
    let logged = Life::new().refused(&flags(3, folder.path()), other);
    assert!(logged.contains("belongs to job test") && logged.contains("--resume /"), "{logged}");
}

#[test]
fn a_job_without_a_name_of_its_own_takes_its_folders() {
    let folder = tempfile::tempdir().unwrap();
    let unnamed = |job: &str| Environment { job: job.to_owned(), unnamed: true, ..first_place() };
    Life::new().train(&flags(1, folder.path()), unnamed("7f9c"));
    let life = Life::new();
    let printed = life.train(&flags(2, folder.path()), unnamed("0b1d"));
    assert_eq!((life.begun(), checksum(&printed)), (23, undisturbed(2).as_str()));
    assert_eq!(std::fs::read_to_string(folder.path().join("job")).unwrap(), "7f9c\n");
}

#[test]
fn two_runs_without_an_agent_do_not_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let endless = flags(100_000, folder.path()).replace("1000000", "10");
    let first = Worker::start(&endless, &environment(0, 1, 0, 0), None);
    wait_for("a checkpoint", || folder.path().join("committed").exists().then_some(()));
    let (status, _, logged) = Worker::start(&flags(1, folder.path()), &environment(0, 1, 0, 0), None).end();
    assert!(status.code() == Some(1) && logged.contains("another run saves in checkpoint folder"), "{logged}");
    // When the first one is killed, then the folder is free
    drop(first);
    let second = Worker::start(&endless, &environment(0, 1, 0, 0), None);
    let committed = || std::fs::read_to_string(folder.path().join("committed")).ok();
    let before = committed();
    wait_for("a checkpoint of the second", || (committed() != before).then_some(()));
    drop(second);
}

#[test]
fn a_resume_at_a_step_that_is_on_disk_does_not_save_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let run = |epochs: u64| {
        let flags = format!("--hidden 16 --checkpoint-every 23 --epochs {epochs} --trace {}", path.display());
        let flags = format!("{flags} --checkpoint-dir {}", folder.path().display());
        Worker::start(&flags, &environment(0, 1, 0, 0), None).succeeds();
    };
    run(1);
    run(2);
    let committed = trace(&path).into_iter().filter(|line| line["event"] == "committed");
    let steps: Vec<u64> = committed.map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [23, 46]);
}

#[test]
fn a_later_start_of_a_job_continues_what_its_first_one_saved() {
    // Given a job that began elsewhere, and was restarted before anything was committed
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Life::new().train(&flags(1, folder.path()), first_place());
    let resume = format!("{} --resume {}@23", flags(4, other.path()), folder.path().display());
    let life = Life::new();
    life.train(&resume.replace("--epochs 4", "--epochs 2"), first_place());
    let mut place = environment(0, 1, 2, free_port());
    let again = Life::new();
    let agent = Agent::restarted(again.folder.path(), &assignment(&place, None), Commits::Granted);
    place.agent = Some(agent.socket.clone());
    let resume = format!("{resume} --trace {}", again.folder.path().join("trace").display());
    Worker::start(&resume, &place, None).succeeds();
    assert_eq!(again.begun(), 46);
    // Else it is refused
    let group = start_group(folder.path(), &resume, 9, 1, None);
    assert!(group.into_iter().all(|(_agent, worker)| worker.end().2.contains("holds step 92")));
}
