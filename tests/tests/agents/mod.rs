//! The built agents, end to end, on real etcd servers.

mod coordinators;
mod crowd;
#[allow(dead_code)] // What tests of the trainer need.
#[path = "../../../trainer/cuda/tests/cuda/double/mod.rs"]
mod double;
mod elasticity;
mod endings;
mod exclusion;
mod faults;
mod final_save;
mod flags;
pub(crate) mod gpus;
mod held_by_three;
mod hosted;
mod in_between;
pub(crate) mod live;
mod logs;
mod memory;
mod mistakes;
mod nccl;
pub(crate) mod networks;
mod outcome;
mod own_model;
mod pausing;
mod peer_tls;
mod preemption;
mod preflight;
mod preload;
mod progress;
mod quiescing;
mod records;
mod replicas;
mod shares;
mod shortage;
mod slow_files;
mod socket;
mod spares;
mod static_nodes;
mod surroundings;
mod training;
mod warm_up;
mod watchdog;
mod workers_store;
