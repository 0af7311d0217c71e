//! Ids that must not be mixed up. Ranks have no type of their own: they are plain numbers of one round.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest job id, in bytes: it becomes part of keys and of file names.
const MAX_JOB_ID: usize = 255;

/// A job: what all agents with the same `--rdzv_id` work on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct JobId(String);

/// Why a text cannot be a job id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadJobId {
    /// Nothing there.
    #[error("a job id must not be empty: give this job a name, the same on every node")]
    Empty,
    /// Too long.
    #[error("the job id is {0} bytes long, at most {MAX_JOB_ID} are allowed")]
    TooLong(usize),
    /// A character that would be read differently in keys, paths or logs.
    #[error(
        "the job id {id:?} holds {found:?}; only letters, digits and ._-:@+= are allowed (it becomes part of keys and \
         paths): try {suggestion:?}"
    )]
    Character {
        /// What was given.
        id: String,
        /// The first character that does not fit.
        found: char,
        /// The id with such characters replaced.
        suggestion: String,
    },
}

fn fits(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-:@+=".contains(c)
}

impl FromStr for JobId {
    type Err = BadJobId;

    fn from_str(id: &str) -> Result<JobId, BadJobId> {
        if id.is_empty() {
            return Err(BadJobId::Empty);
        }
        if id.len() > MAX_JOB_ID {
            return Err(BadJobId::TooLong(id.len()));
        }
        match id.chars().find(|c| !fits(*c)) {
            None => Ok(JobId(id.to_owned())),
            Some(found) => Err(BadJobId::Character {
                id: id.to_owned(),
                found,
                suggestion: id.chars().map(|c| if fits(c) { c } else { '-' }).collect(),
            }),
        }
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<JobId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for JobId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// A node: one agent process, `name:incarnation`. A restarted agent is another node.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(String);

impl NodeId {
    /// The id of one incarnation of a named node.
    pub fn new(name: &str, incarnation: &str) -> NodeId {
        NodeId(format!("{name}:{incarnation}"))
    }

    /// Reads an id from a key or record; any text will do, since ids are only compared.
    pub fn from_text(text: &str) -> NodeId {
        NodeId(text.to_owned())
    }

    /// The text that keys hold.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The node's name, without its incarnation.
    pub fn name(&self) -> &str {
        self.0.rsplit_once(':').map_or(self.0.as_str(), |(name, _)| name)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_job_ids_are_refused_with_a_suggestion() {
        assert!("imagenet-4.2_a:b@c+d=e".parse::<JobId>().is_ok());
        assert_eq!("".parse::<JobId>(), Err(BadJobId::Empty));
        assert_eq!("x".repeat(10_000).parse::<JobId>(), Err(BadJobId::TooLong(10_000)));
        for (id, suggestion) in [("a/b", "a-b"), ("a b", "a-b"), ("größe", "gr--e"), ("..\n", "..-")] {
            match id.parse::<JobId>() {
                Err(BadJobId::Character { suggestion: got, .. }) => assert_eq!(got, suggestion),
                other => panic!("{id:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_node_id_keeps_its_name() {
        assert_eq!(NodeId::new("rack1:7", "ab").name(), "rack1:7");
    }
}
