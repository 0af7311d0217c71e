//! What a client without rights can do to the ports of an agent and of a coordinator, on the built binaries.

mod bytes;
mod delays;
mod floods;
mod forgers;
mod listeners;
mod listening;
mod tap;

use std::net::Ipv4Addr;

use elastic_proto::pulse::pulse_client::PulseClient;
use elastic_proto::pulse::{Found, Hello, IdentifyRequest, MemberMessage};
use elastic_tests::prelude::*;
use floods::Flood;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Nothing takes longer, on a busy machine.
const WITHIN: Duration = Duration::from_secs(30);

const JOB: &str = "job";

/// What an attack may add to the memory of the process attacked.
const ROOM_KB: u64 = 48 << 10;

/// How many connections an attacker opens that does nothing with them: more than the usual soft limit.
const IDLE: usize = 1_100;

/// An agent that takes part in a job of its own by way of `endpoint`, and where it takes pulses.
fn agent_at(endpoint: SocketAddr, script: &str) -> (Process, SocketAddr) {
    let peer = free_port();
    let (peer_flag, endpoint_flag) = (format!("--peer-port={peer}"), format!("--rdzv-endpoint={endpoint}"));
    let job = format!("--rdzv-id={JOB}");
    let agent = Process::start(
        "elastic-agent",
        &[
            "--rdzv-backend=c10d",
            &endpoint_flag,
            &peer_flag,
            &job,
            // The store of one node alone would not be served.
            "--nnodes=1:2",
            "--rdzv-conf=last_call_timeout=0",
            "--nproc-per-node=1",
            "--local-addr=127.0.0.1",
            "--max-restarts=3",
            "--no-python",
            "sh",
            "-c",
            script,
        ],
    );
    (agent, (Ipv4Addr::LOCALHOST, peer).into())
}

/// An agent that serves its store itself, and leads.
fn agent(script: &str) -> (Process, SocketAddr) {
    agent_at((Ipv4Addr::LOCALHOST, free_port()).into(), script)
}

/// A coordinator with a store of its own: where it takes pulses, its store, and where it tells its health.
async fn coordinator() -> (Process, [SocketAddr; 3]) {
    let ports: [SocketAddr; 3] = std::array::from_fn(|_| (Ipv4Addr::LOCALHOST, free_port()).into());
    let [peer, store, http] = ports;
    let flags = [format!("--peer-listen={peer}"), format!("--listen={store}"), format!("--http={http}")];
    let [peer, store, http] = &flags;
    let args = ["--embedded", peer, store, http, "--peer-address=127.0.0.1"];
    let coordinator = Process::start("elastic-coordinator", &args);
    coordinator.says("/metrics, /live", WITHIN).await;
    (coordinator, ports)
}

/// The most memory that a process has had.
fn peak_kb(process: &Process) -> u64 {
    status_kb(process, "VmHWM:")
}

fn status_kb(process: &Process, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Attacks the port for peers in every way that has once made memory grow.
async fn fill(process: &Process, peer: SocketAddr) {
    let before = peak_kb(process);
    let flood = Flood::start(move |said| floods::beats(peer, said));
    flood.says(200_000).await;
    drop(flood);
    let beats = peak_kb(process);
    let flood = Flood::start(move |said| floods::names(peer, said));
    flood.says(60).await;
    drop(flood);
    let names = peak_kb(process);
    let mut hung_up = [false; 2];
    for (hung_up, call) in hung_up.iter_mut().zip(["/elastic.v1.Pulse/Watch", "/elastic.v1.logs.Logs/Read"]) {
        *hung_up = within("all streams are read", WITHIN, floods::streams(peer, call, 100_000)).await;
    }
    let streams = peak_kb(process);
    println!(
        "kB: {before} at rest, +{} by beats, +{} by names, +{} by streams (hung up: {hung_up:?})",
        beats.saturating_sub(before),
        names.saturating_sub(beats),
        streams.saturating_sub(names)
    );
    assert!(streams < before + ROOM_KB, "a stranger made {before} kB grow to {streams}");
}

#[tokio::test]
async fn a_stranger_cannot_fill_an_agent_s_memory() {
    let (agent, peer) = agent("sleep 600");
    agent.says("worker started", WITHIN).await;
    fill(&agent, peer).await;
}

#[tokio::test]
async fn a_stranger_cannot_fill_a_coordinator_s_memory() {
    let (coordinator, [peer, store, _]) = coordinator().await;
    let (agent, _) = agent_at(store, "sleep 600");
    agent.says("worker started", WITHIN).await;
    coordinator.says("leading", WITHIN).await;
    fill(&coordinator, peer).await;
}

#[tokio::test]
async fn a_port_tells_a_stranger_no_name() {
    let (agent, peer) = agent("sleep 600");
    agent.says("worker started", WITHIN).await;
    let mut client = PulseClient::connect(format!("http://{peer}")).await.unwrap();
    let nothing = client.identify(IdentifyRequest::default()).await.unwrap().into_inner();
    assert_eq!(nothing.found(), Found::Nobody);
    let guess = client.identify(IdentifyRequest { node: "a:1".into() }).await.unwrap().into_inner();
    assert_eq!(guess.found(), Found::Another);
    let hello = Hello { job: "guessed".into(), node: "a:1".into(), nonce: Vec::new() };
    let refused =
        client.watch(futures::stream::iter([MemberMessage { hello: Some(hello), ..MemberMessage::default() }]));
    assert_eq!(refused.await.unwrap_err().message(), "that job is not led from here");
}

/// Lets the processes that the test starts begin with the usual soft limit, whatever the test's own limit is.
fn usual_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), maximum }).unwrap();
}

