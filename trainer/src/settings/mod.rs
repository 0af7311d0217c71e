//! The flags of any training, and the environment that an agent gives its worker.

pub mod device;
pub(crate) mod identity;
pub mod resume;

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, FromArgMatches, ValueEnum};
use elastic_collective::Patience;
#[cfg(feature = "cuda")]
use elastic_cuda::Surroundings;

use crate::checkpoint::retention::Retention;
use crate::data::Schedule;
use crate::model::{AdamW, Course, Optimizer, Rate, Sgd};
use device::{Device, Precision};
use identity::CHANGEABLE;
use resume::Resume;

/// Beyond these a number of steps or shards no longer fits, or threads only hinder each other.
const MOST_EPOCHS: u64 = 1_000_000_000;
const MOST_SHARDS: u64 = 65_536;
const MOST_THREADS: u64 = 1024;

/// How to train. A program takes these flags into its own with `#[command(flatten)]`; their text is `--help`'s.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Times to visit every sample
    #[arg(long, default_value = "40")]
    pub epochs: NonZeroU64,
    /// End after so many steps, however many epochs these are [default: after --epochs]
    #[arg(long, value_name = "STEPS", conflicts_with = "epochs")]
    pub max_steps: Option<NonZeroU64>,
    /// Samples in a step, over all workers: it stays the same when workers come and go
    #[arg(long, value_name = "SAMPLES", default_value = "64")]
    pub batch: NonZeroU64,
    /// Logical shards in a batch. Workers share them, so this bounds how many workers have work; a number with many
    /// divisors (8, 12, 24) shares evenly
    #[arg(long, value_name = "COUNT", default_value = "8")]
    pub shards: NonZeroU32,
    /// Samples of a shard that a worker's thread computes at once: bounds its memory. A shard's pieces are added in
    /// order, so a run continues with the same value, or with --change micro-batch [default: all of a shard]
    #[arg(long, value_name = "SAMPLES")]
    pub micro_batch: Option<NonZeroUsize>,
    /// How parameters move along the gradient, as in PyTorch. On GPUs, adamw alone
    #[arg(long, value_enum, value_name = "NAME", default_value_t = OptimizerName::AdamW)]
    pub optimizer: OptimizerName,
    /// Learning rate
    #[arg(long, value_name = "RATE", default_value = "0.001", value_parser = positive)]
    pub lr: f32,
    /// Course of the learning rate after the warm-up. If it falls, a run continues with the same --epochs or
    /// --max-steps, or with --change epochs
    #[arg(long, value_enum, value_name = "COURSE", default_value_t = Course::Constant)]
    pub schedule: Course,
    /// Steps in which the learning rate rises evenly: step 1 has --lr / STEPS, step STEPS has --lr
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub warmup_steps: u64,
    /// Learning rate that --schedule falls to. After step W = --warmup-steps, at q = (s - 1 - W) / (n - W), step s of n
    /// has lr-min + (lr - lr-min) * (1 + cos(pi * q)) / 2 with cosine, and lr-min + (lr - lr-min) * (1 - q) with linear
    #[arg(long, value_name = "RATE", default_value = "0", value_parser = not_negative)]
    pub lr_min: f32,
    /// Scale a step's gradient (the mean over all its samples) down to this Euclidean norm if its norm is larger. All
    /// workers compute the same norm, because they hold the same gradient [default: no clipping]
    #[arg(long, value_name = "NORM", value_parser = positive)]
    pub clip: Option<f32>,
    /// Weight decay of matrices [default with sgd: 0]
    #[arg(
        long,
        value_name = "SHARE",
        default_value = "0.01",
        default_value_if("optimizer", "sgd", "0"),
        value_parser = not_negative
    )]
    pub weight_decay: f32,
    /// How slowly adamw forgets the gradient, and its square
    #[arg(long, value_name = "BETA1,BETA2", default_value = "0.9,0.999", value_parser = two_shares)]
    pub betas: [f32; 2],
    /// What adamw adds to the root of the square, so that nothing is divided by zero
    #[arg(long, value_name = "NUMBER", default_value = "1e-8", value_parser = positive)]
    pub eps: f32,
    /// Momentum of sgd, without dampening
    #[arg(long, value_name = "SHARE", default_value = "0", value_parser = share)]
    pub momentum: f32,
    /// Nesterov's momentum, for sgd
    #[arg(long)]
    pub nesterov: bool,
    /// What a worker keeps of the optimizer's numbers: whole, all of them; or sharded, 2/N of them with N workers, so
    /// that two workers have each part. That saves memory from 3 workers on, and only on CPUs. If both workers of a
    /// part are lost at once, the job resumes from a snapshot or checkpoint. Results and checkpoints are the same, so a
    /// job may resume with the other value. All workers must have the same value
    #[arg(long, value_enum, value_name = "HOW", default_value_t = OptimizerState::Whole)]
    pub optimizer_state: OptimizerState,
    /// Seed of the first parameters and of the order of the samples
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to compute: cpu; cuda, on the GPU whose number is LOCAL_RANK; cuda:N, on GPU N; or auto, on a GPU if one
    /// is usable and the model supports it, else on CPUs. All workers must compute on the same kind. Tested on one
    /// GPU (H200), not yet on several
    #[arg(long, value_name = "DEVICE", default_value_t = Device::Auto)]
    pub device: Device,
    /// Precision of matrix products on a GPU. Parameters, gradients and the optimizer's state are always f32. A run
    /// continues with the same precision, or with --change precision
    #[arg(long, value_enum, value_name = "PRECISION", default_value_t = Precision::F32)]
    pub precision: Precision,
    /// How workers on GPUs sum their gradients: nccl, between the GPUs; tcp, through the hosts; or auto, over NCCL if
    /// it works on every worker, else over TCP. The result is the same. Workers on CPUs use TCP
    #[arg(long, value_enum, value_name = "TRANSPORT", default_value_t = Collectives::Auto)]
    pub collectives: Collectives,
    /// NCCL's library [default: libnccl.so.2 in the folders of ELASTIC_CUDA_LIBRARIES, in the active Python
    /// environment, or on the loader's path]
    #[arg(long, value_name = "FILE")]
    pub nccl_library: Option<PathBuf>,
    /// Compute threads of this worker, on CPUs. `auto`: as many as the processors that it may use, divided by the
    /// workers on its node. Results do not depend on it, but each thread takes memory
    #[arg(long, value_name = "COUNT|auto", default_value = "1", value_parser = threads)]
    pub threads: NonZeroUsize,
    /// Threads of this worker that read samples ahead of the step that needs them; 0 for none. They hold two batches
    /// each, as large as --micro-batch or a shard [default: as many as --threads, while a batch takes more than 50 µs to
    /// read]
    #[arg(long, value_name = "COUNT")]
    pub readers: Option<usize>,
    /// What to do with a damaged sample: fail, or skip it: the mean is over the others. All workers must have the same
    /// value, and meet the same damage: a sample that only some of them can read breaks the equal bits
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Unreadable::Fail)]
    pub unreadable: Unreadable,
    /// Sum a step's gradient over the workers in buckets of this size (1 MB is 2^20 bytes), each during the rest of the
    /// backward pass. With 0, and where GPUs sum over TCP, the sum is one bucket. Results do not depend on it. All
    /// workers must have the same value
    #[arg(long, value_name = "MB", default_value = "25", value_parser = not_negative)]
    pub bucket_mb: f32,
    /// Folder for checkpoints, the same for all workers. Without it, a restarted job starts over
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Where to begin if the job has committed no checkpoint: auto, at the newest in --checkpoint-dir, or at step 0 if
    /// there is none; never, at step 0, in a folder without checkpoints; or at a checkpoint in folder DIR, the newest
    /// or that of step STEP, with the same flags
    #[arg(long, value_name = "auto|never|DIR[@STEP]", default_value_t = Resume::Auto)]
    pub resume: Resume,
    /// Parameters to begin with at step 0, instead of the model's own: a file that has its tensors, by their names and
    /// shapes, in f32. A run must continue with the same
    #[arg(long, value_name = "FILE.safetensors")]
    pub init: Option<PathBuf>,
    /// Flags that may differ from those of the checkpoint that training resumes from
    #[arg(long, value_name = "FLAG,…", value_delimiter = ',', value_parser = PossibleValuesParser::new(CHANGEABLE))]
    pub change: Vec<String>,
    /// Steps between two snapshots of the state in the memory of the node's agent. If all workers die at once, training
    /// continues from the newest. Takes twice the state's size on each node; 0 for none
    #[arg(long, value_name = "STEPS", default_value_t = 10)]
    pub snapshot_every: u64,
    /// Number of nodes that keep snapshots in memory and write shares of checkpoints: the first ones by rank [default:
    /// all nodes]
    #[arg(long, value_name = "NODES")]
    pub checkpoint_replicas: Option<NonZeroU32>,
    /// Steps between two checkpoints; a slow disk gets fewer. The last step is always saved
    #[arg(long, value_name = "STEPS", default_value = "100")]
    pub checkpoint_every: NonZeroU64,
    /// Number of newest committed checkpoints to keep
    #[arg(long, value_name = "COUNT", default_value = "2")]
    pub keep: NonZeroUsize,
    /// Also keep for good the first checkpoint of every STEPS steps
    #[arg(long, value_name = "STEPS")]
    pub keep_every: Option<NonZeroU64>,
    /// Evaluate the model on held-out samples after every STEPS steps and after the last, on all workers [default: never]
    #[arg(long, value_name = "STEPS")]
    pub eval_every: Option<NonZeroU64>,
    /// Append a line of JSON for each step and each committed checkpoint to this file (rank 0)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Draw the loss over the steps, with the changes of the group, into this SVG file when training ends (rank 0, for
    /// the steps of its process)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Give up on a peer that keeps a step waiting for this long. After the loss of a peer, also give up on a next
    /// round that does not begin to form within this time. A GPU that does not end a piece of a step in 20 times as long
    /// hangs
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = patience)]
    pub peer_timeout: Duration,
    /// Give up on a round whose workers have not all appeared after this long
    #[arg(long, value_name = "TIME", default_value = "60", value_parser = patience)]
    pub form_timeout: Duration,
}

