//! The judgement of how workers and the job ended, from what a dead worker left behind to the report of the job's end.
//! If several nodes fail, the leader decides which failure is the job's cause, by the order of events.
//!
//! ```text
//!  exit status ──┐
//!  its own word ─┤ (socket)
//!  error.json ───┤              ┌─▶ the node's key ─▶ leader ─▶ the round's cause ─▶ every agent: report
//!  stderr ───────┼─▶ judge ─▶ Failure
//!  OOM counters ─┘
//! ```

pub(crate) mod judge;
pub(crate) mod recorded;
pub(crate) mod report;
