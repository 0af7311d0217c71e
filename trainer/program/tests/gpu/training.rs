//! The program `elastic-trainer` on the double of the driver, from its flags to the parameters that it ends with.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use elastic_cuda::Surroundings;
use elastic_trainer::Environment;
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::disk::Host;
use serde_json::Value;

use crate::agent::{Agent, Commits, start_member};
use crate::double::{cache, cublaslt, driver, folders, prefix};
use crate::library::is_installed;
use crate::nccl::{self, all_end, start};
pub(crate) use crate::worker::checksum;
use crate::worker::{Worker, environment, free_port, last_step, places, trace, wait_for};

/// Flags for a short run. A few steps are enough, since each uses everything.
pub(crate) const SHORT: &str = "digits --epochs 1 --hidden 32,16 --batch 300 --shards 6 --clip 0.5 --micro-batch 30";

/// The same for a GPT: two epochs of two steps.
pub(crate) const GPT: &str = "gpt --epochs 2 --windows 12 --context 12 --layers 2 --heads 2 --width 16 --vocabulary 20 --batch 6 \
                   --shards 3 --clip 0.5 --micro-batch 1";

/// A worker on a double that `how` describes.
pub(crate) fn command(flags: &str, how: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elastic-trainer"));
    command.args(flags.split_whitespace()).env("FAKE_CUDA", how).env("RUST_LOG", "info");
    command.env("ELASTIC_CUDA_LIBRARIES", folders()).env("VIRTUAL_ENV", prefix());
    command.env_remove("CONDA_PREFIX");
    // A real library that is used with the double must find no GPU.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.env("XDG_CACHE_HOME", cache()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn ended(output: Output) -> (bool, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

pub(crate) fn run(flags: &str, how: &str) -> (bool, String, String) {
    ended(command(flags, how).output().unwrap())
}

/// What a run prints that succeeds.
pub(crate) fn printed(flags: &str, how: &str) -> String {
    let (well, printed, logged) = run(flags, how);
    assert!(well, "{logged}");
    let on_gpu = logged.contains("computes on GPU 0, a double of a GPU, on the CPU: CUDA 13.0");
    assert_eq!(on_gpu, !flags.contains("--device cpu"), "{logged}");
    printed
}

/// Why a run fails: one message.
pub(crate) fn refused(flags: &str, how: &str) -> String {
    let (well, _, logged) = run(flags, how);
    assert!(!well, "{flags} {how}");
    let errors: Vec<&str> = logged.lines().filter(|line| line.contains("ERROR")).collect();
    assert!(errors.len() == 1 && !logged.contains("panicked"), "{logged}");
    errors[0].to_owned()
}

/// Runs a group of workers that train together on GPU 0. Returns what rank 0 prints.
pub(crate) fn together(flags: &str, world_size: usize) -> String {
    all_end(start(flags, &vec![&[][..]; world_size])).0
}

pub(crate) fn losses(trace: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(trace).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["event"] == "step").map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn an_optimizer_that_gpus_lack_is_computed_on_cpus_or_refused() {
    let flags = format!("{SHORT} --optimizer sgd");
    let why = "GPUs step only by AdamW, at one learning rate: --optimizer is sgd";
    let (well, _, logged) = run(&flags, "");
    assert!(well && logged.contains(&format!("computes on the CPU: {why}")), "{logged}");
    let refused = refused(&format!("{flags} --device cuda"), "");
    assert!(refused.contains(why), "{refused}");
}

fn state(folder: &Path) -> Vec<f32> {
    Checkpoints::new(Host, folder).newest().unwrap().state
}

#[test]
fn a_driver_that_captures_no_graphs_gives_the_same_bits_and_one_warning() {
    let flags = format!("{SHORT} --epochs 4 --device cuda").replace("--epochs 1 ", "");
    let (well, captured, quiet) = run(&flags, "");
    assert!(well && !quiet.contains("graph"), "{quiet}");
    let (well, launched, told) = run(&flags, "graphs=0");
    assert!(well && checksum(&captured) == checksum(&launched), "{told}");
    let warnings: Vec<&str> = told.lines().filter(|line| line.contains("WARN")).collect();
    assert!(
        warnings.len() == 1 && warnings[0].contains("GPU 0 failed to capture a graph: operation not supported"),
        "{told}"
    );
}

#[test]
fn training_agrees_with_the_hosts_and_each_resumes_the_others_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let flags = |device: &str, name: &str| {
        let (trace, checkpoints) = (at(&format!("{name}.trace")), at(name));
        format!("{SHORT} --device {device} --trace {} --checkpoint-dir {}", trace.display(), checkpoints.display())
    };
    printed(&flags("cuda", "gpu"), "");
    printed(&flags("cpu", "host"), "");
    let agree = || {
        let (gpu, host) = (losses(&at("gpu.trace")), losses(&at("host.trace")));
        assert_eq!(gpu.len(), host.len());
        assert!(gpu.iter().zip(&host).all(|(gpu, host)| (gpu - host).abs() < 1e-4 * host), "{gpu:?} {host:?}");
        let (gpu, host) = (state(&at("gpu")), state(&at("host")));
        let furthest = gpu.iter().zip(&host).map(|(gpu, host)| (gpu - host).abs()).fold(0.0, f32::max);
        assert!(furthest > 0.0 && furthest < 1e-3, "{furthest}");
    };
    agree();
    // Each device continues from the other's checkpoint.
    let longer = |device: &str, name: &str| flags(device, name).replace("--epochs 1", "--epochs 2");
    printed(&longer("cuda", "host"), "");
    printed(&longer("cpu", "gpu"), "");
    agree();
    assert_eq!(losses(&at("gpu.trace")).len(), 2 * 5);
}

