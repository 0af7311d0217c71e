//! The final save: when a job ends, an agent has the newest snapshot in memory saved and commits it, and the job's next
//! start continues from there.

use elastic_tests::prelude::*;

use crate::agents::live::{number, workers};

const LONG: Duration = Duration::from_secs(60);

const TRAINING: [&str; 3] = ["digits", "--epochs=120", "--hidden=128,128"];

/// A job that trains, with two workers on each node.
pub(crate) async fn training_job(nodes: &str, restarts: u32) -> Job {
    let job = Job::on_etcd(nodes).await.flag("--nproc-per-node=2").flag(&format!("--max-restarts={restarts}"));
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let folder = format!("--checkpoint-dir={}", job.path("checkpoints").display());
    let saves = ["--device=cpu", "--checkpoint-every=200", "--snapshot-every=7", &folder];
    job.trainer([&TRAINING[..], &saves].concat())
}

/// The last step of this event in the trace.
pub(crate) fn last(trace: &Path, event: &str) -> Option<u64> {
    json_lines(trace).iter().filter(|line| line["event"] == event).map(|line| number(line, "step")).max()
}

/// Stops all workers of the job some steps after a checkpoint, calls `meanwhile`, and kills them: a worker that survived
/// the others by some milliseconds would hold the last step. Returns the last step that was done.
pub(crate) async fn kill_all_workers(job: &Job, count: usize, meanwhile: impl FnOnce()) -> u64 {
    let trace = job.path("trace");
    eventually("a checkpoint and some steps", LONG, async || {
        (last(&trace, "committed").is_some() && last(&trace, "step") >= Some(240)).then_some(())
    })
    .await;
    let all = workers(job);
    assert_eq!(all.len(), count);
    all.values().for_each(|pid| send(*pid, Signal::STOP));
    meanwhile();
    all.values().for_each(|pid| send(*pid, Signal::KILL));
    last(&trace, "step").unwrap()
}

/// The step that the newest round began after, once there is a round newer than `round`.
pub(crate) async fn begun_after(job: &Job, round: u64) -> u64 {
    let begin = eventually("the next start's round", LONG, async || {
        let lines = job.lines("trace");
        lines.into_iter().find(|line| line["event"] == "begin" && number(line, "round") > round)
    });
    number(&begin.await, "step")
}

pub(crate) fn newest_round(job: &Job) -> u64 {
    job.lines("trace").iter().map(|line| number(line, "round")).max().unwrap()
}

/// The checksum of the parameters of a training that nothing disturbs.
pub(crate) fn undisturbed_checksum(words: &[&str], env: &[(&str, PathBuf)]) -> String {
    let alone = Command::new(binary("elastic-trainer")).args(words).envs(env.iter().cloned()).output().unwrap();
    let printed = String::from_utf8(alone.stdout).unwrap();
    printed.lines().find(|line| line.starts_with("parameters crc32c:")).unwrap().to_owned()
}

/// Checks that an agent has written the result of an undisturbed run.
pub(crate) fn ends_as_undisturbed(agents: &[Agent]) {
    let checksum = undisturbed_checksum(&[&TRAINING[..], &["--device=cpu"]].concat(), &[]);
    assert!(agents.iter().any(|agent| agent.output().contains(&checksum)), "not {checksum}");
}

fn saved(agent: &Agent) -> Option<u64> {
    agent.output().split_once("saved step ")?.1.split_once(' ')?.0.parse().ok()
}

#[tokio::test]
async fn where_no_restart_is_left_the_first_agent_saves_what_is_in_memory_and_the_next_start_continues_from_it() {
    let job = training_job("2", 0).await;
    let mut agents = job.start_all(["a", "b"]);
    let done = kill_all_workers(&job, 4, || ()).await;
    let round = newest_round(&job);
    assert_eq!(exits(&mut agents).await, [JOB_FAILED; 2]);

    // Then one has saved the last snapshot, and the other has not, and says so
    let steps: Vec<u64> = agents.iter().filter_map(saved).collect();
    let [step] = steps[..] else { panic!("{steps:?} were saved") };
    assert!(step % 7 == 0 && step + 8 > done, "{done} steps were done, and step {step} was saved");
    let silent = agents.iter().find(|agent| saved(agent).is_none()).unwrap().output();
    assert!(silent.contains("this node does not save the snapshots in memory"), "{silent}");
    let pointer = job.record("checkpoint").await.unwrap();
    assert_eq!((number(&pointer, "step"), number(&pointer, "round")), (step, round));
    let verify = Command::new(binary("elastic-trainer"))
        .args(["checkpoint", "verify"])
        .arg(Path::new(pointer["path"].as_str().unwrap()).parent().unwrap())
        .output()
        .unwrap();
    assert!(verify.status.success(), "{}", String::from_utf8_lossy(&verify.stdout));

    // And the next start of the job continues from there, to the undisturbed run's end.
    let mut agents = job.start_all(["a", "b"]);
    assert_eq!(begun_after(&job, round).await, step);
    assert_eq!(exits(&mut agents).await, [0, 0]);
    ends_as_undisturbed(&agents);
}

