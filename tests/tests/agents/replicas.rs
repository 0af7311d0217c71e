//! Replicas of several nodes: whose workers keep their processes.

use elastic_tests::prelude::*;

use super::quiescing::{done, job_on, kill, of, pid, places, round};

#[tokio::test]
async fn a_replica_keeps_its_workers_as_a_whole_and_takes_a_spare_for_a_node_that_leaves() {
    let job = job_on("2:4").await.flag("--replica-nodes=2");
    let names = ["a", "b", "c", "d"];
    let mut agents: Vec<Agent> = job.start_all(names).into();
    let first = places(&job, 0, 4).await;
    let with_rank = |rank: u64| first.iter().find(|(_, place)| place["rank"] == rank).unwrap().0.0.clone();
    let [one, two, left, leaves] = [0, 1, 2, 3].map(with_rank);
    agents.push(job.start("e"));

    // When a node leaves, then the other node of its replica gets new workers with the spare, at no cost
    let leaves = names.iter().position(|name| *name == leaves).unwrap();
    agents[leaves].signal(Signal::TERM);
    assert_eq!(agents[leaves].exit(LIMIT).await, LEFT);
    agents.remove(leaves);
    let second = places(&job, round(&first), 4).await;
    for (rank, node) in [&one, &two].into_iter().enumerate() {
        let place = of(&second, node, 0);
        assert_eq!((pid(place), &place["rank"]), (pid(of(&first, node, 0)), &rank.into()), "{node}");
        assert_eq!((&place["nodes_per_replica"], &place["restart_count"]), (&2.into(), &0.into()));
    }
    assert_ne!(pid(of(&second, &left, 0)), pid(of(&first, &left, 0)));
    assert_eq!([&left, "e"].map(|node| of(&second, node, 0)["rank"].as_u64()), [Some(2), Some(3)]);

    // When a worker is killed, then all workers of its replica are new ones, and the others stay
    kill(of(&second, "e", 0));
    let third = places(&job, round(&second), 4).await;
    for (node, stays) in [(one.as_str(), true), (&two, true), (&left, false), ("e", false)] {
        assert_eq!(pid(of(&third, node, 0)) == pid(of(&second, node, 0)), stays, "{node}");
    }
    assert_eq!(of(&third, "e", 0)["restart_count"], 1);
    done(&job, &mut agents).await;
}

#[tokio::test]
async fn nodes_that_make_no_whole_replicas_are_refused() {
    let job = Job::on_etcd("2:5").await.flag("--replica-nodes=2").program(["true"]);
    job.start("a").says("2:5 nodes make no whole replicas of 2 nodes each (--replica-nodes): give", LIMIT).await;
}
