//! Hosts with two networks and host names, as network namespaces: how nodes find each other there, and over which
//! network.

use std::ffi::OsString;
use std::io::Write;

use elastic_tests::prelude::*;

use crate::agents::peer_tls::Pki;

/// Two hosts of one name, each booted by itself and on two networks; the default route leads into the first, the store
/// is in the second. Each has an `/etc/hosts` of its own, and no name server.
pub(crate) struct Hosts {
    names: [String; 2],
    files: TempDir,
}

impl Hosts {
    /// None, with the reason printed, where namespaces may not be made; `ELASTIC_REQUIRE_NETNS` makes that a failure.
    pub(crate) fn new(test: &str) -> Option<Hosts> {
        let names = ["a", "b"].map(|host| format!("elastic-{test}-{}-{host}", std::process::id()));
        let files = tempfile::tempdir().unwrap();
        let hosts = Hosts { names, files };
        match hosts.set_up() {
            Ok(()) => Some(hosts),
            Err(why) => {
                skip("NETNS", format_args!("no network namespaces can be made: {why}"));
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let [a, b] = &self.names;
        std::fs::write(self.files.path().join("resolv.conf"), "nameserver 127.0.0.1\n").unwrap();
        // The usual case: a host's own name leads to an address by which others reach it.
        let own = elastic_agent::for_tests::hostname();
        for host in [0, 1] {
            self.knows(host, &format!("127.0.0.1 localhost\n10.77.2.{} {own}\n", host + 1));
            std::fs::create_dir(self.runtime(host)).unwrap();
            std::fs::write(self.boot(host), format!("6f0e9d0c-0b0a-4f3e-8f57-00000000000{host}\n")).unwrap();
        }
        for host in [a, b] {
            ip(&["netns", "add", host])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
        }
        for net in ["1", "2"] {
            let name = format!("net{net}");
            ip(&["-n", a, "link", "add", &name, "type", "veth", "peer", "name", &name, "netns", b])?;
            for (host, number) in [(a, "1"), (b, "2")] {
                ip(&["-n", host, "addr", "add", &format!("10.77.{net}.{number}/24"), "dev", &name])?;
                ip(&["-n", host, "addr", "add", &format!("fd77:{net}::{number}/64"), "dev", &name, "nodad"])?;
                ip(&["-n", host, "link", "set", &name, "up"])?;
            }
        }
        for host in [a, b] {
            ip(&["-n", host, "route", "add", "default", "dev", "net1"])?;
            ip(&["-n", host, "-6", "route", "add", "default", "dev", "net1"])?;
        }
        Ok(())
    }

    /// Adds to a host's `/etc/hosts`.
    fn knows(&self, host: usize, lines: &str) {
        // Written in place: this file is mounted over the one that the agents see.
        let mut file = std::fs::File::options().create(true).append(true).open(self.file(host)).unwrap();
        file.write_all(lines.as_bytes()).unwrap();
    }

    fn file(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("hosts-{host}"))
    }

    fn boot(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("boot-{host}"))
    }

    fn runtime(&self, host: usize) -> PathBuf {
        self.files.path().join(format!("run-{host}"))
    }

    /// Each network carries so much from now on, such as `1gbit`.
    pub(crate) fn slow_down(&self, rate: &str) {
        let limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"];
        for (host, net) in self.names.iter().flat_map(|host| [(host, "net1"), (host, "net2")]) {
            ip(&[&["netns", "exec", host, "tc", "qdisc", "add", "dev", net, "root"][..], &limit].concat()).unwrap();
        }
    }

    /// Starts the agent `a` or `b` on the first or the second host.
    pub(crate) fn start(&self, job: &Job, host: usize, flags: &[&str]) -> Agent {
        let script = r#"mount --bind "$0" /etc/hosts && mount --bind "$1" /etc/resolv.conf &&
            mount --bind "$2" /proc/sys/kernel/random/boot_id && export XDG_RUNTIME_DIR="$3" && shift 3 && exec "$@""#;
        let files = [self.file(host), self.files.path().join("resolv.conf"), self.boot(host), self.runtime(host)];
        let netns = ["ip", "netns", "exec", &self.names[host], "sh", "-c", script].map(OsString::from);
        job.start_through(&[&netns[..], &files.map(PathBuf::into_os_string)].concat(), ["a", "b"][host], flags)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.names {
            // This fails if the namespace was never made.
            let _ = Command::new("ip").args(["netns", "del", host]).output();
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}; install iproute2"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", args.join(" "), said.trim())) }
}