/// Which optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// AdamW
    #[default]
    #[value(name = "adamw")]
    AdamW,
    /// Stochastic gradient descent
    Sgd,
}

/// What to do with a sample that cannot be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Unreadable {
    /// End the job.
    #[default]
    Fail,
    /// Leave it out of the step.
    Skip,
}

/// What a worker keeps of the optimizer's numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimizerState {
    /// All of them.
    #[default]
    Whole,
    /// A part. Another worker has a copy of it.
    Sharded,
}

/// How workers on GPUs sum their gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// NCCL where every worker has it, else TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// NCCL, or an error.
    Nccl,
}

impl Default for Settings {
    /// The values of a command line without flags.
    fn default() -> Settings {
        let command = Settings::augment_args(clap::Command::new("defaults").no_binary_name(true));
        let matches = command.get_matches_from(std::iter::empty::<&str>());
        Settings::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

impl Settings {
    /// The optimizer.
    pub fn optimizer(&self) -> Optimizer {
        let Settings { betas: [beta1, beta2], eps: epsilon, weight_decay: decay, momentum, nesterov, .. } = *self;
        match self.optimizer {
            OptimizerName::AdamW => Optimizer::AdamW(AdamW { beta1, beta2, epsilon, decay }),
            OptimizerName::Sgd => Optimizer::Sgd(Sgd { momentum, nesterov, decay }),
        }
    }

    /// Two settings that contradict each other, if there are such.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        let of_adamw = self.betas == [0.9, 0.999] && self.eps == 1e-8;
        match self.optimizer {
            OptimizerName::AdamW if self.momentum > 0.0 => Some("--momentum needs --optimizer sgd"),
            OptimizerName::AdamW if self.nesterov => Some("--nesterov needs --optimizer sgd"),
            OptimizerName::Sgd if self.nesterov && self.momentum == 0.0 => Some("--nesterov needs --momentum"),
            OptimizerName::Sgd if !of_adamw => Some("--betas and --eps need --optimizer adamw"),
            _ => None,
        }
    }

    /// The first setting that is beyond what any machine has, if there is one.
    pub(crate) fn beyond(&self) -> Option<String> {
        let (epochs, shards, threads) = (self.epochs.get(), u64::from(self.shards.get()), self.threads.get() as u64);
        let readers = self.readers.unwrap_or_default() as u64;
        let bounds = [
            ("epochs", epochs, MOST_EPOCHS),
            ("shards", shards, MOST_SHARDS),
            ("threads", threads, MOST_THREADS),
            ("readers", readers, MOST_THREADS),
        ];
        let beyond = bounds.into_iter().find(|(_, value, most)| value > most);
        beyond.map(|(flag, value, most)| format!("--{flag} {value} is more than {most}"))
    }

    /// How many numbers of a gradient are summed over the ranks at once; 0 for all.
    pub(crate) fn bucket(&self) -> usize {
        let bytes = f64::from(self.bucket_mb) * f64::from(1 << 20);
        // A bucket has at least one number.
        if bytes > 0.0 { (bytes as usize / size_of::<f32>()).max(1) } else { 0 }
    }

    /// The steps of a run over so many samples.
    pub(crate) fn steps(&self, samples: u64) -> Schedule {
        match self.max_steps {
            Some(steps) => Schedule::of_steps(samples, self.batch.get(), steps.get()),
            None => Schedule::of_epochs(samples, self.batch.get(), self.epochs.get()),
        }
    }

    /// The learning rates of a run of `steps`.
    pub fn rate(&self, steps: u64) -> Rate {
        let Settings { lr: highest, lr_min: lowest, warmup_steps: warmup, schedule: course, .. } = *self;
        Rate { highest, lowest, warmup, course, steps }
    }

    /// Which checkpoints are kept.
    pub fn retention(&self) -> Retention {
        Retention { keep: self.keep, every: self.keep_every }
    }

    /// How long to wait for peers.
    pub fn patience(&self) -> Patience {
        Patience { form: self.form_timeout, operation: self.peer_timeout }
    }
}

fn positive(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|&value: &f32| value.is_finite() && value > 0.0).ok_or("must be above 0".to_owned())
}

