//! What `--resume` says: where the first state of a job comes from that has committed none.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a job begins that has committed no checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Resume {
    /// At the newest checkpoint in its own folder, if there is one.
    #[default]
    Auto,
    /// At step 0, in a folder without checkpoints.
    Never,
    /// At a checkpoint in a folder: of this step, or the newest.
    From {
        /// The folder, or one checkpoint's in it.
        dir: PathBuf,
        /// The step.
        step: Option<u64>,
    },
}

impl FromStr for Resume {
    type Err = String;

    fn from_str(text: &str) -> Result<Resume, String> {
        let (dir, step) = match text.rsplit_once('@') {
            Some((dir, step)) if step.bytes().all(|byte| byte.is_ascii_digit()) => match step.parse() {
                Ok(step) => (dir, Some(step)),
                Err(_) => {
                    return Err("the step after @ is not a number; write auto, never, DIR, or DIR@STEP".to_owned());
                }
            },
            _ => (text, None),
        };
        match (dir, step) {
            ("auto", None) => Ok(Resume::Auto),
            ("never", None) => Ok(Resume::Never),
            ("", _) => Err("no folder is named; write auto, never, DIR, or DIR@STEP".to_owned()),
            (dir, step) => Ok(Resume::From { dir: dir.into(), step }),
        }
    }
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resume::Auto => f.write_str("auto"),
            Resume::Never => f.write_str("never"),
            Resume::From { dir, step: None } => write!(f, "{}", dir.display()),
            Resume::From { dir, step: Some(step) } => write!(f, "{}@{step}", dir.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_may_have_a_step() {
        let from = |dir: &str, step| Resume::From { dir: dir.into(), step };
        for (text, wanted) in [
            ("auto", Resume::Auto),
            ("never", Resume::Never),
            ("/runs/a", from("/runs/a", None)),
            ("/runs/a@120", from("/runs/a", Some(120))),
            ("/runs/me@home", from("/runs/me@home", None)),
            ("./auto", from("./auto", None)),
            ("/runs/me@home@7", from("/runs/me@home", Some(7))),
        ] {
            let read: Resume = text.parse().unwrap();
            assert_eq!((&read, read.to_string().as_str()), (&wanted, text));
        }
        for wrong in ["", "@7", "/runs/a@", "/runs/a@99999999999999999999"] {
            assert!(wrong.parse::<Resume>().unwrap_err().contains("DIR@STEP"), "{wrong}");
        }
    }
}
