//! What a round's workers ask of the store through their agents, under the fence: barriers and checkpoint commits.

pub mod barrier;
pub mod checkpoint;
