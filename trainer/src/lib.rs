//! Elastic data-parallel training: a library for workers that an agent starts, and the parts it is made of.
//!
//! To train a model of one's own, begin at [`Elastic`]. What is documented here is the interface. Hidden modules are for
//! the programs and tests of this project, and change as these need.
//!
//! ```text
//! elastic      the front: settings, a model and its data in, trained parameters out
//! settings     flags, environment, which device
//! program      a whole worker program around a model
//! train        the loop, from one round to the next in the same process; when a checkpoint is saved; trace and plot
//! agent        the worker's side of the agent's socket
//! engine       what computes a step, on CPUs or a GPU: gradients, the optimizer, the state
//! checkpoint   snapshots in memory, checkpoints on disk: writing, checking, loading
//! model        what a model is to the trainer, the optimizers
//! data         what data is to the trainer, the order of samples, the samples of a step
//! random       numbers that depend on a key alone
//! step         which step a model computes for, and its random numbers
//! error        errors of models and data
//! ```
//!
//! What the program `elastic-trainer` trains is in `elastic_models`, and uses this library as any other crate does.
//! Sums and copies between the ranks of a round are a crate of their own, [`elastic_collective`], and so is all that
//! needs CUDA or NCCL: `elastic_cuda`, which the feature `cuda` brings.
//!
//! A step is fixed by its number: the samples, their cut into logical shards, and the order in which the shards'
//! gradients are added. Which rank computes what is not part of it. So the parameters after step n are the same, bit
//! for bit, for every history of members (one build, one kind of CPU).

#[cfg(target_endian = "big")]
compile_error!("tensors are sent and saved as they lie in memory, which must be little-endian");

mod agent;
#[doc(hidden)]
pub mod checkpoint;
#[doc(hidden)]
pub mod data;
mod elastic;
#[doc(hidden)]
pub mod engine;
mod error;
#[doc(hidden)]
pub mod model;
pub mod program;
pub mod random;
#[doc(hidden)]
pub mod settings;
mod step;
mod train;
#[doc(hidden)]
pub mod vectors;

pub use checkpoint::Loaded;
pub use data::{Data, SampleError, Unit};
pub use elastic::Elastic;
pub use elastic_collective::stop::Stop;
pub use engine::state::State;
pub use error::{Error, Result, TaskError};
pub use model::{Gradient, Model, OnCpusAlone, ParameterGroup, Rule, Sums, Tensor};
pub use settings::device::Device;
pub use settings::{Environment, Settings};
pub use step::{Random, Step};
pub use train::{Event, Observer, Outcome, TrainError};
