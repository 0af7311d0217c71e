//! Which releases work together: what a program says of itself in its records, and which jobs it may take part in. What
//! each side does with records of the other is in `docs/protocol.md`, "Versions".

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::kv::KeyValue;

/// The versions of the protocol that a program speaks. A job has one of them, and all its programs speak that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocols {
    /// The oldest.
    #[serde(rename = "oldest_protocol")]
    pub oldest: u32,
    /// The newest: what it begins a job with.
    #[serde(rename = "newest_protocol")]
    pub newest: u32,
}

impl Protocols {
    /// Those of this build.
    pub const OURS: Protocols = Protocols { oldest: 1, newest: 1 };

    /// Whether a program with these may take part in a job of this version.
    pub fn include(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl fmt::Display for Protocols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.newest - self.oldest.min(self.newest) {
            0 => write!(f, "{}", self.newest),
            1 => write!(f, "{} and {}", self.oldest, self.newest),
            _ => write!(f, "{} to {}", self.oldest, self.newest),
        }
    }
}

/// What a program says of itself in the records that it writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The release, as `--version` prints it.
    pub version: String,
    /// What it speaks.
    #[serde(flatten)]
    pub protocols: Protocols,
}

impl Release {
    /// This build.
    pub fn ours() -> Release {
        Release { version: env!("CARGO_PKG_VERSION").to_owned(), protocols: Protocols::OURS }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {})", self.version, self.protocols)
    }
}

/// The protocol of a job, and the release that began it. This part of `spec` can be read whatever the rest has become.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct JobProtocol {
    /// The version that the job speaks.
    #[serde(rename = "protocol")]
    pub version: u32,
    /// Who wrote it.
    #[serde(default)]
    pub release: Option<Release>,
}

impl JobProtocol {
    /// Reads it from a `spec` record, of this release or of another; `None` for one that is not ours at all.
    pub fn of(spec: &KeyValue) -> Option<JobProtocol> {
        serde_json::from_slice(&spec.value).ok()
    }

    /// Why a program of this release may not take part in the job, with both ranges and what to do; `None` if it may.
    pub fn refuses(&self, ours: &Release) -> Option<String> {
        let version = self.version;
        if ours.protocols.include(version) {
            return None;
        }
        let theirs = self.release.as_ref().map_or_else(|| "an unnamed release".to_owned(), Release::to_string);
        let what = if version > ours.protocols.newest {
            let begun_by = self.release.as_ref();
            let to = begun_by.map_or_else(String::new, |release| format!(" to {}", release.version));
            let newest = ours.protocols.newest;
            let back = if begun_by.is_some_and(|release| release.protocols.include(newest)) {
                format!(", or end the job and start its agents again with --rdzv-conf job_protocol={newest}")
            } else {
                String::new()
            };
            format!("upgrade the programs of this host{to}{back}")
        } else {
            "let the job end and start it again, then it begins with the newest that its agents speak; or use a release \
             that speaks both until then"
                .to_owned()
        };
        Some(format!(
            "the job speaks protocol version {version}, and this is {ours}; the job was begun by {theirs}: {what}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(version: &str, oldest: u32, newest: u32) -> Release {
        Release { version: version.to_owned(), protocols: Protocols { oldest, newest } }
    }

    #[test]
    fn a_job_is_refused_outside_of_the_range_with_both_ranges_and_what_to_do() {
        for (job, by, ours, refusal) in [
            (1, None, release("0.1.0", 1, 1), None),
            (1, None, release("0.2.0", 1, 2), None),
            (2, Some(release("0.2.0", 1, 2)), release("0.3.0", 2, 4), None),
            (
                2,
                Some(release("0.2.0", 1, 2)),
                release("0.1.0", 1, 1),
                Some(
                    "this is 0.1.0 (protocol 1); the job was begun by 0.2.0 (protocol 1 and 2): upgrade the programs of \
                     this host to 0.2.0, or end the job and start its agents again with --rdzv-conf job_protocol=1",
                ),
            ),
            (
                3,
                Some(release("0.3.0", 2, 3)),
                release("0.1.0", 1, 1),
                Some("begun by 0.3.0 (protocol 2 and 3): upgrade the programs of this host to 0.3.0"),
            ),
            (9, None, release("0.1.0", 1, 1), Some("upgrade the programs of this host")),
            (
                1,
                None,
                release("0.4.0", 2, 4),
                Some("this is 0.4.0 (protocol 2 to 4); the job was begun by an unnamed release: let the job end"),
            ),
        ] {
            let told = JobProtocol { version: job, release: by }.refuses(&ours);
            match refusal {
                None => assert_eq!(told, None),
                Some(part) => {
                    let told = told.unwrap();
                    assert!(told.contains(part), "{told}");
                    assert!(told.starts_with(&format!("the job speaks protocol version {job}, ")), "{told}");
                }
            }
        }
    }

    #[test]
    fn the_protocol_is_read_from_a_spec_that_is_otherwise_unknown() {
        let of = |value: &str| {
            let at = crate::kv::Revision(1);
            let (key, value) = ("spec".to_owned(), value.as_bytes().to_vec());
            JobProtocol::of(&KeyValue { key, value, create_revision: at, mod_revision: at, lease: None })
        };
        let later = of(r#"{"protocol":7,"min_nodes":{"any":"shape"},"release":{"version":"2.0.0","oldest_protocol":5,
            "newest_protocol":7,"more":1}}"#);
        assert_eq!(later, Some(JobProtocol { version: 7, release: Some(release("2.0.0", 5, 7)) }));
        assert_eq!(of(r#"{"protocol":1}"#), Some(JobProtocol { version: 1, release: None }));
        assert_eq!(of("rubbish"), None);
    }
}
