//! torchrun's flags, as workers and those who launch them see them: each on the built agent.

use elastic_tests::launcher::{Ended, Launcher, end};
use elastic_tests::prelude::*;

/// A worker's words about itself, by a shell.
const TELL: &str = r#"echo "$RANK $LOCAL_RANK $WORLD_SIZE""#;

fn succeeded(ended: &Ended) {
    assert_eq!(ended.code, 0, "{ended:?}");
}

#[tokio::test]
async fn torchruns_name_gives_its_defaults_its_silence_and_its_exit_codes() {
    let launcher = Launcher::default();
    let one = launcher.run("torchrun", &["--no-python", "sh", "-c", TELL]).await;
    succeeded(&one);
    assert_eq!((one.lines(), one.stderr.as_str()), (vec!["0 0 1"], ""));

    let four = launcher.run("torchrun", &["--nnodes=1", "--nproc_per_node=4", "--no_python", "sh", "-c", TELL]).await;
    assert_eq!(four.lines(), ["0 0 4", "1 1 4", "2 2 4", "3 3 4"]);
    let by_word = launcher.run("elastic-agent", &["torchrun-compat", "--no_python", "sh", "-c", TELL]).await;
    assert_eq!((by_word.lines(), by_word.stderr.as_str()), (vec!["0 0 1"], ""));

    for (args, code) in [
        (&["--no-python", "sh", "-c", "exit 7"][..], 1),
        (&["--nope", "train.py"], 2),
        (&[], 2),
        (&["--nnodes=3:1", "train.py"], 1),
        (&["--no-python", "--module", "train"], 1),
        (&["absent.py"], 1),
    ] {
        let ended = launcher.run("torchrun", args).await;
        assert_eq!(ended.code, code, "{args:?}: {ended:?}");
        assert!(ended.stderr.contains("elastic-agent: "), "{args:?}: {ended:?}");
    }
}

#[tokio::test]
async fn a_program_called_like_a_first_word_of_ours_can_be_run() {
    let launcher = Launcher::default();
    launcher.write("torchrun-compat", "echo mine\n");
    let ended = launcher.run("elastic-agent", &["--no-python", "sh", "torchrun-compat"]).await;
    assert_eq!(ended.lines(), ["mine"]);
    launcher.write("torchrun-compat", "print('mine')\n");
    assert_eq!(launcher.run("elastic-agent", &["./torchrun-compat"]).await.lines(), ["mine"]);
    assert_eq!(launcher.run("elastic-agent", &["--", "torchrun-compat"]).await.lines(), ["mine"]);
}

