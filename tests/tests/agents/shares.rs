//! Checkpoints that the nodes of a job write together to a folder that they share.

use elastic_tests::prelude::*;

use crate::agents::final_save::undisturbed_checksum;
use crate::agents::live::workers;

const LONG: Duration = Duration::from_secs(120);

/// Seconds of training, with a state of more than one chunk.
const TRAINING: [&str; 5] = ["digits", "--device=cpu", "--epochs=1", "--batch=24", "--hidden=1024,1024"];

/// A job of two nodes with a worker each, whose checkpoints go to `folder`, in which a shell puts the node's name in
/// place of `$ELASTIC_NODE`.
async fn job(folder: &str) -> Job {
    let job = Job::on_etcd("2").await.flag("--max-restarts=9").env("RUST_LOG", "info,elastic_trainer=debug");
    let trainer = binary("elastic-trainer");
    let (training, trace) = (TRAINING.join(" "), job.path("trace").display().to_string());
    let folder = job.path(folder).display().to_string();
    let flags = format!("--snapshot-every=50 --checkpoint-every=5 --checkpoint-dir=\"{folder}\" --trace={trace}");
    job.program(["sh", "-c", &format!("exec {} {training} {flags}", trainer.display())].map(str::to_owned))
}

fn output(agents: &[Agent]) -> String {
    agents.iter().map(Agent::output).collect()
}

fn commits(job: &Job) -> usize {
    job.lines("trace").iter().filter(|line| line["event"] == "committed").count()
}

fn verify(folder: &Path) {
    let verify = Command::new(binary("elastic-trainer")).args(["checkpoint", "verify"]).arg(folder).output().unwrap();
    assert!(verify.status.success(), "{}", String::from_utf8_lossy(&verify.stdout));
}

/// All agents end well, with the undisturbed run's result.
async fn end_well(agents: &mut [Agent]) {
    let codes = exits_within(LONG, agents.iter_mut()).await;
    assert!(codes.iter().all(|code| *code == 0), "{codes:?}");
    let checksum = undisturbed_checksum(&TRAINING, &[]);
    assert!(output(agents).contains(&checksum), "not {checksum}");
}

#[tokio::test]
async fn nodes_that_share_a_folder_write_a_share_each() {
    let job = job("checkpoints").await;
    let mut agents = job.start_all(["a", "b"]);
    end_well(&mut agents).await;
    for agent in &agents {
        assert!(agent.output().contains("wrote a share of the checkpoint"), "{}", agent.output());
    }
    let output = output(&agents);
    assert!(output.contains("2 nodes share the checkpoint folder") && output.contains("joined the shares"), "{output}");
    assert!(!output.contains("WARN") && commits(&job) > 1, "{output}");
    verify(&job.path("checkpoints"));
    let names = std::fs::read_dir(job.path("checkpoints")).unwrap();
    let mut names: Vec<_> = names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() == 4 && names[..2] == ["committed", "job"], "nothing else is left: {names:?}");
}

fn half_written(folder: &Path) -> Option<PathBuf> {
    let steps = std::fs::read_dir(folder).ok()?.flatten();
    let files = steps.filter_map(|step| std::fs::read_dir(step.path()).ok()).flatten().flatten();
    let is_shared = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".tmp") && name.matches('.').count() == 3
    };
    files.map(|file| file.path()).find(is_shared)
}

#[tokio::test]
async fn a_writer_that_is_killed_in_mid_write_leaves_the_last_good_one_and_the_next_is_committed() {
    let job = job("checkpoints").await;
    let mut agents = job.start_all(["a", "b"]);
    let (begun, mut before) = (Instant::now(), 0);
    for node in ["a", "b"] {
        // Given a commit since the last kill, and a share on its way
        let waited = |what: &str| assert!(begun.elapsed() < LONG, "waited in vain for {what}");
        while commits(&job) <= before {
            waited("a commit");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        while half_written(&job.path("checkpoints")).is_none() {
            waited("a share");
            std::hint::spin_loop();
        }
        let victim = workers(&job).into_iter().find(|((name, _), _)| name == node).map(|(_, pid)| pid);
        send(victim.expect("a worker"), Signal::KILL);
        let pointer = job.record("checkpoint").await.expect("a committed checkpoint");
        verify(Path::new(pointer["path"].as_str().unwrap()).parent().unwrap());
        before = commits(&job);
    }
    end_well(&mut agents).await;
    assert!(commits(&job) > before);
    verify(&job.path("checkpoints"));
}

#[tokio::test]
async fn where_each_node_has_a_folder_of_its_own_only_rank_0_writes() {
    let job = job("checkpoints-$ELASTIC_NODE").await;
    let mut agents = job.start_all(["a", "b"]);
    assert_eq!(exits_within(LONG, &mut agents).await, [0, 0]);
    let output = output(&agents);
    assert!(!output.contains("share"), "{output}");
    assert!(commits(&job) > 1);
    let folders = ["a", "b"].map(|node| job.path(&format!("checkpoints-{node}")));
    let there: Vec<&PathBuf> = folders.iter().filter(|folder| folder.exists()).collect();
    let [folder] = there[..] else { panic!("{there:?} are there") };
    verify(folder);
}
