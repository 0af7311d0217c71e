//! The command line as users write it: torchrun's cases (1.1, its environment defaults, `min_max_nodes_parse`,
//! `with_env_vars`, `nproc`) and ours. Flags of logs are in [`logs`], mistakes in [`mistakes`], the other launchers'
//! command lines in [`compat`].

mod compat;
mod logs;
mod mistakes;

use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use elastic_rendezvous::job::{Endpoint, OnStoreLoss, RestartPolicy, Timings};
use proptest::prelude::*;

use super::*;
use crate::output::logs::{LogDir, Streams};
use crate::store::choice::{Credentials, Tls};
use crate::workers::command::ProgramKind;
use crate::workers::slots::WorkerCount;
use crate::workers_store::WorkersStoreLimits;
use crate::workers_store::rank0_port::StoreHost;

const FRESH: Uuid = Uuid::from_u128(0x1234);

fn run_os(argv: Vec<OsString>) -> Result<Options, Stop> {
    parse(Dialect::Own, argv, &|_| None, FRESH)
}

fn as_(dialect: Dialect, line: &str, env: &[(&str, &str)]) -> Result<Options, Stop> {
    let look = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
    parse(dialect, line.split_whitespace().map(OsString::from), &look, FRESH)
}

fn run_with(line: &str, env: &[(&str, &str)]) -> Result<Options, Stop> {
    as_(Dialect::Own, line, env)
}

fn run(line: &str) -> Options {
    run_with(line, &[]).unwrap_or_else(|stop| panic!("{line}: {stop}"))
}

/// The options of these flags before a program. The node meets the others through etcd, so that `--nnodes` is free.
fn etcd(flags: &str) -> Options {
    run(&format!("--rdzv-backend=etcd --rdzv-id=J {flags} t.py"))
}

fn mistake_with(line: &str, env: &[(&str, &str)]) -> String {
    match run_with(line, env) {
        Err(stop @ Stop::Usage(_)) => {
            assert_eq!(stop.exit_code(Dialect::Own), 2, "{line}");
            let text = stop.to_string();
            assert_eq!(text.lines().count(), 1, "{line}: one line, not {text:?}");
            text
        }
        other => panic!("{line}: {other:?}"),
    }
}

fn nodes(options: &Options) -> (u32, u32) {
    (options.spec.min_nodes, options.spec.max_nodes)
}

