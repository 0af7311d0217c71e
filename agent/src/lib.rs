//! The library behind `elastic-agent`: what one node does to take part in a job. Not for the rendezvous protocol
//! itself, which lives in `elastic-coordinator`.
//!
//! | module | home of |
//! |---|---|
//! | [`part`] | a node's part in a job, by one protocol or the other |
//! | [`cli`] | flags and `PET_*` variables, parsed into one [`cli::Options`] |
//! | [`agent`] | one node's part in a job, from its first read of the store to its exit code |
//! | [`backend`] | the store a job meets through: etcd, or one served by an agent |
//! | [`group`] | the local worker group: starting it in a round, judging its end |
//! | [`socket`] | the Unix socket that workers may speak to |
//! | [`guard`] | the small process that starts the workers and ends them whenever the agent ends |
//! | [`workers`] | the agent's async view of it: start, hear of exits, stop |
//! | [`watchdog`] | hangs: deadlines of progress, timers of PyTorch, uninterruptible waits; and stacks |
//! | [`health`] | the agent's health over HTTP |
//! | [`logs`] | where the workers' output goes: files, console, both |
//! | [`outcome`] | what a dead worker left behind, what is made of it, and the report of the job's end |
//! | [`devices`] | the accelerators, and which of them a process sees |
//! | [`cpus`] | sets of CPUs, and how many this process may use |
//! | [`numa`] | the CPUs near a worker's GPU |
//! | [`slots`] | how many workers this node runs |
//! | [`command`] | the workers' command line |
//! | [`environment`] | the workers' environment |
//! | [`signals`] | the signals that make the agent leave |
//! | [`events`] | torchrun's events, as lines of JSON |
//! | [`identity`] | the node's name, incarnation and lock |
//! | [`local`] | what a node has of its workers: the group, its socket, its watchdog, its GPUs |
//! | [`gpu_holders`] | whether this node's GPUs are free of an earlier round's processes |
//! | [`memory`] | memory of this node that outlives its workers |
//! | [`rescue`] | what is left in that memory at the job's end: saved, and committed |
//! | [`master`] | the port that the ranks of a round find each other at |
//! | [`interfaces`] | the network interface that gloo and NCCL are handed |
//! | [`network`] | the address peers reach this node at, and ports that are held for it |
//! | [`tcp_store`] | the store that workers find each other through, on torch's wire protocol |
//! | [`template`] | `${local_rank}` and its like in arguments and prefixes |
//! | [`nvml`] | the GPUs of this node, as the driver tells |

pub mod agent;
pub mod backend;
pub mod cli;
pub mod command;
pub mod cpus;
pub mod devices;
pub mod environment;
pub mod events;
pub mod gpu_holders;
pub mod group;
pub mod guard;
pub mod health;
pub mod identity;
pub mod interfaces;
pub mod local;
pub mod logs;
pub mod master;
pub mod memory;
pub mod network;
pub mod numa;
pub mod nvml;
pub mod outcome;
pub mod part;
pub mod rescue;
pub mod shortage;
pub mod signals;
pub mod slots;
pub mod socket;
pub mod tcp_store;
pub mod template;
pub mod warm_up;
pub mod watchdog;
pub mod workers;
