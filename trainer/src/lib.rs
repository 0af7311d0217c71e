//! Elastic data-parallel training: a library for workers that an agent starts, and the parts it is made of. Not for
//! membership: who is in a round is the agent's knowledge, and it reaches a worker by its environment and its socket.
//!
//! To train a model of one's own, begin at [`Elastic`].
//!
//! ```text
//! elastic      the front: settings, a model and its data in, trained parameters out
//! train        the loop: a step, its reduction, its checkpoint; from one round to the next in the same process
//! data         samples, their order, the batch of a step            model       what is trained, its gradient, AdamW
//! collective   sums and copies between the ranks of a round         checkpoint  saving, committing, loading
//! nccl         the same between GPUs
//! agent        the worker's side of the agent's socket              settings    flags, environment
//! engine       what computes a step: CPUs, or a GPU               cuda, device   GPUs, and which to use
//! gradient     a rank's share of a step                           team        the threads that compute it
//! tasks        what the program `elastic-trainer` trains
//! ```
//!
//! A step is fixed by its number: the samples, their cut into logical shards, and the order in which the shards'
//! gradients are added. Which rank computes what is not part of it. So the parameters after step n are the same, bit
//! for bit, for every history of members (one build, one kind of CPU).

#[cfg(target_endian = "big")]
compile_error!("tensors are sent and saved as they lie in memory, which must be little-endian");

pub mod agent;
pub mod checkpoint;
pub mod collective;
pub mod cuda;
pub mod data;
pub mod device;
pub mod elastic;
mod engine;
pub mod gradient;
pub mod model;
pub mod nccl;
pub mod plot;
mod program;
pub mod random;
pub mod saving;
pub mod settings;
mod site_packages;
pub mod state;
pub mod stop;
pub mod tasks;
pub mod team;
pub mod trace;
pub mod train;

pub use data::Data;
pub use device::Device;
pub use elastic::{Elastic, Outcome};
pub use engine::DeviceError;
pub use model::{Model, Tensor};
pub use settings::{Environment, Settings};
pub use stop::Stop;
pub use train::TrainError;
