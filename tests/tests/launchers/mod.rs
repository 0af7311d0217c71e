//! What PyTorch's own tests ask of a launcher, from outside, of elastic-agent and, when asked for, of torchrun; and
//! what torchrun was seen to get wrong.
//!
//! `make test` runs them on elastic-agent by torchrun's name, `make test-torchrun` on torchrun. Which of PyTorch's
//! cases is which test, which have no place here, and which torchrun fails: `docs/launcher-cases.md`.

mod elsewhere;
mod ends;
mod logs;
mod membership;
mod ranks;
mod rendezvous;
mod scene;
mod with_torch;
