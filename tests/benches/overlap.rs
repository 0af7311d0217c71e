//! What it is worth to sum a step's gradient while the backward pass continues: two workers on a thread each, with a
//! GPT, on loopback and over a slower network, with buckets of several sizes in turns. Run by `make bench`; the slower
//! networks need root, for namespaces of their own.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use anyhow::{Context, Result, ensure};
use elastic_tests::prelude::*;

/// 4.9 million parameters, 19.7 MB of gradient; a shard for each worker.
const GPT: &str = "gpt --device cpu --context 128 --layers 6 --heads 8 --width 256 --vocabulary 512 --batch 8 --shards 2 \
                   --epochs 1 --snapshot-every 0";
const STEPS: usize = 14;
/// Steps that are not counted.
const WARM: usize = 2;
const REPETITIONS: usize = 5;
/// 0 is without overlap.
const BUCKETS_MB: [&str; 4] = ["0", "1", "4", "10"];
const RATES: [&str; 2] = ["2gbit", "500mbit"];

fn main() -> Result<()> {
    println!("a step of a GPT of 4.9 M on two workers: milliseconds, median (min–max) of {REPETITIONS} runs in turns");
    compare("loopback", &Network::Loopback)?;
    for rate in RATES {
        match Namespaces::new(rate) {
            Ok(namespaces) => compare(rate, &Network::Slow(namespaces))?,
            Err(cause) => println!("{rate}: not measured: {cause:#}"),
        }
    }
    Ok(())
}

fn compare(name: &str, network: &Network) -> Result<()> {
    let mut times = BUCKETS_MB.map(|_| Vec::new());
    for _ in 0..REPETITIONS {
        for (bucket, times) in BUCKETS_MB.iter().zip(&mut times) {
            times.push(step(bucket, network)?);
        }
    }
    for (bucket, times) in BUCKETS_MB.iter().zip(&times) {
        println!("{name}   --bucket-mb {bucket:>2}   {:.0}", Spread::of(times));
    }
    Ok(())
}

enum Network {
    Loopback,
    Slow(Namespaces),
}

/// Two network namespaces with a wire between them that carries so much a second. Dropping them ends them.
struct Namespaces([String; 2]);

impl Namespaces {
    fn new(rate: &str) -> Result<Namespaces> {
        let names = ["a", "b"].map(|end| format!("elastic-{}-{end}", std::process::id()));
        let [a, b] = &names;
        ip(&format!("netns add {a}"))?;
        let both = Namespaces(names.clone());
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add wire netns {a} type veth peer name wire netns {b}"))?;
        for (number, name) in names.iter().enumerate() {
            ip(&format!("-n {name} addr add 10.77.0.{}/24 dev wire", number + 1))?;
            ip(&format!("-n {name} link set wire up"))?;
            let limit =
                format!("netns exec {name} tc qdisc add dev wire root tbf rate {rate} burst 256kb latency 50ms");
            ip(&limit)?;
        }
        Ok(both)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.0.iter().for_each(|name| drop(ip(&format!("netns del {name}"))));
    }
}

fn ip(words: &str) -> Result<()> {
    let output = Command::new("ip").args(words.split(' ')).output().context("cannot start ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`ip {words}` says: {}", said.trim());
    Ok(())
}

/// Milliseconds of a step.
fn step(bucket: &str, network: &Network) -> Result<f64> {
    let folder = tempfile::tempdir()?;
    let trace = folder.path().join("trace");
    let (address, port) = match network {
        // Free when asked: good enough for a benchmark.
        Network::Loopback => ("127.0.0.1", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()),
        Network::Slow(_) => ("10.77.0.1", 29_500),
    };
    let start = |rank: usize| -> Result<Child> {
        let mut command = match network {
            Network::Loopback => Command::new(binary("elastic-trainer")),
            Network::Slow(Namespaces(names)) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &names[rank]]).arg(binary("elastic-trainer"));
                command
            }
        };
        command.args(GPT.split_whitespace()).args(["--bucket-mb", bucket, "--windows", &(8 * STEPS).to_string()]);
        command.arg("--trace").arg(&trace);
        command.envs([("RANK", rank.to_string()), ("WORLD_SIZE", "2".to_owned())]);
        command.envs([("MASTER_ADDR", address.to_owned()), ("MASTER_PORT", port.to_string())]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("cannot start a worker")
    };
    let mut workers = [start(0)?, start(1)?];
    let times = steps_done(&trace);
    // What they do after the last step does not count.
    for worker in &mut workers {
        let _ = worker.kill();
        let _ = worker.wait();
    }
    let times = times?;
    Ok((times[STEPS - 1] - times[WARM - 1]) as f64 / (STEPS - WARM) as f64)
}

/// When each step was done, in milliseconds, once all are.
fn steps_done(trace: &Path) -> Result<Vec<u64>> {
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        let steps = json_lines(trace).into_iter().filter(|line| line["event"] == "step");
        let times: Vec<u64> = steps.filter_map(|line| line["time_ms"].as_u64()).collect();
        if times.len() == STEPS {
            return Ok(times);
        }
        ensure!(Instant::now() < deadline, "{} of {STEPS} steps are done after five minutes", times.len());
        std::thread::sleep(Duration::from_millis(50));
    }
}