fn full_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

async fn idle(address: SocketAddr) -> Vec<TcpStream> {
    let mut idle = Vec::new();
    for _ in 0..IDLE {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    idle
}

#[tokio::test]
async fn idle_connections_cost_a_job_no_restart() {
    let folder = tempfile::tempdir().unwrap();
    let flag = folder.path().join("fail");
    // The worker fails once, on request.
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; while [ ! -e {} ]; do sleep 0.05; done; exit 1",
        flag.display()
    );
    usual_limit();
    let (mut agent, peer) = agent(&script);
    full_limit();
    agent.says("worker started", WITHIN).await;
    let idle = idle(peer).await;
    std::fs::write(&flag, "").unwrap();
    assert_eq!(agent.exit(WITHIN).await, 0, "{}", agent.output());
    assert!(!agent.output().contains("Too many open files"), "{}", agent.output());
    drop(idle);
}

#[tokio::test]
async fn idle_connections_do_not_take_a_coordinator_s_health_away() {
    usual_limit();
    let (_coordinator, [peer, _, http]) = coordinator().await;
    full_limit();
    let _idle = idle(peer).await;
    let live = async || {
        let mut http = TcpStream::connect(http).await.ok()?;
        http.write_all(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
        let mut answer = String::new();
        http.read_to_string(&mut answer).await.ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(())
    };
    let begun = Instant::now();
    eventually("it is live", WITHIN, live).await;
    println!("live after {:?}", begun.elapsed());
}

/// Starts a program that may have 1,024 descriptors.
fn confined(program: &str, args: &[&str]) -> Process {
    let program = binary(program).to_string_lossy().into_owned();
    let mut words = vec!["-c", r#"ulimit -n 1024; exec "$0" "$@""#, &program];
    words.extend(args);
    Process::start_program(Path::new("sh"), &words)
}

/// Clients of a peer port that were all answered, and stay.
async fn answered(peer: SocketAddr, count: usize) -> Vec<PulseClient<tonic::transport::Channel>> {
    let mut clients = Vec::new();
    while clients.len() < count {
        let ask = async {
            let mut client = PulseClient::connect(format!("http://{peer}")).await?;
            client.identify(IdentifyRequest::default()).await?;
            anyhow::Ok(client)
        };
        clients.push(within(&format!("answer {}", clients.len() + 1), WITHIN, ask).await.unwrap());
    }
    clients
}

#[tokio::test]
async fn where_no_store_is_served_a_leader_has_room_for_more_peers() {
    full_limit();
    let peer: SocketAddr = (Ipv4Addr::LOCALHOST, free_port()).into();
    let port = format!("--peer-port={peer}");
    let flags = ["--standalone", &port, "--nproc-per-node=1", "--no-python", "sleep", "600"];
    let agent = confined("elastic-agent", &flags);
    agent.says("worker started", WITHIN).await;
    // Of 1,024, 256 are its own, and three sevenths of the rest are for workers.
    let _clients = answered(peer, 430).await;

    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let peer: SocketAddr = (Ipv4Addr::LOCALHOST, free_port()).into();
    let (port, etcd_flag) = (format!("--peer-listen={peer}"), format!("--etcd={}", etcd.address()));
    let coordinator = confined("elastic-coordinator", &[&port, &etcd_flag, "--http=127.0.0.1:0"]);
    coordinator.says("/metrics, /live", WITHIN).await;
    let _more = answered(peer, 760).await;
}

#[tokio::test]
async fn a_standalone_job_listens_only_on_loopback() {
    let flags = ["--standalone", "--health-port=0", "--nproc-per-node=1", "--no-python", "sleep", "600"];
    let agent = Process::start("elastic-agent", &flags);
    agent.says("worker started", WITHIN).await;
    let listening = listening::of_all_below(agent.pid());
    println!("{listening:?}");
    // For peers, for workers, and for health.
    assert!(listening.len() >= 3 && listening.iter().all(|address| address.ip().is_loopback()), "{listening:?}");
}

#[tokio::test]
async fn who_never_speaks_is_hung_up_on() {
    let (agent, peer) = agent("sleep 600");
    agent.says("worker started", WITHIN).await;
    let mut silent = TcpStream::connect(peer).await.unwrap();
    let mut greeting = Vec::new();
    let _ended = within("the agent hangs up", WITHIN, silent.read_to_end(&mut greeting)).await;
}
