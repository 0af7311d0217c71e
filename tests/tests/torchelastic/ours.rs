//! Our agents alone, on torchrun's protocol.

use elastic_tests::prelude::*;

use crate::torchelastic::scene::{LIMIT, Ours, Scene};

const SOON: Duration = Duration::from_secs(5);
/// A node that leaves tries for two seconds to tell the others.
const IN_TIME: Duration = Duration::from_secs(8);

#[tokio::test]
async fn a_killed_worker_costs_all_a_restart_and_no_waiting() {
    let scene = Scene::new(None, "2").await.flag("--nproc-per-node=2");
    let [mut a, mut b] = ["a", "b"].map(|name| scene.start(Ours, name));
    let first = scene.works(4, None).await;
    assert_eq!(first.workers.iter().map(|worker| worker.local_rank).collect::<Vec<_>>(), [0, 1, 0, 1]);

    // When a worker is killed, then both nodes start again at once, where torchrun waits for a time to live
    first.of("b").kill();
    let second = scene.works_within(4, Some(&first), SOON).await;
    assert_eq!((second.of("a").restarts, second.of("b").restarts), (0, 1), "each agent counts its own");
    scene.ends_well([&mut a, &mut b]).await;

    // The id is closed, as torchrun closes it
    let mut late = scene.start(Ours, "late");
    assert_eq!(late.exit(SOON).await, 1);
    assert!(late.output().contains("another --rdzv-id"), "{}", late.output());
}

#[tokio::test]
async fn a_killed_agent_is_missed_and_replaced() {
    let scene = Scene::new(None, "2:3").await.conf("lease_ttl", "4");
    let mut agents = ["a", "b", "c"].map(|name| scene.start(Ours, name));
    let whole = scene.works(3, None).await;

    // When an agent dies, then the others notice within its time to live, while torchrun's never would
    agents[2].kill(&scene);
    let two = scene.works_within(2, Some(&whole), Duration::from_secs(15)).await;
    assert_eq!(two.nodes().len(), 2);

    // When it comes back, then they are three again, and nothing was charged
    agents[2] = scene.start(Ours, "c");
    let three = scene.works(3, Some(&two)).await;
    assert!(three.workers.iter().all(|worker| worker.restarts == 0));
    scene.ends_well(&mut agents).await;
}

#[tokio::test]
async fn a_group_grows_shrinks_and_keeps_a_spare() {
    let scene = Scene::new(None, "1:2").await.conf("last_call_timeout", "300ms");
    let mut a = scene.start(Ours, "a");
    let one = scene.works(1, None).await;
    let mut b = scene.start(Ours, "b");
    let two = scene.works_within(2, Some(&one), SOON).await;

    // When a third comes, then it waits, and disturbs no one
    let mut c = scene.start(Ours, "c");
    c.says("is a spare", SOON).await;
    assert_eq!(scene.group(2).as_ref(), Some(&two));

    // When one is asked to leave, then the spare takes its place
    a.signal(Signal::TERM);
    assert_eq!(a.exit(SOON).await, 3);
    let again = scene.works_within(2, Some(&two), SOON).await;
    let mut nodes = again.nodes();
    nodes.sort_unstable();
    assert_eq!(nodes, ["b", "c"]);
    scene.ends_well([&mut b, &mut c]).await;
}

#[tokio::test]
async fn a_spare_ends_as_the_job_does() {
    let scene = Scene::new(None, "1").await;
    let mut a = scene.start(Ours, "a");
    scene.works(1, None).await;
    let mut b = scene.start(Ours, "b");
    b.says("is a spare", SOON).await;
    scene.ends_well([&mut a, &mut b]).await;
}

#[tokio::test]
async fn a_job_that_fails_ends_everywhere_with_its_cause() {
    let scene = Scene::new(None, "2").await.flag("--max-restarts=0");
    let [mut a, mut b] = ["a", "b"].map(|name| scene.start(Ours, name));
    let group = scene.works(2, None).await;
    group.of("b").kill();
    assert_eq!((a.exit(SOON).await, b.exit(SOON).await), (JOB_FAILED, JOB_FAILED));
    for agent in [&a, &b] {
        assert!(agent.output().contains("SIGKILL"), "{}", agent.output());
    }
}