/// Notes its environment, and meets its peer where its master is.
const MEETS: &str = r#"
here()
names = "MASTER_ADDR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
note(f"told-{node}", " ".join(e.get(name, "-") for name in names))
family = socket.AF_INET6 if ":" in e["MASTER_ADDR"] else socket.AF_INET
master = (e["MASTER_ADDR"], int(e["MASTER_PORT"]))
link = socket.socket(family)
if rank == 0:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    link.bind(("", master[1]))
    link.listen()
    peer, (address, *_) = link.accept()
    note("met", address)
    peer.sendall(b"x")
else:
    for _ in range(200):
        if link.connect_ex(master) == 0: break
        time.sleep(0.05)
        link = socket.socket(family)
    link.recv(1)
"#;

/// A job of both hosts. The flags and variables are those of all its agents.
fn job(flags: &[&str], env: &[(&str, &str)]) -> Job {
    // The script itself listens at the address of rank 0.
    let mut job = Job::met_by(flags, "2").conf("workers_store", "workers");
    for (name, value) in env {
        job = job.env(name, value);
    }
    job.python(MEETS)
}

/// A job whose store is served by the first host, at `address`, when it has ended well. The flags are each agent's.
async fn meets(hosts: &Hosts, address: &str, flags: [&[&str]; 2], env: &[(&str, &str)]) -> Job {
    let job = job(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={address}:29400")], env);
    // The first to come gets rank 0.
    let mut first = hosts.start(&job, 0, flags[0]);
    first.says("this agent serves the job's store", LIMIT).await;
    let mut second = hosts.start(&job, 1, flags[1]);
    assert_eq!([first.exit(LIMIT).await, second.exit(LIMIT).await], [0, 0]);
    // The one that serves the store says that it is open to all.
    let open = "can read and change the job's store, and so what its workers load: to close it, give every node";
    assert_eq!([&first, &second].map(|agent| agent.output().matches(open).count()), [1, 0], "{}", first.output());
    job
}

/// The environment of workers on each host: master, gloo's interface, NCCL's. The master first, which is the same.
fn told(job: &Job) -> (String, [String; 2]) {
    let told = ["a", "b"].map(|node| job.read(&format!("told-{node}")));
    let of =
        |told: &str| told.trim().split_once(' ').map(|(master, rest)| (master.to_owned(), rest.to_owned())).unwrap();
    let [(master, a), (same, b)] = [of(&told[0]), of(&told[1])];
    assert_eq!(master, same);
    (master, [a, b])
}

#[tokio::test]
async fn hosts_of_one_name_are_two_nodes() {
    let Some(hosts) = Hosts::new("same") else { return };
    let job = job(&["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.2.1:29400"], &[]);
    let mut agents = [0, 1].map(|host| hosts.start(&job, host, &["--node-name="]));
    assert_eq!(exits(&mut agents).await, [0, 0]);
    let files = std::fs::read_dir(job.path("")).unwrap().flatten();
    let told = files.filter_map(|file| Some(file.file_name().to_str()?.strip_prefix("told-")?.to_owned()));
    let told: BTreeSet<String> = told.collect();
    let own = format!("{}-", elastic_agent::for_tests::hostname());
    assert!(told.len() == 2 && told.iter().all(|name| name.starts_with(&own)), "{told:?}");
}

#[tokio::test]
async fn the_network_that_leads_to_the_store_is_the_workers_too() {
    let Some(hosts) = Hosts::new("route") else { return };
    let job = meets(&hosts, "10.77.2.1", [&[], &[]], &[]).await;
    let (master, interfaces) = told(&job);
    assert!(["10.77.2.1", "10.77.2.2"].contains(&&*master), "{master}");
    assert_eq!(interfaces, ["- -", "- -"], "gloo and NCCL choose for themselves");
    assert!(job.read("met").starts_with("10.77.2."), "{}", job.read("met"));
}

#[tokio::test]
async fn the_interface_is_pinned_where_that_is_asked_for() {
    let Some(hosts) = Hosts::new("pin") else { return };
    let job = meets(&hosts, "10.77.2.1", [&["--pin-interface"], &["--pin-interface"]], &[]).await;
    assert_eq!(told(&job).1, ["net2 =net2", "net2 =net2"]);
}

#[tokio::test]
async fn gloo_is_pinned_where_the_hosts_name_leads_only_to_itself() {
    let Some(hosts) = Hosts::new("gloo") else { return };
    for host in [0, 1] {
        // Debian sets up a host like this.
        std::fs::write(hosts.file(host), format!("127.0.1.1 {}\n", elastic_agent::for_tests::hostname())).unwrap();
    }
    let job = meets(&hosts, "10.77.2.1", [&[], &[]], &[]).await;
    assert_eq!(told(&job).1, ["net2 -", "net2 -"]);
}

#[tokio::test]
async fn the_local_address_decides_and_what_is_set_stays() {
    let Some(hosts) = Hosts::new("flag") else { return };
    let flags: [&[&str]; 2] =
        [&["--pin-interface", "--local-addr=10.77.1.1"], &["--pin-interface", "--local-addr=10.77.1.2"]];
    let job = meets(&hosts, "10.77.2.1", flags, &[("NCCL_SOCKET_IFNAME", "net2")]).await;
    let (master, interfaces) = told(&job);
    assert!(["10.77.1.1", "10.77.1.2"].contains(&&*master), "{master}");
    assert_eq!(interfaces, ["net1 net2", "net1 net2"]);
    assert!(job.read("met").starts_with("10.77.1."), "{}", job.read("met"));
}

#[tokio::test]
async fn with_ipv6_it_is_the_same() {
    let Some(hosts) = Hosts::new("six") else { return };
    let job = meets(&hosts, "[fd77:2::1]", [&["--pin-interface"], &["--pin-interface"]], &[]).await;
    let (master, interfaces) = told(&job);
    assert!(["fd77:2::1", "fd77:2::2"].contains(&&*master), "{master}");
    assert_eq!(interfaces, ["net2 =net2", "net2 =net2"]);
    assert!(job.read("met").starts_with("fd77:2::"), "{}", job.read("met"));
}

/// Each host's own name leads to itself alone, as Debian has it, and the other's to the second network.
fn stock_debian(hosts: &Hosts) {
    hosts.knows(0, "127.0.1.1 node-a\n10.77.2.2 node-b\n");
    hosts.knows(1, "10.77.2.1 node-a\n127.0.1.1 node-b\n");
}

#[tokio::test]
async fn a_host_whose_name_leads_only_to_itself_is_reached_by_the_others() {
    let Some(hosts) = Hosts::new("debian") else { return };
    stock_debian(&hosts);
    meets(&hosts, "node-a", [&[], &[]], &[]).await;
}

#[tokio::test]
async fn node_0_is_reached_by_a_name_that_leads_only_to_itself() {
    let Some(hosts) = Hosts::new("static") else { return };
    stock_debian(&hosts);
    let job = job(&["--master-addr=node-a"], &[]);
    let mut agents = [hosts.start(&job, 0, &["--node-rank=0"]), hosts.start(&job, 1, &["--node-rank=1"])];
    assert_eq!(exits(&mut agents).await, [0, 0]);
    assert_eq!(told(&job).0, "node-a");
}

#[tokio::test]
async fn an_address_that_can_be_bound_and_is_anothers_is_not_served() {
    let Some(hosts) = Hosts::new("nonlocal") else { return };
    // Hosts behind some load balancers are set up like this.
    for host in &hosts.names {
        let script = "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind";
        ip(&["netns", "exec", host, "sh", "-c", script]).expect("let addresses of others be bound");
    }
    meets(&hosts, "10.77.2.1", [&[], &[]], &[]).await;
}

#[tokio::test]
async fn a_name_that_resolves_only_later_is_waited_for() {
    let Some(hosts) = Hosts::new("later") else { return };
    let job = job(&["--rdzv-backend=c10d", "--rdzv-endpoint=pod-0:29400"], &[]);
    // Given a pod whose own name is not in DNS yet
    let mut agents = [hosts.start(&job, 0, &[]), hosts.start(&job, 1, &[])];
    for agent in &agents {
        agent.says("pod-0 cannot be resolved", LIMIT).await;
    }
    assert!(agents.iter_mut().all(|agent| !agent.is_gone()));

    // When it comes there, then its agent serves, and both tell addresses that the other reaches
    for host in [1, 0] {
        hosts.knows(host, "10.77.2.1 pod-0\n");
    }
    assert_eq!(exits(&mut agents).await, [0, 0]);
    assert!(told(&job).0.starts_with("10.77.2."), "{}", told(&job).0);
}

#[tokio::test]
async fn a_store_for_other_hosts_is_served_over_tls_on_the_address_that_is_given() {
    let Some(hosts) = Hosts::new("tls") else { return };
    let store = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.2.1:29400"];
    // Without certificates, where they are required, no one begins
    let refused = job(&store, &[("PET_REQUIRE_PEER_TLS", "1")]);
    let mut open = hosts.start(&refused, 0, &[]);
    assert_eq!(open.exit(LIMIT).await, 2);
    let why = "PET_REQUIRE_PEER_TLS: the nodes of this job would speak with each other without TLS; give every node";
    assert!(open.output().contains(why), "{}", open.output());

    let (pki, job) = (Pki::of(&["a", "b"]).await, job(&store, &[("PET_REQUIRE_PEER_TLS", "1")]));
    let start = |host: usize| {
        let own = pki.flags(["a", "b"][host]);
        let bound = format!("--peer-port=10.77.2.{}:7000", host + 1);
        hosts.start(&job, host, &[own.each_ref().map(String::as_str).as_slice(), &[&bound]].concat())
    };
    let mut first = start(0);
    first.says("this agent serves the job's store", LIMIT).await;
    let everywhere: Vec<String> = listens(&first).into_iter().filter(|at| !at.starts_with("01024D0A:")).collect();
    assert!(everywhere.is_empty(), "not on 10.77.2.1: {everywhere:?}");
    let mut second = start(1);
    assert_eq!([first.exit(LIMIT).await, second.exit(LIMIT).await], [0, 0]);
}

/// Where anybody listens in an agent's network, as the kernel writes addresses.
fn listens(agent: &Agent) -> Vec<String> {
    let read = |table: &str| std::fs::read_to_string(format!("/proc/{}/net/{table}", agent.pid())).unwrap();
    let tables = read("tcp") + &read("tcp6");
    let of = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns.get(3) == Some(&"0A")).then(|| columns[1].to_owned())
    };
    tables.lines().filter_map(of).collect()
}

