//! Who may use the API: the users file, one JSON object a line, and the tokens that its lines know by their SHA-256
//! alone. Which call needs which right is decided in `access`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use clap::ValueEnum;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use elastic_rendezvous::job::{JobId, Requester};
use elastic_store::followed::Followed;

/// What a user may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// See jobs
    Read,
    /// See jobs and change them
    Operate,
}

/// A line of the users file: one token of one user. Two lines of one name are two tokens, as while one is replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// The name that is in jobs' histories.
    pub name: String,
    /// What the user may do.
    pub role: Role,
    /// The only jobs that the user sees and touches; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jobs: Option<BTreeSet<JobId>>,
    /// SHA-256 of the token.
    pub sha256: Fingerprint,
    /// From when on the token is none, in milliseconds since the Unix epoch; absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
}

/// The SHA-256 of a token, in hexadecimal digits where it is written.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint([u8; SHA256_OUTPUT_LEN]);

impl Fingerprint {
    /// Of a token.
    pub fn of(token: &str) -> Fingerprint {
        let mut bytes = [0; SHA256_OUTPUT_LEN];
        bytes.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
        Fingerprint(bytes)
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = String;

    fn try_from(text: String) -> Result<Fingerprint, String> {
        let mut bytes = [0; SHA256_OUTPUT_LEN];
        if text.len() != 2 * bytes.len() || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err("sha256 is not 64 hexadecimal digits".to_owned());
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|error| error.to_string())?;
        }
        Ok(Fingerprint(bytes))
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> String {
        fingerprint.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from(self.clone()))
    }
}

/// A new token: 256 random bits, which no one guesses, so that its hash needs no salt.
pub fn new_token() -> String {
    BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>())
}

/// Whose token it is.
#[derive(Debug, PartialEq, Eq)]
pub enum Whose<'a> {
    /// This user's.
    Of(&'a User),
    /// This user's, and too old.
    Expired(&'a User),
    /// No one's.
    Nobody,
}

/// All users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Users(Vec<User>);

impl Users {
    /// Follows a users file. An error: it cannot be used now.
    pub fn follow(file: PathBuf) -> Result<Followed<Users>, String> {
        let name = file.display().to_string();
        let parse =
            move |texts: &[String]| Users::parse(&texts.concat()).map_err(|problem| format!("{name}: {problem}"));
        Followed::new("the users of --http-users", vec![file], parse)
    }

    /// Reads a file's lines. Empty ones, and those that begin with `#`, say nothing. An error names the line that is
    /// wrong.
    pub fn parse(text: &str) -> Result<Users, String> {
        let mut users: Vec<User> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let wrong = |why: &str| format!("line {}: {why}: write a new line with `elasticctl token`", at + 1);
            let user: User = serde_json::from_str(line).map_err(|error| wrong(&error.to_string()))?;
            if !Requester::is_name(&user.name) {
                return Err(wrong("its name is empty, too long, or holds control characters"));
            }
            if users.iter().any(|other| other.sha256 == user.sha256) {
                return Err(wrong("an earlier line has the same token"));
            }
            users.push(user);
        }
        Ok(Users(users))
    }

    /// Whose token this is. How long the answer takes says nothing about how much of a token was right.
    pub fn whose(&self, token: &str, now_ms: u64) -> Whose<'_> {
        let given = Fingerprint::of(token);
        let mut found = None;
        for user in &self.0 {
            if bool::from(user.sha256.0.ct_eq(&given.0)) {
                found = Some(user);
            }
        }
        match found {
            Some(user) if user.expires_ms.is_some_and(|end| now_ms >= end) => Whose::Expired(user),
            Some(user) => Whose::Of(user),
            None => Whose::Nobody,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str, token: &str, expires_ms: Option<u64>) -> User {
        User { name: name.to_owned(), role: Role::Read, jobs: None, sha256: Fingerprint::of(token), expires_ms }
    }

    #[test]
    fn a_token_is_known_by_its_hash_until_it_expires() {
        let (one, other) = (new_token(), new_token());
        assert!(one != other && one.len() >= 43, "{one}");
        let lines = [user("a", &one, Some(100)), user("b", &other, None)];
        let text: Vec<String> = lines.iter().map(|user| serde_json::to_string(user).unwrap()).collect();
        assert!(!text.concat().contains(&one));
        let users = Users::parse(&format!("# ours\n\n{}\n", text.join("\n"))).unwrap();
        assert_eq!(users.whose(&one, 99), Whose::Of(&lines[0]));
        assert_eq!(users.whose(&one, 100), Whose::Expired(&lines[0]));
        assert_eq!(users.whose(&other, u64::MAX), Whose::Of(&lines[1]));
        for wrong in ["", &one[1..], "a", &String::from(lines[0].sha256.clone())] {
            assert_eq!(users.whose(wrong, 0), Whose::Nobody, "{wrong}");
        }
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good = serde_json::to_string(&user("a", "t", None)).unwrap();
        for (line, says) in [
            (good.as_str(), "same token"),
            ("{", "EOF"),
            (&good.replace("read", "root"), "root"),
            (&good.replace("\"a\"", "\"\""), "name"),
            (&good.replace("name", "nmae"), "nmae"),
            (&good.replace("sha256\":\"", "sha256\":\"0"), "64 hexadecimal digits"),
        ] {
            let error = Users::parse(&format!("{good}\n{line}\n")).unwrap_err();
            assert!(error.starts_with("line 2: ") && error.contains(says), "{line}: {error}");
        }
    }
}
