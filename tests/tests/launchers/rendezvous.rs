//! The rendezvous backends by which nodes find each other, and what a launcher says when they cannot.

use elastic_tests::prelude::*;

use crate::launchers::scene::{ALONE, Launcher, Rendezvous, Scene, cases, names};

cases! {
    nodes_with_fixed_ranks_meet_at_the_master
    nodes_with_fixed_ranks_meet_over_ipv6
    nodes_meet_on_etcd_below_a_prefix
    a_standalone_node_heeds_no_rendezvous_flags
    two_standalone_nodes_do_not_meet
    a_backend_that_does_not_exist_is_named
    too_few_nodes_give_up_after_the_join_timeout
    an_id_that_was_used_before_is_no_success
    ; beyond torchrun:
    a_failed_jobs_id_can_be_used_again = "left == right"
}

const TOUCH: &str = "touch rank-$RANK-$1";

/// Runs two nodes with static rendezvous. The one with rank 1 starts first.
async fn fixed(scene: &Scene, flags: &[&str]) {
    let start = |rank| scene.start_with(&[flags, &["--nnodes=2", "--node_rank", rank]].concat(), &[rank]);
    scene.end_well(&mut ["1", "0"].map(start)).await;
    assert_eq!(scene.ranks(), names(["0-0", "1-1"]));
}

async fn nodes_with_fixed_ranks_meet_at_the_master(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let port = format!("--master_port={}", free_port());
    fixed(&scene, &["--master_addr=127.0.0.1", &port]).await;
}

async fn nodes_with_fixed_ranks_meet_over_ipv6(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let endpoint = format!("--rdzv_endpoint=[::1]:{}", free_port());
    fixed(&scene, &["--rdzv_backend=static", "--local_addr=::1", &endpoint]).await;
}

async fn nodes_meet_on_etcd_below_a_prefix(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK-of-$WORLD_SIZE");
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd").await;
    let start = |prefix: &str| {
        let conf = format!("--rdzv_conf=timeout=60,last_call_timeout=1,protocol=http,etcd_prefix={prefix}");
        scene.start(&rendezvous.and(&["--nnodes=2", &conf]))
    };
    // A slash at the end of the prefix changes nothing.
    scene.end_well(&mut ["/jobs/of/ours", "/jobs/of/ours/"].map(start)).await;
    assert_eq!(scene.ranks(), names(["0-of-2", "1-of-2"]));
}

async fn a_standalone_node_heeds_no_rendezvous_flags(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let flags = ["--rdzv_backend=etcd", "--rdzv_endpoint=nowhere.invalid:1", "--rdzv_id=j"];
    assert_eq!((scene.run(&[&[ALONE][..], &flags].concat()).await, scene.ranks()), (0, names(["0-"])));
}

async fn two_standalone_nodes_do_not_meet(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$RANK-of-$WORLD_SIZE-$1; until [ -e both ]; do sleep 0.05; done");
    let mut nodes = ["a", "b"].map(|name| scene.start_with(&[ALONE], &[name]));
    scene.has_ranks(["0-of-1-a", "0-of-1-b"]).await;
    scene.write("both", "");
    scene.end_well(&mut nodes).await;
}

async fn a_backend_that_does_not_exist_is_named(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    assert_eq!(scene.run(&["--rdzv_backend=zookeeper", "--rdzv_endpoint=127.0.0.1:1"]).await, 1);
    let log = scene.log();
    assert!(log.contains("zookeeper") && scene.ranks().is_empty(), "{log}");
    if let Launcher::ElasticAgent = scene.launcher {
        assert!(["etcd", "c10d", "static", "--standalone"].iter().all(|name| log.contains(name)), "{log}");
    }
    let code = scene.run(&["--rdzv_backend=static", "--rdzv_endpoint=127.0.0.1:x", "--nnodes=2"]).await;
    assert_eq!((code, scene.ranks()), (1, names([])));
}

async fn too_few_nodes_give_up_after_the_join_timeout(launcher: Launcher) {
    let scene = Scene::new(launcher, TOUCH);
    let rendezvous = Rendezvous::c10d();
    let code = scene.run(&rendezvous.and(&["--nnodes=2", "--rdzv_conf=join_timeout=3,last_call_timeout=1"])).await;
    assert_eq!((code, scene.ranks()), (1, names([])));
    assert!(scene.log().to_lowercase().contains("timeout"), "{}", scene.log());
}

/// torchrun's `etcd` closes an id when its job ends.
async fn an_id_that_was_used_before_is_no_success(launcher: Launcher) {
    let scene = Scene::new(launcher, "touch rank-$1");
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd").await;
    let flags = rendezvous.and(&["--nnodes=1"]);
    assert_eq!(scene.end(&mut scene.start_with(&flags, &["first"])).await, 0);
    assert_eq!(scene.end(&mut scene.start_with(&flags, &["second"])).await, 1);
    assert_eq!(scene.ranks(), names(["first"]));
    if let Launcher::ElasticAgent = scene.launcher {
        assert!(scene.log().contains("no worker ran here: job `j` had ended already"), "{}", scene.log());
    }
}

/// On torchrun's `etcd` the first failure closes the id for up to two hours.
async fn a_failed_jobs_id_can_be_used_again(launcher: Launcher) {
    let scene = Scene::new(launcher, "[ -e better ] || exit 1; touch rank-$RANK-of-$WORLD_SIZE");
    let (_server, rendezvous) = Rendezvous::etcd(&scene.launcher, "etcd").await;
    assert_eq!(scene.run(&rendezvous.and(&["--nnodes=1"])).await, 1);
    scene.write("better", "");
    assert_eq!((scene.run(&rendezvous.and(&["--nnodes=1"])).await, scene.ranks()), (0, names(["0-of-1"])));
}