#[test]
fn every_number_of_workers_and_every_order_of_threads_gives_the_same_bits() {
    let flags = format!("{SHORT} --device cuda:0");
    let alone = printed(&flags, "");
    for world_size in [2, 3] {
        assert_eq!(checksum(&together(&flags, world_size)), checksum(&alone), "{world_size} workers");
    }
    assert_eq!(checksum(&printed(&flags, "backwards=1")), checksum(&alone), "last threads first");
    assert_ne!(checksum(&printed(&flags.replace("--clip 0.5", ""), "")), checksum(&alone), "without --clip");
}

#[test]
fn a_newcomer_gets_the_state_from_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "digits --epochs 4 --hidden 16 --batch 60 --shards 2 --device cuda:0";
    let cuda = Surroundings { folders: vec![driver(), cublaslt()], prefixes: vec![prefix()], cache: Some(cache()) };
    let member = |place: &Environment| {
        start_member(folder.path(), flags, Environment { cuda: cuda.clone(), ..place.clone() }, None)
    };
    // Given a worker that trains and will continue as rank 1, with a newcomer as rank 0
    let (agent, worker) = member(&places(1, 1)[0]);
    agent.step_reached(1);
    agent.forming(2, Duration::from_secs(40));
    let held = agent.quiesced(2);
    let next = places(2, 2);
    agent.assign(&next[1]);
    let (_agent, newcomer) = member(&next[0]);
    // Then both continue from the first worker's step.
    let (printed, logged) = newcomer.succeeds();
    assert!(logged.contains(&format!("continues from memory round=2 step={held} lacking=1")), "{logged}");
    worker.succeeds();
    assert_eq!(checksum(&printed), checksum(&self::printed(flags, "")));
}

#[test]
fn a_worker_is_known_to_its_agent_once_its_gpu_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    let cuda = Surroundings { folders: vec![driver()], prefixes: vec![prefix()], cache: Some(cache()) };
    for (round, warm_up) in [(1, false), (2, true)] {
        let mut place = Environment { cuda: cuda.clone(), warm_up, ..environment(0, 1, round, free_port()) };
        let agent = Agent::start(folder.path(), &place, None, Commits::Granted);
        place.agent = Some(agent.socket.clone());
        let (status, _, logged) = Worker::start(&format!("{SHORT} --device cuda:7"), &place, None).end();
        assert!(!status.success() && logged.contains("there is no GPU 7"), "{logged}");
        match warm_up {
            // In a round it is a failure, and the worker reports it to the agent.
            false => assert!(agent.failure().1.contains("there is no GPU 7")),
            true => assert!(agent.heard.lock().unwrap().is_empty(), "it was no more than started"),
        }
    }
}

