//! The Python package: its sampler, its end of the worker socket under real agents, and the wheel; and the runner of
//! the GPU kit. Needs no PyTorch.

use elastic_tests::prelude::*;

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("agent/python")
}

fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&text));
    output
}

#[test]
fn the_package_keeps_its_promises() {
    let mut command = Command::new("python3");
    command.args(["-m", "unittest", "discover", "-s"]).arg(package().join("tests"));
    succeeds(command.env("PYTHONPATH", package()));
}

#[test]
fn the_runner_of_the_gpu_kit_keeps_its_promises() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu");
    succeeds(Command::new("python3").args(["-m", "unittest", "discover", "-s"]).arg(folder));
}

#[test]
fn the_kits_play_of_faults_runs_on_cpus_too() {
    let play = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu/nccl.py");
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.arg(play).arg(binary("elastic-trainer")).arg(binary("elastic-agent")).env("TMPDIR", folder.path());
    let output = succeeds(command.args(["--device", "cpu", "--small"]));
    let printed = String::from_utf8(output.stdout).unwrap();
    let all = printed.lines().find(|line| line.contains(r#""after": "all of it""#)).unwrap_or_default();
    assert!(all.contains(r#""equal to one worker's": true"#), "{printed}");
}

#[test]
fn a_function_is_launched_from_python_and_returns_what_its_workers_did() {
    let folder = tempfile::tempdir().unwrap();
    let programs = binary("elastic-agent").parent().unwrap().to_owned();
    let path =
        std::env::join_paths([programs].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())));
    let python = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.args(arguments).env("PYTHONPATH", package()).env("PATH", path.as_ref().unwrap());
        command
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch/launches.py");
    let output = succeeds(&mut python(&[script.to_str().unwrap(), folder.path().to_str().unwrap()]));
    let said = String::from_utf8(output.stdout).unwrap();
    let told = |what: &str| -> Value {
        let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter_map(|line| line.get(what).cloned())
            .next()
            .unwrap_or_else(|| panic!("nothing about {what}: {said}"))
    };
    assert_eq!(told("returned"), serde_json::json!({ "0": 1, "1": 11 }));
    let cause = told("failed");
    assert!(cause.as_str().unwrap().starts_with("ValueError: the loss is not a number"), "{cause}");
    assert!(cause.as_str().unwrap().contains("in fails"), "the traceback is in the report: {cause}");
    // What a round that failed has returned is not taken for the result.
    assert_eq!(told("again"), serde_json::json!({ "0": "second", "1": "second" }));
    let mut cell: Vec<_> = told("cell").as_str().unwrap().lines().map(str::to_owned).collect();
    cell.sort();
    assert_eq!(cell, ["a program", "a program", "rank 0 works", "rank 1 works"]);
    assert_eq!(told("interrupted"), true);

    // A function that is defined where no other process finds it
    let cell = r#"
import sys, types
from elastic_agent.launch import LaunchError, elastic_launch
endpoint = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="job")
config = types.SimpleNamespace(min_nodes=1, max_nodes=1, nproc_per_node=1, **endpoint)
def work(): return 7
try:
    import cloudpickle
    assert elastic_launch(config, work)() == {0: 7}
except ImportError:
    pass
sys.modules["cloudpickle"] = None
elastic_launch(config, work)()
"#;
    let refused = python(&["-c", cell]).output().unwrap();
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("pip install cloudpickle, or put it into a module"), "{why}");
}

