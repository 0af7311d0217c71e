//! What workers do with PyTorch. Skipped, with a line that says so, where there is none.

use elastic_tests::prelude::*;

use crate::launchers::scene::{ALONE, Launcher, Rendezvous, Scene, cases};

cases! {
    workers_of_two_nodes_sum_over_all
    workers_may_name_the_address_themselves
    workers_of_two_nodes_call_each_other
    ; beyond torchrun:
    a_timer_that_expires_ends_only_its_worker = "left == right"
}

fn scene(launcher: Launcher) -> Option<Scene> {
    let torch = Torch::find()?;
    Some(Scene::new(launcher, "").with(&torch))
}

/// Runs a script of `tests/pytorch` on two nodes: what its workers told.
async fn on_two_nodes(scene: &Scene, workers: &str, program: &[&str]) -> Vec<Value> {
    let rendezvous = Rendezvous::c10d();
    let script = torch::script(program[0]);
    let program = [&[script.to_str().unwrap()], &program[1..]].concat();
    let flags = rendezvous.and(&["--nnodes=2", "--nproc_per_node", workers]);
    let start = || scene.start_program(&flags, &program);
    scene.end_well(&mut [start(), start()]).await;
    json_lines(&scene.path("trace"))
}

/// The sum of the ranks, counted from 1, as each worker has it.
fn met(told: &[Value], workers: usize, total: u64) {
    assert_eq!(told.len(), workers);
    for line in told {
        assert_eq!((&line["total"], &line["launched"]), (&total.into(), &true.into()), "{line}");
    }
}

async fn workers_of_two_nodes_sum_over_all(launcher: Launcher) {
    let Some(scene) = scene(launcher) else { return };
    met(&on_two_nodes(&scene, "2", &["init_process_group.py", "env"]).await, 4, 10);
}

async fn workers_may_name_the_address_themselves(launcher: Launcher) {
    let Some(scene) = scene(launcher) else { return };
    met(&on_two_nodes(&scene, "1", &["init_process_group.py", "tcp"]).await, 2, 3);
}

async fn workers_of_two_nodes_call_each_other(launcher: Launcher) {
    let Some(scene) = scene(launcher) else { return };
    let mut told: Vec<(Value, Value)> = on_two_nodes(&scene, "1", &["rpc_neighbour.py"])
        .await
        .into_iter()
        .map(|line| (line["neighbour"].clone(), line["answer"].clone()))
        .collect();
    told.sort_by_key(|(neighbour, _)| neighbour.to_string());
    assert_eq!(told, [("worker0".into(), 11.into()), ("worker1".into(), 10.into())]);
}

/// torchrun's timer ends its agent, too.
async fn a_timer_that_expires_ends_only_its_worker(launcher: Launcher) {
    let Some(scene) = scene(launcher) else { return };
    let scene = scene.env("TORCHELASTIC_ENABLE_FILE_TIMER", "1");
    let script = torch::script("file_timer.py");
    let flags = [ALONE, "--nproc_per_node=2", "--max_restarts=1"];
    scene.end_well(&mut [scene.start_program(&flags, &[script.to_str().unwrap()])]).await;
    let told = json_lines(&scene.path("trace"));
    let of = |attempt: u64, event: &str| {
        let fits = |line: &&Value| line["attempt"] == attempt && line["event"] == event;
        told.iter().filter(fits).count()
    };
    assert_eq!((of(0, "in time"), of(0, "done"), of(1, "in time"), of(1, "done")), (2, 0, 2, 2), "{told:#?}");
}
