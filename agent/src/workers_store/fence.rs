//! Who may speak to a round's store: the hosts of the round's nodes.
//!
//! Neither torch's protocol nor its client knows a secret. So each node's agent proves, on a connection of its own, that
//! it knows the job's, and the store then serves all that comes from the same address. Where a worker connects, its agent
//! does too, so the address is the same whatever networks and translations lie between.
//!
//! ```text
//!  agent                                     store
//!    │ INTRODUCTION ───────────────────────▶ │
//!    │ ◀──────────────────── 32 random bytes │
//!    │ the proof, 32 bytes ────────────────▶ │
//!    │ ◀─────────────────────────── ADMITTED │
//! ```

use std::collections::BTreeSet;
use std::net::IpAddr;

use elastic_rendezvous::job::{Claim, JobSecret};

/// What an agent says first. No request of torch's begins with its first byte.
pub const INTRODUCTION: &[u8] = b"elastic introduction 1\n";
/// Random bytes that the store answers with, used once.
pub const NONCE: usize = 32;
/// Length of a proof, in bytes.
pub(crate) const PROOF: usize = 32;
/// What the store answers to a proof that is right. To another it answers nothing.
pub const ADMITTED: u8 = 1;

/// What a round's agents know, and strangers do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The job's secret.
    pub secret: JobSecret,
    /// The job.
    pub job: String,
    /// The round.
    pub round: u64,
}

impl Known {
    /// The proof of an agent that was given this nonce.
    pub fn prove(&self, nonce: &[u8]) -> Vec<u8> {
        self.asked(nonce, |claim| self.secret.prove(claim))
    }

    fn asked<T>(&self, nonce: &[u8], answer: impl FnOnce(&Claim<'_>) -> T) -> T {
        let round = self.round.to_string();
        answer(&Claim { purpose: "elastic introduction 1", nonce, job: &self.job, node: &round, client: "" })
    }
}

/// How far a connection has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// What it sends is served.
    Served,
    /// It may say who it is. What it has sent waits.
    Waits(Vec<u8>),
    /// It was given this nonce, and has sent so much of its proof.
    Proves([u8; NONCE], Vec<u8>),
}

impl Entry {
    /// Bytes that are kept for it.
    pub(super) fn held(&self) -> usize {
        match self {
            Entry::Served => 0,
            Entry::Waits(said) | Entry::Proves(_, said) => said.len(),
        }
    }

    /// Whether it waits for its host's agent: it has begun to speak torch's protocol.
    pub(super) fn is_held(&self) -> bool {
        matches!(self, Entry::Waits(said) if !INTRODUCTION.starts_with(said))
    }
}

/// What to do with a connection that has sent something.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing yet.
    Wait,
    /// Serve what it has sent, and all that it will.
    Serve(Vec<u8>),
    /// Answer with this nonce.
    Ask([u8; NONCE]),
    /// Say so, and serve all that has come from its host.
    Admit,
    /// It does not know the secret.
    Refuse,
}

/// The hosts that are let in.
#[derive(Debug)]
pub(super) struct Fence {
    known: Known,
    admitted: BTreeSet<IpAddr>,
}

impl Fence {
    pub(super) fn new(known: Known) -> Fence {
        Fence { known, admitted: BTreeSet::new() }
    }