#[tokio::test]
async fn node_0_need_not_know_its_own_name_yet() {
    let Some(hosts) = Hosts::new("pod") else { return };
    let job = job(&["--master-addr=pod-0"], &[]);
    let first = hosts.start(&job, 0, &["--node-rank=0"]);
    first.says("this agent serves the job's store", LIMIT).await;
    let second = hosts.start(&job, 1, &["--node-rank=1"]);
    second.says("waiting for it", LIMIT).await;
    for host in [0, 1] {
        hosts.knows(host, "10.77.2.1 pod-0\n");
    }
    assert_eq!(exits(&mut [first, second]).await, [0, 0]);
}

#[tokio::test]
async fn a_name_that_never_resolves_ends_the_wait_with_its_name() {
    let Some(hosts) = Hosts::new("never") else { return };
    let job = job(&["--rdzv-backend=c10d", "--rdzv-endpoint=pod-0:29400"], &[]);
    let job = job.conf("join_timeout", "2s");
    let mut agent = hosts.start(&job, 0, &[]);
    assert_eq!(agent.exit(LIMIT).await, 1);
    let output = agent.output();
    assert!(output.contains("pod-0 cannot be resolved") && output.contains("join_timeout"), "{output}");
}

/// Within seconds, where `join_timeout` is a quarter of an hour.
#[tokio::test]
async fn an_endpoint_that_leads_no_node_to_another_is_named() {
    let Some(hosts) = Hosts::new("endpoint") else { return };
    let job = |endpoint: &str, is_host: Option<&str>| {
        let job = job(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={endpoint}:29400"), "--insecure"], &[]);
        let job = job.conf("join_timeout", "15m");
        if let Some(is_host) = is_host { job.conf("is_host", is_host) } else { job }
    };
    // Each host takes itself for the one that the endpoint names,
    let itself = job("127.0.1.1", None);
    let agents = [0, 1].map(|host| hosts.start(&itself, host, &[]));
    for agent in &agents {
        agent.says("such as --rdzv-endpoint=10.77.", LIMIT).await;
    }
    drop(agents);
    // none has the address, as a Service's, or none may serve,
    for (endpoint, is_host) in [("10.77.2.9", None), ("10.77.2.1", Some("0"))] {
        let job = job(endpoint, is_host);
        let alone = hosts.start(&job, 0, &[]);
        let said = alone.says("up to join_timeout (15m): ", LIMIT).await;
        assert_eq!(said, if is_host.is_none() { "no" } else { "another" }, "{}", alone.output());
        assert!(alone.output().contains("--node-rank=0 or --rdzv-conf=is_host=1"), "{}", alone.output());
    }
    // or both serve.
    let both = job("10.77.2.1", Some("1"));
    let _first = hosts.start(&both, 0, &[]);
    let second = hosts.start(&both, 1, &[]);
    second.says("at 10.77.2.1:29400 another agent serves one: give --rdzv-conf=is_host=1", LIMIT).await;
}

#[tokio::test]
async fn a_pod_is_advised_in_the_variables_of_its_spec() {
    let Some(hosts) = Hosts::new("variables") else { return };
    let env = [("PET_RDZV_ENDPOINT", "10.77.2.1:29400"), ("PET_INSECURE", "1")];
    let job = job(&["--rdzv-backend=c10d"], &env).conf("is_host", "0");
    hosts.start(&job, 1, &[]).says("PET_NODE_RANK=0 or PET_RDZV_CONF=is_host=1", LIMIT).await;
}

#[tokio::test]
async fn a_host_to_which_too_little_comes_is_kept_out() {
    let Some(hosts) = Hosts::new("slow") else { return };
    let limited =
        format!("netns exec {} tc qdisc add dev net2 root tbf rate 20mbit burst 32kb latency 50ms", hosts.names[0]);
    if let Err(why) = ip(&limited.split(' ').collect::<Vec<_>>()) {
        return skip("TBF", format_args!("no link can be made slow: {why}"));
    }
    let job = Job::met_by(&["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.2.1:29400"], "1:2");
    let mut first = hosts.start(&job, 0, &["--preflight-peer-bandwidth=100Mbit"]);
    first.says("bandwidth to a node of the job: no node of it is on another machine yet", LIMIT).await;
    job.runs(1, 1).await;

    let mut second = hosts.start(&job, 1, &["--preflight-peer-bandwidth=100Mbit"]);
    assert_eq!(second.exit(LIMIT).await, 1);
    let said = second.output();
    assert!(said.contains("bit/s from node a at 10.77.2.1:") && said.contains(", of 100 Mbit/s needed: "), "{said}");
    assert_eq!(job.round().map(|round| round.number), Some(1), "the first continues");

    let mut second = hosts.start(&job, 1, &["--preflight-peer-bandwidth=4Mbit"]);
    second.says(", of 4 Mbit/s needed", LIMIT).await;
    job.runs(2, 2).await.exit(0);
    assert_eq!([first.exit(LIMIT).await, second.exit(LIMIT).await], [0, 0]);
}
