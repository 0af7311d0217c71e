//! Programs of the two releases in one job: as leader and members, one replaced by the other while the job trains.

use elastic_tests::prelude::*;
use elastic_tests::previous_release::PreviousRelease;

use super::{Build, LEFT};
use crate::agents::live::{self, number, undisturbed};

#[tokio::test]
async fn a_leader_of_one_release_leads_members_of_the_other() {
    let Some(before) = PreviousRelease::build() else { return };
    for leads in [Build::Now, Build::Before] {
        eprintln!("the leader is of {leads:?}");
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let job = Job::on(&etcd, "2:3").prompt().flag("--max-restarts=3");
        // Given a leader of one release, and members of the other
        let leader = leads.start(&job, &before, "a");
        assert_eq!(job.leader().await, "a");
        let mut others = ["b", "c"].map(|node| leads.other().start(&job, &before, node));
        let round = job.runs(1, 3).await;
        // when workers fail at both, then that is handled at once, and counted
        round.of("b").exit(1);
        let round = job.runs_within(round.number + 1, 3, AT_ONCE).await;
        round.of("a").exit(1);
        let round = job.runs_within(round.number + 1, 3, AT_ONCE).await;
        assert_eq!(round.restarts(), 2);
        // When an agent is lost, then the others continue without it
        others[1].kill();
        let round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        assert_eq!(round.restarts(), 2, "a loss costs no restart");
        // When it comes back as the other release, then it has a place again
        let back = leads.start(&job, &before, "c");
        let round = job.runs_within(round.number + 1, 3, AT_ONCE).await;
        // When the leader is lost, then the other release leads, or its own
        drop(leader);
        let round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        // and all have the same result.
        round.exit(0);
        let [b, _] = &mut others;
        let mut back = back;
        assert_eq!(exits([b, &mut back]).await, [0, 0], "{leads:?}");
    }
}

#[tokio::test]
async fn a_failed_job_has_one_cause_and_begins_again_with_either_release() {
    let Some(before) = PreviousRelease::build() else { return };
    let job = Job::on_etcd("2").await;
    for (generation, leads) in [(1, Build::Before), (2, Build::Now), (3, Build::Before)] {
        let first = leads.start(&job, &before, "a");
        assert_eq!(job.leader().await, "a", "generation {generation}");
        let second = leads.other().start(&job, &before, "b");
        let last = job.round().map_or(0, |round| round.number);
        let round = job.runs(last + 1, 2).await;
        round.of("b").exit(7);
        let mut agents = [first, second];
        assert_eq!(exits(&mut agents).await, [JOB_FAILED; 2], "generation {generation}");
        for agent in &agents {
            assert!(agent.output().contains("told to exit with 7"), "{}: {}", agent.name, agent.output());
        }
        let record = job.record("round").await.unwrap();
        let told = (&record["generation"], &record["state"], &record["cause"]["exit_code"]);
        assert_eq!(told, (&generation.into(), &"failed".into(), &7.into()));
    }
}

const TRAINING: [&str; 2] = ["--epochs=600", "--hidden=64"];

/// Three nodes train while each is drained and comes back as `to`; the pids of workers that stay are the same.
async fn replace_node_by_node(from: Build, to: Build) {
    let Some(before) = PreviousRelease::build() else { return };
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = undisturbed(&TRAINING, &folder.path().join("trace"));
    let job = Job::on_etcd("2:3").await.flag("--max-restarts=0");
    let trace = format!("--trace={}", job.path("trace").display());
    let trainer = binary("elastic-trainer").display().to_string();
    let program = [trainer.as_str(), "digits"].into_iter().chain(TRAINING).chain([trace.as_str()]);
    let job = job.program(program.collect::<Vec<_>>());
    let mut agents: Vec<Agent> = ["a", "b", "c"].map(|node| from.start(&job, &before, node)).into();
    let whole = async |round: u64| {
        let what = "all three ranks train";
        let fits = |line: &serde_json::Value| line["world_size"] == 3 && number(line, "round") > round;
        number(&live::step(&job.path("trace"), what, 2 * LIMIT, fits).await, "round")
    };
    let mut round = whole(0).await;
    for (at, node) in ["a", "b", "c"].into_iter().enumerate() {
        let pids = live::workers(&job);
        let stay: BTreeSet<_> = pids.iter().filter(|((name, _), _)| name != node).collect();
        let mut leaves = agents.remove(at);
        leaves.signal(Signal::TERM);
        assert_eq!(leaves.exit(LIMIT).await, LEFT, "a drained agent ends well: {}", leaves.output());
        agents.insert(at, to.start(&job, &before, node));
        round = whole(round).await;
        let now = live::workers(&job);
        let stayed: BTreeSet<_> = now.iter().filter(|((name, _), _)| name != node).collect();
        assert_eq!(stay, stayed, "workers that know about rounds keep their process when {node} is replaced");
    }
    assert_eq!(job.record("round").await.unwrap()["restarts"], 0);
    for agent in &mut agents {
        assert_eq!(agent.exit(3 * LIMIT).await, 0, "{}", agent.output());
    }
    let printed: String = agents.iter().map(Agent::output).collect();
    undisturbed.is_same(&job.lines("trace"), &printed);
}

#[tokio::test]
async fn nodes_are_upgraded_one_by_one_while_the_job_trains() {
    replace_node_by_node(Build::Before, Build::Now).await;
}

#[tokio::test]
async fn nodes_go_back_one_by_one_while_the_job_trains() {
    replace_node_by_node(Build::Now, Build::Before).await;
}

#[tokio::test]
async fn a_coordinator_is_replaced_by_one_of_the_other_release_and_back() {
    let Some(before) = PreviousRelease::build() else { return };
    let job = Job::on_etcd("2").await.prompt().flag("--max-restarts=9").flag("--restarts-without-progress=9");
    let mut agents = [Build::Before.start(&job, &before, "a"), Build::Now.start(&job, &before, "b")];
    let mut round = job.runs(1, 2).await;
    let address = job.etcd().address();
    let args = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--lease-ttl", "2"];
    for build in [Build::Before, Build::Now, Build::Before] {
        // Given a coordinator of this release, which takes the lead without a new round
        let mut running = match build {
            Build::Before => Process::start_program(&before.program("elastic-coordinator"), &args),
            Build::Now => Process::start("elastic-coordinator", &args),
        };
        let peer = running.says("pulses at ", LIMIT).await;
        eventually(&format!("the coordinator of {build:?} leads"), LIMIT, async || {
            let leader = job.record("leader").await?;
            let at = format!("{}:{}", leader["peer"]["host"].as_str()?, leader["peer"]["port"]);
            (leader["coordinator"] == true && at == peer).then_some(())
        })
        .await;
        assert_eq!(job.round().unwrap().number, round.number, "a new leader costs no round");
        // when workers fail at both nodes, then it handles that
        for node in ["a", "b"] {
            round.of(node).exit(1);
            round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        }
        // When it ends, then an agent leads, without a new round.
        assert_eq!(running.terminate(LIMIT).await, 0);
        eventually("an agent leads", LIMIT, async || {
            job.record("leader").await.filter(|leader| leader["coordinator"].is_null())
        })
        .await;
        assert_eq!(job.round().unwrap().number, round.number);
    }
    job.succeeds(&mut agents).await;
}
