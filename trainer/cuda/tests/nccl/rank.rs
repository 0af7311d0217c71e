//! A rank in a process of its own: it carries out the commands on standard input.

use std::ffi::c_void;
use std::io::BufRead;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use elastic_collective::recorder::Recorder;
use elastic_collective::stop::Stop;
use elastic_collective::tree::nodes_of;
use elastic_collective::{Group, GroupConfig, Patience};
use elastic_cuda::nccl::{Added, Communicator, Device, Joined, Span};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::libraries::open;
use crate::process::DEADLINE;

/// Numbers that a rank sums: enough that no socket holds them all.
pub(crate) const NUMBERS: usize = 300_000;

/// The stand-in's stream: see `fake_nccl::Stream`.
#[repr(C)]
#[derive(Default)]
struct Counters {
    enqueued: AtomicU64,
    ended: AtomicU64,
}

/// Host memory instead of a GPU's.
struct Host {
    counters: &'static Counters,
    mark: u64,
}

impl Device for Host {
    fn bind(&mut self) -> Result<(), String> {
        Ok(())
    }
    fn stream(&self) -> *mut c_void {
        std::ptr::from_ref(self.counters).cast_mut().cast()
    }
    fn mark(&mut self) -> Result<(), String> {
        self.mark = self.counters.enqueued.load(Ordering::SeqCst);
        Ok(())
    }
    fn add(&mut self, Added { left, right, into }: Added) -> Result<(), String> {
        // SAFETY: the communicator adds only in the spans that it was given, one addition at a time.
        let slice = |span: Span| unsafe { std::slice::from_raw_parts(span.address() as *const f32, span.elements()) };
        let (left, right) = (slice(left), right.map(slice));
        let sum: Vec<f32> = (0..into.elements()).map(|i| right.map_or(left[i], |right| left[i] + right[i])).collect();
        // SAFETY: as above; nothing else of them is read any more.
        unsafe { std::ptr::copy_nonoverlapping(sum.as_ptr(), into.address() as *mut f32, sum.len()) };
        Ok(())
    }
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(self.counters.ended.load(Ordering::SeqCst) >= self.mark)
    }
}

/// A rank as its process sees it.
struct Rank {
    communicator: Communicator,
    group: Option<Group>,
    config: Option<GroupConfig>,
    stop: Stop,
    recorder: Recorder,
}

