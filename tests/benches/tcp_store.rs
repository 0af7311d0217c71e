//! The agents' store and torch's own server side by side: one load, two processes in turns, so that whatever else the
//! machine does meets both. Run by `make bench`. Without a Python with torch (`ELASTIC_TORCH_PYTHON`) ours runs alone.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::io::{self, BufRead, BufReader, Read, Write};

use anyhow::{Context, Result, ensure};
use elastic_agent::for_tests::{TcpStore, WorkersStoreLimits};
use elastic_tests::prelude::*;
use elastic_tests::processor::process;
use elastic_tests::torch::TorchServer;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::thread::{CpuSet, sched_setaffinity};

const CLIENTS: [usize; 4] = [1, 8, 64, 256];
/// Odd, for a median. Many and short, so that what a shared host takes away now and then falls into few of them.
const REPETITIONS: usize = 101;
const SPAN: Duration = Duration::from_millis(20);
const BARRIER: usize = 512;
const BARRIERS: usize = 15;
const VALUE: usize = 64;
const KEYS: usize = 8;
const SERVE: &str = "serve-the-store";

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some(SERVE) {
        return serve();
    }
    let ours = Ours::start()?;
    let torch = Torch::find()
        .map(|torch| torch.serve(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_store/server.py")));
    let mut servers = vec![Server { port: ours.port, pid: ours.child.id() }];
    servers.extend(torch.as_ref().map(|torch: &TorchServer| Server { port: torch.port, pid: torch.pid() }));
    apart(&servers)?;
    println!("Of each: operations a second, p50 and p99 in µs, and µs of the server's CPU time for one operation.\n");
    println!("| operation | clients | ours | p50 | p99 | CPU | torch | p50 | p99 | CPU | rate | p50 | p99 | CPU |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for clients in CLIENTS {
        let mut groups: Vec<Clients> =
            servers.iter().map(|server| Clients::connect(*server, clients)).collect::<Result<_>>()?;
        for operation in OPERATIONS {
            let mut runs: Vec<Vec<Run>> = vec![Vec::new(); groups.len()];
            for repetition in 0..REPETITIONS {
                for turn in 0..groups.len() {
                    // No store is always first.
                    let which = (turn + repetition) % groups.len();
                    runs[which].push(groups[which].run(&operation, SPAN)?);
                }
            }
            let line: Vec<Run> = runs.into_iter().map(Run::median).collect();
            println!("{}", row(operation.name, clients, &line));
        }
    }
    barriers(&servers)
}

/// The load on one core, each server on another: where the kernel puts two threads that wake each other differs from
/// run to run by more than the servers do.
fn apart(servers: &[Server]) -> Result<()> {
    if std::thread::available_parallelism()?.get() < 2 {
        return Ok(());
    }
    let only = |core| {
        let mut set = CpuSet::new();
        set.set(core);
        set
    };
    sched_setaffinity(None, &only(0))?;
    for server in servers {
        for task in std::fs::read_dir(format!("/proc/{}/task", server.pid))? {
            let thread = task?.file_name().to_str().and_then(|id| id.parse().ok()).and_then(Pid::from_raw);
            sched_setaffinity(Some(thread.context("a thread's id")?), &only(1))?;
        }
    }
    Ok(())
}

fn row(name: &str, clients: usize, runs: &[Run]) -> String {
    let mut line = format!("| {name} | {clients} |");
    for run in runs {
        line += &format!(" {:.0} | {:.0} | {:.0} | {:.1} |", run.rate, run.p50, run.p99, run.cpu);
    }
    if let [ours, torch] = runs {
        let of = |part: fn(&Run) -> f64| part(ours) / part(torch);
        let (rate, p50, p99, cpu) = (of(|run| run.rate), of(|run| run.p50), of(|run| run.p99), of(|run| run.cpu));
        line += &format!(" {rate:.2}x | {p50:.2}x | {p99:.2}x | {cpu:.2}x |");
    }
    line
}

fn barriers(servers: &[Server]) -> Result<()> {
    let mut groups: Vec<Clients> =
        servers.iter().map(|server| Clients::connect(*server, BARRIER)).collect::<Result<_>>()?;
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); groups.len()];
    for repetition in 0..BARRIERS {
        for turn in 0..groups.len() {
            let which = (turn + repetition) % groups.len();
            let name = format!("/barrier/{repetition}");
            let request = [&[18][..], &string(&name), &(BARRIER as u64).to_le_bytes()].concat();
            let begun = Instant::now();
            groups[which].all_once(&request, 1)?;
            times[which].push(begun.elapsed().as_secs_f64() * 1e3);
        }
    }
    let medians: Vec<f64> = times.iter().map(|times| percentile(times, 50.0)).collect();
    match medians[..] {
        [ours, torch] => {
            println!("\nbarrier of {BARRIER}: ours {ours:.2} ms, torch {torch:.2} ms, {:.2}x the time", ours / torch);
        }
        _ => println!("\nbarrier of {BARRIER}: {:.2} ms", medians[0]),
    }
    Ok(())
}

fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    rustix::net::listen(&listener, 4096)?;
    println!("{}", listener.local_addr()?.port());
    let _store = TcpStore::serve(listener, WorkersStoreLimits::default(), None)?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

#[derive(Clone, Copy)]
struct Server {
    port: u16,
    pid: u32,
}

impl Server {
    /// Microseconds that its threads were on a CPU.
    fn cpu(self) -> Result<f64> {
        Ok(process(&self.pid.to_string())?.as_nanos() as f64 / 1e3)
    }
}

/// This program once more, as torch's server is another process too.
struct Ours {
    port: u16,
    child: Child,
}

