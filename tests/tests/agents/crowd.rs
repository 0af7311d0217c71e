//! As many agents of one job as this machine holds.

use elastic_tests::prelude::*;
use elastic_tests::processor::memory_kb;

const AGENTS: u32 = 200;
const LONG: Duration = Duration::from_secs(120);

#[tokio::test]
#[ignore = "make chaos: two hundred agents with their guards and workers"]
async fn two_hundred_agents_meet_lose_one_and_succeed() {
    let job = Job::on_etcd(&format!("{}:{AGENTS}", AGENTS - 1)).await.prompt().conf("join_timeout", "2m");
    let begun = Instant::now();
    let mut agents: Vec<Agent> = (0..AGENTS).map(|node| job.start(&format!("n{node:03}"))).collect();
    let first = job.runs_within(1, AGENTS, LONG).await;
    assert_eq!(first.number, 1, "all meet in the first round, though they come at once");
    let memory: u64 = agents.iter().map(|agent| memory_kb(&agent.pid().to_string()).unwrap()).sum();
    eprintln!("{AGENTS} agents run {:.2} s after the first was started", begun.elapsed().as_secs_f64());
    eprintln!("{} kB each (proportional set size), without guards and workers", memory / u64::from(AGENTS));

    let begun = Instant::now();
    agents.remove(AGENTS as usize / 2).kill();
    let second = job.runs_within(2, AGENTS - 1, LONG).await;
    eprintln!("the others continue {:.2} s after one was killed", begun.elapsed().as_secs_f64());
    assert_eq!((second.number, second.restarts()), (2, 0), "one loss costs one round and no restart");

    let begun = Instant::now();
    second.exit(0);
    assert_eq!(exits_within(LONG, &mut agents).await, vec![0; AGENTS as usize - 1]);
    eprintln!("all have ended {:.2} s after their workers did", begun.elapsed().as_secs_f64());
}
