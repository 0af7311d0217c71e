//! What PyTorch's own tests ask of a launcher, from outside, of elastic-agent and, when asked for, of torchrun; and
//! what torchrun was seen to get wrong.
//!
//! `make test` runs them on elastic-agent by torchrun's name, `make test-torchrun` on torchrun.
//!
//! # PyTorch's own cases
//!
//! Which test here checks what PyTorch's tests of torchrun (`test/distributed/elastic`, `test/distributed/launcher`)
//! require.
//!
//! Five tests run only on torchrun (†), because tests in `tests/tests/agents/` check the same on elastic-agent. Workers
//! are shell scripts unless the row says PyTorch.
//!
//! All 49 tests were run on torchrun on 2026-11-22, and passed unless the row says *fails*. Such a test names the step
//! that torchrun fails (`beyond torchrun`, `tested in agents`).
//!
//! - `run_test`: `launch_user_script_python` → `every_worker_has_a_rank`
//! - `…python_caffe2_bc`: `--master-addr`, `--master-port`, `--node-rank` alone →
//!   `the_master_may_be_named_as_before_there_were_rendezvous_flags`
//! - `…bash`, `--no-python` with `--module` → all tests run shell scripts; `a_module_is_not_run_without_python`
//! - `…default_nproc` → `one_worker_is_the_default`
//! - `…with_env_vars` → `flags_may_come_from_the_environment`
//! - `nproc_auto`, `number`, `unknown`, `gpu`, `cpu` → `workers_may_be_counted_by_a_word`; with GPUs
//!   `workers_are_counted_by_what_the_driver_shows` in `agents/flags.rs`
//! - `launch_elastic` → `fewer_nodes_than_the_maximum_begin_after_the_last_call`
//! - `…worker_raise_exception` → `a_failing_script_fails_the_launch`, `what_a_script_raised_is_reported`
//! - `…agent_raise_exception` → `what_the_launcher_fails_on_is_reported`
//! - `launch_standalone` → `a_standalone_node_heeds_no_rendezvous_flags`
//! - `launch_run_path` → `a_script_may_be_run_by_its_path`
//! - `…multiple_agents` → `two_launchers_share_the_ranks`
//! - `min_max_nodes_parse` → `a_wrong_number_of_nodes_is_refused`, `agent/src/cli/tests`
//! - shutdown on success and on failure → `a_failed_jobs_id_can_be_used_again` instead; `agents/endings.rs` (*fails*: the
//!   id stays closed)
//! - `is_torchelastic_launched` → `torchruns_variables_are_there`, `workers_of_two_nodes_sum_over_all` (PyTorch)
//! - `init_method` `env://` and `tcp://` → `workers_of_two_nodes_sum_over_all`, `workers_may_name_the_address_themselves`
//!   (PyTorch)
//! - `capture_logs…`, log prefixes → `streams_go_to_files_and_to_the_console_with_a_prefix`
//! - `virtual_local_rank` → `each_worker_may_see_only_its_own_device`
//! - `simple_dist_sum` → `workers_of_two_nodes_sum_over_all` (PyTorch)
//! - `dist_sum_heterogeneous` → `nodes_of_several_sizes_share_the_ranks`
//! - `run_check_env` → `torchruns_variables_are_there`
//! - `sad_function` → `the_error_that_a_worker_wrote_down_is_handed_up`
//! - `bipolar_function` → `restarts_are_bounded_and_each_has_a_directory`
//! - `correct_rank_assignment_heterogeneous` → `each_role_has_ranks_of_its_own`
//! - `double_agent_fault_tolerance` → `a_killed_node_is_replaced` † (*fails*: the survivor does not notice)
//! - `double_agent_elastic` → `a_group_continues_without_a_killed_node` † (*fails*: the survivor does not notice)
//! - `no_exit_barrier_on_failure` → `a_node_whose_worker_failed_does_not_wait`
//! - `workers_drift_success` → `one_node_may_be_done_before_another`
//! - `workers_drift_fail`: a barrier that fails → none: there is no exit barrier
//! - `torch_rpc` → `workers_of_two_nodes_call_each_other` (PyTorch)
//! - `zombie_test`, a child that ignores SIGTERM, `shutdown_timeout_test` →
//!   `who_does_not_end_by_the_shutdown_timeout_is_killed`
//! - signals to handle → `signals_to_the_launcher_reach_its_workers`
//! - `etcd_rdzv_basic_params`, `full_params`; two agents at once → `nodes_meet_on_etcd_below_a_prefix` (torchrun by
//!   etcd's v2 API)
//! - dynamic rendezvous: scale-up contract → `a_group_takes_in_a_newcomer` † (*fails*)
//! - dynamic: redundancy list → `a_spare_waits_takes_over_and_ends_well` † (*fails*)
//! - dynamic: min nodes, last call, join timeout → `too_few_nodes_give_up_after_the_join_timeout`, `fewer_nodes_…`
//! - dynamic: close timeout, keep-alive attempts → none: nothing is closed, and leases replace keep-alives
//!   (`agents/faults.rs`)
//! - static: IPv6, a missing port, several agents → `nodes_with_fixed_ranks_meet_at_the_master`, `…over_ipv6`,
//!   `a_backend_that_does_not_exist_is_named`
//! - `etcd_server_test`: a side-car's ports → `two_standalone_nodes_do_not_meet`: `--standalone` needs no etcd
//! - `out_of_tree_rendezvous` → `a_backend_that_does_not_exist_is_named`: it is refused
//! - `file_based_local_timer_test` → `a_timer_that_expires_ends_only_its_worker` (PyTorch) (*fails*: the agent is killed
//!   with the worker)
//!
//! Cases that PyTorch's tests lack:
//!
//! - commands from the documents of TorchX, Kubeflow, Accelerate and Slurm → `launchers/elsewhere.rs`
//! - a second run of one node with the same flags → `a_second_run_with_the_same_flags_runs_too` (*fails*: it waits as a
//!   spare, and fails)
//! - an id whose job has ended → `an_id_that_was_used_before_is_no_success`
//! - a restart over gloo → `gloo_begins_again_and_outlives_rank_0` in `torch_store/` (PyTorch) (not run: it *fails* at
//!   random, 2 of 3 runs)
//! - the same id after a failure → `a_failed_jobs_id_can_be_used_again` (*fails* on `etcd`)
//! - torchrun's other defects (`docs/differences-from-torchrun.md`) → the first *L* of a row there (*fails*;
//!   `the_node_of_rank_0_may_be_killed` †)

mod elsewhere;
mod ends;
mod logs;
mod membership;
mod ranks;
mod rendezvous;
mod scene;
mod with_torch;