    /// A connection that is not served yet has sent these bytes. `nonce` gives random ones.
    pub(super) fn heard(
        &mut self,
        entry: &mut Entry,
        from: Option<IpAddr>,
        bytes: &[u8],
        nonce: impl FnOnce() -> Option<[u8; NONCE]>,
    ) -> Turn {
        match entry {
            Entry::Served => Turn::Serve(bytes.to_vec()),
            Entry::Waits(said) => {
                said.extend_from_slice(bytes);
                if said.starts_with(INTRODUCTION) {
                    let Some(nonce) = nonce() else { return Turn::Refuse };
                    let proof = said.split_off(INTRODUCTION.len());
                    *entry = Entry::Proves(nonce, proof);
                    return Turn::Ask(nonce);
                }
                if INTRODUCTION.starts_with(said) || !from.is_some_and(|from| self.admitted.contains(&from)) {
                    return Turn::Wait;
                }
                let said = std::mem::take(said);
                *entry = Entry::Served;
                Turn::Serve(said)
            }
            Entry::Proves(nonce, proof) => {
                proof.extend_from_slice(bytes);
                match (proof.len(), from) {
                    (..PROOF, _) => Turn::Wait,
                    (PROOF, Some(from))
                        if self.known.asked(&nonce[..], |claim| self.known.secret.verify(claim, proof)) =>
                    {
                        self.admitted.insert(from);
                        Turn::Admit
                    }
                    _ => Turn::Refuse,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)));
    const B: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)));
    const NONCES: [u8; NONCE] = [9; NONCE];

    fn known() -> Known {
        Known { secret: JobSecret::of([7; JobSecret::LENGTH]), job: "job".into(), round: 3 }
    }

    fn waits() -> Entry {
        Entry::Waits(Vec::new())
    }

    /// What a fence answers to these bytes of one connection, sent one after the other.
    fn says(fence: &mut Fence, entry: &mut Entry, from: Option<IpAddr>, bytes: &[u8]) -> Turn {
        let mut turn = Turn::Wait;
        for byte in bytes {
            assert_eq!(turn, Turn::Wait);
            turn = fence.heard(entry, from, &[*byte], || Some(NONCES));
        }
        turn
    }

    #[test]
    fn a_host_is_served_once_its_agent_has_proved_itself_from_there() {
        let mut fence = Fence::new(known());
        let mut worker = waits();
        assert_eq!(says(&mut fence, &mut worker, A, b"\x00abc"), Turn::Wait);
        let mut agent = waits();
        assert_eq!(says(&mut fence, &mut agent, A, INTRODUCTION), Turn::Ask(NONCES));
        assert_eq!(says(&mut fence, &mut agent, A, &known().prove(&NONCES)), Turn::Admit);
        assert_eq!(fence.heard(&mut worker, A, b"", || None), Turn::Serve(b"\x00abc".to_vec()));
        // And no other
        assert_eq!(says(&mut fence, &mut waits(), B, b"\x00abc"), Turn::Wait);
        assert_eq!(fence.heard(&mut waits(), None, b"\x00abc", || None), Turn::Wait);
        // It may introduce itself once more
        assert_eq!(says(&mut fence, &mut waits(), A, INTRODUCTION), Turn::Ask(NONCES));
    }

    #[test]
    fn nothing_but_the_proof_for_this_round_and_nonce_lets_anybody_in() {
        let right = known().prove(&NONCES);
        let wrong: [(&str, Vec<u8>); 5] = [
            ("another secret", Known { secret: JobSecret::of([8; 32]), ..known() }.prove(&NONCES)),
            ("another job", Known { job: "other".into(), ..known() }.prove(&NONCES)),
            ("another round", Known { round: 4, ..known() }.prove(&NONCES)),
            ("another nonce", known().prove(&[1; NONCE])),
            ("more than a proof", [right.clone(), vec![0]].concat()),
        ];
        for (what, proof) in wrong {
            let mut fence = Fence::new(known());
            let mut entry = waits();
            assert_eq!(fence.heard(&mut entry, A, INTRODUCTION, || Some(NONCES)), Turn::Ask(NONCES));
            assert_eq!(fence.heard(&mut entry, A, &proof, || None), Turn::Refuse, "{what}");
            assert_eq!(says(&mut fence, &mut waits(), A, b"\x00abc"), Turn::Wait, "{what}");
        }
        assert_eq!(right.len(), PROOF);
    }

    #[test]
    fn a_proof_that_was_sent_before_the_nonce_is_none() {
        let mut fence = Fence::new(known());
        let early = [INTRODUCTION, &known().prove(&[0; NONCE])].concat();
        let mut entry = waits();
        assert_eq!(fence.heard(&mut entry, A, &early, || Some(NONCES)), Turn::Ask(NONCES));
        assert_eq!(fence.heard(&mut entry, A, &known().prove(&NONCES), || None), Turn::Refuse);
    }
}
