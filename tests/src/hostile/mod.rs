//! What strangers may send or leave behind, byte for byte: each function takes any bytes, gives them to one parser of
//! ours, and panics where the product does, or does not come to rest. `tests/hostile/bytes.rs` gives changed samples, and
//! `fuzz/` whatever libFuzzer finds.
//!
//! | module | what is given |
//! |---|---|
//! | [`records`] | a job's records in the store, to a leader, a node, and operators |
//! | [`streams`] | the workers' store, the workers' socket, and what an etcd v2 answers |
//! | [`services`] | the embedded store, and the port for peers |
//! | [`files`] | checkpoints and command lines |
//! | [`change`] | changes of JSON that keep it JSON |

pub mod change;
pub mod files;
pub mod records;
pub mod services;
pub mod streams;

/// A parser's name, and what gives bytes to it.
pub type Target = (&'static str, fn(&[u8]));

/// Every parser that is tested.
pub const TARGETS: [Target; 8] = [
    ("records", records::play),
    ("workers_store", streams::workers_store),
    ("worker_socket", streams::worker_socket),
    ("etcd_v2", streams::etcd_v2),
    ("embedded_store", services::embedded_store),
    ("peer_port", services::peer_port),
    ("checkpoint", files::checkpoint),
    ("command_line", files::command_line),
];
