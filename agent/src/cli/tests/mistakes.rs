//! Every mistake on the command line, with the message it gets.

use super::*;

/// Command lines, and what the message of each holds.
const MISTAKES: &[(&str, &str)] = &[
    ("--nnodes=3:1 t", "--nnodes=3:1: the minimum 3 is more than the maximum 1; write N or MIN:MAX"),
    ("--nnodes=0 t", "--nnodes=0: 0 is less than 1; write N or MIN:MAX"),
    ("--nnodes=-1 t", "--nnodes=-1: -1 is less than 1"),
    ("--nnodes -1 t", "--nnodes=-1: -1 is less than 1"),
    ("--nnodes=a:b t", "--nnodes=a:b: `a` is not a whole number"),
    ("--nnodes=1:2:3 t", "--nnodes=1:2:3: it has 3 parts"),
    ("--nnodes=1: t", "--nnodes=1:: `` is not a whole number"),
    ("--nnodes= t", "--nnodes=: `` is not a whole number"),
    ("--nnodes=99999999999999999999 t", "is more than 1000000"),
    ("--nnodes", "--nnodes: its value is missing; write --nnodes=VALUE"),
    ("--nnodes --standalone t", "--nnodes: its value is missing"),
    ("--standalone=1 t", "--standalone: it takes no value; write --standalone alone"),
    ("--nproc-per-node=0 t", "--nproc-per-node=0: 0 is less than 1; give a number from 1 on, or `auto`"),
    ("--nproc-per-node=tpu t", "--nproc-per-node=tpu: unsupported value `tpu`; give a number from 1 on, or `auto`"),
    ("--max-restarts=-1 t", "--max-restarts=-1: -1 is less than 0"),
    ("--max-restarts=1.5 t", "`1.5` is not a whole number"),
    ("--restarts-without-progress=0 t", "0 is less than 1"),
    ("--restart-policy=some t", "give `failures` or `all`"),
    ("--on-store-loss=panic t", "give `wait` or `fence`"),
    ("--bogus t", "--bogus: no such flag; see elastic-agent --help"),
    ("--nodes=2 t", "no such flag; did you mean `--nnodes`?"),
    ("--node=2 t", "write one of --node-name, --node-rank"),
    ("--rdzv=etcd t", "--rdzv: it is short for several flags; write one of --rdzv-backend, --rdzv-endpoint"),
    ("--log=x t", "write one of --log-dir, --log-line-prefix-template, --log-rotate, --log-attempts, --logs-specs"),
    ("--rdzv_=etcd t", "it is short for several flags"),
    ("", "PROGRAM: no program is named; put the script after the flags"),
    ("--standalone", "PROGRAM: no program is named"),
    ("--standalone --", "PROGRAM: no program is named"),
    ("-m --no-python t", "--no-python: it cannot be used with --module"),
    ("--preload=torch --no-python t", "--preload=torch: the workers run no Python script or module"),
    ("--preload=torch,,x t", "--preload=torch,,x: `` is no module's name; write, for example, torch,numpy"),
    ("--preload=a-b t", "`a-b` is no module's name"),
    ("--standalone --nnodes=2 t", "--nnodes=2: one node alone cannot be 2; use --rdzv-backend=etcd"),
    ("--nnodes=2 --node-rank=2 t", "--node-rank=2: 2 nodes have the ranks 0 to 1; give each node its own, from 0"),
    ("--master-port=1 --node-rank=1 t", "--node-rank=1: 1 nodes have the ranks 0 to 0"),
    ("--nnodes=2 --node-rank=-1 t", "--node-rank=-1: -1 is less than 0"),
    ("--nnodes=2 --master-port=0 t", "--master-port=0: other nodes cannot know which port 0 becomes"),
    ("--nnodes=2 --master-addr=a:1 t", "--master-addr=a:1: it is not a host"),
    ("--nnodes=2 --rdzv-endpoint=a,b t", "--rdzv-endpoint=a,b: it names several hosts"),
    (
        "--nnodes=2 --rdzv-conf protocol=https t",
        "that is for etcd, and the store here is an agent's own; give --peer-cert",
    ),
    ("--peer-cert=c --peer-ca=a t", "--peer-cert and --peer-ca: it comes without --peer-key; give all three"),
    ("--peer-port=host:1 t", "--peer-port=host:1: it is no address with a port"),
    ("--rdzv-backend=etcd-v2 --rdzv-endpoint=a:0 t", "a:0 has port 0; 2379 is etcd's port"),
    ("--rdzv-backend=zeus t", "--rdzv-backend=zeus: no such backend; one of a Python package cannot be"),
    ("--rdzv-backend=c10d --rdzv-endpoint=a,b t", "it names 2 hosts"),
    ("--rdzv-backend=c10d --rdzv-endpoint=a,b,a --nnodes=3 t", "it names a:29400 twice"),
    ("--rdzv-backend=c10d --rdzv-endpoint=a,b,c --rdzv-conf is_host=1 --nnodes=3 t", "leave --rdzv-conf is_host out"),
    ("--rdzv-backend=c10d --rdzv-endpoint=https://a t", "does not speak https"),
    ("--rdzv-backend=c10d --rdzv-endpoint=a:0 --nnodes=2 t", "other nodes cannot know which port 0 becomes"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a:0 t", "a:0 has port 0; 2379 is etcd's port"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a:b t", "--rdzv-endpoint=a:b: `b` is not a port"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a:65536 t", "65536 is not a port"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a: t", "`` is not a port"),
    ("--rdzv-backend=etcd --rdzv-endpoint=:2379 t", "a host is missing"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a,,b t", "a host is missing"),
    (
        "--rdzv-backend=etcd --rdzv-endpoint=::1 t",
        "without brackets, an IPv6 address and a port look the same; write [::1]:2379",
    ),
    ("--rdzv-backend=etcd --rdzv-endpoint=[::1 t", "lacks the closing `]`"),
    ("--rdzv-backend=etcd --rdzv-endpoint=[a]:1 t", "`a` is not an IPv6 address"),
    ("--rdzv-backend=etcd --rdzv-endpoint=[::1]x t", "`x` follows the `]`"),
    ("--rdzv-backend=etcd --rdzv-endpoint=a/b t", "'/' cannot be part of a host name"),
    ("--rdzv-backend=etcd --rdzv-endpoint=unix://a t", "`unix://` is not a protocol"),
    ("--rdzv-backend=etcd --rdzv-endpoint=http://a,https://b t", "some endpoints say http and others https"),
    (
        "--rdzv-backend=etcd --rdzv-id=a/b t",
        "'/' cannot be part of it: letters, digits and `._-:@+=` can; for example `a-b`",
    ),
    ("--rdzv-backend=etcd --rdzv-id=.. t", "it names a directory"),
    ("--rdzv-backend=etcd --rdzv-id=jöb t", "for example `j-b`"),
    ("--node-name=a/b t", "--node-name=a/b: '/' cannot be part of it"),
    ("--local-addr=a:1 t", "--local-addr=a:1: it is not a host; give a host name or an address, without a port"),
    ("--peer-port=70000 t", "--peer-port=70000: `70000` is not a port"),
    ("--shutdown-timeout=-1 t", "--shutdown-timeout=-1: a time cannot be negative"),
    ("--shutdown-timeout=5w t", "`5w` is not a time; write seconds"),
    ("--monitor-interval=x t", "--monitor-interval=x:"),
    ("--preflight-peer-bandwidth=1G t", "--preflight-peer-bandwidth=1G: `1G` has no unit that is known; write bits"),
    ("--preflight-peer-bandwidth=100MB/s t", "`100MB/s` has no unit that is known"),
    ("--preflight-peer-bandwidth=-1Gbit t", "`-1Gbit` is not a rate"),
    ("--preflight-peer-bandwidth=Gbit t", "`Gbit` is not a rate"),
    ("--preflight-peer-bandwidth=0Gbit t", "`0Gbit` is too slow to measure"),
    ("--preflight-peer-bandwidth=99999Gbit t", "`99999Gbit` is faster than any link"),
    ("-r 4 t", "--redirects=4: \"4\" is no choice of streams; write 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
    ("-r 0:1,2 t", "\"2\" has no ':'"),
    ("-t 0:1,0:2 t", "local rank 0 is given twice"),
    ("--local-ranks-filter=0,a t", "--local-ranks-filter=0,a: `a` is no local rank; write local ranks as in 0,3"),
    ("--duplicate-stdout-filters=a, t", "an empty word is in every line; write words between commas"),
    ("--log-rotate=1 t", "--log-rotate=1: 1 bytes are less than 4096; write SIZE or SIZE:KEEP"),
    ("--log-rotate=1M:0 t", "`0` is not a number of files"),
    ("--log-attempts=0 t", "--log-attempts=0: 0 is less than 1; give a whole number from 1 to"),
    ("--report=xml t", "--report=xml: `xml` is not known; give `text` or `json`"),
    (
        "--numa-binding=near t",
        "--numa-binding=near: `near` is not a binding mode; give `node`, `socket`, `exclusive` or",
    ),
    ("--start-method=thread t", "--start-method=thread: `thread` is not known; give `spawn`, `fork` or"),
    ("--event-log-handler=kafka t", "`kafka` is not a handler of the agent; it cannot load one"),
    ("--logs-specs=mine t", "--logs-specs: it names a class of a Python package, and no Python runs in the agent"),
    ("--print-completion=ksh t", "--print-completion=ksh: `ksh` is not a known shell; give bash, zsh, fish or tcsh"),
];

#[test]
fn every_mistake_is_one_line_with_what_why_and_what_to_do() {
    for (line, expected) in MISTAKES {
        let text = mistake_with(line, &[]);
        assert!(text.contains(expected), "{line}:\n  {text:?} should hold\n  {expected:?}");
    }
    let long = mistake_with(&format!("--rdzv-backend=etcd --rdzv-id={} t", "x".repeat(256)), &[]);
    assert!(long.contains("it has 256 bytes, 255 are the most"), "{long}");
    assert_eq!(etcd("").job.as_ref(), "J");
}

#[test]
fn rendezvous_details_are_known_and_checked() {
    let table = [
        ("lease_ttl", "the value is missing in `lease_ttl`; write KEY=VALUE"),
        ("=5", "the key is missing in `=5`"),
        ("lease_ttl=5,", "the key is missing in ``"),
        ("lease_tll=5", "--rdzv-conf lease_tll: no such key; did you mean `lease_ttl`?"),
        ("last-call=5", "did you mean `last_call_timeout`?"),
        ("zzz=5", "the keys are join_timeout, timeout,"),
        ("password=x", "a command line can be read by everyone on the host: use password_file=PATH"),
        ("lease_ttl=5,lease_ttl=6", "--rdzv-conf lease_ttl=6: the key is given twice"),
        ("lease_ttl=0", "--rdzv-conf lease_ttl=0: the store counts leases in whole seconds"),
        ("lease_ttl=1500ms", "whole seconds"),
        ("join_timeout=soon", "--rdzv-conf join_timeout=soon: `soon` is not a time"),
        ("join_timeout=0", "it cannot be zero"),
        ("join_timeout=9999999h", "is longer than 100 years"),
        ("join_timeout=1.2.3", "is not a time"),
        ("lease_ttl=3", "a lease of 3s is too short for a margin of 1s"),
        ("quiesce_timeout=soon", "`soon` is not a time"),
        ("on_store_loss=x", "give `wait` or `fence`"),
        ("protocol=ftp", "give `http` or `https`"),
        ("protocol=http,cacert=a", "certificates are given for plain http"),
        ("cert=a", "cert comes without key"),
        ("ssl_cert_key=a", "key comes without cert"),
        ("user=u", "user comes without password_file"),
        ("user=u:p,password_file=f", "give the name alone"),
        ("prefix=/", "it is no key prefix"),
        ("prefix=a//b", "it is no key prefix"),
        ("is_host=perhaps", "is neither true nor false"),
        ("workers_store=rank0", "give `agent` or `workers`"),
        ("workers_store_memory=lots", "`lots` is not a size; give one such as 4096, 500M or 256MiB"),
        ("workers_store_memory=100KiB", "less than 1MiB is too little"),
        ("store_type=file", "a store of type `file` is not served"),
        ("api=v1", "`v1` is not an API of etcd; give `v3` or `v2`"),
    ];
    for (conf, expected) in table {
        let text = mistake_with(&format!("--rdzv-backend=etcd --rdzv-id=J --rdzv-conf {conf} t"), &[]);
        assert!(text.contains(expected), "{conf}:\n  {text:?} should hold\n  {expected:?}");
    }
    for conf in ["protocol=https", "cacert=a", "user=u,password_file=f"] {
        let text = mistake_with(&format!("--rdzv-backend=c10d --rdzv-conf {conf} t"), &[]);
        assert!(text.contains("that is for etcd"), "{text}");
    }
}

#[test]
fn mistakes_in_variables_name_the_variable() {
    let table = [
        ("PET_STANDALONE", "true", "PET_STANDALONE=true: it is not a number; set 1 to switch it on"),
        ("PET_NNODES", "3:1", "PET_NNODES=3:1: the minimum 3"),
        ("PET_RDZV_BACKEND", "etcd-v3", "no such backend"),
        ("PET_RUN_PATH", "yes", "PET_RUN_PATH=yes: it is not a number"),
        ("PET_NUMA_BINDING", "x", "PET_NUMA_BINDING=x: `x` is not a binding mode"),
        ("PET_LOCAL_RANKS_FILTER", "x", "PET_LOCAL_RANKS_FILTER=x: `x` is no local rank"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x:"),
    ];
    for (name, value, expected) in table {
        let text = mistake_with("t", &[(name, value)]);
        assert!(text.contains(expected), "{name}: {text:?} should hold {expected:?}");
    }
}

#[test]
fn values_that_would_break_a_terminal_are_escaped() {
    let text = match run_os(vec!["--rdzv-backend=a\nb\u{1b}[2J".into(), "t".into()]) {
        Err(stop) => stop.to_string(),
        Ok(options) => panic!("{options:?}"),
    };
    assert!(text.contains(r"a\nb\u{1b}[2J") && text.lines().count() == 1, "{text:?}");
}
