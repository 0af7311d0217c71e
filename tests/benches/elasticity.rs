//! What the trainer's loop adds to a step, with an agent and with a trace: looks at the round, the agent's words,
//! progress, votes. The loop and the bare step take turns in one process. Run by `make bench`.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod step;

use elastic_tests::prelude::*;
use std::io::{BufRead, BufReader, Write, sink};
use std::os::unix::net::{UnixListener, UnixStream};

use anyhow::{Context, Result};
use elastic_collective::recorder::{Operation, Recorder};
use elastic_models::{Gpt, Mlp};
use elastic_proto::worker::{Assignment, FromWorker, ToWorker};
use elastic_trainer::Model;
use elastic_trainer::{Data, Device, Elastic, Environment, Gradient, Rule, SampleError, Settings, Step, Tensor};
use step::{GPTS, MLP, Run, Shards};

const BLOCKS: usize = 15;
/// Steps of nothing in a block, and those before that are not counted.
const STEPS: u64 = 20_000;
const WARM: usize = 1_000;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("agent");
    let listener = UnixListener::bind(&socket)?;
    std::thread::spawn(move || listener.incoming().flatten().for_each(|worker| drop(serve(&worker))));
    let trace = folder.path().join("trace");

    let (mut bare, mut looped, mut traced) = (Vec::new(), Vec::new(), Vec::new());
    let mut nothing = Run::new(1, Nothing::new(), Shards::nothing());
    let data = Stamped::new(Shards::nothing());
    for _ in 0..BLOCKS {
        bare.push(nothing.time(STEPS as usize) * 1e3);
        looped.push(looped_step(&Nothing::new(), &data, STEPS, WARM, &socket, None)? * 1e3);
        traced.push(looped_step(&Nothing::new(), &data, STEPS, WARM, &socket, Some(&trace))? * 1e3);
    }
    println!("a step of nothing: microseconds, median (min–max) of {BLOCKS} interleaved blocks of {STEPS} steps");
    let [bare, looped, traced] = [bare, looped, traced].map(|all| Spread::of(&all));
    println!("bare {bare}   loop {looped}   loop with a trace {traced}");
    let (plain, traced) = (looped.median - bare.median, traced.median - bare.median);
    println!("the loop adds {plain:.2}, with a trace {traced:.2}; an operation in the recorder {:.2}", recording());

    let mut mlp = Run::new(1, Mlp::new(&MLP), Shards::mlp(128));
    share("MLP 0.7 M", [plain, traced], &mut mlp, 60);
    for (name, size, batch) in GPTS {
        let mut gpt = Run::new(1, Gpt::new(size), Shards::gpt(size, batch));
        share(name, [plain, traced], &mut gpt, 3);
    }
    Ok(())
}

/// What these microseconds are of a model's step.
fn share<M: Model>(name: &str, added: [f64; 2], run: &mut Run<M>, steps: usize) {
    run.time(2);
    let step = Spread::of(&(0..BLOCKS).map(|_| run.time(steps)).collect::<Vec<_>>());
    let [plain, traced] = added.map(|micros| micros / 10.0 / step.median);
    println!("{name}: a step takes {step} ms; the loop adds {plain:.3} %, with a trace {traced:.3} %");
}

/// Milliseconds of a step in the trainer's loop, except for the first.
fn looped_step<M: Model>(
    model: &M,
    data: &Stamped<M::Batch>,
    steps: u64,
    warm: usize,
    socket: &Path,
    trace: Option<&PathBuf>,
) -> Result<f64> {
    let socket = socket.to_str().context("a path in UTF-8")?.to_owned();
    let environment = Environment::read(|name| match name {
        "ELASTIC_AGENT_SOCKET" => Some(socket.clone()),
        "TORCHELASTIC_RUN_ID" => Some("bench".to_owned()),
        _ => None,
    })?;
    let (one, epochs) = (1.try_into()?, steps.div_ceil(data.samples()).try_into()?);
    let (trace, device) = (trace.cloned(), Device::Cpu);
    // Snapshots have a benchmark of their own.
    let settings =
        Settings { batch: one, shards: 1.try_into()?, epochs, trace, device, snapshot_every: 0, ..Settings::default() };
    data.times.lock().unwrap().clear();
    Elastic::new(settings, environment).output(&mut sink()).run(model, data)?;
    let times = data.times.lock().unwrap();
    let (first, last) = (times[warm], times[times.len() - 1]);
    Ok((last - first).as_secs_f64() * 1e3 / (times.len() - 1 - warm) as f64)
}

/// Answers a worker as an agent does that has no memory to lend.
fn serve(worker: &UnixStream) -> Result<()> {
    for line in BufReader::new(worker).lines() {
        let answer = match serde_json::from_str(&line?)? {
            FromWorker::Register { .. } => ToWorker::Welcome(Assignment {
                job: "bench".to_owned(),
                round: 0,
                rank: 0,
                world_size: 1,
                group_rank: 0,
                group_world_size: 1,
                master_addr: String::new(),
                master_port: 0,
                restart_count: 0,
                nodes_per_replica: None,
                checkpoint: None,
            }),
            FromWorker::Memory { id, .. } => {
                ToWorker::Error { id: Some(id), message: "none to spare".to_owned(), again: false }
            }
            _ => continue,
        };
        let mut worker = worker;
        writeln!(worker, "{}", serde_json::to_string(&answer)?)?;
    }
    Ok(())
}

/// Microseconds that the recorder takes for an operation.
fn recording() -> f64 {
    let (recorder, turns) = (Recorder::default(), 100_000);
    let begun = Instant::now();
    for number in 0..turns {
        let operation = Operation { round: 1, number, transport: "tcp", name: "ordered sum", bytes: 4 };
        let sequence = recorder.begin(operation, Instant::now());
        recorder.done(sequence, Instant::now());
    }
    begun.elapsed().as_secs_f64() * 1e6 / turns as f64
}

struct Nothing([Tensor; 1]);

impl Nothing {
    fn new() -> Nothing {
        Nothing([Tensor { name: "nothing".into(), shape: vec![1], range: 0..1, rule: Rule::of_shape(&[1]) }])
    }
}

impl Model for Nothing {
    type Batch = ();
    type Replica = ();

    fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    fn init(&self, _seed: u64) -> elastic_trainer::Result<Vec<f32>> {
        Ok(vec![0.0])
    }

    fn replica(&self) -> elastic_trainer::Result<()> {
        Ok(())
    }

    fn gradient(
        &self,
        _: &Step<'_>,
        _: &[f32],
        (): &(),
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> elastic_trainer::Result<f32> {
        gradient.fill(0.0);
        Ok(0.0)
    }
}

impl Shards<()> {
    fn nothing() -> Shards<()> {
        Shards::new(|_, ()| ())
    }
}

/// Data that knows when it was read: once a step.
struct Stamped<B> {
    data: Shards<B>,
    times: Mutex<Vec<Instant>>,
}

impl<B: Default + Send> Stamped<B> {
    fn new(data: Shards<B>) -> Stamped<B> {
        Stamped { data, times: Mutex::default() }
    }
}

impl<B: Default + Send> Data for Stamped<B> {
    type Batch = B;

    fn samples(&self) -> u64 {
        self.data.samples()
    }

    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut B) -> Result<(), SampleError> {
        self.times.lock().unwrap().push(Instant::now());
        self.data.read(samples, step, batch)
    }
}