#[test]
fn left_the_choice_it_takes_a_gpu_or_says_why_not() {
    assert!(printed(SHORT, "devices=2").contains("test accuracy"));
    for (how, level, why) in [
        ("devices=0", "INFO", "shows no GPU: no CUDA-capable device is detected"),
        // There is a GPU, which stays unused: a warning
        ("version=11040", "WARN", "supports CUDA 11.4, not 12.0; update the driver"),
        ("version=12080", "WARN", "needs a later CUDA than the NVIDIA driver's 12"),
    ] {
        let (well, _, logged) = run(SHORT, how);
        assert!(well && logged.contains(&format!("{level} computes on the CPU")) && logged.contains(why), "{logged}");
        let error = refused(&format!("{SHORT} --device cuda"), how);
        assert!(error.contains("cannot use --device cuda") && error.contains(why), "{error}");
    }
    let error = refused(&format!("{SHORT} --device cuda:2"), "devices=2");
    assert!(error.contains("there is no GPU 2: this node has 2"), "{error}");
    // Without any library at all
    let mut bare = command(&format!("{SHORT} --device cuda"), "");
    bare.env_remove("ELASTIC_CUDA_LIBRARIES").env("LD_LIBRARY_PATH", "/nowhere");
    let (well, _, logged) = ended(bare.output().unwrap());
    // If a driver is installed, it is found and shows no GPU.
    let lacks = logged.contains("cannot find libcuda.so.1; install the NVIDIA driver");
    let installed = is_installed(&["libcuda.so.1"], Some(&prefix()), Some("/nowhere"));
    assert!(!well && lacks != installed, "{logged}");
    // And without a compiler
    let mut without = command(&format!("{SHORT} --device cuda"), "");
    without.env("VIRTUAL_ENV", "/nowhere").env("LD_LIBRARY_PATH", "/nowhere");
    let (well, _, logged) = ended(without.output().unwrap());
    let lacks = logged.contains("cannot find libnvrtc.so.13; pip install nvidia-cuda-nvrtc");
    let installed = is_installed(&["libnvrtc.so.13", "libnvrtc.so.12"], None, Some("/nowhere"));
    assert!(lacks != installed && !(lacks && well), "{logged}");
}

#[test]
fn a_gpt_learns_on_a_gpu_what_it_learns_on_the_host_and_the_same_bits_for_every_number_of_workers() {
    let folder = tempfile::tempdir().unwrap();
    let flags = |device: &str| format!("{GPT} --device {device} --trace {}", folder.path().join(device).display());
    let alone = printed(&flags("cuda"), "");
    printed(&flags("cpu"), "");
    let (gpu, host) = (losses(&folder.path().join("cuda")), losses(&folder.path().join("cpu")));
    assert!(gpu.len() == 4 && host.len() == 4, "{gpu:?} {host:?}");
    assert!(gpu.iter().zip(&host).all(|(gpu, host)| (gpu - host).abs() < 1e-4 * host), "{gpu:?} {host:?}");

    let flags = format!("{GPT} --device cuda:0");
    assert_eq!(checksum(&together(&flags, 2)), checksum(&alone), "2 workers");
    assert_eq!(checksum(&printed(&flags, "backwards=1")), checksum(&alone), "last threads first");
    assert_ne!(checksum(&printed(&flags.replace("--clip 0.5", ""), "")), checksum(&alone), "without --clip");
}

#[test]
fn a_model_without_kernels_is_refused_and_stays_on_the_host_by_itself() {
    let flags = GPT.replace("--heads 2 --width 16", "--heads 1 --width 136");
    let error = refused(&format!("{flags} --device cuda"), "");
    let why = "this model computes on CPUs alone: its heads have 136 columns";
    assert!(error.contains(&format!("cannot use --device cuda: {why}")), "{error}");
    let (well, printed, logged) = run(&flags, "");
    assert!(well && printed.contains("held-out loss"), "{logged}");
    assert!(logged.contains(&format!("computes on the CPU: {why}")), "{logged}");
}

/// Starts ranks 0 and 1 with these flags, rank 1 on a double that `how` describes. Rank 0 refuses rank 1. Returns rank
/// 1's log.
pub(crate) fn refused_by_rank_0(first: &str, second: &str, how: &str) -> String {
    let port = free_port();
    let start =
        |rank, flags: &str, variables| nccl::Worker::start(&format!("{SHORT} {flags}"), (rank, 2), port, variables);
    // Rank 0 would wait for another rank 1, and is killed when it is dropped.
    let (_first, second) = (start(0, first, &[]), start(1, second, &[("FAKE_CUDA", how)]));
    let (well, _, logged) = second.end();
    assert!(!well && logged.contains("rank 0 refused this worker"), "{logged}");
    logged
}

#[test]
fn a_worker_on_another_device_is_refused_by_its_peers() {
    let logged = refused_by_rank_0("--device cpu", "--device cuda:0", "devices=1");
    let kind = "(on a GPU: sm_90, NVRTC 13.5, cuBLASLt 13.1.0 on 132 processors)";
    assert!(logged.contains(kind), "{logged}");
}

