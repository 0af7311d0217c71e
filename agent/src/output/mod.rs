//! The workers' output, what they leave behind, and the reports of both.
//!
//! | module | what it is |
//! |---|---|
//! | [`events`] | torchrun's events, as lines of JSON |
//! | [`logs`] | where the workers' output goes: files, console, both |
//! | [`outcome`] | what a dead worker left behind, what it means, and the final report |
//! | [`template`] | `${local_rank}` and its like in arguments and prefixes |

pub(crate) mod events;
pub(crate) mod logs;
pub(crate) mod outcome;
pub(crate) mod template;
