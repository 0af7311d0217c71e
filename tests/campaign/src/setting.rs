//! What the jobs of a campaign are made of.

use anyhow::{Context, Result};
use elastic_tests::prelude::*;
use serde::{Deserialize, Serialize};

use super::training::Training;

/// What is another than in a plain job: `elastic-trainer` on the installed etcd, over an open network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) enum Setting {
    #[default]
    Plain,
    PyTorch,
    /// Everyone has a certificate, and etcd has users, whose tokens end after seconds.
    Secured,
    Etcd35,
}

impl Setting {
    pub(crate) const ALL: [Setting; 4] = [Setting::Plain, Setting::PyTorch, Setting::Secured, Setting::Etcd35];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Setting::Plain => "plain",
            Setting::PyTorch => "pytorch",
            Setting::Secured => "secured",
            Setting::Etcd35 => "etcd-3.5",
        }
    }

    pub(crate) fn training(self) -> Result<Training> {
        match self {
            Setting::PyTorch => Training::pytorch(),
            _ => Ok(Training::Trainer),
        }
    }

    pub(crate) fn etcd(self) -> Result<PathBuf> {
        match self {
            Setting::Etcd35 => etcd35().context("no etcd 3.5: scripts/setup.sh test fetches it"),
            _ => Ok(Path::new("etcd").to_owned()),
        }
    }
}
