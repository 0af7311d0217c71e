//! Elastic data-parallel training: a library for workers that an agent starts, and the parts it is made of. Not for
//! membership: who is in a round is the agent's knowledge, and it reaches a worker by its environment and its socket.
//!
//! To train a model of one's own, begin at [`Elastic`].
//!
//! ```text
//! elastic      the front: settings, a model and its data in, trained parameters out
//! train        the loop: a step, its reduction, its checkpoint; from one round to the next in the same process
//! data         samples, their order, the batch of a step            model       what is trained, its gradient, AdamW
//! checkpoint   saving, committing, loading                          settings    flags, environment
//! agent        the worker's side of the agent's socket              device      which GPU to use, if any
//! engine       what computes a step: CPUs, or a GPU
//! gradient     a rank's share of a step                           team        the threads that compute it
//! tasks        what the program `elastic-trainer` trains
//! ```
//!
//! Sums and copies between the ranks of a round are a crate of their own, [`elastic_collective`], and so is all that
//! needs CUDA or NCCL: `elastic_cuda`, which the feature `cuda` brings.
//!
//! A step is fixed by its number: the samples, their cut into logical shards, and the order in which the shards'
//! gradients are added. Which rank computes what is not part of it. So the parameters after step n are the same, bit
//! for bit, for every history of members (one build, one kind of CPU).

#[cfg(target_endian = "big")]
compile_error!("tensors are sent and saved as they lie in memory, which must be little-endian");

pub mod agent;
pub mod checkpoint;
pub mod data;
pub mod device;
pub mod elastic;
mod engine;
pub mod gradient;
pub mod model;
pub mod plot;
mod program;
pub mod random;
pub mod saving;
pub mod settings;
pub mod state;
pub mod tasks;
pub mod team;
pub mod trace;
pub mod train;

pub use data::Data;
pub use device::Device;
pub use elastic::{Elastic, Outcome};
pub use elastic_collective as collective;
pub use elastic_collective::stop::Stop;
#[cfg(feature = "cuda")]
pub use elastic_cuda as cuda;
pub use engine::DeviceError;
pub use model::{Model, Tensor};
pub use settings::{Environment, Settings};
pub use train::TrainError;