fn not_negative(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|&value: &f32| value.is_finite() && value >= 0.0).ok_or("must be 0 or more".to_owned())
}

/// Less than all.
fn share(text: &str) -> Result<f32, String> {
    not_negative(text).ok().filter(|share| *share < 1.0).ok_or("must be 0 or more, and less than 1".to_owned())
}

fn two_shares(text: &str) -> Result<[f32; 2], String> {
    let (first, second) = text.split_once(',').ok_or("must be two numbers, such as 0.9,0.999")?;
    Ok([share(first.trim())?, share(second.trim())?])
}

fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let workers = || std::env::var("LOCAL_WORLD_SIZE").ok()?.parse().ok();
    match text {
        "auto" => Ok(divided(available_parallelism().map_or(1, NonZeroUsize::get), workers().unwrap_or(1))),
        text => text.parse().map_err(|_| "must be auto, or a number above 0".to_owned()),
    }
}

/// A worker's share of its node's processors: at least one.
fn divided(processors: usize, workers: usize) -> NonZeroUsize {
    processors.checked_div(workers).and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN)
}

fn patience(text: &str) -> Result<Duration, String> {
    let time = elastic_flags::duration_or_seconds(text).map_err(|refused| refused.to_string())?;
    if time.is_zero() { Err("must be above 0".to_owned()) } else { Ok(time) }
}

