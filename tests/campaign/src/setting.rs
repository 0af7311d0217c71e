//! What the jobs of a campaign are made of.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use elastic_tests::etcd::etcd35;
use serde::{Deserialize, Serialize};

use super::training::Training;

/// What is another than in a plain job: `elastic-trainer` on the installed etcd, over an open network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Setting {
    /// Nothing.
    #[default]
    Plain,
    /// The workers train with PyTorch.
    PyTorch,
    /// Everyone has a certificate, and etcd has users, whose tokens end after seconds.
    Secured,
    /// etcd is the next release.
    Etcd35,
}

impl Setting {
    /// All of them.
    pub const ALL: [Setting; 4] = [Setting::Plain, Setting::PyTorch, Setting::Secured, Setting::Etcd35];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Plain => "plain",
            Setting::PyTorch => "pytorch",
            Setting::Secured => "secured",
            Setting::Etcd35 => "etcd-3.5",
        }
    }

    /// What its workers run.
    ///
    /// # Errors
    /// There is no PyTorch.
    pub fn training(self) -> Result<Training> {
        match self {
            Setting::PyTorch => Training::pytorch(),
            _ => Ok(Training::Trainer),
        }
    }

    /// The program of etcd's members.
    ///
    /// # Errors
    /// There is no such etcd.
    pub fn etcd(self) -> Result<PathBuf> {
        match self {
            Setting::Etcd35 => etcd35().context("no etcd 3.5: scripts/setup.sh test fetches it"),
            _ => Ok(Path::new("etcd").to_owned()),
        }
    }
}
