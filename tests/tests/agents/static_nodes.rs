//! Nodes with fixed ranks, which meet at the agent of node 0: `--rdzv-backend=static`.

use elastic_tests::prelude::*;

fn job(nnodes: &str) -> Job {
    Job::met_by(&["--master_addr=127.0.0.1", &format!("--master_port={}", free_port())], nnodes)
}

#[tokio::test]
async fn ranks_are_those_that_were_asked_for_in_any_order_of_arrival_and_after_restarts() {
    let job = job("3").flag("--max-restarts=1");
    let mut c = job.start_with("c", &["--node_rank=1"]);
    c.says("waiting for it", LIMIT).await;
    let mut a = job.start_with("a", &["--node_rank=2"]);
    let mut b = job.start_with("b", &["--node_rank=0"]);
    let first = job.runs(1, 3).await;
    assert_eq!(first.nodes(), ["b", "c", "a"]);
    first.of("c").kill();
    let second = job.runs(first.number + 1, 3).await;
    assert_eq!((second.nodes(), second.restarts()), (vec!["b", "c", "a"], 1));
    job.succeeds([&mut a, &mut b, &mut c]).await;
}

#[tokio::test]
async fn a_node_that_is_started_again_gets_its_rank_again() {
    let job = job("3");
    let mut host = job.start_with("host", &["--node-rank=0"]);
    let mut one = job.start_with("one", &["--node-rank=1"]);
    let mut two = job.start_with("two", &["--node-rank=2"]);
    let first = job.runs(1, 3).await;
    one.kill();
    let mut again = job.start_with("one", &["--node-rank=1"]);
    let second = job.runs(first.number + 1, 3).await;
    assert_eq!(second.nodes(), ["host", "one", "two"]);
    job.succeeds([&mut host, &mut again, &mut two]).await;
}

#[tokio::test]
async fn two_nodes_that_claim_one_rank_are_both_named() {
    let job = job("2");
    let mut host = job.start_with("host", &["--node-rank=0"]);
    let mut first = job.start_with("first", &["--node-rank=1"]);
    let round = job.runs(1, 2).await;
    let mut second = job.start_with("second", &["--node-rank=1"]);
    assert_eq!(second.exit(LIMIT).await, 1, "{}", second.output());
    let output = second.output();
    assert!(output.contains("node rank 1 is claimed by first on") && output.contains("and by second"), "{output}");
    assert_eq!(job.runs(1, 2).await, round, "the others continue undisturbed");
    job.succeeds([&mut host, &mut first]).await;
}

#[tokio::test]
async fn one_node_needs_no_port_even_if_it_is_given_one() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let job = Job::met_by(&[&format!("--master_port={}", taken.local_addr().unwrap().port())], "1");
    let mut agent = job.start("a");
    job.runs(1, 1).await.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}
