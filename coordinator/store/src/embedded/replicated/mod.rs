//! The embedded store on three agents. Any two of them can serve it: Raft (<https://raft.github.io/raft.pdf>) over
//! state in memory.
//!
//! ```text
//!   clients ─▶ EmbeddedServer ─▶ Group ── commands ─▶ Replica ── letters ─▶ the other two
//!                  ▲               │  ◀── committed ──┘
//!                  └──── Hub ◀─────┘  carried out in the log's order, on each of the three
//! ```
//!
//! [`Replica`] is the pure machine: which agent votes in which life, who leads, what is agreed on. `Group` drives it, and
//! `post` carries its letters over the store's own port and TLS.
//!
//! What differs from Raft on disks, as a process that ends forgets its log and its votes:
//!
//! - A voter is a *life*: a number that a process draws at its start. One that starts again is another, without a vote.
//!   The leader sends it the state, takes the life before it out, and takes it in, each by an entry of the log.
//! - That a life has ended is proven, never guessed: the process at its seat answers a letter to it as another.
//! - A cluster begins when two fresh lives meet, and no third has a state. Two are the least that agree on anything, so
//!   no two clusters of the three can serve at once.
//! - Of two that vote, each has all that was agreed on. So where one's life has ended, the other continues, once a third
//!   has the state too. Before a third gets a vote, the two agree who it is: then the other needs it to continue.
//! - None leaves while another that is there still needs the store: each says so in its letters.
//! - Who cannot have a cluster any more begins a new life. For the others that is the same as a crash.

mod group;
mod leading;
mod leaving;
mod life;
mod log;
mod post;
mod replica;
#[cfg(test)]
mod tests;

pub use group::{Group, Replicas};
pub use replica::{Output, Replica, Standing};

pub(super) use group::Letters;
