//! PyTorch's own scripts, with a real PyTorch, under the built agent: training that goes on when workers and agents
//! die, and when nodes come and go. Skipped, with a line that says so, where there is no PyTorch.

mod checkpoints;
mod matrix;
mod models;
mod readme;
mod session;
mod snapshots;
mod trace;
mod training;
