//! What the jobs of a campaign are made of.

use anyhow::{Context, Result};
use clap::ValueEnum;
use elastic_tests::prelude::*;

use super::training::Training;

/// A stage or a setting as the command line and the file of results name it.
pub(crate) fn name(of: &impl ValueEnum) -> String {
    of.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// What is another than in a plain job: `elastic-trainer` on the installed etcd, over an open network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Setting {
    #[default]
    Plain,
    #[value(name = "pytorch")]
    PyTorch,
    /// Everyone has a certificate, and etcd has users, whose tokens end after seconds.
    Secured,
    #[value(name = "etcd-3.5")]
    Etcd35,
    #[value(name = "etcd-3.6")]
    Etcd36,
    #[value(name = "etcd-3.7")]
    Etcd37,
    /// Without etcd: the three agents hold the store.
    Replicated,
}

impl Setting {
    pub(crate) fn training(self) -> Result<Training> {
        match self {
            Setting::PyTorch => Training::pytorch(),
            _ => Ok(Training::Trainer),
        }
    }

    pub(crate) fn etcd(self) -> Result<PathBuf> {
        let release = match self {
            Setting::Etcd35 => "3.5",
            Setting::Etcd36 => "3.6",
            Setting::Etcd37 => "3.7",
            _ => return Ok(Path::new("etcd").to_owned()),
        };
        etcd_of(release).with_context(|| format!("no etcd {release}: scripts/setup.sh test gets it"))
    }
}
