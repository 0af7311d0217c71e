//! How nodes agree on rounds: the leader's decisions and every node's steps, as pure machines. They do no IO: the
//! drivers in `elastic_coordinator::node` do what they ask for, and so does the simulation.
//!
//! | module | what it is |
//! |---|---|
//! | [`decide`](mod@decide) | what the leader does next, from all it knows |
//! | [`view`] | what a leader knows |
//! | `exclusion` | nodes that failed again and again, and get no place for a time |
//! | `roster` | the nodes within it, found by what is asked about them |
//! | [`leader`] | keeps the view up to date and carries decisions out as guarded transactions |
//! | [`member`] | a node's own steps: its key, its lease, its workers, its fence point |
//!
//! > A node writes only its own key. The leader writes only the round. Everyone watches the round; only the leader
//! > watches the nodes.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod decide;
mod exclusion;
pub mod leader;
pub mod member;
mod roster;
mod seats;
pub mod view;

pub use decide::{Decision, Eviction, Form, Verdict, decide};
pub use exclusion::KnownFaults;
pub use leader::{Demand, Former, Leader, LeaderInput, LeaderOutput, Word};
pub use member::{Call, Credentials, End, Member, MemberInput, MemberOutput, MemberSetup, Outcome, Start};
pub use roster::{Contact, Evicted, Present, Roster, SealedMember};
pub use seats::Seat;
