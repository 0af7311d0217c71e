//! All tests across crates, as one program: a program for each module would build what they share once for each.
//!
//! | module | what it tests |
//! |---|---|
//! | `agents` | the built agents, end to end, on real etcd servers |
//! | `deploy` | what is in `deploy/`: the recipe, its scripts |
//! | `embedded_against_etcd` | the embedded store beside a real etcd: the same answers to random histories |
//! | `etcd_faults`, `etcd_v2` | what our clients of etcd's v3 and v2 API do when servers or networks fail |
//! | `frameworks` | Transformers, Lightning and Accelerate, under kills: `make test-frameworks` |
//! | `hostile` | what a client without rights can do to the ports of an agent and of a coordinator |
//! | `launchers` | PyTorch's own cases for launchers, on the agent and on torchrun |
//! | `linearizable` | whether what clients see under faults could come from a store that does one thing at a time |
//! | `operator` | `elastic-coordinator` and `elasticctl` as users run them |
//! | `operator_doctor` | what `elasticctl doctor` says of servers that are well, dead, full, foreign or strict |
//! | `packaging` | what `make dist` makes, installed and run where nothing else is |
//! | `protocol` | rounds with real drivers and connections, all in one process |
//! | `python` | the Python package and its wheel, without PyTorch |
//! | `pytorch`, `torch_store`, `torchelastic` | PyTorch's scripts, its store's clients, and its rendezvous on etcd v2 |
//! | `setup` | what `scripts/setup.sh` says on machines that lack something |
//! | `upgrade` | jobs whose programs are of this release and of the one before |
//! | `store_contract`, `store_contract_embedded` | what each store must do |

// Helpers of tests fail as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::print_stdout)]

mod agents;
mod deploy;
mod embedded_against_etcd;
mod etcd_faults;
mod etcd_v2;
mod frameworks;
mod hostile;
mod launchers;
mod linearizable;
mod operator;
mod operator_doctor;
mod packaging;
mod protocol;
mod python;
mod pytorch;
mod setup;
mod store_contract;
mod store_contract_embedded;
mod torch_store;
mod torchelastic;
mod upgrade;
