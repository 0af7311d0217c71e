//! Jobs that meet by TorchElastic's own rendezvous on etcd's v2 API: of our agents alone, and mixed with real torchrun.
//! Those with torchrun are skipped, with a line that says so, where there is no PyTorch.

mod found;
mod migration;
mod mixed;
mod ours;
mod scene;
mod training;
