//! How things ended: what a dead worker left behind, what is made of it, and the report of the job's end. Not for which
//! of several nodes' failures is the job's cause: the leader decides that, by order of events.
//!
//! ```text
//!  exit status ──┐
//!  its own word ─┤ (socket)
//!  error.json ───┤              ┌─▶ the node's key ─▶ leader ─▶ the round's cause ─▶ every agent: report
//!  stderr ───────┼─▶ judge ─▶ Failure
//!  OOM counters ─┘
//! ```

pub mod judge;
pub mod recorded;
pub mod report;