impl Rank {
    /// Does what a line asks for. Returns the answer's line.
    fn obey(&mut self, line: &str) -> Result<String, String> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "set" => {
                // SAFETY: the stand-in reads the environment with Rust's own functions, which take turns with this.
                unsafe { std::env::set_var(words[1], words.get(2).unwrap_or(&"")) };
                Ok("set".to_owned())
            }
            "records" => {
                self.recorder = Recorder::new(Some(Path::new(words[1])));
                Ok("set".to_owned())
            }
            "forming" => {
                self.stop.forms(number(1), Duration::from_millis(number(2)));
                Ok("set".to_owned())
            }
            "join" => {
                let config = GroupConfig {
                    job: "test".to_owned(),
                    round: number(1),
                    rank: number(2) as u32,
                    world_size: number(3) as u32,
                    master_addr: "127.0.0.1".to_owned(),
                    master_port: number(4) as u16,
                    agent_store: false,
                    settings: String::new(),
                };
                self.group = None;
                let time = Duration::from_millis(number(5));
                let patience = Patience { form: DEADLINE, operation: DEADLINE };
                let group = Group::form(&config, patience, self.stop.clone());
                self.config = Some(config);
                let group = group.map_err(|error| error.to_string())?.recorded_by(&self.recorder);
                let group = self.group.insert(group.with_patience(Patience { form: time, operation: time }));
                match self.communicator.join(group).map_err(|error| error.to_string())? {
                    Joined::Made => Ok("joined".to_owned()),
                    Joined::Unlike { versions } => Err(format!("unlike: {versions}")),
                    Joined::Refused { ranks, cause } => Err(format!("refused by {ranks:?}: {cause:?}")),
                }
            }
            "sum" => {
                let group = self.group.as_mut().unwrap();
                let ranks = group.world_size();
                let mut own: Vec<f32> = (0..NUMBERS).map(|i| (i % 100) as f32 + group.rank() as f32).collect();
                let mut data = vec![0.0; NUMBERS];
                let mut staging = vec![0.0; Communicator::staging_elements(group, ranks, NUMBERS)];
                // SAFETY: the numbers outlive the call.
                let [own, sum, room] = [&mut own, &mut data, &mut staging]
                    .map(|numbers| unsafe { Span::new(numbers.as_mut_ptr() as usize, numbers.len()) });
                let result = self.communicator.ordered_sum(group, ranks, &[own], sum, room);
                let right = |(i, sum): (usize, &f32)| {
                    *sum == (ranks as usize * (i % 100)) as f32 + (ranks * (ranks - 1) / 2) as f32
                };
                if let Err(error) = &result {
                    self.recorder.write(self.config.as_ref().unwrap(), &error.to_string()).unwrap();
                }
                result.map_err(|error| error.to_string())?;
                if data.iter().enumerate().all(right) { Ok("right".to_owned()) } else { Err("wrong sums".to_owned()) }
            }
            "ordered" => self.ordered_sums().map(|()| "right".to_owned()),
            "leave" => {
                self.communicator.end();
                self.group.take().unwrap().leave();
                Ok("left".to_owned())
            }
            other => panic!("`{other}` is no task"),
        }
    }

    /// The ordered sum. Its bits must be those of the same sum over TCP.
    fn ordered_sums(&mut self) -> Result<(), String> {
        let group = self.group.as_mut().unwrap();
        let (rank, ranks) = (group.rank(), group.world_size());
        for (shards, length) in [(8, 10_001), (5, 3), (1, 100), (7, 1), (12, 70_000)] {
            let nodes = nodes_of(rank, ranks, shards);
            let numbers = |seed: u32| {
                let mut random = SmallRng::seed_from_u64(seed.into());
                (0..length).map(|_| random.random::<f32>() - 0.5).collect()
            };
            let mut partials: Vec<Vec<f32>> = nodes.iter().map(|node| numbers(node.first)).collect();
            let rest: Vec<&[f32]> = partials.iter().skip(1).map(Vec::as_slice).collect();
            let mut expected = partials.first().cloned().unwrap_or(vec![0.0; length]);
            group.ordered_sum(shards, &rest, &mut expected, 0).map_err(|error| error.to_string())?;

            let mut sum = vec![0.0; length];
            let mut staging = vec![0.0; Communicator::staging_elements(group, shards, length)];
            // SAFETY: the numbers outlive the call.
            let span = |data: &mut [f32]| unsafe { Span::new(data.as_mut_ptr() as usize, data.len()) };
            let spans: Vec<Span> = partials.iter_mut().map(|partial| span(partial)).collect();
            let (into, room) = (span(&mut sum), span(&mut staging));
            let result = self.communicator.ordered_sum(group, shards, &spans, into, room);
            result.map_err(|error| error.to_string())?;
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            if bits(&sum) != bits(&expected) {
                return Err(format!("other bits in {shards} shards of {length}"));
            }
        }
        Ok(())
    }
}

fn host() -> Host {
    Host { counters: Box::leak(Box::default()), mark: 0 }
}

/// A process that tests start: one rank, which reads commands line by line.
#[test]
#[ignore = "a part of the other tests"]
fn rank() {
    let library = open(Path::new(&std::env::var("NCCL_OF_TEST").unwrap())).unwrap();
    let communicator = Communicator::new(library, Box::new(host())).unwrap();
    let (stop, recorder) = (Stop::default(), Recorder::default());
    let mut rank = Rank { communicator, group: None, config: None, stop, recorder };
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        println!("\n> begun");
        match rank.obey(&line) {
            Ok(answer) => println!("\n> {answer}"),
            Err(error) => println!("\n> error: {error}"),
        }
    }
}
