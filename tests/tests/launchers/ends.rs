//! How a launch ends: by mistakes, by failures, by signals; and what is left then.

use elastic_tests::prelude::*;

use crate::launchers::scene::{ALONE, Launcher, PATIENCE, Rendezvous, Scene, cases, is_alive};

cases! {
    a_failing_script_fails_the_launch
    what_a_script_raised_is_reported
    what_the_launcher_fails_on_is_reported
    a_wrong_number_of_nodes_is_refused
    a_module_is_not_run_without_python
    restarts_are_bounded_and_each_has_a_directory
    the_error_that_a_worker_wrote_down_is_handed_up
    a_node_whose_worker_failed_does_not_wait
    one_node_may_be_done_before_another
    signals_to_the_launcher_reach_its_workers
    who_does_not_end_by_the_shutdown_timeout_is_killed
    ; beyond torchrun:
    the_shutdown_timeout_holds_when_a_worker_fails = "took"
    nothing_outlives_its_worker = "is left"
    nothing_outlives_the_launcher = "is left"
    who_is_done_hears_of_a_failure_at_once = "both fail"
}

/// Shorter than the grace that workers get by default: torchrun's is 30 s.
const SOON: Duration = Duration::from_secs(20);

async fn a_failing_script_fails_the_launch(launcher: Launcher) {
    let scene = Scene::new(launcher, "exit 7");
    assert_eq!(scene.run(&[ALONE]).await, 1);
    assert!(scene.log().contains('7'), "{}", scene.log());
}

async fn what_a_script_raised_is_reported(launcher: Launcher) {
    let scene = Scene::new(launcher, "");
    scene.write("raises.py", "raise RuntimeError('the digits are illegible')\n");
    let rendezvous = Rendezvous::c10d();
    let mut run = scene.start_program(&rendezvous.and(&["--nnodes=1:2", "--nproc_per_node=2"]), &["raises.py"]);
    assert_eq!(scene.end(&mut run).await, 1);
    let log = scene.log();
    assert!(log.contains("RuntimeError: the digits are illegible") && log.contains("raises.py"), "{log}");
}

async fn what_the_launcher_fails_on_is_reported(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK");
    scene.write("file", "");
    assert_eq!(scene.run(&[ALONE, "--log-dir=file/logs"]).await, 1);
    assert!(scene.ranks().is_empty() && scene.log().contains("file/logs"), "{}", scene.log());
}

async fn a_wrong_number_of_nodes_is_refused(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK");
    assert_eq!(scene.run(&["--nnodes=2:20:30"]).await, 1);
    assert!(scene.ranks().is_empty() && scene.log().contains("2:20:30"), "{}", scene.log());
}

async fn a_module_is_not_run_without_python(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK");
    assert_eq!(scene.run(&[ALONE, "--module"]).await, 1);
    assert!(scene.ranks().is_empty() && scene.log().contains("--no-python"), "{}", scene.log());
}

async fn restarts_are_bounded_and_each_has_a_directory(launcher: Launcher) {
    let scene = Scene::new(launcher, "echo run >> runs-$RANK; if [ $RANK = 1 ]; then exit 1; fi; exec sleep 1000");
    let flags = ["--nproc_per_node=2", "--max_restarts=2", "--redirects=3", "--log-dir=logs"];
    assert_eq!(scene.run(&[&[ALONE][..], &flags].concat()).await, 1);
    assert_eq!(scene.read("runs-1").lines().count(), 3);
    let run = scene.path("logs").read_dir().unwrap().next().unwrap().unwrap().path();
    let mut attempts: Vec<_> = run.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    attempts.sort();
    assert_eq!(attempts, ["attempt_0", "attempt_1", "attempt_2"]);
    assert!(run.join("attempt_2/1/stderr.log").exists());
}

