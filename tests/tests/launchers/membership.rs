//! Nodes that come, go and die. torchrun brings none of this about with its default settings.

use std::io::{Read, Write};

use elastic_tests::prelude::*;

use crate::launchers::scene::{Launcher, Rendezvous, Scene, cases};

cases! {
    ; beyond torchrun:
    a_node_killed_before_the_first_round_holds_no_place = "the others work"
    a_signal_while_others_are_waited_for_is_a_leave = "left == right"
    ; tested in agents:
    a_group_takes_in_a_newcomer = "the ranks are [\"0-of-2-a\", \"1-of-2-b\"]"
    a_group_continues_without_a_killed_node = "the ranks are [\"0-of-1-a\"]"
    a_killed_node_is_replaced = "both work again"
    the_node_of_rank_0_may_be_killed = "the two work"
    // torchrun's spare takes over too late, or takes over and the other one ends with code 1.
    a_spare_waits_takes_over_and_ends_well = ""
}

/// Workers that say their rank, their node and the size of the world, and continue until a file ends them.
const STAY: &str = "touch rank-$RANK-of-$WORLD_SIZE-$1; until [ -e finish ]; do sleep 0.05; done";

/// The first round begins with as many nodes as there may be.
const UNTIL_ALL: &str = "--rdzv_conf=last_call_timeout=30,min_round_time=0";

/// The launcher of a node whose workers know its name.
fn start(scene: &Scene, flags: &[&str], name: &str) -> Process {
    scene.start_with(flags, &[name])
}

async fn has_joined(launcher: &Launcher, etcd: &EtcdServer) -> bool {
    if let Launcher::ElasticAgent = launcher {
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &"j".parse().unwrap());
        return etcd.store().range(&keys.nodes()).await.is_ok_and(|(nodes, _)| !nodes.is_empty());
    }
    let mut stream = TcpStream::connect(etcd.address()).unwrap();
    stream.write_all(b"GET /v2/keys/torch/elastic/rendezvous/j HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.contains("modifiedIndex")
}

async fn finish<const N: usize>(scene: &Scene, nodes: [&mut Process; N]) {
    scene.write("finish", "");
    scene.end_well(nodes).await;
}

async fn works(scene: &Scene, what: &str, workers: usize) {
    scene.eventually(what, || (scene.ranks().len() == workers).then_some(())).await;
}

/// Forgets the workers that have started so far.
fn forget(scene: &Scene) {
    for rank in scene.ranks() {
        std::fs::remove_file(scene.path(&format!("rank-{rank}"))).unwrap();
    }
}

/// On `c10d` and `etcd-v2` the newcomer waits for an address that a surviving rank 0 does not write again.
async fn a_group_takes_in_a_newcomer(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=1:2"]);
    let mut first = start(&scene, &flags, "a");
    scene.has_ranks(["0-of-1-a"]).await;
    let mut second = start(&scene, &flags, "b");
    scene.has_ranks(["0-of-2-a", "1-of-2-b"]).await;
    finish(&scene, [&mut first, &mut second]).await;
}

/// Under torchrun, the others do not notice as long as their workers do not.
async fn a_group_continues_without_a_killed_node(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let rendezvous = Rendezvous::c10d();
    let flags = rendezvous.and(&["--nnodes=1:2", UNTIL_ALL]);
    let mut first = start(&scene, &flags, "a");
    scene.eventually("the store is there", || TcpStream::connect(&rendezvous.endpoint).ok()).await;
    let mut second = start(&scene, &flags, "b");
    scene.has_ranks(["0-of-2-a", "1-of-2-b"]).await;
    second.kill();
    scene.has_ranks(["0-of-1-a"]).await;
    finish(&scene, [&mut first]).await;
}

async fn a_killed_node_is_replaced(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd-v2").await;
    let flags = rendezvous.and(&["--nnodes=2", "--max_restarts=2"]);
    let (mut first, mut second) = (start(&scene, &flags, "a"), start(&scene, &flags, "b"));
    works(&scene, "both work", 2).await;
    forget(&scene);
    second.kill();
    let mut third = start(&scene, &flags, "c");
    works(&scene, "both work again", 2).await;
    finish(&scene, [&mut first, &mut third]).await;
}

async fn the_node_of_rank_0_may_be_killed(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd-v2").await;
    let flags = rendezvous.and(&["--nnodes=2:3", UNTIL_ALL]);
    let names = ["a", "b", "c"];
    let mut nodes = names.map(|name| start(&scene, &flags, name));
    works(&scene, "the three work", 3).await;
    let zeroth = names.iter().position(|name| scene.ranks().contains(&format!("0-of-3-{name}"))).unwrap();
    forget(&scene);
    nodes[zeroth].kill();
    works(&scene, "the two work", 2).await;
    scene.write("finish", "");
    scene.end_well(nodes.iter_mut().enumerate().filter(|(at, _)| *at != zeroth).map(|(_, node)| node)).await;
}

async fn a_spare_waits_takes_over_and_ends_well(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd-v2").await;
    // torchrun takes seconds to begin at all.
    let join_timeout = if let Launcher::ElasticAgent = scene.launcher { 4 } else { 20 };
    let conf = format!("--rdzv_conf=join_timeout={join_timeout},last_call_timeout=1");
    let flags = rendezvous.and(&["--nnodes=2", &conf]);
    let (mut first, mut second) = (start(&scene, &flags, "a"), start(&scene, &flags, "b"));
    works(&scene, "both work", 2).await;
    let mut spares = [start(&scene, &flags, "c"), start(&scene, &flags, "d")];
    // For longer than it may take to join.
    let until = Instant::now() + Duration::from_secs(join_timeout + 2);
    scene.eventually("time passes", || (Instant::now() >= until).then_some(())).await;
    assert!(spares.each_mut().iter_mut().all(|spare| !spare.is_gone()), "a spare gave up\n{}", scene.log());
    forget(&scene);
    second.kill();
    works(&scene, "one takes over", 2).await;
    let [c, d] = &mut spares;
    finish(&scene, [&mut first, c, d]).await;
}

/// With torchrun the dead node stays a participant until its keep-alives count as missed. Here that takes longer than
/// the others need to join.
async fn a_node_killed_before_the_first_round_holds_no_place(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let (server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd-v2").await;
    let flags =
        rendezvous.and(&["--nnodes=2", "--rdzv_conf=last_call_timeout=1,min_round_time=0,keep_alive_max_attempt=60"]);
    let mut first = start(&scene, &flags, "a");
    eventually("it has joined", Duration::from_secs(60), async || {
        has_joined(&scene.launcher, &server).await.then_some(())
    })
    .await;
    first.kill();
    let [mut b, mut c] = ["b", "c"].map(|name| start(&scene, &flags, name));
    works(&scene, "the others work", 2).await;
    finish(&scene, [&mut b, &mut c]).await;
}

/// torchrun handles signals only once workers run. Before that, SIGTERM ends it without any cleaning up.
async fn a_signal_while_others_are_waited_for_is_a_leave(launcher: Launcher) {
    let scene = Scene::new(launcher, STAY);
    let rendezvous = Rendezvous::c10d();
    let mut alone = start(&scene, &rendezvous.and(&["--nnodes=2"]), "a");
    scene.eventually("the store is there", || TcpStream::connect(&rendezvous.endpoint).ok()).await;
    alone.signal(Signal::TERM);
    assert_eq!((scene.end(&mut alone).await, scene.ranks().len()), (1, 0));
}