/// The place that the environment gives this process. Without an agent it is alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// `RANK`
    pub rank: u32,
    /// `WORLD_SIZE`
    pub world_size: u32,
    /// `LOCAL_RANK`
    pub local_rank: u32,
    /// `MASTER_ADDR`
    pub master_addr: String,
    /// `MASTER_PORT`
    pub master_port: u16,
    /// `TORCHELASTIC_USE_AGENT_STORE`: a TCPStore is served there by the agent; else rank 0 listens itself.
    pub agent_store: bool,
    /// `ELASTIC_ROUND`; torchrun, which does not set it, counts in `TORCHELASTIC_RESTART_COUNT`.
    pub round: u64,
    /// `TORCHELASTIC_RUN_ID`
    pub job: String,
    /// `ELASTIC_JOB_UNNAMED`: the agent made that id up, so the job takes the id that its checkpoint folder has.
    pub unnamed: bool,
    /// The agent's socket, in `ELASTIC_AGENT_SOCKET`.
    pub agent: Option<PathBuf>,
    /// `ELASTIC_WARM_UP`: the worker has no rank yet. The agent tells it later, and the rank and round in here mean
    /// nothing.
    pub warm_up: bool,
    /// Where the flight recorder's files go: `ELASTIC_RECORD_DIR`, or the folder of `TORCHELASTIC_ERROR_FILE`, which is
    /// the worker's own in the agent's logs. None are written without either.
    pub record_dir: Option<PathBuf>,
    /// The variable `LOCAL_RANK` itself: a number among the workers that see the same GPUs. With `--virtual-local-rank`
    /// each sees one.
    pub device_rank: u32,
    /// Where CUDA's libraries may lie.
    #[cfg(feature = "cuda")]
    pub cuda: Surroundings,
}

