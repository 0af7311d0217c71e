//! Hosts with two networks, as network namespaces: the one that leads to the store is the one that is used.

use std::process::Command;

use elastic_tests::agents::{Job, LIMIT};

use crate::python::{noted, python};

/// Two hosts, each on two networks; the default route leads into the first, the store is in the second.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// None, with the reason printed, where namespaces may not be made; `ELASTIC_REQUIRE_NETNS=1` makes that a failure.
    fn new(test: &str) -> Option<Hosts> {
        let names = ["a", "b"].map(|host| format!("elastic-{test}-{}-{host}", std::process::id()));
        let hosts = Hosts { names };
        match hosts.set_up() {
            Ok(()) => Some(hosts),
            Err(why) if std::env::var_os("ELASTIC_REQUIRE_NETNS").is_some() => panic!("no network namespaces: {why}"),
            Err(why) => {
                eprintln!("skipped: no network namespaces: {why}");
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let [a, b] = &self.names;
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
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.names {
            // Where it was never made there is nothing to delete.
            let _ = Command::new("ip").args(["netns", "del", host]).output();
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}; install iproute2"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", args.join(" "), said.trim())) }
}

/// Notes what it was told, and meets its peer where its master is.
const MEETS: &str = r#"
here()
names = "MASTER_ADDR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
note(f"told-{node}", " ".join(e.get(name, "-") for name in names))
family = socket.AF_INET6 if ":" in e["MASTER_ADDR"] else socket.AF_INET
master = (e["MASTER_ADDR"], int(e["MASTER_PORT"]))
link = socket.socket(family)
if rank == 0:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    link.bind(master)
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

/// A job of both hosts whose store is served by the first, at `address`. The flags are both agents'.
async fn meets(hosts: &Hosts, address: &str, flags: [&[&str]; 2], env: &[(&str, &str)]) -> Job {
    let endpoint = format!("--rdzv-endpoint={address}:29400");
    // The script itself listens where rank 0 is to.
    let mut job = Job::met_by(&["--rdzv-backend=c10d", &endpoint], "2").conf("workers_store", "workers");
    for (name, value) in env {
        job = job.env(name, value);
    }
    let job = python(job, MEETS);
    let [a, b] = &hosts.names;
    // The first to come gets rank 0.
    let mut first = job.start_in(a, "a", flags[0]);
    first.says("this agent serves the job's store", LIMIT).await;
    let mut second = job.start_in(b, "b", flags[1]);
    assert_eq!([first.exit(LIMIT).await, second.exit(LIMIT).await], [0, 0]);
    job
}

#[tokio::test]
async fn the_network_that_leads_to_the_store_is_the_workers_too() {
    let Some(hosts) = Hosts::new("route") else { return };
    let job = meets(&hosts, "10.77.2.1", [&[], &[]], &[]).await;
    let told = ["a", "b"].map(|node| noted(&job, &format!("told-{node}")));
    let master = told[0].split(' ').next().unwrap();
    assert!(["10.77.2.1", "10.77.2.2"].contains(&master), "{told:?}");
    assert_eq!(told[0], format!("{master} net2 =net2\n"));
    assert_eq!(told[1], told[0]);
    assert!(noted(&job, "met").starts_with("10.77.2."), "{}", noted(&job, "met"));
}

#[tokio::test]
async fn the_local_address_decides_and_what_is_set_stays() {
    let Some(hosts) = Hosts::new("flag") else { return };
    let flags: [&[&str]; 2] = [&["--local-addr=10.77.1.1"], &["--local-addr=10.77.1.2"]];
    let job = meets(&hosts, "10.77.2.1", flags, &[("NCCL_SOCKET_IFNAME", "net2")]).await;
    let told = ["a", "b"].map(|node| noted(&job, &format!("told-{node}")));
    let master = told[0].split(' ').next().unwrap();
    assert!(["10.77.1.1", "10.77.1.2"].contains(&master), "{told:?}");
    assert_eq!(told, [format!("{master} net1 net2\n"), format!("{master} net1 net2\n")]);
    assert!(noted(&job, "met").starts_with("10.77.1."), "{}", noted(&job, "met"));
}

#[tokio::test]
async fn with_ipv6_it_is_the_same() {
    let Some(hosts) = Hosts::new("six") else { return };
    let job = meets(&hosts, "[fd77:2::1]", [&[], &[]], &[]).await;
    let told = noted(&job, "told-a");
    let master = told.split(' ').next().unwrap();
    assert!(["fd77:2::1", "fd77:2::2"].contains(&master), "{told}");
    assert_eq!(told, format!("{master} net2 =net2\n"));
    assert!(noted(&job, "met").starts_with("fd77:2::"), "{}", noted(&job, "met"));
}
