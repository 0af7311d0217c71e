//! Where the workers' streams go.

use crate::launchers::scene::{ALONE, Launcher, Scene, cases};

cases! {
    streams_go_to_files_and_to_the_console_with_a_prefix
    ; beyond torchrun:
    streams_of_ranks_beyond_nine_can_be_redirected = "left == right"
}

async fn streams_go_to_files_and_to_the_console_with_a_prefix(launcher: Launcher) {
    let scene = Scene::new(launcher, "echo out of $RANK; echo err of $RANK >&2");
    let flags = [ALONE, "--nproc_per_node=2", "--redirects=3", "--tee=3", "--log-dir=logs"];
    let prefix = "--log-line-prefix-template=[rank${rank} of ${role_name}]: ";
    assert_eq!(scene.run(&[&flags[..], &[prefix]].concat()).await, 0);
    let log = scene.log();
    let mut told: Vec<&str> = log.lines().filter(|line| line.starts_with("[rank")).collect();
    told.sort_unstable();
    let expected = ["[rank0 of default]: err of 0", "[rank0 of default]: out of 0"];
    assert_eq!(told, [expected, ["[rank1 of default]: err of 1", "[rank1 of default]: out of 1"]].concat(), "{log}");
    let run = scene.path("logs").read_dir().unwrap().next().unwrap().unwrap().path();
    for (file, text) in [("0/stdout.log", "out of 0\n"), ("1/stderr.log", "err of 1\n")] {
        assert_eq!(std::fs::read_to_string(run.join("attempt_0").join(file)).unwrap(), text);
    }
}

/// torchrun allows only one digit for a rank here.
async fn streams_of_ranks_beyond_nine_can_be_redirected(launcher: Launcher) {
    let scene = Scene::new(launcher, "echo from $RANK; touch rank-$RANK");
    let code = scene.run(&[ALONE, "--nproc_per_node=12", "-r", "10:1", "--log-dir=logs"]).await;
    assert_eq!((code, scene.ranks().len()), (0, 12));
    let log = scene.log();
    assert!(!log.contains("from 10\n") && log.contains("from 11\n"), "{log}");
}
