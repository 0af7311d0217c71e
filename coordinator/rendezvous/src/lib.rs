//! The rendezvous protocol as pure machines: how nodes agree on rounds. Values, and functions of values; no IO, no clock
//! and no log. The time is an argument of every decision. The drivers in `elastic_node` run the machines against a real
//! store, and `elastic_simulation` runs them in simulated time.
//!
//! Each module uses only those above it in this table.
//!
//! | module | what it is |
//! |---|---|
//! | [`time`] | time as a value, and dates for people |
//! | [`kv`] | the vocabulary of a key-value store: revisions, guards, transactions, events, errors |
//! | [`job`] | a job's vocabulary: ids, keys, records |
//! | [`view`] | what a leader knows of a job |
//! | `roster` | the nodes within a view, by name and by rank |
//! | `exclusion` | nodes that failed again and again, and get no place for a time |
//! | [`decide`](mod@decide) | what the leader does next: a function of the view and the time |
//! | [`leader`] | keeps the view up to date and writes decisions as guarded transactions |
//! | [`member`] | a node's own steps: its key, its lease, its workers, its fence point |
//!
//! > A node writes only its own key. The leader writes only the round. Everyone watches the round; only the leader
//! > watches the nodes.
//!
//! A comment `mutant NAME: THIS => THAT` names a fault of the next line, which replaces THIS by THAT. The tests of
//! `elastic_simulation` put it into a copy of the line, and must notice it.

#![forbid(unsafe_code)]
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod decide;
mod exclusion;
pub mod job;
pub mod kv;
pub mod leader;
pub mod member;
mod roster;
mod seats;
pub mod time;
pub mod view;

pub use decide::{Decision, Eviction, Form, Verdict, decide};
pub use exclusion::KnownFaults;
pub use leader::{Demand, Leader, LeaderInput, LeaderOutput, Word};
pub use member::{
    Call, Command, Credentials, End, GroupReport, Member, MemberInput, MemberOutput, MemberSetup, Outcome, Start,
};
pub use roster::{Contact, Evicted, Present, Roster, SealedMember};
pub use seats::Seat;
pub use view::Former;
