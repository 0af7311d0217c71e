//! How the two ends of a pulse stream prove to each other that they know the job's secret: anyone who merely reaches a
//! leader's port speaks for no member, and anyone who has come by a leader's address speaks for no leader.
//!
//! ```text
//!  member                                     leader
//!    │ ── hello: job, node, nonce m ──────────▶ │
//!    │ ◀────────────────────────────── nonce l ─ │
//!    │ ── proof ───────────────────────────────▶ │  HMAC(secret; member's purpose, m and l, job, leader, node)
//!    │ ◀──────────────────────────────── proof ─ │  HMAC(secret; leader's purpose, m and l, job, leader, node)
//! ```
//!
//! A beat follows the member's proof at once, and the leader's proof comes with its answer, so beats wait for nothing
//! that they have not waited for before. Both proofs name both ends: one that was given to another leader is none here.

use elastic_rendezvous::job::{Claim, JobSecret, NodeId};

/// Length of the random bytes that a client's proof is over.
pub(super) const NONCE: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Member,
    Leader,
}

/// What both proofs of one stream are over.
pub(super) struct Meeting<'a> {
    pub(super) job: &'a str,
    pub(super) leader: &'a NodeId,
    pub(super) member: &'a NodeId,
    pub(super) nonces: &'a Nonces,
}

/// The member's nonce and the leader's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Nonces([u8; 2 * NONCE]);

impl Nonces {
    /// `None`: one is no nonce.
    pub(super) fn of(member: &[u8], leader: &[u8]) -> Option<Nonces> {
        let whole = member.len() == NONCE && leader.len() == NONCE;
        whole.then(|| [member, leader].concat().try_into().ok()).flatten().map(Nonces)
    }

    pub(super) fn leaders(&self) -> Vec<u8> {
        self.0[NONCE..].to_vec()
    }
}

impl Meeting<'_> {
    pub(super) fn prove(&self, side: Side, secret: &JobSecret) -> Vec<u8> {
        self.with_claim(side, |claim| secret.prove(claim))
    }

    pub(super) fn verify(&self, side: Side, secret: &JobSecret, proof: &[u8]) -> bool {
        self.with_claim(side, |claim| secret.verify(claim, proof))
    }

    fn with_claim<T>(&self, side: Side, then: impl FnOnce(&Claim<'_>) -> T) -> T {
        let purpose = match side {
            Side::Member => "elastic pulse member 1",
            Side::Leader => "elastic pulse leader 1",
        };
        let (node, client) = (self.leader.as_str(), self.member.as_str());
        then(&Claim { purpose, nonce: &self.nonces.0, job: self.job, node, client })
    }
}

/// What a member has shown on its stream.
#[derive(Debug, Clone)]
pub struct Shown {
    pub(super) job: String,
    pub(super) nonces: Nonces,
    pub(super) proof: Vec<u8>,
}

impl Shown {
    /// The leader's own proof, if this is one of `member`, made for `leader`.
    pub(super) fn answer(&self, secret: &JobSecret, leader: &NodeId, member: &NodeId) -> Option<Vec<u8>> {
        let meeting = Meeting { job: &self.job, leader, member, nonces: &self.nonces };
        meeting.verify(Side::Member, secret, &self.proof).then(|| meeting.prove(Side::Leader, secret))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_stream_of_one_member_to_one_leader_and_from_one_end() {
        let secret = JobSecret::of([7; JobSecret::LENGTH]);
        let [leader, other, member] = ["l:1", "l:2", "m:1"].map(NodeId::from_text);
        let nonces = |member: u8, leader: u8| Nonces::of(&[member; NONCE], &[leader; NONCE]).unwrap();
        let (ours, theirs) = (nonces(1, 2), nonces(1, 3));
        let meeting = Meeting { job: "job", leader: &leader, member: &member, nonces: &ours };
        let proof = meeting.prove(Side::Member, &secret);
        let shown = Shown { job: "job".into(), nonces: ours.clone(), proof: proof.clone() };
        let answer = shown.answer(&secret, &leader, &member).expect("it is proved");
        assert!(meeting.verify(Side::Leader, &secret, &answer));
        assert!(!meeting.verify(Side::Leader, &secret, &proof), "a member's own proof, sent back");

        let stranger = JobSecret::of([8; JobSecret::LENGTH]);
        let forged = Shown { proof: meeting.prove(Side::Member, &stranger), ..shown.clone() };
        let sent_back = Shown { proof: answer, ..shown.clone() };
        let empty = Shown { proof: Vec::new(), ..shown.clone() };
        let replayed = Shown { nonces: theirs, ..shown.clone() };
        let elsewhere = Shown { job: "another".into(), ..shown.clone() };
        for (what, shown) in [
            ("without the secret", forged),
            ("a leader's proof, sent back", sent_back),
            ("nothing", empty),
            ("heard on another stream", replayed),
            ("of another job", elsewhere),
        ] {
            assert_eq!(shown.answer(&secret, &leader, &member), None, "{what}");
        }
        assert_eq!(shown.answer(&secret, &other, &member), None, "passed on to another leader");
        assert_eq!(shown.answer(&secret, &leader, &other), None, "of another member");
    }

    #[test]
    fn a_nonce_of_another_length_is_none() {
        for (member, leader) in [(NONCE, 0), (0, NONCE), (NONCE - 1, NONCE + 1), (2 * NONCE, 0)] {
            assert_eq!(Nonces::of(&vec![1; member], &vec![2; leader]), None);
        }
    }
}
