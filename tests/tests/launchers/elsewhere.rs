//! Command lines and variables as other projects' documents have them, on one machine: of TorchX, Kubeflow, Accelerate
//! and Slurm. Only names of hosts and ports are this machine's.

use ::elastic_agent::for_tests::hostname;
use elastic_tests::prelude::*;

use crate::launchers::scene::{Launcher, PATIENCE, Scene, cases, names};

cases! {
    torchx_runs_a_node
    torchx_runs_nodes
    kubeflows_elastic_job_sets_variables
    kubeflows_train_job_sets_variables
    accelerate_starts_a_node_each
    a_slurm_script_starts_a_node_each
    ; beyond torchrun:
    a_second_run_with_the_same_flags_runs_too = "the second"
}

/// A script, as the documents run one: by Python, with arguments of its own.
const TELL: &str = "
import os, sys
name = '-of-'.join([os.environ['RANK'], os.environ['WORLD_SIZE']])
open(f'rank-{name}', 'w')
print('hello', *sys.argv[1:])
";

fn scene(launcher: Launcher) -> Scene {
    let scene = Scene::new(launcher, "");
    scene.write("main.py", TELL);
    scene
}

/// The name of this host, if it leads to this host, and a free port.
fn head_node() -> String {
    let host = hostname();
    let known = std::net::ToSocketAddrs::to_socket_addrs(&(host.as_str(), 0)).is_ok();
    format!("{}:{}", if known { &host } else { "127.0.0.1" }, free_port())
}

/// The words of a command line.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().map(|word| if word == "''" { "" } else { word }).collect()
}

/// Starts this command line on as many nodes as there are lists of variables, and waits until all have ended well.
async fn all_end_well(scene: &Scene, line: &str, nodes: &[&[(&str, &str)]]) {
    let mut nodes: Vec<Process> = nodes.iter().map(|env| scene.start_in(env, &words(line), &[])).collect();
    scene.end_well(&mut nodes).await;
}

async fn torchx_runs_a_node(launcher: Launcher) {
    let scene = scene(launcher);
    // `torchx run -s local_cwd dist.ddp -j 1x2 --script main.py --epochs 3`
    let line = "--rdzv_backend c10d --rdzv_endpoint localhost:0 --rdzv_id main-x1b2c3 --nnodes 1 --nproc_per_node 2 \
                --tee 3 --role '' main.py --epochs 3";
    all_end_well(&scene, line, &[&[("LOGLEVEL", "WARNING")]]).await;
    assert_eq!(scene.ranks(), names(["0-of-2", "1-of-2"]));
    let log = scene.log();
    assert!(["[0]:hello --epochs 3", "[1]:hello --epochs 3"].iter().all(|line| log.contains(line)), "{log}");
}

async fn torchx_runs_nodes(launcher: Launcher) {
    let scene = scene(launcher);
    // `torchx run -s local_cwd dist.ddp -j 2x2 --script main.py`
    let line = format!(
        "--rdzv_backend c10d --rdzv_endpoint {} --rdzv_id main-x1b2c3 --nnodes 2 --nproc_per_node 2 --tee 3 --role '' \
         main.py",
        head_node()
    );
    all_end_well(&scene, &line, &[&[], &[]]).await;
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
}

/// A PyTorchJob with an `elasticPolicy`, whose command is `torchrun main.py`.
async fn kubeflows_elastic_job_sets_variables(launcher: Launcher) {
    let scene = scene(launcher);
    let endpoint = head_node();
    let pod = [
        ("PET_RDZV_BACKEND", "c10d"),
        ("PET_RDZV_ENDPOINT", endpoint.as_str()),
        ("PET_RDZV_ID", "elastic-example"),
        ("PET_RDZV_CONF", "last_call_timeout=2"),
        ("PET_NNODES", "2:3"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_MAX_RESTARTS", "100"),
        ("PET_STANDALONE", "0"),
    ];
    all_end_well(&scene, "main.py", &[&pod, &pod]).await;
    assert_eq!(scene.ranks(), names(["0-of-2", "1-of-2"]));
}

/// A TrainJob of the runtime `torch-distributed`, whose command is `torchrun main.py`.
async fn kubeflows_train_job_sets_variables(launcher: Launcher) {
    let scene = scene(launcher);
    let head = head_node();
    let (host, port) = head.split_once(':').unwrap();
    let pod = |rank| {
        [
            ("PET_NNODES", "2"),
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_NODE_RANK", rank),
            ("PET_MASTER_ADDR", host),
            ("PET_MASTER_PORT", port),
        ]
    };
    all_end_well(&scene, "main.py", &[&pod("0"), &pod("1")]).await;
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
}

/// Accelerate's examples run `nlp_example.py` so on each of two machines; its cookbooks repeat the rendezvous in
/// `--rdzv_conf`.
async fn accelerate_starts_a_node_each(launcher: Launcher) {
    let scene = scene(launcher);
    let head = head_node();
    let line = format!(
        "--nproc_per_node 2 --nnodes 2 --rdzv_id 2299 --rdzv_backend c10d --rdzv_endpoint {head} \
         --rdzv_conf rdzv_backend=c10d,rdzv_endpoint={head},overlap_timeout=600,timeout=60,timeout=90 main.py \
         --mixed_precision fp16"
    );
    all_end_well(&scene, &line, &[&[], &[]]).await;
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
}

/// `sbatch_run.sh` of PyTorch's tutorial: `srun torchrun …`, with one task on each of four nodes.
async fn a_slurm_script_starts_a_node_each(launcher: Launcher) {
    let scene = scene(launcher);
    let head = head_node();
    let line = format!(
        "--nnodes 4 --nproc_per_node 1 --rdzv_id 2024 --rdzv_backend c10d --rdzv_endpoint {head} main.py 50 10"
    );
    let task = [("LOGLEVEL", "INFO")];
    all_end_well(&scene, &line, &[&task[..]; 4]).await;
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
    let warned = scene.log().matches("can read and change the job's store").count();
    if let Launcher::ElasticAgent = scene.launcher {
        let open = usize::from(!head.starts_with("127."));
        assert_eq!(warned, open, "the node that serves the store says that it is open: {}", scene.log());
    }
}

/// With torchrun the second waits for the first as its spare, and fails when the first has ended.
async fn a_second_run_with_the_same_flags_runs_too(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$1; [ $1 = second ] || until [ -e rank-second ]; do sleep 0.05; done");
    let endpoint = format!("--rdzv_endpoint=localhost:{}", free_port());
    let flags = ["--nnodes=1", "--nproc_per_node=1", "--rdzv_id=100", "--rdzv_backend=c10d", &endpoint];
    let mut first = scene.start_with(&flags, &["first"]);
    scene.has_ranks(["first"]).await;
    let mut second = scene.start_with(&flags, &["second"]);
    let begun = Instant::now();
    while second.ended().is_none() && begun.elapsed() < PATIENCE {
        assert!(first.ended().is_none() || scene.ranks().contains("second"), "the second is still to run");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((second.ended(), scene.ranks()), (Some(0), names(["first", "second"])), "the second");
    scene.end_well([&mut first]).await;
}
