//! The secret of a job: it proves, to an agent of the job, that somebody may read the job's keys in the store. It
//! encrypts nothing, and chance comes from the caller.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The record under `secret`: a key of 32 random bytes. It is written with a generation's `spec`, and stays in the store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSecret {
    #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
    key: [u8; JobSecret::LENGTH],
}

/// What is proved: that a client knows the secret now, for one question to one node.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// What for, so that a proof for one purpose is none for another.
    pub purpose: &'a str,
    /// Random bytes of the node that is asked, used once.
    pub nonce: &'a [u8],
    /// The job.
    pub job: &'a str,
    /// The id of the node that is asked.
    pub node: &'a str,
    /// Who asks.
    pub client: &'a str,
}

impl JobSecret {
    /// Length of the key in bytes.
    pub const LENGTH: usize = 32;

    /// A secret of these random bytes.
    pub fn of(key: [u8; JobSecret::LENGTH]) -> JobSecret {
        JobSecret { key }
    }

    /// The proof of a claim: HMAC-SHA256 over its fields, each after its length in four bytes (big endian).
    pub fn prove(&self, claim: &Claim<'_>) -> Vec<u8> {
        hmac::sign(&self.hmac(), &claim.bytes()).as_ref().to_vec()
    }

    /// Whether `proof` is the proof of this claim. Takes the same time for every wrong proof.
    pub fn verify(&self, claim: &Claim<'_>, proof: &[u8]) -> bool {
        hmac::verify(&self.hmac(), &claim.bytes(), proof).is_ok()
    }

    fn hmac(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.key)
    }
}

impl Claim<'_> {
    fn bytes(&self) -> Vec<u8> {
        let fields = [self.purpose.as_bytes(), self.nonce, self.job.as_bytes(), self.node.as_bytes()];
        let mut bytes = Vec::new();
        for field in fields.into_iter().chain([self.client.as_bytes()]) {
            bytes.extend_from_slice(&u32::try_from(field.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(field);
        }
        bytes
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(…)")
    }
}

fn to_base64<S: Serializer>(key: &[u8; JobSecret::LENGTH], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(key))
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; JobSecret::LENGTH], D::Error> {
    let problem = || serde::de::Error::custom("the key is not 32 bytes in base64");
    let bytes = STANDARD.decode(String::deserialize(deserializer)?).map_err(|_| problem())?;
    bytes.try_into().map_err(|_| problem())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: Claim<'_> = Claim { purpose: "logs", nonce: b"nonce", job: "job", node: "a:1", client: "me" };

    #[test]
    fn a_proof_fits_its_secret_and_its_claim_alone() {
        let secret = JobSecret::of([7; 32]);
        let proof = secret.prove(&CLAIM);
        assert!(secret.verify(&CLAIM, &proof));
        assert!(!JobSecret::of([8; 32]).verify(&CLAIM, &proof));
        assert!(!secret.verify(&CLAIM, &[]));
        for other in [
            Claim { purpose: "pulse", ..CLAIM },
            Claim { nonce: b"another", ..CLAIM },
            Claim { job: "jo", ..CLAIM },
            Claim { node: "a:2", ..CLAIM },
            Claim { client: "you", ..CLAIM },
            // The same bytes, cut elsewhere.
            Claim { job: "jo", node: "ba:1", ..CLAIM },
        ] {
            assert!(!secret.verify(&other, &proof), "{other:?}");
        }
    }

    #[test]
    fn a_secret_survives_json_and_is_never_shown() {
        let secret = JobSecret::of(std::array::from_fn(|at| at as u8));
        let json = serde_json::to_string(&secret).unwrap();
        assert_eq!(json, r#"{"key":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}"#);
        assert_eq!(serde_json::from_str::<JobSecret>(&json).unwrap(), secret);
        assert_eq!(format!("{secret:?}"), "JobSecret(…)");
        for damaged in [r#"{"key":"AAEC"}"#, r#"{"key":"!"}"#, "{}"] {
            assert!(serde_json::from_str::<JobSecret>(damaged).is_err(), "{damaged}");
        }
    }
}
