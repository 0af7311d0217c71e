//! Every listener of the programs, under every kind of input that has filled some server's memory: what memory it takes,
//! and whether the next client is served. The table that is printed is in `docs/reliability.md`.

use std::net::Ipv4Addr;

use elastic_proto::pulse::IdentifyRequest;
use elastic_proto::pulse::pulse_client::PulseClient;
use elastic_tests::hostile::streams::{HELLO, PING};
use elastic_tests::prelude::*;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::hostile::{ROOM_KB, WITHIN, coordinator, peak_kb, status_kb};

/// How long an attacker writes at most, and then holds what it has.
const WRITES: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, PartialEq)]
enum Speaks {
    /// gRPC: pulses, and what else peers ask.
    Peers,
    /// gRPC: etcd's API.
    Store,
    /// HTTP/1.1.
    Http,
    /// PyTorch's TCPStore.
    TcpStore,
}

/// What is sent, on how many connections, and how often. Answers are not read.
struct Input {
    name: &'static str,
    connections: usize,
    begins: fn(Speaks) -> Vec<u8>,
    continues: fn(Speaks) -> Vec<u8>,
    times: usize,
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// An HTTP/2 frame.
fn frame(length: usize, kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    [&(length as u32).to_be_bytes()[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

fn greeting(to: Speaks) -> Vec<u8> {
    match to {
        Speaks::Peers | Speaks::Store => PREFACE.to_vec(),
        Speaks::Http => b"POST / HTTP/1.1\r\nHost: x\r\n".to_vec(),
        Speaks::TcpStore => HELLO.to_vec(),
    }
}

fn nothing(_: Speaks) -> Vec<u8> {
    Vec::new()
}

fn noise(_: Speaks) -> Vec<u8> {
    (0..65_536_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A part of something whose length is far more than anybody should keep.
fn huge(to: Speaks) -> Vec<u8> {
    match to {
        Speaks::Peers | Speaks::Store => [PREFACE, &frame(0xff_ffff, 0, 0, &[0; 64])].concat(),
        Speaks::Http => [&greeting(to)[..], b"Content-Length: 4294967296\r\n\r\n"].concat(),
        // SET, with a key of 4 GiB.
        Speaks::TcpStore => [&HELLO[..], &[1], &(1_u64 << 32).to_le_bytes(), b"k"].concat(),
    }
}

fn endless(to: Speaks) -> Vec<u8> {
    match to {
        // CONTINUATION without END_HEADERS: literals of a name and a value.
        Speaks::Peers | Speaks::Store => {
            let field = [&[0, 1, b'n', 127, 0x81, 0x7e][..], &[b'v'; 16_256]].concat();
            frame(field.len(), 9, 0, &field)
        }
        Speaks::Http => [&b"X: "[..], &[b'v'; 65_000], b"\r\n"].concat(),
        Speaks::TcpStore => vec![b'k'; 65_536],
    }
}

fn endless_begins(to: Speaks) -> Vec<u8> {
    match to {
        Speaks::Peers | Speaks::Store => [PREFACE, &frame(0, 1, 0, &[])].concat(),
        Speaks::Http => greeting(to),
        Speaks::TcpStore => [&HELLO[..], &[1], &(1_u64 << 32).to_le_bytes()].concat(),
    }
}

/// A question whose answer someone would have to take.
fn questions(to: Speaks) -> Vec<u8> {
    match to {
        // PING: an answer each.
        Speaks::Peers | Speaks::Store => [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8].repeat(1000),
        Speaks::Http => b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(1000),
        Speaks::TcpStore => PING.repeat(1000),
    }
}

fn questions_begin(to: Speaks) -> Vec<u8> {
    if to == Speaks::Http { Vec::new() } else { greeting(to) }
}

const INPUTS: [Input; 6] = [
    Input { name: "1,000 connections, silent", connections: 1000, begins: nothing, continues: nothing, times: 0 },
    Input { name: "500 greetings, then silence", connections: 500, begins: greeting, continues: nothing, times: 0 },
    Input { name: "64 MiB of noise", connections: 8, begins: nothing, continues: noise, times: 128 },
    Input { name: "lengths of 4 GiB (16 MiB in HTTP/2)", connections: 100, begins: huge, continues: nothing, times: 0 },
    Input {
        name: "64 MiB of one header or key",
        connections: 8,
        begins: endless_begins,
        continues: endless,
        times: 128,
    },
    Input {
        name: "answers that no one reads",
        connections: 32,
        begins: questions_begin,
        continues: questions,
        times: 200,
    },
];

async fn attack(to: Speaks, address: SocketAddr, input: &Input) -> Vec<TcpStream> {
    let (begins, continues) = ((input.begins)(to), (input.continues)(to));
    let until = Instant::now() + WRITES;
    let one = async || {
        let mut stream = timeout(WRITES, TcpStream::connect(address)).await.ok()?.ok()?;
        let words = std::iter::once(&begins).chain(std::iter::repeat_n(&continues, input.times));
        for word in words {
            // Hung up, or full.
            if !matches!(timeout(until - Instant::now().min(until), stream.write_all(word)).await, Ok(Ok(()))) {
                break;
            }
        }
        Some(stream)
    };
    join_all((0..input.connections).map(|_| one())).await.into_iter().flatten().collect()
}

/// Whether a client with a question is answered.
async fn serves(to: Speaks, address: SocketAddr) -> Option<()> {
    match to {
        Speaks::Peers => {
            let mut client = PulseClient::connect(format!("http://{address}")).await.ok()?;
            client.identify(IdentifyRequest::default()).await.ok().map(drop)
        }
        Speaks::Store => {
            let mut client = etcd_client::Client::connect([address.to_string()], None).await.ok()?;
            client.get("k", None).await.ok().map(drop)
        }
        Speaks::Http => {
            let mut stream = TcpStream::connect(address).await.ok()?;
            stream.write_all(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.ok()?;
            answer.starts_with(b"HTTP/1.1 200").then_some(())
        }
        Speaks::TcpStore => {
            let mut stream = TcpStream::connect(address).await.ok()?;
            stream.write_all(&[HELLO, PING].concat()).await.ok()?;
            let mut answer = [0; 4];
            stream.read_exact(&mut answer).await.ok()?;
            (answer == PING[1..]).then_some(())
        }
    }
}

fn resident_kb(process: &Process) -> u64 {
    status_kb(process, "VmRSS:")
}

/// Lets the kernel count the most memory of a process again.
fn forget_peak(process: &Process) {
    std::fs::write(format!("/proc/{}/clear_refs", process.pid()), "5").unwrap();
}

#[tokio::test]
async fn no_listener_is_filled_or_silenced_by_any_input() {
    let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let [store, peer, health] = std::array::from_fn(|_| free_port());
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("master-port");
    let script = format!("echo $MASTER_PORT > {0}.new && mv {0}.new {0} && sleep 600", told.display());
    let flags = [
        "--rdzv-backend=c10d",
        &format!("--rdzv-endpoint=127.0.0.1:{store}"),
        &format!("--peer-port={peer}"),
        &format!("--health-port={health}"),
        "--rdzv-id=job",
        "--nnodes=1:2",
        "--rdzv-conf=last_call_timeout=0",
        "--nproc-per-node=1",
        "--local-addr=127.0.0.1",
        "--no-python",
        "sh",
        "-c",
        &script,
    ];
    let agent = Process::start("elastic-agent", &flags);
    let master: u16 = eventually("the worker tells its store's port", WITHIN, async || {
        std::fs::read_to_string(&told).ok()?.trim().parse().ok()
    })
    .await;
    let (coordinator, [coordinator_peer, coordinator_store, http]) = coordinator().await;
    let listeners = [
        ("an agent's peer port", &agent, Speaks::Peers, loopback(peer)),
        ("an agent's embedded store", &agent, Speaks::Store, loopback(store)),
        ("the workers' store", &agent, Speaks::TcpStore, loopback(master)),
        ("an agent's health", &agent, Speaks::Http, loopback(health)),
        ("a coordinator's peer port", &coordinator, Speaks::Peers, coordinator_peer),
        ("a coordinator's embedded store", &coordinator, Speaks::Store, coordinator_store),
        ("a coordinator's health", &coordinator, Speaks::Http, http),
    ];
    println!("\n| listener | input | before | most | after |\n|---|---|---|---|---|");
    for (name, process, speaks, address) in listeners {
        for input in &INPUTS {
            forget_peak(process);
            let before = resident_kb(process);
            let held = attack(speaks, address, input).await;
            let most = peak_kb(process);
            drop(held);
            let served = eventually("the next client is served", WITHIN, || serves(speaks, address));
            served.await;
            println!("| {name} | {} | {before} | {most} | {} |", input.name, resident_kb(process));
            assert!(most < before + ROOM_KB, "{name}, {}: from {before} to {most} kB", input.name);
        }
    }
    assert!(!agent.output().contains("panicked") && !coordinator.output().contains("panicked"));
}