impl Ours {
    fn start() -> Result<Ours> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.arg(SERVE).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("its output")?).read_line(&mut line)?;
        Ok(Ours { port: line.trim().parse()?, child })
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// A request of one client, by its number, and how long the answer is.
struct Operation {
    name: &'static str,
    request: fn(usize) -> Vec<u8>,
    answer: usize,
}

const OPERATIONS: [Operation; 6] = [
    // A SET has no answer: the PING behind it does.
    Operation { name: "set", request: |n| [set(&key(n)), vec![13, 1, 2, 3, 4]].concat(), answer: 4 },
    Operation { name: "get", request: |n| [vec![3], string(key(n))].concat(), answer: 8 + VALUE },
    Operation {
        name: "add",
        request: |n| [vec![4], string(format!("/n/{n}")), 1_i64.to_le_bytes().to_vec()].concat(),
        answer: 8,
    },
    Operation { name: "wait", request: |n| keys(6, &[key(n)]), answer: 1 },
    Operation { name: "check", request: |n| keys(5, &[key(n)]), answer: 1 },
    Operation { name: "multi_get, 8 keys", request: |n| keys(10, &shared(n)), answer: KEYS * (8 + VALUE) },
];

fn key(client: usize) -> String {
    format!("/rank/{client}")
}

/// Keys of others too, as when addresses are gathered.
fn shared(client: usize) -> Vec<String> {
    (0..KEYS).map(|n| key(client + n)).collect()
}

fn set(key: &str) -> Vec<u8> {
    [vec![1], string(key), string([b'v'; VALUE])].concat()
}

fn keys(op: u8, keys: &[String]) -> Vec<u8> {
    [vec![op], (keys.len() as u64).to_le_bytes().to_vec(), keys.iter().flat_map(string).collect()].concat()
}

struct Client {
    stream: TcpStream,
    begun: Instant,
    /// Bytes of the answer still to come.
    left: usize,
}

/// Clients of one server, each with one request under way; one thread drives them all.
struct Clients {
    server: Server,
    epoll: rustix::fd::OwnedFd,
    clients: Vec<Client>,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    /// Operations a second.
    rate: f64,
    /// Microseconds.
    p50: f64,
    p99: f64,
    /// Of the server's CPU time, for one operation.
    cpu: f64,
}

impl Run {
    fn median(runs: Vec<Run>) -> Run {
        let of = |part: fn(&Run) -> f64| percentile(&runs.iter().map(part).collect::<Vec<_>>(), 50.0);
        Run { rate: of(|run| run.rate), p50: of(|run| run.p50), p99: of(|run| run.p99), cpu: of(|run| run.cpu) }
    }
}

impl Clients {
    fn connect(server: Server, clients: usize) -> Result<Clients> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let mut group = Clients { server, epoll, clients: Vec::new() };
        for number in 0..clients {
            let mut stream = TcpStream::connect(("127.0.0.1", server.port))?;
            stream.set_nodelay(true)?;
            stream.write_all(&[0, 0xce, 0xf7, 0x85, 0x3c])?;
            stream.set_nonblocking(true)?;
            epoll::add(&group.epoll, &stream, EventData::new_u64(number as u64), EventFlags::IN)?;
            group.clients.push(Client { stream, begun: Instant::now(), left: 0 });
        }
        // What is asked for is there.
        let all: Vec<u8> = (0..clients + KEYS).flat_map(|n| set(&key(n))).collect();
        group.clients[0].stream.write_all(&all)?;
        group.all_once(&[13, 1, 2, 3, 4], 4)?;
        Ok(group)
    }

    fn run(&mut self, operation: &Operation, span: Duration) -> Result<Run> {
        let requests: Vec<Vec<u8>> = (0..self.clients.len()).map(operation.request).collect();
        let before = self.server.cpu()?;
        let begun = Instant::now();
        let mut times = Vec::new();
        self.drive(&requests, operation.answer, |took| {
            times.push(took.as_nanos() as f64 / 1e3);
            begun.elapsed() < span
        })?;
        let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
        let cpu = (self.server.cpu()? - before) / times.len() as f64;
        Ok(Run { rate, p50: percentile(&times, 50.0), p99: percentile(&times, 99.0), cpu })
    }

    /// Every client asks once, and all are answered.
    fn all_once(&mut self, request: &[u8], answer: usize) -> Result<()> {
        self.drive(&vec![request.to_vec(); self.clients.len()], answer, |_| false)
    }

    /// Has each client ask again and again, for as long as `continues` says when it hears what an answer took.
    fn drive(
        &mut self,
        requests: &[Vec<u8>],
        answer: usize,
        mut continues: impl FnMut(Duration) -> bool,
    ) -> Result<()> {
        for (client, request) in self.clients.iter_mut().zip(requests) {
            client.ask(request, answer)?;
        }
        let mut under_way = self.clients.len();
        let mut events = Vec::with_capacity(256);
        let mut bytes = [0; 4096];
        while under_way > 0 {
            epoll::wait(&self.epoll, spare_capacity(&mut events), None)?;
            for event in events.drain(..) {
                let number = event.data.u64() as usize;
                let client = &mut self.clients[number];
                let count = client.stream.read(&mut bytes)?;
                ensure!(count > 0 && count <= client.left, "the server closed, or said {count} bytes too many");
                client.left -= count;
                if client.left > 0 {
                    continue;
                }
                if continues(client.begun.elapsed()) {
                    client.ask(&requests[number], answer)?;
                } else {
                    under_way -= 1;
                }
            }
        }
        Ok(())
    }
}

impl Client {
    fn ask(&mut self, request: &[u8], answer: usize) -> Result<()> {
        self.begun = Instant::now();
        self.left = answer;
        // Short, and nothing else is under way: it fits into the socket's buffer.
        Ok(self.stream.write_all(request)?)
    }
}