#[tokio::test]
async fn a_final_save_that_fails_leaves_the_last_good_checkpoint_and_says_why() {
    let job = training_job("1", 0).await;
    let mut agent = job.start("a");
    // Given a folder that cannot be written
    let (folder, aside) = (job.path("checkpoints"), job.path("aside"));
    let spoil = || {
        std::fs::rename(&folder, &aside).unwrap();
        std::fs::write(&folder, "").unwrap();
    };
    kill_all_workers(&job, 2, spoil).await;
    let round = newest_round(&job);
    let committed = last(&job.path("trace"), "committed").unwrap();
    assert_eq!(exits([&mut agent]).await, [JOB_FAILED]);
    let output = agent.output();
    let expected = format!("the job resumes from step {committed}, {}/", folder.display());
    assert!(output.contains("the newest snapshot in memory is not saved: ") && output.contains(&expected), "{output}");
    assert!(output.contains("cannot be written"), "{output}");

    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(&aside, &folder).unwrap();
    let mut agent = job.start("a");
    assert_eq!(begun_after(&job, round).await, committed);
    assert_eq!(exits([&mut agent]).await, [0]);
}

/// Asks for memory, says how it is saved, and fails.
const WORKER: &str = r#"
import json, os, socket, sys
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
def ask(**message):
    agent.sendall((json.dumps(message) + "\n").encode())
    answer = b""
    while not answer.endswith(b"\n"): answer += socket.recv_fds(agent, 65536, 4)[0]
    return json.loads(answer)
ask(type="register", local_rank=0, pid=os.getpid())
assert ask(type="memory", id=1, bytes=8192, rescue=["sh", "-c", sys.argv[1]])["type"] == "memory"
sys.exit(3)
"#;

/// The agent of a job whose worker fails at once, and whose memory is saved by a shell.
fn failing(job: Job, save: &str) -> (Job, Agent) {
    job.write("worker.py", WORKER);
    let script = job.path("worker.py").display().to_string();
    let job = job.program(["python3", &script, save]);
    let agent = job.start("a");
    (job, agent)
}

/// The same, with a final save that lasts until someone ends it, once it has begun. Returns its folder in `/proc` too.
async fn saving_for_long() -> (Job, Agent, PathBuf) {
    // The agent turns `$$` into `$`.
    let save = "echo $$$$ > pid; echo begun >&2; exec sleep 600";
    let (job, agent) = failing(Job::on_etcd("1").await.flag("--max-restarts=0"), save);
    agent.says("saving from memory: begun", LONG).await;
    let pid: u32 = std::fs::read_to_string(job.path("pid")).unwrap().trim().parse().unwrap();
    (job, agent, Path::new("/proc").join(pid.to_string()))
}

#[tokio::test]
async fn a_second_signal_ends_a_final_save_that_takes_long() {
    let (_job, mut agent, saves) = saving_for_long().await;
    agent.signal(Signal::INT);
    agent.says("a second signal after 3 s kills the workers and leaves at once", LONG).await;
    assert!(!agent.is_gone(), "the first lets it be");
    agent.signal_until_it_ends(Signal::INT).await;
    assert_eq!(exits([&mut agent]).await, [JOB_FAILED]);
    assert!(agent.output().contains("saving was interrupted"), "{}", agent.output());
    eventually("the end of what saved", LONG, async || (!saves.exists()).then_some(())).await;
}

#[tokio::test]
async fn a_final_save_dies_with_its_agent() {
    let (_job, mut agent, saves) = saving_for_long().await;
    agent.kill();
    // A zombie counts as gone. It has no command line.
    let gone = async || std::fs::read(saves.join("cmdline")).map_or(true, |line| line.is_empty()).then_some(());
    eventually("the end of what saved", LONG, gone).await;
}

#[tokio::test]
async fn what_a_final_save_prints_is_committed_only_if_it_is_a_checkpoint() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (save, says) in [
        ("echo no >&2; exit 4", "sh ended with exit status: 4: no; the job resumes from its beginning"),
        ("echo nonsense", "sh printed no checkpoint but \"nonsense"),
        ("true", "there is no snapshot in memory to save"),
        (
            r#"echo '{"step":7,"path":"/x/manifest.json","digest":"crc32c:0"}'; test $# = 1 -a $0 = --after -a $1 = 0"#,
            "saved step 7 from memory to /x/manifest.json",
        ),
    ] {
        let (job, mut agent) = failing(Job::on(&etcd, "1").flag("--max-restarts=0"), save);
        assert_eq!(exits([&mut agent]).await, [JOB_FAILED]);
        assert!(agent.output().contains(says), "{save}: {}", agent.output());
        let committed = job.record("checkpoint").await.is_some();
        assert_eq!(committed, save.contains("manifest"), "{save}");
    }
}