#[test]
fn a_gpu_that_fails_ends_the_run_with_one_message() {
    let flags = format!("{SHORT} --device cuda");
    let error = refused(&flags, "memory=40000");
    assert!(error.contains("has no memory for") && error.contains("lower --micro-batch"), "{error}");
    for launch in ["fail=1", "fail=100", "fail=701"] {
        let error = refused(&flags, launch);
        assert!(error.contains("GPU 0 failed to") && error.contains("an illegal memory access"), "{error}");
    }
}

#[test]
fn a_gpu_that_hangs_is_given_up_and_named() {
    let flags = format!("{SHORT} --device cuda --peer-timeout 0.1");
    for launch in ["hang=1", "hang=100", "hang=701"] {
        let (well, _, logged) = nccl::Worker::start(&flags, (0, 1), free_port(), &[("FAKE_CUDA", launch)]).end();
        let said = "ERROR GPU 0 has not ended its work for 2.0 s: search for Xids";
        assert!(!well && logged.contains(said) && logged.matches("ERROR").count() == 1, "{launch}: {logged}");
    }
}

#[test]
fn a_step_that_is_longer_than_the_time_to_quiesce_is_given_up_on_a_gpu_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let flags = "digits --epochs 1 --hidden 512,512 --batch 700 --shards 1 --micro-batch 1 --device cuda:0";
    let cuda = Surroundings { folders: vec![driver(), cublaslt()], prefixes: vec![prefix()], cache: Some(cache()) };
    let place = Environment { cuda, ..places(1, 1)[0].clone() };
    let flags = format!("{flags} --trace {}", path.display());
    let (agent, _worker) = start_member(folder.path(), &flags, place, None);
    wait_for("the first step", || (!trace(&path).is_empty()).then_some(()));
    let (time, asked) = (Duration::from_secs(4), Instant::now());
    agent.forming(2, time);
    assert_eq!(agent.quiesced(2), 0);
    assert!(asked.elapsed() < time, "{:?}", asked.elapsed());
}

/// The memory that a worker on a GPU holds after some steps, in bytes; the double's GPU's is a part of it.
fn resident(hidden: usize) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let flags = format!("digits --epochs 9 --hidden {hidden} --batch 1 --shards 1 --device cuda:0");
    let worker = nccl::Worker::start(&format!("{flags} --trace {}", path.display()), (0, 1), free_port(), &[]);
    wait_for("two steps", || last_step(&path, "step").filter(|step| *step > 1));
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    1024 * line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
}

#[test]
fn a_worker_on_a_gpu_holds_no_state_on_the_host() {
    let (width, inputs, outputs) = (50_000, 64, 10);
    let parameters = (inputs + 1) * width + (width + 1) * outputs;
    let held = resident(width).saturating_sub(resident(8)) as f64 / (4 * parameters) as f64;
    // Of each parameter the GPU holds three numbers, a gradient and a sum of gradients.
    assert!(held < 7.0, "{held:.1} numbers for each parameter");
}

#[test]
fn a_batch_is_read_while_the_gpu_is_at_the_one_before() {
    // Pieces of shards, over the border of an epoch
    let flags = format!("{GPT} --device cuda:0");
    let (well, _, logged) = ended(command(&flags, "").env("RUST_LOG", "debug").output().unwrap());
    assert!(well, "{logged}");
    let late = logged.lines().filter(|line| line.contains("was not read before it was needed")).count();
    assert_eq!(late, 1, "the first of all: {logged}");
}

#[test]
fn an_evaluation_finds_the_hosts_losses_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for flags in [SHORT.to_owned(), format!("{GPT} --held-out 7")] {
        let evaluated = |device: &str| {
            let path = folder.path().join(format!("{device}{}", flags.len()));
            let printed = printed(&format!("{flags} --eval-every 2 --device {device} --trace {}", path.display()), "");
            let lines = trace(&path).into_iter().filter(|line| line["event"] == "evaluated");
            (printed, lines.map(|line| line["loss"].as_f64().unwrap()).collect::<Vec<_>>())
        };
        let ((printed_there, gpu), (_, host)) = (evaluated("cuda"), evaluated("cpu"));
        assert!(gpu.len() > 1 && gpu.len() == host.len(), "{gpu:?} {host:?}");
        assert!(gpu.iter().zip(&host).all(|(gpu, host)| (gpu - host).abs() < 1e-4 * host), "{gpu:?} {host:?}");
        assert_eq!(checksum(&printed_there), checksum(&printed(&format!("{flags} --device cuda"), "")));
    }
}