#[tokio::test]
async fn a_script_speaks_with_its_agent() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").plain_script("worker_api.py", &[]);
    let mut agents = job.start_all(["a", "b"]);
    let told = async |event: &str, round: u64, count: usize| -> Vec<Value> {
        eventually(&format!("`{event}` is reported in round {round}"), LIMIT, async || {
            let lines = job.lines("trace");
            let fits = |line: &Value| line["event"] == event && line["round"] == round;
            Some(lines.into_iter().filter(fits).collect::<Vec<_>>()).filter(|lines| lines.len() >= count)
        })
        .await
    };

    // Given a checkpoint that rank 0 has committed after both have met, then an older one is refused
    let place = told("passed", 1, 2).await[0]["place"].clone();
    assert_eq!((&place["job"], &place["world_size"], &place["checkpoint"]), (&"job".into(), &2.into(), &Value::Null));
    let answer = told("committed", 1, 1).await.remove(0);
    assert_eq!(answer["again"], false, "no later commit of it can succeed");
    let refused = answer["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains('9') && refused.contains("10"), "{refused}");

    // When a worker dies, then the other hears that a round is forming, and both resume from the checkpoint
    job.runs(1, 2).await.workers[1].kill();
    let forming = told("forming", 1, 1).await;
    assert_eq!((&forming[0]["next"], &forming[0]["rank"]), (&2.into(), &0.into()), "{forming:?}");
    for line in told("passed", 2, 2).await {
        let checkpoint = &line["place"]["checkpoint"];
        assert_eq!((&checkpoint["step"], &checkpoint["round"]), (&10.into(), &1.into()), "{line}");
        assert_eq!(checkpoint["path"], job.path("checkpoint-1").to_str().unwrap());
        // The digest of "weights".
        assert_eq!(checkpoint["digest"], "sha256:9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c");
    }
    told("committed", 2, 1).await;
    job.write("finish", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

#[tokio::test]
async fn a_script_that_gives_up_ends_its_job() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=3").env("PYTHONPATH", package());
    let job = job.python_script("import elastic_agent\nelastic_agent.give_up('the loss is NaN')");
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let why = "a: the loss is NaN (exit code 1); the worker says that a restart cannot help";
    assert!(agent.output().contains(why), "{}", agent.output());
}

#[tokio::test]
async fn a_callback_may_commit_a_checkpoint_and_another_may_fail() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").plain_script("commits_on_round_change.py", &[]);
    let mut agents = job.start_all(["a", "b"]);
    let placed = async |round: u64| -> Vec<Value> {
        eventually(&format!("both are placed in round {round}"), LIMIT, async || {
            let lines = job.lines("trace");
            let fits = |line: &Value| line["event"] == "placed" && line["round"] == round;
            Some(lines.into_iter().filter(fits).collect::<Vec<_>>()).filter(|lines| lines.len() == 2)
        })
        .await
    };
    placed(1).await;
    job.runs(1, 2).await.workers[1].kill();
    for line in placed(2).await {
        assert_eq!(line["checkpoint"]["step"], 20, "what the callback committed is what all resume from: {line}");
    }
    let said = agents.iter().map(|agent| agent.output()).collect::<String>();
    assert!(said.contains("ValueError: a callback failed as round 2 was forming"), "{said}");
    job.write("finish", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

#[tokio::test]
async fn a_script_keeps_its_process_when_a_peer_dies() {
    keeps_its_process(Job::on_etcd("2").await).await;
}

#[tokio::test]
async fn a_script_that_starts_ahead_gets_its_place_when_it_is_ready() {
    keeps_its_process(Job::on_etcd("2").await.flag("--warm-up=60")).await;
}

#[tokio::test]
async fn a_script_that_may_not_quiesce_hears_why() {
    let job = Job::on_etcd("1:2").await.plain_script("quiesces_unregistered.py", &[]);
    let mut agents = vec![job.start("a")];
    job.runs(1, 1).await;
    agents.push(job.start("b"));
    let refused = eventually("the first is refused", LIMIT, async || {
        job.lines("trace").into_iter().find(|line| line["event"] == "refused")
    })
    .await;
    assert!(refused["error"].as_str().unwrap().contains("registered with `round_aware`"), "{refused}");
    assert_eq!(refused["is_runtime_error"], false);
}

async fn keeps_its_process(job: Job) {
    let job = job.flag("--max-restarts=1").plain_script("keeps_process.py", &[]);
    let mut agents = job.start_all(["a", "b"]);
    let placed = async |round: u64| -> Vec<Value> {
        let mut placed = eventually(&format!("both have a place in round {round}"), LIMIT, async || {
            let lines = job.lines("trace");
            let fits = |line: &Value| line["event"] == "placed" && line["place"]["round"] == round;
            Some(lines.into_iter().filter(fits).collect::<Vec<_>>()).filter(|lines| lines.len() == 2)
        })
        .await;
        placed.sort_by_key(|line| line["place"]["rank"].as_u64());
        placed
    };
    let first = placed(1).await;
    assert!(first.iter().zip(0..).all(|(line, rank)| line["rank"] == rank && line["size"] == 2), "{first:?}");
    job.runs(1, 2).await.workers[1].kill();
    let second = placed(2).await;
    assert_eq!(second[0]["pid"], first[0]["pid"]);
    assert_ne!(second[1]["pid"], first[1]["pid"]);
    assert_ne!(second[0]["place"]["master_port"], first[0]["place"]["master_port"]);
    assert!(second.iter().all(|line| line["again"] == true), "{second:?}");
    for line in second {
        assert_eq!(line["master_port"], line["place"]["master_port"].to_string(), "what torch reads is the new place");
    }
    job.write("finish", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

/// The wheel that `make wheel` has built; none, with a line that says so, unless `ELASTIC_REQUIRE_WHEEL` is set.
fn wheel() -> Option<PathBuf> {
    let target = binary("elastic-agent").parent().and_then(Path::parent).unwrap().join("wheels");
    let files = std::fs::read_dir(target).into_iter().flatten().flatten().map(|entry| entry.path());
    let wheel = files.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    if wheel.is_none() {
        skip("WHEEL", "there is no wheel: run `make wheel`");
    }
    wheel
}

#[test]
fn the_wheel_puts_the_program_on_the_path() {
    let Some(wheel) = wheel() else { return };
    let dir = tempfile::tempdir().unwrap();
    let venv = dir.path().join("venv");
    succeeds(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    let bin = venv.join("bin");
    succeeds(
        Command::new(bin.join("python"))
            .args(["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"])
            .arg(&wheel),
    );

    // Then the program runs from there, and the workers' Python has the package
    let script = dir.path().join("train.py");
    std::fs::write(
        &script,
        "import elastic_agent, sys\nassert 'torch' not in sys.modules\n\
         print(elastic_agent.__file__, elastic_agent.assignment()['world_size'])\n",
    )
    .unwrap();
    let output = succeeds(
        Command::new(bin.join("elastic-agent"))
            .args(["--standalone", "--log-dir=/dev/null"])
            .arg(&script)
            // As a service runs it: nothing has activated the environment.
            .env_remove("VIRTUAL_ENV")
            .env_remove("PYTHON_EXEC")
            .env_remove("PYTHONPATH"),
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with(venv.to_str().unwrap()) && said.trim_end().ends_with(" 1"), "{said}");
    let listed = succeeds(Command::new(bin.join("python")).args(["-m", "pip", "list", "--format=freeze"]));
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("elastic-agent=="), "{listed}");

    for module in ["elastic_agent", "elastic_agent.run"] {
        a_module_reports_what_a_script_records(&bin, module);
    }
}

/// `python -m MODULE` runs the program, workers on this Python, whose `record` names the job's root cause.
fn a_module_reports_what_a_script_records(bin: &Path, module: &str) {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("train.py");
    let text = "import sys\nfrom elastic_agent import record\n@record\ndef main():\n    \
                raise ValueError(f'no {sys.argv[1]} with {sys.executable}')\nmain()\n";
    std::fs::write(&script, text).unwrap();
    let mut command = Command::new(bin.join("python"));
    command.args(["-m", module, "--standalone", "--report=json", "--log-dir"]).arg(dir.path().join("logs"));
    command.arg(&script).arg("data").env_remove("VIRTUAL_ENV").env_remove("PYTHON_EXEC").env_remove("PYTHONPATH");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(JOB_FAILED), "{module}: {}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(said.lines().last().unwrap_or_default()).unwrap();
    let cause = report.to_string();
    let message = format!("ValueError: no data with {}", bin.join("python").display());
    assert!(cause.contains(&message), "{module}: {cause}");
    assert!(cause.contains("Traceback (most recent call last)") && cause.contains("in main"), "{module}: {cause}");
}
