//! Where a Python environment keeps its packages, since NVIDIA's libraries may be among them.

use std::fs;
use std::path::{Path, PathBuf};

/// Variables that name the environment that is active.
pub(crate) const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];

/// The folders of packages of the environment at `prefix`, one for each Python in it.
pub(crate) fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let pythons = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    let mut folders: Vec<PathBuf> = pythons.map(|entry| entry.path().join("site-packages")).collect();
    folders.sort();
    folders
}
