//! Command lines of torchrun 2.15, `torch.distributed.launch`, torchelastic 0.2.2 and Bagua, and `PET_*` variables that
//! operators set. Only the program's name is replaced.

use super::*;

fn torchrun(line: &str) -> Options {
    as_(Dialect::Torchrun, line, &[]).unwrap_or_else(|stop| panic!("{line}: {stop}"))
}

#[test]
fn each_launcher_has_its_own_defaults() {
    let options = torchrun("t");
    assert_eq!(
        (options.workers.count, options.spec.max_restarts, options.log.level),
        (WorkerCount::Count(1), 0, Level::WARN)
    );
    assert_eq!(options.store.choice, StoreChoice::Standalone);

    let old = as_(Dialect::Torchelastic, "--rdzv_id=J t", &[]).unwrap();
    assert_eq!((old.workers.count, old.spec.max_restarts, old.log.level), (WorkerCount::Auto, 3, Level::INFO));
    assert_eq!(etcd_endpoints(&old), ["localhost:2379"]);
    let variables = [("PET_MAX_RESTARTS", "100"), ("PET_NPROC_PER_NODE", "2")];
    let told = as_(Dialect::Torchelastic, "--with_etcd t", &variables).unwrap();
    assert_eq!((told.workers.count, told.spec.max_restarts), (WorkerCount::Count(2), 100));
    assert_eq!(told.store.choice, StoreChoice::Standalone);
}

#[test]
fn launch_tells_its_workers_their_local_rank() {
    let options = as_(Dialect::Launch, "--nproc_per_node=2 train.py --lr 1", &[]).unwrap();
    assert_eq!(options.workers.program.args, ["--local-rank=${local_rank}", "--lr", "1"]);
    assert_eq!(options.log.level, Level::WARN);
    let options = as_(Dialect::Launch, "--use_env -m pkg.train --lr 1", &[]).unwrap();
    assert_eq!((options.workers.program.kind, options.workers.program.args.len()), (ProgramKind::Module, 2));
    let refused = as_(Dialect::Launch, "--no_python prog", &[]).unwrap_err().to_string();
    assert!(refused.contains("--no-python") && refused.contains("add --use-env"), "{refused}");
    assert!(as_(Dialect::Launch, "--no_python --use-env prog", &[]).is_ok());
}

/// A command line of torchrun, with words that may be empty.
fn torchrun_words(words: &[&str]) -> Options {
    let argv = words.iter().map(OsString::from);
    parse(Dialect::Torchrun, argv, &|_| None, FRESH).unwrap_or_else(|stop| panic!("{words:?}: {stop}"))
}

#[test]
fn empty_flags_are_as_if_they_were_not_given() {
    let flags = "rdzv-endpoint rdzv-id rdzv-conf log-dir local-addr local-ranks-filter duplicate-stdout-filters \
        duplicate-stderr-filters log-line-prefix-template logs-specs";
    for flag in flags.split_whitespace() {
        assert_eq!(torchrun_words(&[&format!("--{flag}"), "", "t"]), torchrun("t"), "--{flag}");
        let own = run_os(vec![format!("--{flag}=").into(), "t".into()]);
        assert_eq!(own.as_ref(), run_with("t", &[]).as_ref(), "--{flag}");
    }
    // An empty flag wins over its variable, as on torchrun's command line.
    let variables = [("PET_LOG_DIR", "/logs"), ("PET_RDZV_CONF", "timeout=7")];
    let empty = as_(Dialect::Torchrun, "--log-dir= --rdzv-conf= t", &variables).unwrap();
    assert_eq!(empty, torchrun("t"));
}

#[test]
fn any_role_is_taken() {
    for role in ["", "a\tb", &"r".repeat(4000)] {
        assert_eq!(torchrun_words(&["--role", role, "t"]).workers.role, role);
    }
    assert_eq!(run("--role= t").workers.role, "");
    assert!(mistake_with(&format!("--role={} t", "r".repeat(129)), &[]).contains("it is too long"));
}

#[test]
fn rendezvous_keys_that_are_unknown_or_repeated_are_warned_of() {
    let conf = "rdzv_backend=c10d,overlap_timeout=600,timeout=60,timeout=90,lease_ttl=20";
    let options = torchrun(&format!("--rdzv_conf={conf} t"));
    assert_eq!(options.spec.timings.join_timeout, Duration::from_secs(90), "the last one counts");
    let warnings = &options.log.warnings;
    let expected = [
        "--rdzv-conf rdzv_backend: no such key",
        "--rdzv-conf overlap_timeout: no such key",
        "--rdzv-conf timeout=90: the key is given twice",
    ];
    assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
    for (warning, expected) in warnings.iter().zip(expected) {
        assert!(warning.starts_with(expected), "{warning:?} should begin with {expected:?}");
    }
}