fn etcd_endpoints(options: &Options) -> Vec<String> {
    match &options.store.choice {
        StoreChoice::Etcd { endpoints, .. } => endpoints.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_script_alone_runs_once_on_one_node() {
    let options = run("train.py --epochs 3");
    assert_eq!(nodes(&options), (1, 1));
    assert_eq!(options.workers.count, WorkerCount::Count(1));
    assert_eq!(options.store.choice, StoreChoice::Standalone);
    assert_eq!(options.job.to_string(), FRESH.to_string());
    assert_eq!((options.spec.max_restarts, options.spec.restart_policy), (0, RestartPolicy::Failures));
    assert_eq!(options.workers.program.kind, ProgramKind::Script);
    assert_eq!(options.workers.program.name, "train.py");
    assert_eq!(options.workers.program.args, ["--epochs", "3"]);
    assert_eq!((options.workers.role.as_str(), options.log.level), ("default", Level::INFO));
    assert_eq!(options.log.warnings, [""; 0]);
}

#[test]
fn nodes_are_a_number_or_a_range() {
    let options =
        run("--rdzv_backend=etcd --rdzv_endpoint=host:2379 --nnodes=1:4 --nproc_per_node=2 --rdzv_id=JOB t.py");
    assert_eq!((etcd_endpoints(&options), nodes(&options)), (vec!["host:2379".to_owned()], (1, 4)));
    assert_eq!((options.workers.count, options.job.as_ref()), (WorkerCount::Count(2), "JOB"));
    for (text, min, max) in [("1", 1, 1), ("3", 3, 3), ("2:20", 2, 20), ("1:1", 1, 1)] {
        assert_eq!(nodes(&etcd(&format!("--nnodes={text}"))), (min, max), "{text}");
    }
}

#[test]
fn workers_are_a_number_or_what_the_machine_has() {
    use WorkerCount::{Auto, Count, Cpu, Gpu, Xpu};
    for (text, workers) in [("8", Count(8)), ("auto", Auto), ("cpu", Cpu), ("gpu", Gpu), ("xpu", Xpu)] {
        assert_eq!(run(&format!("--nproc-per-node {text} t.py")).workers.count, workers);
    }
}

#[test]
fn times_may_have_units() {
    let options = etcd(
        "--rdzv-conf timeout=800,last_call_timeout=500ms,lease_ttl=20s,takeover_delay=15m,start_timeout=1h,\
         min_round_time=0,stop_grace=0.5,margin=2.5,drain_grace=2m",
    );
    let expected = Timings {
        join_timeout: Duration::from_secs(800),
        last_call: Duration::from_millis(500),
        lease_ttl: Duration::from_secs(20),
        margin: Duration::from_millis(2500),
        min_round_time: Duration::ZERO,
        takeover_delay: Duration::from_secs(900),
        start_timeout: Duration::from_secs(3600),
        stop_grace: Duration::from_millis(500),
        drain_grace: Duration::from_secs(120),
    };
    assert_eq!(options.spec.timings, expected);
    // Our own key takes precedence over torchrun's `timeout`, wherever it is.
    let both = etcd("--rdzv-conf join_timeout=5,timeout=900");
    assert_eq!(both.spec.timings.join_timeout, Duration::from_secs(5));
    assert_eq!(etcd("").spec.timings, Timings::default());
}

#[test]
fn a_store_for_everybody_is_served_unless_tls_is_required() {
    let node0 = Endpoint { host: "n0".into(), port: 29400 };
    let c10d = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n0";
    let etcd = "--rdzv-backend=etcd --rdzv-endpoint=n0 --rdzv-id=J";
    for line in [c10d, "--nnodes=2 --master-addr=n0", etcd, "--nnodes=2 --master-addr=n0 --peer-port=0.0.0.0:7000"] {
        assert!(run(&format!("{line} t")).network.leaves_open(&node0), "{line}");
        let refused = mistake_with(&format!("{line} --insecure --require-peer-tls t"), &[]);
        assert!(refused.starts_with("--require-peer-tls: the nodes of this job would speak"), "{line}: {refused}");
        let refused = mistake_with(&format!("{line} t"), &[("PET_REQUIRE_PEER_TLS", "1")]);
        assert!(refused.starts_with("PET_REQUIRE_PEER_TLS: "), "{line}: {refused}");
    }
    let local = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost";
    let bound = format!("{c10d} --peer-port=127.0.0.1:7000");
    let tls = format!("{c10d} --peer-cert=c --peer-key=k --peer-ca=a");
    for line in [&tls, &bound, local, "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=n0", "--standalone"] {
        let closed = run(&format!("{line} --require-peer-tls t"));
        assert!(closed.store.choice.endpoints().iter().all(|store| !closed.network.leaves_open(store)), "{line}");
    }
    assert!(!run_with(&format!("{c10d} t"), &[("PET_INSECURE", "1")]).unwrap().network.leaves_open(&node0));
}

#[test]
fn the_address_that_is_bound_is_announced_unless_another_is_given() {
    let told = |flags: &str| {
        let options = etcd(flags);
        (options.network.bind.map(|ip| ip.to_string()), options.network.port, options.network.local_addr)
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(told("--peer-port=7000"), (None, 7000, None));
    assert_eq!(told("--peer-port=10.0.0.1:7000"), (text("10.0.0.1"), 7000, text("10.0.0.1")));
    assert_eq!(told("--peer-port=[::]:0"), (text("::"), 0, None));
    assert_eq!(told("--peer-port=10.0.0.1:1 --local-addr=n1"), (text("10.0.0.1"), 1, text("n1")));
}

#[test]
fn tls_and_users_reach_etcd() {
    let rendezvous = |flags: &str| match etcd(flags).store.choice {
        StoreChoice::Etcd { tls, credentials, .. } => (tls, credentials),
        other => panic!("{other:?}"),
    };
    let tls = Tls { ca: Some("ca".into()), client: Some(("c".into(), "k".into())) };
    for conf in ["protocol=https,cert=c,key=k,cacert=ca", "ssl_cert=c,ssl_cert_key=k,ca_cert=ca"] {
        assert_eq!(rendezvous(&format!("--rdzv-conf {conf}")), (Some(tls.clone()), None), "{conf}");
    }
    assert_eq!(rendezvous("--rdzv-endpoint https://h").0, Some(Tls::default()));
    assert_eq!(rendezvous("--rdzv-endpoint http://h:1/").0, None);
    let user = Credentials { user: "u".into(), password_file: "/f".into() };
    assert_eq!(rendezvous("--rdzv-conf user=u,password_file=/f"), (None, Some(user)));
    let disagree = mistake_with("--rdzv-backend=etcd --rdzv-endpoint=https://h --rdzv-conf protocol=http t", &[]);
    assert!(disagree.contains("disagree"), "{disagree}");
}

#[test]
fn endpoints_have_default_ports_and_may_be_several() {
    let table = [
        ("", "localhost:2379"),
        ("--rdzv-endpoint=h", "h:2379"),
        ("--rdzv-endpoint=etcd_service:4001", "etcd_service:4001"),
        ("--rdzv-endpoint=[::1]", "[::1]:2379"),
        ("--rdzv-endpoint=[fd00::2]:99", "[fd00::2]:99"),
        ("--rdzv-endpoint=a,b:1,[::1]:2", "a:2379 b:1 [::1]:2"),
    ];
    for (flags, expected) in table {
        assert_eq!(etcd_endpoints(&etcd(flags)).join(" "), expected, "{flags}");
    }
    let hosted = |line: &str| run(line).store.choice;
    let at =
        |host: &str, port, is_host| StoreChoice::Hosted { endpoint: Endpoint { host: host.into(), port }, is_host };
    assert_eq!(hosted("--rdzv-backend=c10d --nnodes=2 t"), at("localhost", 29400, None));
    assert_eq!(hosted("--rdzv-backend=c10d --rdzv-endpoint=n0 --nnodes=2 t"), at("n0", 29400, None));
    let told = hosted("--rdzv-backend=c10d --rdzv-endpoint=n0:5 --nnodes=2 --rdzv-conf is_host=true,read_timeout=60 t");
    assert_eq!(told, at("n0", 5, Some(true)));
    assert_eq!(hosted("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 t"), StoreChoice::Standalone);
}

#[test]
fn standalone_overrides_other_flags_and_says_so() {
    let options = run("--standalone --rdzv-backend=etcd --rdzv-endpoint=h:1 --rdzv-id=J --nnodes=1:4 t");
    assert_eq!(options.store.choice, StoreChoice::Standalone);
    assert_eq!((options.job.as_ref(), options.spec.max_nodes), (FRESH.to_string().as_str(), 1));
    assert_eq!(options.log.warnings.len(), 4, "{:?}", options.log.warnings);
    assert_eq!(run("--with_etcd t").store.choice, StoreChoice::Standalone);
    // A value that is not used cannot be wrong. It may come from a variable that is set for all jobs of a cluster.
    assert_eq!(run_with("--standalone t", &[("PET_RDZV_ID", "a/b")]).unwrap().log.warnings, [""; 0]);
}

#[test]
fn an_etcd_job_without_an_id_is_torchruns_none_with_a_warning() {
    let options = run("--rdzv-backend=etcd t");
    assert_eq!(options.job.as_ref(), "none");
    assert!(options.log.warnings[0].contains("two such jobs on one etcd become one"), "{:?}", options.log.warnings);
}

#[test]
fn flags_may_be_spelled_with_underscores_and_be_shortened() {
    let full = run("--rdzv-backend c10d --rdzv-endpoint localhost --nproc-per-node 2 --max-restarts 3 --redirects 3 t");
    for line in [
        "--rdzv_backend c10d --rdzv_endpoint localhost --nproc_per_node 2 --max_restarts 3 --redirects 3 t",
        "--rdzv-b c10d --rdzv_end=localhost --nproc 2 --max 3 --redirect=3 t",
        "--max-restarts 9 --rdzv-b=c10d --rdzv-e localhost --nproc_per 2 --max-r=3 -r3 -- t",
    ] {
        assert_eq!(run(line), full, "{line}");
    }
    assert_eq!(run("--nnode=1 --stand t").store.choice, StoreChoice::Standalone);
}

#[test]
fn variables_are_defaults_and_the_command_line_wins() {
    let env = [
        ("PET_NNODES", "1:2"),
        ("PET_NPROC_PER_NODE", "4"),
        ("PET_RDZV_BACKEND", "etcd"),
        ("PET_RDZV_ENDPOINT", "etcd:2379"),
        ("PET_RDZV_ID", "from-env"),
        ("PET_RDZV_CONF", "last_call_timeout=3"),
        ("PET_STANDALONE", "0"),
        ("PET_MAX_RESTARTS", "100"),
        ("PET_MONITOR_INTERVAL", "5"),
        ("PET_START_METHOD", "spawn"),
        ("PET_NODE_RANK", "1"),
        ("PET_ROLE", "r"),
        ("PET_MODULE", "1"),
        ("PET_NO_PYTHON", "0"),
        ("PET_LOG_DIR", "/logs"),
        ("PET_REDIRECTS", "1"),
        ("PET_TEE", "2"),
        ("PET_VERBOSE", "1"),
        ("PET_RUN_PATH", "0"),
    ];
    let options = run_with("pkg.train", &env).unwrap();
    assert_eq!(nodes(&options), (1, 2));
    assert_eq!(options.workers.count, WorkerCount::Count(4));
    assert_eq!(etcd_endpoints(&options), ["etcd:2379"]);
    assert_eq!((options.job.as_ref(), options.spec.max_restarts), ("from-env", 100));
    assert_eq!(options.workers.role, "r");
    assert_eq!(options.spec.timings.last_call, Duration::from_secs(3));
    assert_eq!(options.workers.program.kind, ProgramKind::Module);
    assert_eq!(options.output.logs.dir, LogDir::At("/logs".into()));
    assert_eq!(options.output.logs.redirects.of(0), Streams { stdout: true, stderr: false });
    assert_eq!(options.output.logs.tee.of(0), Streams { stdout: false, stderr: true });
    assert_eq!(options.log.level, Level::DEBUG);
    assert_eq!(options.log.warnings, [""; 0], "an operator's variables are no reason to warn");

    let options = run_with("--nnodes=3 --rdzv-id=J --tee=3 t", &env).unwrap();
    assert_eq!((options.spec.min_nodes, options.job.as_ref()), (3, "J"));
    assert_eq!(options.output.logs.tee.of(5), Streams { stdout: true, stderr: true });

    // Empty means unset, and words after the program are no flags of ours.
    let empty = run_with("t --nnodes=9", &[("PET_NNODES", ""), ("PET_STANDALONE", "")]).unwrap();
    assert_eq!(empty.spec.max_nodes, 1);
}

#[test]
fn the_stop_grace_has_one_meaning_and_an_order() {
    let grace = |line: &str, env| run_with(line, env).unwrap().spec.timings.stop_grace.as_secs();
    let conf = "--rdzv-backend=c10d --rdzv-conf stop_grace=7";
    let env = [("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")];
    assert_eq!(grace(&format!("{conf} --shutdown-timeout=5 t"), &env), 5);
    assert_eq!(grace("t", &env), 9);
    assert_eq!(grace(&format!("{conf} t"), &[]), 7);
    assert_eq!(grace("t", &[]), Timings::default().stop_grace.as_secs());
}

#[test]
fn the_drain_grace_is_the_stop_grace_unless_it_is_given() {
    let grace = |line: &str| run(line).spec.timings.drain_grace.as_secs();
    assert_eq!(grace("t"), Timings::default().drain_grace.as_secs());
    assert_eq!(grace("--shutdown-timeout=5 t"), 5);
    assert_eq!(grace("--shutdown-timeout=5 --drain-grace=2m t"), 120);
    let conf = "--rdzv-backend=c10d --rdzv-conf stop_grace=7,drain_grace=9";
    assert_eq!(grace(&format!("{conf} t")), 9);
    assert_eq!(grace(&format!("{conf} --drain-grace=1 t")), 1);
}

#[test]
fn the_time_to_quiesce_is_part_of_the_stop_grace() {
    let quiesce = |conf: &str| etcd(conf).workers.quiesce_timeout;
    assert_eq!(quiesce(""), Timings::default().stop_grace / 2);
    assert_eq!(quiesce("--shutdown-timeout=5"), Duration::from_millis(2500));
    assert_eq!(quiesce("--rdzv-conf stop_grace=7,quiesce_timeout=6"), Duration::from_secs(6));
    assert_eq!(quiesce("--rdzv-conf stop_grace=7,quiesce_timeout=9"), Duration::from_secs(7));
    assert_eq!(quiesce("--rdzv-conf quiesce_timeout=0"), Duration::ZERO);
}

#[test]
fn the_rest_of_the_flags_arrive() {
    let options = run(
        "--rdzv-backend=etcd --rdzv-id=J --rdzv-conf prefix=my/jobs/ --node-name=n1 --local-addr=[::1] --peer-port=7000 \
         --restart-policy=all --on-store-loss=fence --json-logs --no-python -vv sleep 5",
    );
    assert_eq!(options.store.prefix.as_deref(), Some("/my/jobs"));
    assert_eq!((options.node_name.as_deref(), options.network.local_addr.as_deref()), (Some("n1"), Some("::1")));
    assert_eq!((options.network.port, options.log.json), (7000, true));
    assert_eq!((options.workers.program.kind, options.log.level), (ProgramKind::Executable, Level::TRACE));
    let spec = options.spec;
    assert_eq!((spec.restart_policy, spec.on_store_loss), (RestartPolicy::All, OnStoreLoss::Fence));
    assert_eq!((spec.min_nodes, spec.max_nodes, spec.timings), (1, 1, Timings::default()));
    let conf = etcd("--rdzv-conf on_store_loss=fence --on-store-loss=wait");
    assert_eq!(conf.spec.on_store_loss, OnStoreLoss::Wait, "the flag goes before the key");
}

#[test]
fn who_serves_the_workers_store_is_the_keys_word_or_torchruns_variable() {
    let host = |conf: &str, disabled: &str| {
        let env = [("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", disabled)];
        run_with(&format!("{conf} t"), &env).unwrap_or_else(|stop| panic!("{conf}: {stop}")).workers.store_host
    };
    assert_eq!(host("", ""), StoreHost::Agent(WorkersStoreLimits::default()));
    assert_eq!((host("", "0"), host("", "1")), (host("", ""), StoreHost::Workers));
    assert_eq!(host("--rdzv-conf workers_store=workers", ""), StoreHost::Workers);
    assert_eq!(host("--rdzv-conf workers_store=agent", "1"), host("", ""), "the key goes before the variable");
    let small = WorkersStoreLimits { memory: 3 << 20, ..WorkersStoreLimits::default() };
    assert_eq!(host("--rdzv-conf workers_store_memory=3MiB", ""), StoreHost::Agent(small));
}

#[test]
fn health_is_this_machines_alone_unless_an_address_is_given() {
    let health = |flags: &str, env: &str| {
        let options = run_with(&format!("{flags} t"), &[("TORCHELASTIC_HEALTH_CHECK_PORT", env)]);
        options.unwrap_or_else(|stop| panic!("{flags}: {stop}")).health.map(|port| port.at.to_string())
    };
    let needed = |flags: &str| {
        let variable = [("TORCHELASTIC_HEALTH_CHECK_PORT", "7")];
        run_with(&format!("{flags} t"), &variable).unwrap().health.map(|port| port.needed)
    };
    assert_eq!((needed("--health-port=8080"), needed("")), (Some(true), Some(false)));
    assert_eq!(health("--health-port=8080", "").as_deref(), Some("127.0.0.1:8080"));
    assert_eq!(health("--health-port=0.0.0.0:8080", "7").as_deref(), Some("0.0.0.0:8080"));
    assert_eq!(health("--health-port=[::]:8080", "").as_deref(), Some("[::]:8080"));
    assert_eq!(health("", "8080").as_deref(), Some("127.0.0.1:8080"));
    assert_eq!(health("", "0.0.0.0:8080").as_deref(), Some("0.0.0.0:8080"));
    assert_eq!(health("", "x"), None);
}

#[test]
fn an_id_that_was_given_is_the_jobs_name_also_if_it_is_a_uuid() {
    let given = FRESH.to_string();
    let one = run(&format!("--rdzv-backend=c10d --nnodes=1 --rdzv-id={given} t"));
    assert_eq!((one.job.as_ref(), one.is_unnamed), (given.as_str(), false));
    assert!(run("--standalone t").is_unnamed && run("--rdzv-backend=static t").is_unnamed);
}

#[test]
fn flags_without_effect_are_taken() {
    let options = run("--start-method=fork --monitor-interval=5 --rdzv-backend=c10d --rdzv-conf \
         close_timeout=30,keep_alive_interval=2 t");
    assert_eq!(options.log.warnings.len(), 2, "{:?}", options.log.warnings);
    let options = run("--node_rank 0 --master_addr=h --rdzv-backend=c10d t");
    assert_eq!(options.log.warnings.len(), 2, "{:?}", options.log.warnings);
    assert!(options.log.warnings[0].starts_with("--node-rank has no effect with --rdzv-backend=c10d"));
    let operators = [("PET_NODE_RANK", "3"), ("PET_MASTER_ADDR", "h"), ("PET_MASTER_PORT", "1")];
    assert_eq!(run_with("--rdzv-backend=c10d t", &operators).unwrap().log.warnings, [""; 0]);
}

#[test]
fn help_and_version_are_no_mistakes() {
    flags::definition(Dialect::Own).debug_assert();
    let Err(help @ Stop::Show(_)) = run_with("--help", &[]) else { panic!("no help") };
    assert_eq!(help.exit_code(Dialect::Own), 0);
    let text = help.to_string();
    for part in ["Rendezvous:", "--nnodes <N|MIN:MAX>", "Examples:", "--rdzv-id=JOB", "does not poll", "Exit codes"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(!text.contains("logs-specs"), "what is refused is not advertised");
    let Err(Stop::Show(version)) = run_with("--version", &[]) else { panic!("no version") };
    assert_eq!(version.trim(), concat!("elastic-agent ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_double_dash_before_the_program_goes_and_later_ones_stay() {
    let options = run("--standalone -- t.py -- --nnodes=7 -m");
    assert_eq!(options.workers.program.name, "t.py");
    assert_eq!(options.workers.program.args, ["--", "--nnodes=7", "-m"]);
    assert_eq!(run("t.py -- x").workers.program.args, ["--", "x"]);
    assert_eq!(run("-- -odd-name x").workers.program.name, "-odd-name");
}

/// Words that a user might write after the program: any bytes, and words that look like our own flags.
fn word() -> impl Strategy<Value = OsString> {
    let own = ["--", "-", "", "-m", "-r", "--nnodes", "--nnodes=2", "--rdzv_id=x", "--help", "-V", "--no_python", "-1"];
    prop_oneof![
        proptest::sample::select(own.to_vec()).prop_map(OsString::from),
        proptest::collection::vec(1u8.., 0..12).prop_map(OsString::from_vec),
        "-{1,2}[a-z_-]{0,12}(=.{0,5})?".prop_map(OsString::from),
    ]
}

#[test]
fn a_bandwidth_is_in_bits_per_second() {
    for (text, rate) in
        [("1Gbit", 1_000_000_000), ("2.5gbit", 2_500_000_000), ("800Mbit/s", 800_000_000), ("64kbit", 64_000)]
    {
        let options = etcd(&format!("--preflight-peer-bandwidth={text}"));
        assert_eq!(options.preflight.peer_bandwidth.map(|rate| rate.0), Some(rate), "{text}");
    }
    assert_eq!(etcd("").preflight.peer_bandwidth, None);
    let warned = etcd("--rdzv-conf=api=v2 --preflight-peer-bandwidth=1Gbit").log.warnings;
    assert!(warned.iter().any(|line| line.contains("--preflight-peer-bandwidth has no effect")), "{warned:?}");
}

proptest! {
    #[test]
    fn what_follows_the_program_is_never_touched(
        words in proptest::collection::vec(word(), 0..12),
        flags in proptest::sample::subsequence(vec!["--nnodes=1", "--max_restarts=2", "-r3", "--standalone", "-v"], 0..5),
        dashes in any::<bool>(),
    ) {
        let mut argv: Vec<OsString> = flags.iter().map(OsString::from).collect();
        argv.extend(dashes.then(|| "--".into()));
        argv.push("train.py".into());
        argv.extend(words.iter().cloned());
        let options = run_os(argv).map_err(|stop| TestCaseError::fail(stop.to_string()))?;
        prop_assert_eq!(options.workers.program.name, OsString::from("train.py"));
        prop_assert_eq!(options.workers.program.args, words);
        prop_assert_eq!(options.spec.max_restarts, if flags.contains(&"--max_restarts=2") { 2 } else { 0 });
    }

    #[test]
    fn nothing_written_can_make_parsing_panic(words in proptest::collection::vec(word(), 0..8)) {
        if let Err(stop @ Stop::Usage(_)) = run_os(words) {
            prop_assert_eq!(stop.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn a_suggested_id_is_accepted(text in "\\PC{1,300}") {
        if let Err(refusal) = values::id(&text, LONGEST_JOB)
            && let Some(clean) = refusal.advice.strip_prefix("for example `")
        {
            let clean = clean.trim_end_matches('`');
            prop_assert_eq!(values::id(clean, LONGEST_JOB), Ok(clean.to_owned()));
        }
    }
}