/// A variable does not hold what it should.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is not a number, or too large.
    #[error("{name} is \"{value}\", not a number in its range; correct it where this worker is started")]
    Number {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
    },
    /// The numbers contradict each other.
    #[error("RANK is {rank} but WORLD_SIZE is {world_size}; ranks count from 0")]
    Rank {
        /// `RANK`
        rank: u32,
        /// `WORLD_SIZE`
        world_size: u32,
    },
    /// There are peers, but no way to them.
    #[error("WORLD_SIZE is {world_size} but {name} is not set; set it where this worker is started")]
    Missing {
        /// The variable.
        name: &'static str,
        /// `WORLD_SIZE`
        world_size: u32,
    },
}

impl Environment {
    /// Reads variables through `get`, which is `std::env::var` outside tests. An empty variable counts as not set.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Environment, EnvironmentError> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        fn number<T: std::str::FromStr>(
            name: &'static str,
            value: Option<String>,
            otherwise: T,
        ) -> Result<T, EnvironmentError> {
            match value {
                None => Ok(otherwise),
                Some(value) => value.parse().map_err(|_| EnvironmentError::Number { name, value }),
            }
        }
        let (rank, world_size) = (number("RANK", get("RANK"), 0)?, number("WORLD_SIZE", get("WORLD_SIZE"), 1)?);
        if rank >= world_size {
            return Err(EnvironmentError::Rank { rank, world_size });
        }
        for name in ["MASTER_ADDR", "MASTER_PORT"] {
            if world_size > 1 && get(name).is_none() {
                return Err(EnvironmentError::Missing { name, world_size });
            }
        }
        let restarts = number("TORCHELASTIC_RESTART_COUNT", get("TORCHELASTIC_RESTART_COUNT"), 0)?;
        Ok(Environment {
            rank,
            world_size,
            local_rank: number("LOCAL_RANK", get("ELASTIC_LOCAL_RANK").or_else(|| get("LOCAL_RANK")), 0)?,
            master_addr: get("MASTER_ADDR").unwrap_or_default(),
            master_port: number("MASTER_PORT", get("MASTER_PORT"), 0)?,
            agent_store: get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"),
            round: number("ELASTIC_ROUND", get("ELASTIC_ROUND"), restarts)?,
            job: get("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            unnamed: get("ELASTIC_JOB_UNNAMED").is_some_and(|value| value == "1"),
            agent: get(elastic_proto::worker::SOCKET_ENV).map(PathBuf::from),
            warm_up: get(elastic_proto::worker::WARM_UP_ENV).is_some_and(|value| value == "1"),
            record_dir: get("ELASTIC_RECORD_DIR").map(PathBuf::from).or_else(|| {
                let error_file = PathBuf::from(get("TORCHELASTIC_ERROR_FILE")?);
                error_file.parent().map(PathBuf::from)
            }),
            device_rank: number("LOCAL_RANK", get("LOCAL_RANK"), 0)?,
            #[cfg(feature = "cuda")]
            cuda: Surroundings::read(get),
        })
    }
}

#[cfg(test)]
mod tests;
