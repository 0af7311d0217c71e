//! Spare hosts that several jobs share.

use elastic_tests::prelude::*;

struct Scene {
    etcd: EtcdServer,
    folder: TempDir,
}

impl Scene {
    async fn new() -> Scene {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        Scene { etcd, folder: tempfile::tempdir().unwrap() }
    }

    fn job(&self, id: &str, nnodes: &str) -> Job {
        let job = Job::on(&self.etcd, nnodes).named(id).prompt();
        job.write_file(self.folder.path());
        job
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Waits until the newest round runs with workers of exactly these nodes.
async fn runs_on<const N: usize>(job: &Job, mut nodes: [&str; N]) -> u64 {
    nodes.sort_unstable();
    let what = format!("a round runs on {nodes:?}");
    let round = eventually(&what, LIMIT, async || {
        let round = job.round().filter(|round| round.is_whole(N as u32))?;
        let mut names = round.nodes();
        names.sort_unstable();
        (names == nodes).then_some(round.number)
    });
    round.await
}

async fn end(job: &Job, agents: &mut [&mut Agent]) {
    job.round().unwrap().exit(0);
    for code in exits(agents.iter_mut().map(|agent| &mut **agent)).await {
        assert_eq!(code, 0);
    }
}

#[tokio::test]
async fn a_spare_host_serves_one_job_after_the_other() {
    let scene = Scene::new().await;
    let (a, b) = (scene.job("a", "2"), scene.job("b", "2"));
    let [mut a1, mut a2] = a.start_all(["a1", "a2"]);
    let [mut b1, mut b2] = b.start_all(["b1", "b2"]);
    a.runs(1, 2).await;
    b.runs(1, 2).await;
    let mut spare = a.start_spare("spare", scene.folder());
    spare.says("a spare host of the jobs", LIMIT).await;

    a2.kill();
    runs_on(&a, ["a1", "spare"]).await;
    spare.says("a lacks a node: it has 1 of at least 2 nodes", LIMIT).await;
    assert_eq!(a.records("coming/").await.len(), 0, "a claim goes when the node is there");

    end(&a, &mut [&mut a1]).await;
    spare.says("part in a is over (exit code 0)", LIMIT).await;

    b2.kill();
    runs_on(&b, ["b1", "spare"]).await;
    spare.signal(Signal::TERM);
    assert_eq!(spare.exit(LIMIT).await, 0);
    let mut back = b.start("b2");
    runs_on(&b, ["b1", "b2"]).await;
    end(&b, &mut [&mut b1, &mut back]).await;
}

#[tokio::test]
async fn of_two_spare_hosts_one_goes_to_one_place() {
    let scene = Scene::new().await;
    let (a, b) = (scene.job("a", "2"), scene.job("b", "1:2"));
    let [mut a1, mut a2] = a.start_all(["a1", "a2"]);
    a.runs(1, 2).await;
    let spares = [a.start_spare("s1", scene.folder()), b.start_spare("s2", scene.folder())];
    for spare in &spares {
        spare.says("a spare host of the jobs", LIMIT).await;
    }
    a2.kill();
    let round = a.runs(2, 2).await;
    let went = |spare: &&Agent| round.workers.iter().any(|worker| worker.node == spare.name);
    assert_eq!(spares.iter().filter(went).count(), 1);
    let idle = spares.iter().find(|spare| !went(spare)).unwrap();
    assert!(!idle.output().contains("taking part"), "{}", idle.output());

    // The other one is there for the next job.
    let mut b1 = b.start("b1");
    runs_on(&b, ["b1", &idle.name]).await;
    end(&a, &mut [&mut a1]).await;
    end(&b, &mut [&mut b1]).await;
}

#[tokio::test]
async fn a_spare_host_leaves_a_job_that_can_do_without_it_for_one_that_cannot_run() {
    let scene = Scene::new().await;
    let (a, b) = (scene.job("a", "1:2"), scene.job("b", "2"));
    let mut a1 = a.start("a1");
    a.runs(1, 1).await;
    let mut spare = a.start_spare("spare", scene.folder());
    runs_on(&a, ["a1", "spare"]).await;
    let [mut b1, mut b2] = b.start_all(["b1", "b2"]);
    b.runs(1, 2).await;

    b2.kill();
    runs_on(&b, ["b1", "spare"]).await;
    let round = runs_on(&a, ["a1"]).await;
    let record = a.record("round").await.unwrap();
    assert_eq!((record["number"].as_u64(), record["restarts"].as_u64()), (Some(round), Some(0)), "it left as planned");

    // Its agent does not outlive it, and leaves as planned.
    spare.kill();
    let mut back = b.start("b2");
    runs_on(&b, ["b1", "b2"]).await;
    assert_eq!(b.record("round").await.unwrap()["restarts"], 0);
    end(&a, &mut [&mut a1]).await;
    end(&b, &mut [&mut b1, &mut back]).await;
}

#[tokio::test]
async fn a_job_whose_agent_fails_here_is_skipped_for_a_while() {
    let scene = Scene::new().await;
    let a = scene.job("a", "2");
    let [mut a1, mut a2] = a.start_all(["a1", "a2"]);
    a.runs(1, 2).await;
    // It disagrees with the job.
    let file = scene.folder().join("a.job");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("PET_MAX_RESTARTS=7\n{text}")).unwrap();
    std::fs::write(scene.folder().join("bad.job"), "--nnodes=x").unwrap();
    let spare = a.start_spare("spare", scene.folder());
    spare.says("bad.job: --nnodes=x", LIMIT).await;
    a2.kill();
    spare.says("the agent of a ended with exit code 1, and says why above; not going there for 10s", LIMIT).await;
    assert!(spare.output().contains("--max-restarts is 7 here but 0 in the job"), "{}", spare.output());

    let mut back = a.start("a2");
    runs_on(&a, ["a1", "a2"]).await;
    end(&a, &mut [&mut a1, &mut back]).await;
}