#[tokio::test]
async fn etcds_restart_costs_nothing() {
    let mut scene = Scene::new(None, "2").await.conf("lease_ttl", "4");
    let [mut a, mut b] = ["a", "b"].map(|name| scene.start(Ours, name));
    let group = scene.works(2, None).await;

    // When etcd is away for longer than every time to live, then the workers continue
    scene.etcd.kill();
    let begun = Instant::now();
    eventually("the outage is long enough", LIMIT, async || (begun.elapsed() > SOON).then_some(())).await;
    scene.etcd.restart().await;
    let key = "/torchelastic/p2p/run_job/rdzv/v_1/rank_";
    for rank in 0..2 {
        let put_back = async || scene.read(&format!("{key}{rank}")).await;
        eventually("a sign of life is put back", LIMIT, put_back).await;
    }
    assert_eq!(scene.group(2).as_ref(), Some(&group));
    scene.ends_well([&mut a, &mut b]).await;
}

#[tokio::test]
async fn a_signal_ends_an_agent_in_time_when_etcd_is_gone() {
    let mut scene = Scene::new(None, "2").await;
    let [mut a, mut b] = ["a", "b"].map(|name| scene.start(Ours, name));
    scene.works(2, None).await;

    // Whether etcd is silent
    scene.etcd.pause().await;
    a.signal(Signal::TERM);
    assert_eq!(a.exit(IN_TIME).await, 3);
    // Or dead
    scene.etcd.kill();
    b.signal(Signal::TERM);
    assert_eq!(b.exit(IN_TIME).await, 3);
    assert_eq!(scene.living(), []);
}

/// Meets its peer at a barrier, the second only when told to; then offers a checkpoint. What it hears goes to a file.
const MEETS: &str = r#"#!/usr/bin/env python3
import json, os, pathlib, socket, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
lines = agent.makefile()
def ask(**message):
    agent.sendall((json.dumps(message) + "\n").encode())
    with open(folder / f"heard-{rank}", "a") as heard: heard.write(lines.readline())
ask(type="register", local_rank=0, pid=os.getpid())
while rank == "1" and not (folder / "go").exists(): time.sleep(0.02)
ask(type="barrier", id=1, name="all-here")
ask(type="commit", id=2, checkpoint=dict(step=1, path="/ckpt/1", digest="crc32c:0"))
"#;

#[tokio::test]
async fn workers_meet_at_a_barrier_and_commit_nothing() {
    let scene = Scene::new(None, "2").await;
    std::fs::write(scene.path("worker.sh"), MEETS).unwrap();
    let mut agents = ["a", "b"].map(|name| scene.start(Ours, name));
    let arrival = "/torchelastic/p2p/run_job/barriers/v_1/at_all-here/rank_0";
    eventually("the first has arrived", LIMIT, async || scene.read(arrival).await).await;
    let heard = |rank: u32| json_lines(&scene.path(&format!("heard-{rank}")));
    assert_eq!(heard(0).len(), 1, "{:?}", heard(0));

    std::fs::write(scene.path("go"), "").unwrap();
    for agent in &mut agents {
        assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    }
    for heard in [heard(0), heard(1)] {
        assert_eq!(heard[1]["type"], "barrier_passed", "{heard:?}");
        assert_eq!(heard[2]["type"], "error", "{heard:?}");
        assert!(heard[2]["message"].as_str().unwrap().contains("--rdzv-backend=etcd without api=v2"), "{heard:?}");
    }
}

#[tokio::test]
async fn nodes_of_different_sizes_get_contiguous_ranks() {
    let scene = Scene::new(None, "3").await;
    let agents = [("a", 1), ("b", 3), ("c", 2)];
    let mut agents = agents.map(|(name, slots)| {
        let slots = format!("--nproc-per-node={slots}");
        scene.start_with(Ours, name, &["--rdzv-backend=etcd", "--rdzv-conf=api=v2,last_call_timeout=1", &slots])
    });
    let group = scene.works(6, None).await;
    for node in ["a", "b", "c"] {
        let ranks: Vec<u32> = group.workers.iter().filter(|it| it.node == node).map(|it| it.rank).collect();
        assert!(ranks.windows(2).all(|pair| pair[1] == pair[0] + 1), "{group:?}");
    }
    scene.ends_well(&mut agents).await;
}
