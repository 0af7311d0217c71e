//! What most tests and benchmarks name: the harness, and the types of other crates that it speaks in.

pub use std::collections::{BTreeMap, BTreeSet};
pub use std::fs::File;
pub use std::net::{SocketAddr, TcpListener, TcpStream};
pub use std::os::unix::fs::PermissionsExt;
pub use std::path::{Path, PathBuf};
pub use std::process::{Child, Command, Output, Stdio};
pub use std::sync::{Arc, Mutex};
pub use std::time::{Duration, Instant, SystemTime};

pub use elastic_rendezvous::job::{Endpoint, FailureClass, JobId, Keys, LeaderRecord, NodeId, Spec, Versioned};
pub use elastic_store::etcd::{EtcdConfig, EtcdStore, EtcdTls, EtcdUser, Secret};
pub use elastic_store::{Op, Revision, Scope, Store, StoreError, Txn, WatchUpdate, Watcher};
pub use rustix::process::{Pid, Signal, kill_process};
pub use serde_json::{Value, json};
pub use tempfile::TempDir;

pub use crate::agents::{
    AT_ONCE, Agent, JOB_FAILED, Job, LEASE, LEFT, LIMIT, Round, Worker, exits, exits_within, json_lines,
};
pub use crate::balancer::Balancer;
pub use crate::etcd::{
    Certs, EtcdCluster, EtcdOptions, EtcdServer, RELEASES, etcd_of, free_port, signed_tokens, usual_etcd,
    version_server,
};
pub use crate::in_process::{InProcessNode, quick_spec, start_node};
pub use crate::percentile::{Spread, percentile};
pub use crate::processes::{
    Process, binary, children, compile_library, ctl, ctl_ok, fake_nvml, output, output_of, printed, remove_settings,
    send,
};
pub use crate::proxy::FaultProxy;
pub use crate::replicas::Replicated;
pub use crate::requirement::skip;
pub use crate::torch::{self, Torch, script};
pub use crate::wait::{eventually, within};
