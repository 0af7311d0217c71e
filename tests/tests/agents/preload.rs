//! `--preload`: workers that are forked from a process which has imported their modules.

use elastic_tests::prelude::*;

/// Notes what it finds, and waits for its end.
const WORKER: &str = r#"
import json, os, pathlib, sys, time
folder, round = pathlib.Path(sys.argv[1]), int(os.environ["ELASTIC_ROUND"])
found = {"pid": os.getpid(), "parent": os.getppid(), "has": "decimal" in sys.modules, "round": round, "file": __file__}
with open(folder / "found", "a") as file: file.write(json.dumps(found) + "\n")
while not (folder / "done").exists(): time.sleep(0.02)
"#;

fn with(modules: &str, job: Job) -> Job {
    job.write("worker.py", WORKER);
    let (worker, folder) = (job.path("worker.py"), job.path(""));
    job.plain_script(worker.to_str().unwrap(), &[folder.to_str().unwrap()]).flag(&format!("--preload={modules}"))
}

async fn found(job: &Job, count: usize) -> Value {
    eventually("the worker runs", LIMIT, async || job.lines("found").into_iter().nth(count - 1)).await
}

/// The process that has imported the module, after so many.
async fn imported(agent: &Agent, count: usize) -> String {
    let text = "decimal is imported, and workers are forked from process ";
    let told = async || Some(agent.output().split(text).nth(count)?.split(' ').next()?.to_owned());
    eventually("the module is imported", LIMIT, told).await
}

fn kill(pid: &Value) {
    let pid = Pid::from_raw(i32::try_from(pid.as_i64().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_worker_that_is_started_again_finds_its_modules_imported() {
    let job = with("decimal", Job::on_etcd("1").await.flag("--max-restarts=9"));
    let mut agent = job.start("a");
    let first = found(&job, 1).await;
    assert_eq!(first["has"], false, "the first workers wait for no imports");
    let nursery = imported(&agent, 1).await;

    kill(&first["pid"]);
    let second = found(&job, 2).await;
    assert_eq!(second["has"], true);
    assert_eq!(second["parent"], first["parent"], "its parent is the guard");
    assert_eq!((&second["round"], &second["file"]), (&2.into(), &first["file"]));

    // When the process is gone, then workers start as without it,
    kill(&nursery.parse::<i64>().unwrap().into());
    agent.says("--preload=decimal: its process", LIMIT).await;
    kill(&second["pid"]);
    let third = found(&job, 3).await;
    assert_eq!((&third["has"], &third["parent"]), (&false.into(), &first["parent"]));

    // and from another one once that has imported the module.
    imported(&agent, 2).await;
    kill(&third["pid"]);
    assert_eq!(found(&job, 4).await["has"], true);
    job.write("done", "");
    job.ended([&mut agent], 0).await;
}

#[tokio::test]
async fn a_nursery_that_hangs_comes_back() {
    let job = with("decimal", Job::on_etcd("1").await.flag("--max-restarts=9"));
    let mut agent = job.start("a");
    let first = found(&job, 1).await;
    let nursery = imported(&agent, 1).await;

    // When it is stopped, and does not answer
    let stopped = Pid::from_raw(nursery.parse().unwrap()).unwrap();
    rustix::process::kill_process(stopped, Signal::STOP).unwrap();
    kill(&first["pid"]);
    assert_eq!(found(&job, 2).await["has"], false);
    agent.says("it forked no worker within 2s. Workers start without it until", LIMIT).await;

    // Then later workers are forked from another
    let next = imported(&agent, 2).await;
    assert_ne!(next, nursery);
    kill(&found(&job, 2).await["pid"]);
    assert_eq!(found(&job, 3).await["has"], true);
    job.write("done", "");
    job.ended([&mut agent], 0).await;
}

/// Notes what it draws first, and ends with an error, as often as there are restarts.
const DRAWS: &str = r#"
import json, pathlib, random, sys, time
has = "torch" in sys.modules
import numpy, torch
with open(pathlib.Path(sys.argv[1]) / "found", "a") as file:
    drawn = [random.random(), numpy.random.random(), torch.initial_seed(), torch.rand(1).item()]
    file.write(json.dumps({"has": has, "drawn": drawn}) + "\n")
while not (pathlib.Path(sys.argv[1]) / "go").exists(): time.sleep(0.02)
sys.exit(1)
"#;

#[tokio::test]
async fn workers_of_pytorch_draw_other_numbers_than_those_before_them() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1").await.flag("--max-restarts=2").flag("--preload=torch,numpy.random");
    job.write("worker.py", DRAWS);
    let (worker, folder) = (job.path("worker.py"), job.path(""));
    let job = job.script(&torch, worker.to_str().unwrap(), &[folder.to_str().unwrap()]);
    let mut agent = job.start("a");
    agent.says("is imported, and workers are forked from process ", 4 * LIMIT).await;
    job.write("go", "");
    job.ended([&mut agent], JOB_FAILED).await;
    let found = job.lines("found");
    assert_eq!(found.iter().map(|line| &line["has"]).collect::<Vec<_>>(), [false, true, true]);
    for n in 0..4 {
        let drawn: BTreeSet<String> = found.iter().map(|line| line["drawn"][n].to_string()).collect();
        assert_eq!(drawn.len(), 3, "each has its own: {found:?}");
    }
}

#[tokio::test]
async fn a_module_that_cannot_be_imported_costs_one_warning() {
    let job = with("json,no_such_module", Job::on_etcd("1").await);
    let mut agent = job.start("a");
    found(&job, 1).await;
    agent.says("importing no_such_module failed: ModuleNotFoundError: No module named", LIMIT).await;
    agent.says("Workers start without it from now on", LIMIT).await;
    job.write("done", "");
    job.ended([&mut agent], 0).await;
}