#[tokio::test]
async fn variables_are_enough_to_describe_a_job() {
    let set = [
        ("PET_NNODES", "1"),
        ("PET_NPROC_PER_NODE", "2"),
        ("PET_STANDALONE", "1"),
        ("PET_MODULE", "0"),
        ("PET_NO_PYTHON", "1"),
        ("PET_MAX_RESTARTS", "0"),
        ("PET_MONITOR_INTERVAL", "0.1"),
        ("PET_START_METHOD", "fork"),
        ("PET_ROLE", "r"),
    ];
    let launcher = set.iter().fold(Launcher::default(), |launcher, (name, value)| launcher.env(name, value));
    let ended = launcher.run("torchrun", &["sh", "-c", r#"echo "$ROLE_NAME $RANK""#]).await;
    succeeded(&ended);
    assert_eq!(ended.lines(), ["r 0", "r 1"]);
}

#[tokio::test]
async fn a_script_is_run_in_each_of_the_ways_there_are() {
    let launcher = Launcher::default();
    launcher.write("tell.py", "import os, sys\nprint(__name__, *sys.argv[1:], os.environ['LOCAL_RANK'])\n");
    for (name, args, expected) in [
        ("torchrun", &["tell.py", "--x"][..], "__main__ --x 0"),
        ("torchrun", &["-m", "tell", "--x"], "__main__ --x 0"),
        ("torchrun", &["--run-path", "tell.py", "${local_rank}"], "__main__ 0 0"),
        ("torch.distributed.launch", &["tell.py", "--x"], "__main__ --local-rank=0 --x 0"),
        ("torch.distributed.launch", &["--use_env", "tell.py", "--x"], "__main__ --x 0"),
        ("elastic-agent", &["launch-compat", "--nproc_per_node=1", "tell.py"], "__main__ --local-rank=0 0"),
    ] {
        let ended = launcher.run(name, args).await;
        assert_eq!((ended.code, ended.lines()), (0, vec![expected]), "{name} {args:?}: {}", ended.stderr);
    }
    // As `python -` reads it
    let ended = launcher.reads("tell.py").run("torchrun", &["-", "--x"]).await;
    assert_eq!((ended.code, ended.lines()), (0, vec!["__main__ --x 0"]), "{}", ended.stderr);
}

#[tokio::test]
async fn workers_are_counted_by_what_the_driver_shows() {
    // A stand-in for the driver's library: no GPU is needed, and none is used.
    let gpus = r#"{"GPU-aaaa",0,1,0,{0}},{"GPU-bbbb",0,2,0,{0}},{"GPU-cccc",0,3,0,{0}}"#;
    let count = async |list: Option<&str>, workers: &str| {
        let launcher = Launcher::default().gpus(gpus);
        let launcher = list.into_iter().fold(launcher, |launcher, list| launcher.env("CUDA_VISIBLE_DEVICES", list));
        launcher.run("torchrun", &["--nproc_per_node", workers, "--no-python", "sh", "-c", TELL]).await
    };
    assert_eq!(count(None, "gpu").await.lines(), ["0 0 3", "1 1 3", "2 2 3"]);
    assert_eq!(count(None, "auto").await.lines().len(), 3);
    assert_eq!(count(Some("GPU-cc,0"), "gpu").await.lines(), ["0 0 2", "1 1 2"]);
    let hidden = count(Some("-1"), "gpu").await;
    assert!(hidden.code == 1 && hidden.stderr.contains("shows none of the 3 GPUs"), "{hidden:?}");
    // None is visible, so it is as many as there are CPUs for this process.
    let cpus = count(None, "cpu").await.lines().len();
    assert!(cpus >= 1);
    assert_eq!(count(Some(""), "auto").await.lines().len(), cpus);
}

#[tokio::test]
async fn workers_are_bound_to_cpus_near_their_gpus() {
    // The stand-in's GPUs sit where real devices of this machine do.
    let mut devices: Vec<String> = std::fs::read_dir("/sys/bus/pci/devices")
        .map(|entries| entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
        .unwrap_or_default();
    devices.sort();
    devices.push("0000:01:00.0".into());
    let part = |range| u32::from_str_radix(&devices[0][range], 16).unwrap();
    let place = format!("{},{},{}", part(0..4), part(5..7), part(8..10));
    let launcher = Launcher::default().gpus(&format!(r#"{{"GPU-a",{place},{{0}}}},{{"GPU-b",{place},{{0}}}}"#));
    let tell = "grep Cpus_allowed_list /proc/self/status";
    let bound = async |mode: &str| {
        let numa = format!("--numa-binding={mode}");
        launcher.run("torchrun", &[&numa, "--nproc-per-node=2", "--no-python", "sh", "-c", tell]).await
    };
    let cpus =
        |line: &str| line.split_whitespace().last().unwrap().parse::<elastic_agent::for_tests::CpuSet>().unwrap();
    let ours = elastic_agent::for_tests::allowed_cpus().unwrap();

    let node = bound("node").await;
    succeeded(&node);
    let sets: Vec<_> = node.lines().iter().map(|line| cpus(line)).collect();
    assert!(sets.len() == 2 && sets[0] == sets[1] && sets[0].and(&ours) == sets[0], "{sets:?}");

    let exclusive = bound("exclusive").await;
    if exclusive.code == 0 {
        let shares: Vec<_> = exclusive.lines().iter().map(|line| cpus(line)).collect();
        assert_eq!(shares[0].and(&shares[1]).0, BTreeSet::new(), "{shares:?}");
        assert!(shares.iter().all(|share| !share.0.is_empty() && share.and(&sets[0]) == *share), "{shares:?}");
    } else {
        // A machine of one core.
        assert!(exclusive.stderr.contains("cores for 2 GPUs"), "{exclusive:?}");
    }
    let few = launcher.run("torchrun", &["--numa-binding=node", "--nproc-per-node=3", "--no-python", "true"]).await;
    assert!(few.code == 1 && few.stderr.contains("worker 2 has no GPU"), "{few:?}");
}

#[tokio::test]
async fn a_signal_before_anything_was_joined_is_a_planned_end() {
    let launcher = Launcher::default();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("--rdzv-endpoint={closed}");
    let flags = ["--rdzv-backend=etcd", &endpoint, "--rdzv-id=J", "--no-python", "true"];
    let mut agent = launcher.start("torchrun", &flags);
    let mut stderr = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(agent.stderr.take().unwrap()));
    let mut said = Vec::new();
    let mut hear = async |part: &str| {
        while let Some(line) = stderr.next_line().await.unwrap() {
            said.push(line);
            if said.last().is_some_and(|line| line.contains(part)) {
                return;
            }
        }
        panic!("{part:?} was not said: {said:?}");
    };
    within("the agent waits", LIMIT, hear("waiting for it")).await;
    kill_process(Pid::from_raw(agent.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    within("the agent leaves", LIMIT, hear("leaving before the job was joined")).await;
    assert_eq!(end(agent).await.code, 1);
}

#[tokio::test]
async fn events_are_lines_of_json_if_they_are_asked_for() {
    let launcher = Launcher::default();
    let told = async |program: &str| {
        let flags = ["--event-log-handler=console", "--nproc-per-node=2", "--no-python", "sh", "-c", program];
        let ended = launcher.run("torchrun", &flags).await;
        let events: Vec<serde_json::Value> =
            ended.stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let mut names: Vec<String> = events
            .iter()
            .map(|event| {
                let name = event["name"].as_str().unwrap().rsplit('.').next().unwrap();
                format!("{} {name} {}", event["source"].as_str().unwrap(), event["metadata"]["global_rank"])
            })
            .collect();
        names.sort();
        (names, events)
    };
    let (names, _) = told("true").await;
    let expected = [
        "AGENT RENDEZVOUS null",
        "AGENT SUCCEEDED null",
        "WORKER START 0",
        "WORKER START 1",
        "WORKER SUCCEEDED 0",
        "WORKER SUCCEEDED 1",
    ];
    assert_eq!(names, expected);
    let (names, events) = told("[ $RANK = 0 ] && exec sleep 1000; exit 3").await;
    for name in ["AGENT FAILED null", "WORKER FAILED 1", "WORKER TERMINATED 0"] {
        assert!(names.iter().any(|told| told == name), "{name}: {names:?}");
    }
    let failed = events.iter().find(|event| event["metadata"]["state"] == "FAILED").unwrap();
    let inner = failed["metadata"]["metadata"].as_str().unwrap();
    assert!(inner.contains(r#""exit_code":[3]"#), "{failed}");
}

#[tokio::test]
async fn the_completion_for_bash_is_one_that_bash_takes() {
    let launcher = Launcher::default();
    let ended = launcher.run("torchrun", &["--print-completion", "bash"]).await;
    succeeded(&ended);
    launcher.write("completion", &ended.stdout);
    let ask = "source ./completion; COMP_WORDS=(torchrun --nproc); COMP_CWORD=1; \
               _torchrun torchrun --nproc torchrun; echo \"${COMPREPLY[*]}\"";
    let answer = std::process::Command::new("bash").args(["-c", ask]).current_dir(launcher.path("")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "--nproc-per-node", "{answer:?}");
}

#[tokio::test]
async fn the_reference_has_every_flag() {
    let help = Launcher::default().run("elastic-agent", &["--help"]).await;
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference.md")).unwrap();
    let (flags, _) = help.stdout.split_once("Examples:").unwrap();
    let named =
        flags.lines().filter_map(|line| line.trim_start().split_once("--").filter(|(short, _)| short.len() <= 4));
    let missing: Vec<&str> = named
        .map(|(_, rest)| rest.split([' ', ',', '.', ']']).next().unwrap())
        .filter(|name| !matches!(*name, "help" | "version" | "verbose") && !page.contains(&format!("`--{name}")))
        .collect();
    assert_eq!(missing, [""; 0], "docs/reference.md lacks these");
}
