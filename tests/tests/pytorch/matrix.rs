//! Every script with every rendezvous: with fixed nodes, one of them killed and replaced, and with nodes that come
//! and go. `make test` runs two of these pairs: the rest of each script, means and kind of change is in `training` and
//! `readme`. `make test-torch-matrix` runs all.

use elastic_tests::prelude::*;

use crate::pytorch::trace::{
    LIMIT, Line, continues, finish, last_epoch, lines, resumes_what_was_saved, used_once, works,
};

macro_rules! matrix {
    ($($(#[$left_out:meta])? $name:ident = $play:ident $with:tt;)*) => {
        $(#[tokio::test] $(#[$left_out])? async fn $name() { play!($play $with) })*
    };
}

macro_rules! play {
    ($play:ident ($script:ident, $means:ident)) => {
        $play(&$script, Means::$means).await
    };
}

matrix! {
    #[ignore = "make test-torch-matrix"] ddp_on_etcd_with_fixed_nodes = fixed_nodes(DDP, Etcd);
    #[ignore = "make test-torch-matrix"] ddp_on_etcd_with_changing_nodes = changing_nodes(DDP, Etcd);
    #[ignore = "make test-torch-matrix"] ddp_on_c10d_with_fixed_nodes = fixed_nodes(DDP, C10d);
    #[ignore = "make test-torch-matrix"] ddp_on_c10d_with_changing_nodes = changing_nodes(DDP, C10d);
    #[ignore = "make test-torch-matrix"] ddp_alone = alone(DDP, Standalone);
    #[ignore = "make test-torch-matrix"] fsdp_on_etcd_with_fixed_nodes = fixed_nodes(FSDP, Etcd);
    #[ignore = "make test-torch-matrix"] fsdp_on_etcd_with_changing_nodes = changing_nodes(FSDP, Etcd);
    fsdp_on_c10d_with_fixed_nodes = fixed_nodes(FSDP, C10d);
    #[ignore = "make test-torch-matrix"] fsdp_on_c10d_with_changing_nodes = changing_nodes(FSDP, C10d);
    #[ignore = "make test-torch-matrix"] fsdp_alone = alone(FSDP, Standalone);
    #[ignore = "make test-torch-matrix"] imagenet_on_etcd_with_fixed_nodes = fixed_nodes(IMAGENET, Etcd);
    #[ignore = "make test-torch-matrix"] imagenet_on_etcd_with_changing_nodes = changing_nodes(IMAGENET, Etcd);
    #[ignore = "make test-torch-matrix"] imagenet_on_c10d_with_fixed_nodes = fixed_nodes(IMAGENET, C10d);
    #[ignore = "make test-torch-matrix"] imagenet_on_c10d_with_changing_nodes = changing_nodes(IMAGENET, C10d);
    #[ignore = "make test-torch-matrix"] imagenet_alone = alone(IMAGENET, Standalone);
    #[ignore = "make test-torch-matrix"] record_on_etcd_with_fixed_nodes = fails_as_recorded(TWO, Etcd);
    #[ignore = "make test-torch-matrix"] record_on_etcd_with_changing_nodes = fails_as_recorded(ONE_TO_FOUR, Etcd);
    #[ignore = "make test-torch-matrix"] record_on_c10d_with_fixed_nodes = fails_as_recorded(TWO, C10d);
    #[ignore = "make test-torch-matrix"] record_on_c10d_with_changing_nodes = fails_as_recorded(ONE_TO_FOUR, C10d);
    record_alone = fails_as_recorded(ONE, Standalone);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Means {
    Etcd,
    C10d,
    Standalone,
}

/// A script of `tests/pytorch` and what must hold of what it told.
struct Script {
    file: &'static str,
    works: &'static str,
    enough: fn(&[Line]) -> bool,
    check: fn(&[Line]),
}

const DDP: Script = Script {
    file: "train_ddp.py",
    works: "epoch",
    enough: |lines| last_epoch(lines, "epoch") >= 2,
    check: |lines| {
        continues(lines, "saved", "epoch", 0);
        used_once(lines, "epoch", "epoch", 0, |epoch| epoch < last_epoch(lines, "epoch"));
    },
};

const FSDP: Script = Script {
    file: "train_fsdp.py",
    works: "saved",
    enough: |_| true,
    check: |lines| {
        continues(lines, "saved", "step", 1);
        assert!(resumes_what_was_saved(lines) >= 2, "{lines:#?}");
    },
};

const IMAGENET: Script = Script {
    file: "train_imagenet.py",
    works: "step",
    enough: |lines| last_epoch(lines, "step") >= 2,
    check: |lines| used_once(lines, "step", "step", 1, |epoch| epoch < last_epoch(lines, "step")),
};

const ONE: &str = "1";
const TWO: &str = "2";
const ONE_TO_FOUR: &str = "1:4";

/// Waits until the store is served, where the first agent serves it on this port.
async fn is_served(port: Option<u16>) {
    if let Some(port) = port {
        eventually("the store is served", LIMIT, async || TcpStream::connect(("127.0.0.1", port)).ok()).await;
    }
}

/// A job, and the port of its store if the first agent serves it.
async fn job(means: Means, nnodes: &str) -> (Job, Option<u16>) {
    match means {
        Means::Etcd => (Job::on_etcd(nnodes).await, None),
        Means::C10d => {
            let port = free_port();
            let endpoint = format!("--rdzv-endpoint=127.0.0.1:{port}");
            (Job::met_by(&["--rdzv-backend=c10d", &endpoint], nnodes), Some(port))
        }
        Means::Standalone => (Job::met_by(&["--standalone"], nnodes).flag("--nproc-per-node=2"), None),
    }
}

/// The end, once there is enough to check.
async fn ends_well(job: &Job, script: &Script, agents: &mut [Agent]) {
    eventually("there is enough", LIMIT, async || (script.enough)(&lines(job)).then_some(())).await;
    finish(job);
    assert!(exits_within(LIMIT, agents).await.iter().all(|&code| code == 0));
    (script.check)(&lines(job));
}

async fn fixed_nodes(script: &Script, means: Means) {
    let Some(torch) = Torch::find() else { return };
    fixed_nodes_of(&torch, script, means).await;
}

/// An old worker, whose launcher is as new as ours.
#[tokio::test]
async fn ddp_of_torch_1_13_with_fixed_nodes() {
    let Some(torch) = Torch::old() else { return };
    fixed_nodes_of(&torch, &DDP, Means::Etcd).await;
}

async fn fixed_nodes_of(torch: &Torch, script: &Script, means: Means) {
    let (job, store) = job(means, TWO).await;
    let job = job.flag("--max-restarts=1").script(torch, script.file, &[]);
    let a = job.start("a");
    is_served(store).await;
    let mut agents = [a, job.start("b")];
    let first = works(&job, script.works, 1, 2).await;

    // When a worker is killed, then all start again from the checkpoint, at the cost of one restart
    job.round().unwrap().of("b").kill();
    let second = works(&job, script.works, first + 1, 2).await;
    assert_eq!(job.round().unwrap().restarts(), 1);

    // When an agent is killed and replaced, then they continue, free of charge: rank 0's, unless it serves the store
    let killed = if means == Means::Etcd && job.round().unwrap().nodes()[0] == "a" { 0 } else { 1 };
    agents[killed].kill();
    agents[killed] = job.start(["a", "b"][killed]);
    works(&job, script.works, second + 1, 2).await;
    assert_eq!(job.round().unwrap().restarts(), 1);
    ends_well(&job, script, &mut agents).await;
}

async fn changing_nodes(script: &Script, means: Means) {
    let Some(torch) = Torch::find() else { return };
    let (job, _) = job(means, ONE_TO_FOUR).await;
    let job = job.flag("--max-restarts=0").script(&torch, script.file, &[]);
    let a = job.start("a");
    let alone = works(&job, script.works, 1, 1).await;

    // When three come, then the four continue together
    let [mut b, mut c, mut d] = job.start_all(["b", "c", "d"]);
    let four = works(&job, script.works, alone + 1, 4).await;

    // When one is asked to leave and one dies, then two are left, and nothing is charged
    b.signal(Signal::TERM);
    assert_eq!(b.exit(LIMIT).await, 3);
    c.kill();
    let two = works(&job, script.works, four + 1, 2).await;
    assert_eq!(job.round().unwrap().restarts(), 0);

    // When another leaves, then the first continues alone, to the end
    d.signal(Signal::TERM);
    assert_eq!(d.exit(LIMIT).await, 3);
    works(&job, script.works, two + 1, 1).await;
    ends_well(&job, script, &mut [a]).await;
}

/// What can change on a node that no one joins: its workers.
async fn alone(script: &Script, means: Means) {
    let Some(torch) = Torch::find() else { return };
    let (job, _) = job(means, ONE).await;
    let job = job.flag("--max-restarts=1").script(&torch, script.file, &[]);
    let mut agents = [job.start("a")];
    let first = works(&job, script.works, 1, 2).await;
    job.round().unwrap().workers[1].kill();
    works(&job, script.works, first + 1, 2).await;
    assert_eq!(job.round().unwrap().restarts(), 1);
    ends_well(&job, script, &mut agents).await;
}

/// What a script raises is written down by `record`, and told by every agent as the job's root cause.
async fn fails_as_recorded(nnodes: &str, means: Means) {
    let Some(torch) = Torch::find() else { return };
    let (job, _) = job(means, nnodes).await;
    let job = job.flag("--max-restarts=0").script(&torch, "train_ddp.py", &["--fail"]);
    let names = if nnodes == ONE { &["a"][..] } else { &["a", "b"] };
    let mut agents: Vec<Agent> = names.iter().map(|name| job.start(name)).collect();
    assert!(exits_within(LIMIT, &mut agents).await.iter().all(|&code| code == JOB_FAILED));

    let mut folders = vec![job.path("logs")];
    let mut messages = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("error.json") {
                let error: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
                messages.push(error["message"]["message"].clone());
            }
        }
    }
    assert!(messages.contains(&"ValueError: the digits are illegible".into()), "{messages:?}");
    let cause = |agent: &Agent| agent.output().split_once("  root cause").map(|(_, cause)| cause.trim().to_owned());
    let causes: Vec<_> = agents.iter().map(cause).collect();
    let text = causes[0].as_ref().unwrap();
    assert!(causes.iter().all(|other| other.as_ref() == Some(text)), "{causes:#?}");
    assert!(text.contains("ValueError: the digits are illegible") && text.contains("exit code  1"), "{text}");
}
