//! Who asks for something, and by what means: for the history, which people read. Nothing is decided by it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requester {
    /// A user of the API; or, with `elasticctl`, what the person says or `user@host`.
    pub name: String,
    /// By what means.
    pub via: Via,
}

/// By what means something is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Via {
    /// `elasticctl`, on the store itself: the store's users are what protects that.
    Elasticctl,
    /// The coordinator's API, with a token.
    Api,
    /// What a newer version names.
    #[serde(other)]
    Other,
}

impl Requester {
    /// Most bytes of a name.
    pub const LONGEST_NAME: usize = 64;

    /// Whether a name can be in a line for people: neither empty nor long, and without control characters.
    pub fn is_name(name: &str) -> bool {
        !name.trim().is_empty() && name.len() <= Requester::LONGEST_NAME && !name.chars().any(char::is_control)
    }
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Requester { name, via } = self;
        match via {
            Via::Elasticctl => write!(f, "{name} (elasticctl)"),
            Via::Api => write!(f, "{name} (API)"),
            Via::Other => f.write_str(name),
        }
    }
}
