//! What is in `deploy/`: the recipe followed on machines that are made for it, and each script by itself. And the example
//! for Slurm, which a real one runs.
//!
//! | module | what it is |
//! |---|---|
//! | `recipe` | `deploy/README.md` followed, to a job that trains |
//! | `scripts` | certificates and settings, each alone |
//! | `ansible` | the playbook, run on machines |
//! | `alerts` | what Prometheus is to warn of |
//! | `prometheus` | what a real Prometheus sees of jobs that fail: alerts and dashboards |
//! | `blocks` | the commands in a document |
//! | `kubernetes` | the manifests: what they name, and their pods' command lines on machines |
//! | `machines` | machines as namespaces, reached by `ssh` and `scp` |
//! | `slurm` | the example for Slurm, submitted to one |
//! | `units` | systemd's units, started as systemd would |
//! | `users` | etcd's users: what each may do, and a job whose programs run as those meant for them |

mod alerts;
mod ansible;
mod blocks;
mod kubernetes;
mod machines;
mod prometheus;
mod recipe;
mod scripts;
mod slurm;
mod units;
mod users;

use elastic_tests::prelude::*;

/// A file of `deploy/`.
fn deploy(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy")).join(file)
}