async fn the_error_that_a_worker_wrote_down_is_handed_up(launcher: Launcher) {
    let recorded = r#"{"message":{"message":"ValueError: boom","extraInfo":{"py_callstack":"T","timestamp":"1"}}}"#;
    let scene = Scene::new(launcher, &format!("echo '{recorded}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
    let own = scene.path("own.json");
    let scene = scene.env("TORCHELASTIC_ERROR_FILE", own.to_str().unwrap());
    assert_eq!(scene.run(&[ALONE]).await, 1);
    let handed: serde_json::Value = serde_json::from_str(&scene.read("own.json")).unwrap();
    assert!(handed["message"]["message"].as_str().is_some_and(|text| text.contains("ValueError: boom")), "{handed}");
    assert_eq!(handed["message"]["errorCode"], 1, "{handed}");
}

async fn a_node_whose_worker_failed_does_not_wait(launcher: Launcher) {
    let scene = Scene::new(
        launcher,
        "if [ $1 = b ]; then until [ -s up-a ]; do sleep 0.05; done; exit 1; fi; echo > up-a; exec sleep 1000",
    );
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=2"]);
    let (a, mut b) = (scene.start_with(&flags, &["a"]), scene.start_with(&flags, &["b"]));
    scene.appears("up-a").await;
    let begun = Instant::now();
    assert_eq!(scene.end(&mut b).await, 1);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    drop(a);
}

async fn one_node_may_be_done_before_another(launcher: Launcher) {
    let scene = Scene::new(launcher, "[ $RANK = 0 ] || until [ -e late ]; do sleep 0.05; done; echo > done-$RANK");
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=2"]);
    let mut nodes = [scene.start(&flags), scene.start(&flags)];
    scene.appears("done-0").await;
    scene.write("late", "");
    scene.end_well(&mut nodes).await;
}

async fn signals_to_the_launcher_reach_its_workers(launcher: Launcher) {
    let scene = Scene::new(launcher, "trap 'echo > got; exit 0' USR1; echo > up; while :; do sleep 0.05; done");
    let mut run = scene.start(&[ALONE, "--signals-to-handle=SIGTERM,SIGUSR1,SIGBOGUS"]);
    scene.appears("up").await;
    run.signal(Signal::USR1);
    assert_eq!(scene.end(&mut run).await, 1);
    let ignored = if let Launcher::ElasticAgent = scene.launcher { "ignoring SIGBOGUS" } else { "SIGBOGUS" };
    assert!(!scene.read("got").is_empty() && scene.log().contains(ignored), "{}", scene.log());
}

const DEAF: &str = "trap '' TERM; echo > deaf; while :; do sleep 0.1; done";

async fn who_does_not_end_by_the_shutdown_timeout_is_killed(launcher: Launcher) {
    let scene = Scene::new(launcher, DEAF);
    let mut run = scene.start(&[ALONE, "--shutdown-timeout=1"]);
    scene.appears("deaf").await;
    let begun = Instant::now();
    run.signal(Signal::TERM);
    assert_eq!(scene.end(&mut run).await, 1);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

/// torchrun waits 30 s then, whatever the flag says.
async fn the_shutdown_timeout_holds_when_a_worker_fails(launcher: Launcher) {
    let script = format!("[ $RANK = 1 ] || {{ {DEAF}; }}; until [ -e deaf ]; do sleep 0.05; done; exit 1");
    let scene = Scene::new(launcher, &script);
    let mut run = scene.start(&[ALONE, "--nproc_per_node=2", "--shutdown-timeout=1"]);
    scene.appears("deaf").await;
    let begun = Instant::now();
    assert_eq!(scene.end(&mut run).await, 1);
    assert!(begun.elapsed() < SOON, "it took {:?}", begun.elapsed());
}

/// Worker 0 starts a process outside its own session.
const STRAY: &str =
    "if [ $RANK = 0 ]; then setsid sleep 1000 & echo $! > child; until [ -s own ]; do sleep 0.05; done; END; fi
    echo $$ > own; exec sleep 1000";

async fn ends(scene: &Scene, name: &str) {
    let (what, pid) = (format!("{name} is left"), scene.read(name));
    let begun = Instant::now();
    while is_alive(&pid) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn nothing_outlives_its_worker(launcher: Launcher) {
    let scene = Scene::new(launcher, &STRAY.replace("END", "exit 1"));
    assert_eq!(scene.run(&[ALONE, "--nproc_per_node=2"]).await, 1);
    ends(&scene, "own").await;
    ends(&scene, "child").await;
}

async fn nothing_outlives_the_launcher(launcher: Launcher) {
    let scene = Scene::new(launcher, &STRAY.replace("END", "exec sleep 1000"));
    let mut run = scene.start(&[ALONE, "--nproc_per_node=2"]);
    scene.appears("child").await;
    scene.appears("own").await;
    run.kill();
    ends(&scene, "own").await;
    ends(&scene, "child").await;
}

/// torchrun waits in its exit barrier for 300 s, or, where the failed node served the store, ends as if all were well.
async fn who_is_done_hears_of_a_failure_at_once(launcher: Launcher) {
    let scene = Scene::new(
        launcher,
        "[ $RANK = 0 ] && { echo > done; exit 0; }; until [ -e late ]; do sleep 0.05; done; exit 1",
    );
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=2"]);
    let mut nodes = [scene.start(&flags), scene.start(&flags)];
    scene.appears("done").await;
    scene.write("late", "");
    // Which of the two has rank 0 is theirs to say.
    let begun = Instant::now();
    let mut ended = || nodes.iter_mut().map(Process::ended).collect::<Vec<_>>();
    while ended().contains(&None) && begun.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(ended(), [Some(1); 2], "both fail");
}
