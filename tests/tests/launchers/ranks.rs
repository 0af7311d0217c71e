//! How many workers there are, what each learns about its place, and what it runs.

use elastic_tests::prelude::*;

use crate::launchers::scene::{ALONE, Launcher, Rendezvous, Scene, cases, names};

cases! {
    every_worker_has_a_rank
    one_worker_is_the_default
    flags_may_come_from_the_environment
    workers_may_be_counted_by_a_word
    fewer_nodes_than_the_maximum_begin_after_the_last_call
    two_launchers_share_the_ranks
    nodes_of_several_sizes_share_the_ranks
    each_role_has_ranks_of_its_own
    torchruns_variables_are_there
    the_local_rank_is_filled_in
    each_worker_may_see_only_its_own_device
    a_script_may_be_run_by_its_path
    the_master_may_be_named_as_before_there_were_rendezvous_flags
}

const TOUCH: &str = "touch rank-$RANK-of-$WORLD_SIZE";

async fn every_worker_has_a_rank(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    assert_eq!(scene.run(&[ALONE, "--nnodes=1", "--nproc_per_node=4"]).await, 0);
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
}

async fn one_worker_is_the_default(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    assert_eq!((scene.run(&[ALONE]).await, scene.ranks()), (0, names(["0-of-1"])));
}

async fn flags_may_come_from_the_environment(launcher: Launcher) {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let scene = [
        ("PET_NNODES", "1"),
        ("PET_NPROC_PER_NODE", "2"),
        ("PET_RDZV_BACKEND", "c10d"),
        ("PET_RDZV_ENDPOINT", &endpoint),
        ("PET_RDZV_ID", "by-variables"),
        ("PET_RDZV_CONF", "last_call_timeout=1"),
        ("PET_MONITOR_INTERVAL", "0.1"),
        ("PET_START_METHOD", "spawn"),
        ("PET_MAX_RESTARTS", "1"),
        ("PET_ROLE", "trainer"),
        ("PET_MODULE", "0"),
        ("PET_NO_PYTHON", "1"),
    ]
    .into_iter()
    .fold(
        Scene::new(launcher, "touch rank-$RANK-of-$WORLD_SIZE-$ROLE_NAME-$TORCHELASTIC_RUN_ID"),
        |scene, (name, value)| scene.env(name, value),
    );
    let program = scene.path("worker.sh");
    let code = scene.end(&mut scene.start_program(&[], &[program.to_str().unwrap()])).await;
    assert_eq!((code, scene.ranks()), (0, names(["0-of-2-trainer-by-variables", "1-of-2-trainer-by-variables"])));

    // What is said on the command line wins.
    assert_eq!(scene.run(&["--nproc_per_node=1", "--rdzv_id=by-flags"]).await, 0);
    assert!(scene.ranks().contains("0-of-1-trainer-by-flags"), "{:?}", scene.ranks());
}

async fn workers_may_be_counted_by_a_word(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH).env("CUDA_VISIBLE_DEVICES", "");
    assert_eq!(scene.run(&[ALONE, "--nproc_per_node=cpu"]).await, 0);
    let cpus = scene.ranks();
    assert!(!cpus.is_empty() && cpus.iter().all(|rank| rank.ends_with(&format!("-of-{}", cpus.len()))), "{cpus:?}");
    assert_eq!(scene.run(&[ALONE, "--nproc_per_node=auto"]).await, 0);
    assert_eq!(scene.ranks(), cpus, "no GPU is to be seen");

    for (word, says) in [("gpu", ["GPU", "Cuda"]), ("several", ["several", "several"])] {
        let scene = Scene::new(scene.launcher.clone(), TOUCH).env("CUDA_VISIBLE_DEVICES", "");
        let code = scene.run(&[ALONE, &format!("--nproc_per_node={word}")]).await;
        assert_eq!((code, scene.ranks()), (1, names([])), "{word}");
        assert!(says.iter().any(|part| scene.log().contains(part)), "{}", scene.log());
    }
}

async fn fewer_nodes_than_the_maximum_begin_after_the_last_call(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let code = scene.run(&Rendezvous::c10d().and(&["--nnodes=1:2", "--nproc_per_node=2"])).await;
    assert_eq!((code, scene.ranks()), (0, names(["0-of-2", "1-of-2"])));
}

async fn two_launchers_share_the_ranks(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=2", "--nproc_per_node=2"]);
    scene.end_well(&mut [scene.start(&flags), scene.start(&flags)]).await;
    assert_eq!(scene.ranks(), names(["0-of-4", "1-of-4", "2-of-4", "3-of-4"]));
}