#[test]
fn one_node_on_c10d_needs_no_store_and_keeps_its_id() {
    for line in [
        "--nnodes=1 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=localhost:29400 t",
        "--nnodes=1:1 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=node0.example:29400 t",
        "--rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 t",
        "--rdzv_id=100 --rdzv_backend=c10d t",
        "--rdzv_id=100 --rdzv_endpoint=node0 t",
    ] {
        let options = torchrun(line);
        assert_eq!((options.store.choice, options.job.as_ref()), (StoreChoice::Standalone, "100"), "{line}");
        assert_eq!(options.log.warnings, [""; 0], "{line}");
    }
}

#[test]
fn mistakes_end_as_they_do_with_torchrun() {
    let table = [
        ("--bogus t", 2),
        ("--nnodes", 2),
        ("", 2),
        ("--max-restarts=x t", 2),
        ("--start-method=thread t", 2),
        ("--numa-binding=near t", 2),
        ("--node-rank=x t", 2),
        ("--nnodes=3:1 t", 1),
        ("--nnodes=1:2:3 t", 1),
        ("--nproc-per-node=tpu t", 1),
        ("--rdzv-backend=zeus t", 1),
        ("--rdzv-backend=c10d --rdzv-conf timeout t", 1),
        ("-m --no-python t", 1),
        ("-r 4 t", 1),
    ];
    for (line, code) in table {
        let Err(stop) = as_(Dialect::Torchrun, line, &[]) else { panic!("{line} is accepted") };
        assert_eq!(stop.exit_code(Dialect::Torchrun), code, "{line}: {stop}");
        assert_eq!(stop.exit_code(Dialect::Own), 2, "{line}");
    }
    let variable = as_(Dialect::Torchrun, "t", &[("PET_STANDALONE", "true")]).unwrap_err();
    assert_eq!(variable.exit_code(Dialect::Torchrun), 1);
}

/// Long flags of torchrun 2.15 that take a value, and those that take none.
const VALUES: &str = "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval \
    start-method event-log-handler role log-dir redirects tee log-line-prefix-template local-ranks-filter \
    duplicate-stdout-filters duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs \
    numa-binding signals-to-handle shutdown-timeout print-completion";
const SWITCHES: &str = "standalone module no-python run-path virtual-local-rank help";

#[test]
fn every_abbreviation_that_is_unique_for_torchrun_means_the_same_here() {
    let flags: Vec<&str> = VALUES.split_whitespace().chain(SWITCHES.split_whitespace()).collect();
    // Python counts both spellings, so a beginning that both spellings share is not unique.
    let spellings: Vec<(String, &str)> = flags
        .iter()
        .flat_map(|flag| {
            let both = [(*flag).to_owned(), flag.replace('-', "_")];
            both.into_iter().take(if flag.contains('-') { 2 } else { 1 }).map(move |spelling| (spelling, *flag))
        })
        .collect();
    let mut checked = 0;
    for (spelling, flag) in &spellings {
        for length in 1..=spelling.len() {
            let short = &spelling[..length];
            let exact = spellings.iter().any(|(other, _)| other == short);
            if !exact && spellings.iter().filter(|(other, _)| other.starts_with(short)).count() != 1 {
                continue;
            }
            let takes_value = VALUES.split_whitespace().any(|value| value == *flag);
            let argument = if takes_value { format!("--{short}=x") } else { format!("--{short}") };
            let words = ["elastic-agent".to_owned(), argument.clone(), "t".to_owned()];
            let matches = flags::definition(Dialect::Torchrun).try_get_matches_from(words);
            match matches {
                Ok(matches) => {
                    let source = matches.value_source(flag);
                    assert_eq!(source, Some(clap::parser::ValueSource::CommandLine), "{argument} is not --{flag}");
                }
                Err(error) => {
                    assert_eq!((error.kind(), *flag), (clap::error::ErrorKind::DisplayHelp, "help"), "{argument}")
                }
            }
            checked += 1;
        }
    }
    assert!(checked > 200, "{checked} abbreviations");
}

#[test]
fn static_nodes_meet_at_the_master_and_have_their_ranks() {
    let line = "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 --nproc_per_node=4 t";
    let options = torchrun(line);
    let endpoint = Endpoint { host: "10.0.0.1".into(), port: 1234 };
    assert_eq!(options.store.choice, StoreChoice::Hosted { endpoint: endpoint.clone(), is_host: Some(false) });
    assert_eq!((options.store.place, options.network.local_addr, options.job.as_ref()), (Some(1), None, "none"));

    let first = torchrun(&line.replace("node_rank=1", "node_rank=0"));
    assert_eq!(first.store.choice, StoreChoice::Hosted { endpoint, is_host: Some(true) });
    assert_eq!((first.store.place, first.network.local_addr.as_deref()), (Some(0), Some("10.0.0.1")));

    let by_endpoint = torchrun("--nnodes=2 --rdzv-endpoint=h --node-rank=1 t");
    assert!(matches!(by_endpoint.store.choice, StoreChoice::Hosted { endpoint, .. } if endpoint.port == 29500));
    let ranged = torchrun("--nnodes=1:2 t");
    assert_eq!((nodes(&ranged), ranged.store.place), ((2, 2), Some(0)));
    assert!(ranged.log.warnings[0].contains("--nnodes=1:2 is taken as 2"), "{:?}", ranged.log.warnings);
}

