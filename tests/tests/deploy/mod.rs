//! What is in `deploy/`: the recipe followed on machines that are made for it, and each script by itself. And the example
//! for Slurm, which a real one runs.

mod alerts;
mod ansible;
mod blocks;
mod kubernetes;
mod machines;
mod prometheus;
mod recipe;
mod rights;
mod scripts;
mod slurm;
mod units;
mod users;

use elastic_tests::prelude::*;

/// A file of `deploy/`.
fn deploy(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy")).join(file)
}