async fn nodes_of_several_sizes_share_the_ranks(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let rendezvous = Rendezvous::c10d();
    let start = |size| scene.start(&rendezvous.and(&["--nnodes=3", "--nproc_per_node", size]));
    scene.end_well(&mut ["1", "2", "3"].map(start)).await;
    assert_eq!(scene.ranks(), names(["0-of-6", "1-of-6", "2-of-6", "3-of-6", "4-of-6", "5-of-6"]));
}

async fn each_role_has_ranks_of_its_own(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK; echo $ROLE_NAME $ROLE_RANK $ROLE_WORLD_SIZE >> roles");
    let rendezvous = Rendezvous::c10d();
    let roles = [("master", "1"), ("trainer", "2"), ("ps", "3"), ("trainer", "1")];
    let start = |(role, size)| scene.start(&rendezvous.and(&["--nnodes=4", "--role", role, "--nproc_per_node", size]));
    scene.end_well(&mut roles.map(start)).await;
    assert_eq!(scene.ranks(), names(["0", "1", "2", "3", "4", "5", "6"]));
    let told = scene.read("roles");
    let mut told: Vec<&str> = told.lines().collect();
    told.sort_unstable();
    let trainers = ["trainer 0 3", "trainer 1 3", "trainer 2 3"];
    assert_eq!(told, [&["master 0 1", "ps 0 3", "ps 1 3", "ps 2 3"][..], &trainers].concat());
}

async fn torchruns_variables_are_there(launcher: Launcher) {
    let scene = Scene::new(launcher, "env > rank-$RANK");
    assert_eq!(scene.run(&[ALONE, "--role=trainer", "--nproc_per_node=2"]).await, 0);
    let env = scene.read("rank-1");
    let value = |name: &str| {
        let line = env.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.unwrap_or_else(|| panic!("{name} is not in {env}"))
    };
    for (name, expected) in [
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("GROUP_RANK", "0"),
        ("ROLE_RANK", "1"),
        ("ROLE_NAME", "trainer"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("ROLE_WORLD_SIZE", "2"),
        ("GROUP_WORLD_SIZE", "1"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    ] {
        assert_eq!(value(name), expected, "{name}");
    }
    for name in ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"] {
        assert!(!value(name).is_empty(), "{name}");
    }
    assert!(["True", "False"].contains(&value("TORCHELASTIC_USE_AGENT_STORE")));
}

async fn the_local_rank_is_filled_in(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch \"rank-$1\"");
    scene.end_well(&mut [scene.start_with(&[ALONE, "--nproc_per_node=2"], &["${local_rank}"])]).await;
    assert_eq!(scene.ranks(), names(["0", "1"]));
}

async fn each_worker_may_see_only_its_own_device(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-${ELASTIC_LOCAL_RANK:-$RANK}-$LOCAL_RANK-$CUDA_VISIBLE_DEVICES");
    let scene = scene.env("CUDA_VISIBLE_DEVICES", "4,5");
    assert_eq!(scene.run(&[ALONE, "--virtual-local-rank", "--nproc_per_node=2"]).await, 0);
    assert_eq!(scene.ranks(), names(["0-0-4", "1-0-5"]));
    let code = scene.run(&[ALONE, "--virtual-local-rank", "--nproc_per_node=3"]).await;
    assert_eq!((code, scene.ranks().len()), (1, 2), "one has no device, so nothing is started");
    if let Launcher::ElasticAgent = scene.launcher {
        assert!(scene.log().contains("worker 2 has no device of its own"), "{}", scene.log());
    }
}

async fn a_script_may_be_run_by_its_path(launcher: Launcher) {
    let scene = Scene::new(launcher, "");
    let script = "import os, sys\nopen('-'.join(['rank', os.environ['RANK'], __name__, *sys.argv[1:]]), 'w')\n";
    scene.write("tell.py", script);
    let mut run = scene.start_program(&[ALONE, "--run-path", "--nproc_per_node=2"], &["tell.py", "--at", "7"]);
    assert_eq!((scene.end(&mut run).await, scene.ranks()), (0, names(["0-__main__---at-7", "1-__main__---at-7"])));
}

async fn the_master_may_be_named_as_before_there_were_rendezvous_flags(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let port = format!("--master-port={}", free_port());
    let flags = ["--nnodes=1", "--nproc_per_node=2", "--monitor-interval=1", "--start-method=spawn"];
    let code = scene.run(&[&flags[..], &["--master-addr=localhost", &port, "--node-rank=0"]].concat()).await;
    assert_eq!((code, scene.ranks()), (0, names(["0-of-2", "1-of-2"])));
}