#[test]
fn three_endpoints_name_the_agents_that_hold_the_store_in_one_order() {
    let choice =
        |list: &str| torchrun(&format!("--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint={list} t")).store.choice;
    let endpoint = |host: &str, port| Endpoint { host: host.into(), port };
    let endpoints = vec![endpoint("a", 29400), endpoint("b", 7), endpoint("c", 29400)];
    assert_eq!(choice("a,b:7,c"), StoreChoice::Replicated { endpoints });
    assert_eq!(choice("a,b:7,c"), choice("c,a,b:7"));
}

#[test]
fn one_node_alone_serves_nothing_on_any_port_it_is_given() {
    // torchrun's rule: the id is fresh unless a flag says where to meet.
    assert_eq!(torchrun("--rdzv-id=J t").job.to_string(), FRESH.to_string());
    let told = torchrun("--master_port=1234 --rdzv-id=J t");
    assert_eq!((told.store.choice, told.job.as_ref()), (StoreChoice::Standalone, "J"));
    let variables = [("PET_MASTER_PORT", "1234"), ("PET_MASTER_ADDR", "localhost"), ("PET_NODE_RANK", "0")];
    assert_eq!(as_(Dialect::Torchrun, "t", &variables).unwrap().store.choice, StoreChoice::Standalone);
}

#[test]
fn command_lines_from_elsewhere_run_with_the_name_swapped() {
    // Bagua's tutorial.
    let bagua =
        torchrun("--nnodes=1:4 --nproc_per_node=2 --rdzv_id=J --rdzv_backend=c10d --rdzv_endpoint=node0 t.py a");
    assert!(matches!(&bagua.store.choice, StoreChoice::Hosted { endpoint, .. } if endpoint.port == 29400));
    assert_eq!(nodes(&bagua), (1, 4));

    // The ElasticJob controller puts its flags before those of the image.
    let line = "--rdzv_backend=etcd --rdzv_endpoint=etcd-service:2379 --rdzv_id=imagenet --nnodes=1:3 \
                --nproc_per_node=1 /workspace/main.py --arch=resnet18 --epochs=3 /workspace/data";
    let kube = as_(Dialect::Torchelastic, line, &[]).unwrap();
    assert_eq!(etcd_endpoints(&kube), ["etcd-service:2379"]);
    assert_eq!(kube.workers.program.args, ["--arch=resnet18", "--epochs=3", "/workspace/data"]);

    // Kubeflow's PyTorchJob sets only variables.
    let variables = [
        ("PET_RDZV_ENDPOINT", "etcd:2379"),
        ("PET_RDZV_BACKEND", "etcd"),
        ("PET_RDZV_ID", "J"),
        ("PET_RDZV_CONF", "last_call_timeout=5"),
        ("PET_NNODES", "1:64"),
        ("PET_MAX_RESTARTS", "100"),
        ("PET_STANDALONE", "0"),
        ("PET_MONITOR_INTERVAL", "5"),
        ("PET_START_METHOD", "spawn"),
        ("PET_NPROC_PER_NODE", "auto"),
        ("PET_NODE_RANK", "0"),
    ];
    let operators = as_(Dialect::Torchrun, "train.py", &variables).unwrap();
    assert_eq!(
        (operators.spec.max_nodes, operators.spec.max_restarts, operators.workers.count),
        (64, 100, WorkerCount::Auto)
    );
    assert_eq!(operators.log.warnings, [""; 0]);

    // Old scripts on one machine, and on two.
    let two = as_(
        Dialect::Launch,
        "--nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=1234 t",
        &[],
    );
    assert_eq!(two.unwrap().store.place, Some(0));
}

#[test]
fn completions_name_the_flags() {
    for (shell, part) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef torchrun"),
        ("fish", "complete -c torchrun"),
        ("tcsh", "complete torchrun 'c/--/("),
    ] {
        let Err(stop @ Stop::Show(_)) = as_(Dialect::Torchrun, &format!("--print-completion {shell}"), &[]) else {
            panic!("no script for {shell}")
        };
        let script = stop.to_string();
        assert!(script.contains(part) && script.contains("nproc-per-node"), "{shell}: {script}");
        assert!(!script.contains("logs-specs"), "{shell} offers what is refused");
        assert_eq!(stop.exit_code(Dialect::Torchrun), 0);
    }
}
