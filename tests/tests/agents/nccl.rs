//! Training on GPUs that sums over NCCL, through changes of its group. The GPU and NCCL are doubles: these tests say
//! nothing about real ones.

use elastic_tests::prelude::*;

use crate::agents::double::{cache, driver, prefix};
use crate::agents::final_save::undisturbed_checksum;
use crate::agents::live::{Worker, workers};

const LONG: Duration = Duration::from_secs(60);

const TRAINING: &str = "digits --epochs 60 --hidden 8 --batch 200 --shards 3 --device cuda";

/// The double of NCCL, built beside this test.
fn fake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libfake_nccl.so")
}

fn variables() -> [(&'static str, PathBuf); 3] {
    [("ELASTIC_CUDA_LIBRARIES", driver()), ("VIRTUAL_ENV", prefix()), ("XDG_CACHE_HOME", cache())]
}

/// Waits until a round trains with so many workers, a while after `step`: its last step.
async fn gets_on(job: &Job, world_size: u64, after: u64) -> u64 {
    eventually(&format!("{world_size} train"), LONG, async || {
        let lines = job.lines("trace");
        let last = lines.iter().rfind(|line| line["event"] == "step")?;
        let step = last["step"].as_u64()?;
        (last["world_size"] == world_size && step > after + 20).then_some(step)
    })
    .await
}

#[tokio::test]
async fn each_round_of_a_changing_group_sums_over_nccl_and_no_bit_changes() {
    // Trained alone first: this also compiles the kernels once, instead of in three workers at the same time.
    let words: Vec<&str> = TRAINING.split(' ').collect();
    let checksum = undisturbed_checksum(&words, &variables());
    let mut job = Job::on_etcd("1:3").await.flag("--max-restarts=10").conf("last_call_timeout", "100ms");
    let library = format!("--nccl-library={}", fake().display());
    for (name, value) in variables() {
        job = job.env(name, value);
    }
    let job = job.trainer([&words[..], &[&library, "--collectives=nccl"]].concat());
    let mut agents = job.start_all(["a", "b", "c"]);
    let step = gets_on(&job, 3, 0).await;
    let first = workers(&job);
    let alive = |worker: &Worker| workers(&job).get(worker) == first.get(worker);
    let at = |node: &str| (node.to_owned(), 0);

    // When a node dies, then the others continue without it
    agents[2].kill();
    let step = gets_on(&job, 2, step).await;
    // When it comes back, then there are three again
    agents[2] = job.start("c");
    let step = gets_on(&job, 3, step).await;
    assert!(alive(&at("a")) && alive(&at("b")), "{first:?} {:?}", workers(&job));
    // When a worker dies, then another takes its place
    send(first[&at("b")], Signal::KILL);
    eventually("another worker", LONG, async || {
        workers(&job).get(&at("b")).filter(|pid| **pid != first[&at("b")]).copied()
    })
    .await;
    gets_on(&job, 3, step).await;
    assert!(alive(&at("a")));

    // Then the end is that of one worker alone
    for agent in &mut agents {
        assert_eq!(agent.exit(LONG).await, 0, "{}", agent.output());
    }
    assert!(agents.iter().map(Agent::output).collect::<String>().contains(&checksum), "not {checksum}");
    // And each round had a communicator of its own.
    let made = agents[0].output().matches("NCCL's communicator is made").count();
    assert!(made >= 4, "{made} communicators in {}", agents[0].output());
}
