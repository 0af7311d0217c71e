//! `elastic_agent.torch.Session`: a training loop whose process outlives changes of its group.

mod deaths;
mod joins;
mod lost;
mod promises;
mod replicas;
mod slow;

use elastic_agent::for_tests::{TcpStore, WorkersStoreLimits};
use elastic_tests::prelude::*;

use crate::pytorch::trace::{LIMIT, Line, ended, lines, works};
use promises::{all_agree, each_sample_once_an_epoch, no_step_is_lost, result};

const SCRIPT: &str = "trains_in_session.py";

#[tokio::test]
async fn a_session_keeps_its_process_and_loses_no_step() {
    let Some(torch) = Torch::find() else { return };
    let job =
        Job::on_etcd("1:2").await.flag("--max-restarts=1").flag("--warm-up=120").script(&torch, SCRIPT, &["shards"]);
    let mut agents = job.start_all(["a", "b"]);
    let first = works(&job, "applied", 1, 2).await;
    let pid = pid_of(&job, "a", first);

    // When an agent dies, then the other continues in the same process
    agents[1].kill();
    let alone = works(&job, "applied", first + 1, 1).await;
    assert_eq!(pid_of(&job, "a", alone), pid);

    // When a node joins, then it gets the state, and no step is done again
    agents[1] = job.start("b");
    let both = works(&job, "applied", alone + 1, 2).await;
    assert_eq!(pid_of(&job, "a", both), pid);
    let told = lines(&job);
    let joined = told.iter().find(|line| line.is("begin") && line.number("round") == both).unwrap();
    assert!(joined.text("node") == "b" && joined.number("step") > 0, "{joined:?}");
    assert_eq!(last_step(&told, both - 1) + 1, first_step(&told, both), "a planned change repeats nothing");

    // When a worker dies, then the other continues at once, and the replacement gets the state when it has its imports
    let survivor = pid_of(&job, "b", both);
    kill(pid);
    let meanwhile = works(&job, "applied", both + 1, 1).await;
    assert_eq!(pid_of(&job, "b", meanwhile), survivor);
    let third = works(&job, "applied", meanwhile + 1, 2).await;
    assert_eq!(pid_of(&job, "b", third), survivor);
    assert_ne!(pid_of(&job, "a", third), pid);

    // When a node leaves as planned, then no step is done again
    agents[1].signal(Signal::TERM);
    assert_eq!(agents[1].exit(LIMIT).await, 3);
    let last = works(&job, "applied", third + 1, 1).await;
    assert_eq!(last_step(&lines(&job), third) + 1, first_step(&lines(&job), last), "a leave repeats nothing");

    // When a node comes after the last step, while the script tests its model, then it gets no place
    job.write("tests", "");
    let epochs = finish(&job);
    eventually("the training is over", LIMIT, async || lines(&job).into_iter().find(|line| line.is("end"))).await;
    agents[1] = job.start("b");
    agents[0].says("no node is admitted", LIMIT).await;
    std::fs::remove_file(job.path("tests")).unwrap();
    ended(&mut agents, 0).await;
    let told = lines(&job);
    assert_eq!(told.iter().filter(|line| line.is("end")).count(), 1);
    each_sample_once_an_epoch(&told, epochs);

    // Then the result is that of a training that nothing disturbed
    is_as_undisturbed(&torch, &["shards"], &told, epochs).await;
}

#[tokio::test]
async fn a_session_resumes_from_its_checkpoint_when_all_die_or_leave() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").script(&torch, SCRIPT, &["rank-batch"]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut agents: [Agent; 2] = job.start_all(["a", "b"]);
    let committed = async || job.record("checkpoint").await.filter(|it| it["step"].as_u64() >= Some(20));
    let committed = eventually("two checkpoints are committed", LIMIT, committed).await;

    kill(pid_of(&job, "a", 1));
    kill(pid_of(&job, "b", 1));
    let second = works(&job, "applied", 2, 2).await;
    let told = lines(&job);
    for begin in told.iter().filter(|line| line.is("begin") && line.number("round") == second) {
        assert!(begin.number("step") >= committed["step"].as_u64().unwrap(), "{begin:?}, committed {committed}");
        assert_eq!(begin.number("step") % 10, 0, "{begin:?}");
    }
    // The script hears of its group once, when the state is there.
    let groups: Vec<_> = told.iter().filter(|line| line.is("group") && line.number("round") == second).collect();
    let right = |line: &&Line| line.number("size") == 2 && line.number("step") > 0;
    assert!(groups.len() == 2 && groups.iter().all(right), "{groups:?}");

    // When the job is asked to leave, then its last step is saved, and it continues from there
    agents.iter().for_each(|agent| agent.signal(Signal::TERM));
    ended(&mut agents, LEFT).await;
    let done = lines(&job).iter().filter(|line| line.is("applied")).map(|line| line.number("step")).max().unwrap() + 1;
    assert_eq!(job.record("checkpoint").await.unwrap()["step"], done);
    agents = job.start_all(["a", "b"]);
    let third = works(&job, "applied", second + 1, 2).await;
    assert_eq!(first_step(&lines(&job), third), done);

    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
    result(&lines(&job));
}

#[tokio::test]
async fn a_node_that_leaves_while_a_newcomer_joins_saves_what_only_it_has() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.script(&torch, SCRIPT, &[]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut a = job.start("a");
    let first = works(&job, "applied", 1, 1).await;

    // When a node has its place, and its worker does not yet meet the one that has the state
    job.write("late-b", "");
    let mut b = job.start("b");
    let place = async || job.workers().into_iter().find(|worker| worker.node == "b");
    let second = eventually("b has a place", LIMIT, place).await.round;
    // ... and that one is asked to leave
    job.leaves([&mut a]).await;

    // Then it has saved its last step, and the other continues from there
    std::fs::remove_file(job.path("late-b")).unwrap();
    let third = works(&job, "applied", second + 1, 1).await;
    let told = lines(&job);
    assert_eq!(first_step(&told, third), last_step(&told, first) + 1);
    let epochs = finish(&job);
    assert_eq!(b.exit(LIMIT).await, 0);
    each_sample_once_an_epoch(&lines(&job), epochs);
}

#[tokio::test]
async fn a_session_that_does_something_else_keeps_its_state_while_a_node_joins() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.conf("quiesce_timeout", "2s").script(&torch, SCRIPT, &["stateful"]);
    let mut agents = vec![job.start("a")];
    let first = works(&job, "applied", 1, 1).await;
    job.write("aside-a", "");
    let aside = async || lines(&job).into_iter().find(|line| line.is("aside"));
    let step = eventually("it is aside", LIMIT, aside).await.number("step");

    // When a node joins, and gets its place, long before the first is back
    agents.push(job.start("b"));
    let place = async || job.workers().into_iter().find(|worker| worker.node == "b");
    let second = eventually("b has a place", LIMIT, place).await.round;
    assert!(second > first);
    std::fs::remove_file(job.path("aside-a")).unwrap();

    // Then the first has kept its process, and both continue from its state
    works(&job, "applied", second, 2).await;
    assert_eq!(pid_of(&job, "a", second), pid_of(&job, "a", first));
    assert_eq!(first_step(&lines(&job), second), step);
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
}

#[tokio::test]
async fn a_node_that_joins_the_second_session_of_a_script_gets_the_result_of_the_first() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.flag("--warm-up=120").script(&torch, "trains_twice.py", &[]);
    let mut agents = vec![job.start("a")];
    let first = works(&job, "applied", 1, 1).await;
    let pid = pid_of(&job, "a", first);

    // When a node joins during the second session
    agents.push(job.start("b"));
    let both = works(&job, "applied", first + 1, 2).await;

    // Then it has not trained the first, and the other has kept its process
    assert_eq!(pid_of(&job, "a", both), pid);
    let taught: Vec<_> = lines(&job).into_iter().filter(|line| line.is("taught")).collect();
    assert_eq!(taught.len(), 2, "{taught:?}");
    assert!(
        taught.iter().all(|line| line.number("step") == 16 && line.real("sum") == taught[0].real("sum")),
        "{taught:?}"
    );
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    let told = lines(&job);
    each_sample_once_an_epoch(&told, epochs);
    no_step_is_lost(&told);
    all_agree(&told);
}

#[tokio::test]
async fn a_loop_of_the_scripts_own_gains_and_loses_a_worker() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.flag("--max-restarts=1").flag("--warm-up=120");
    let job = job.script(&torch, "trains_in_loop.py", &[]);
    let mut agents = vec![job.start("a")];
    let first = works(&job, "applied", 1, 1).await;
    let pid = pid_of(&job, "a", first);

    // When a node joins, and then its worker dies within a step
    agents.push(job.start("b"));
    let both = works(&job, "applied", first + 1, 2).await;
    kill(pid_of(&job, "b", both));

    // Then the other continues in its process, and the next worker of that node has the state
    let third = works(&job, "applied", both + 1, 2).await;
    assert_eq!(pid_of(&job, "a", third), pid);
    let told = lines(&job);
    let step = told.iter().filter(|line| line.is("applied")).map(|line| line.number("step")).max().unwrap() + 50;
    job.write("until", &step.to_string());
    ended(&mut agents, 0).await;
    let told = lines(&job);
    all_agree(&told);
    let ends: Vec<_> = told.iter().filter(|line| line.is("end")).collect();
    let right = |line: &&Line| {
        let (sum, undisturbed) = (line.real("sum"), line.real("undisturbed"));
        line.number("step") == step && (sum - undisturbed).abs() < 1e-6 * undisturbed
    };
    assert!(ends.len() == 2 && ends.iter().all(right), "{ends:?}");
}

#[tokio::test]
async fn a_session_whose_loader_has_processes_saves_its_last_step() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1").await.script(&torch, SCRIPT, &["stateful"]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut a = job.start("a");
    works(&job, "applied", 1, 1).await;
    job.leaves([&mut a]).await;
    let done = last_step(&lines(&job), 1) + 1;
    let saved = job.record("checkpoint").await.unwrap()["step"].as_u64().unwrap();
    // A step whose samples it had named may be the one that could not be done.
    assert!((done - 1..=done).contains(&saved), "{saved}, and {done} steps were begun");
}

#[tokio::test]
async fn a_session_continues_from_the_agents_memory_when_all_die() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").script(&torch, SCRIPT, &["shards"]);
    job.write("snapshots", "");
    let mut agents = job.start_all(["a", "b"]);
    let first = works(&job, "applied", 1, 2).await;
    kill(pid_of(&job, "a", first));
    kill(pid_of(&job, "b", first));
    let second = works(&job, "applied", first + 1, 2).await;
    let told = lines(&job);
    let applied = |line: &&Line| line.is("applied") && line.number("round") == first;
    let done = told.iter().filter(applied).map(|line| line.number("step")).max().unwrap() + 1;
    for begin in told.iter().filter(|line| line.is("begin") && line.number("round") == second) {
        assert!((done - 1..=done + 1).contains(&begin.number("step")), "{begin:?}, {done} steps were done");
    }
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);

    // Then the result is that of a training that nothing disturbed, also what the script changes after each step
    is_as_undisturbed(&torch, &["shards"], &lines(&job), epochs).await;
}

#[tokio::test]
async fn a_session_whose_connections_break_meets_again_in_its_processes() {
    let Some(torch) = Torch::find() else { return };
    // Batches that processes have read ahead are another place's then.
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").script(&torch, SCRIPT, &["stateful"]);
    let mut agents = job.start_all(["a", "b"]);
    let first = works(&job, "applied", 1, 2).await;
    if lines(&job).iter().any(|line| line.is("begin") && line.text("loader") != "StatefulDataLoader") {
        skip("TORCH", format_args!("there is no torchdata, so PyTorch's own loader is tried: run scripts/torch.sh"));
    }
    job.write("break-b", "");
    let second = works(&job, "applied", first + 1, 2).await;
    for node in ["a", "b"] {
        assert_eq!(pid_of(&job, node, second), pid_of(&job, node, first));
    }
    let told = lines(&job);
    assert!(first_step(&told, second) <= last_step(&told, first) + 1, "no step is left out");
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
}

#[test]
fn many_groups_leave_nothing_behind() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "forms_groups.py", &["100"]);
}

#[tokio::test]
async fn a_worker_with_a_loader_has_after_20_rounds_what_it_had_after_few() {
    many_rounds_leave_nothing_behind(20).await;
}

#[tokio::test]
#[ignore = "takes most of a minute: make chaos"]
async fn a_worker_with_a_loader_has_after_200_rounds_what_it_had_after_few() {
    many_rounds_leave_nothing_behind(200).await;
}

async fn many_rounds_leave_nothing_behind(rounds: usize) {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--max-restarts=1000").flag("--exclude-after=0");
    let job = job.script(&torch, "leaves_nothing.py", &[]);
    let mut agents: [Agent; 2] = job.start_all(["a", "b"]);
    let of = |node: &str| -> Vec<Line> {
        lines(&job).into_iter().filter(|line| line.is("has") && line.text("node") == node).collect()
    };
    let enough = async || ["a", "b"].iter().all(|node| of(node).len() >= rounds).then_some(());
    eventually("many rounds were formed", LIMIT, enough).await;
    job.write("enough", "");
    ended(&mut agents, 0).await;
    for node in ["a", "b"] {
        let told = of(node);
        // Some of a round's own go a moment after it, on a busy machine in many rounds: so the least of half of them.
        let least = |rounds: &[Line], what| rounds.iter().map(|line| line.number(what)).min().unwrap();
        for what in ["descriptors", "threads", "children"] {
            let (few, many) = (least(&told[2..told.len() / 2], what), least(&told[told.len() / 2..], what));
            assert_eq!(few, many, "{what} of {node}: {told:?}");
        }
    }
}

#[test]
fn a_rank_that_dies_in_the_midst_of_sending_is_not_waited_for() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "dies_in_mid_transfer.py", &[]);
}

#[test]
fn what_moves_slowly_between_ranks_is_waited_for() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "sends_slowly.py", &[]);
}

#[test]
fn a_slow_disk_ends_no_group_and_the_last_step_is_saved() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "saves_slowly.py", &[]);
}

#[test]
fn a_session_whose_store_knows_nothing_begins_at_what_its_folder_has() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "begins_from_disk.py", &[]);
}

#[test]
fn loops_do_what_they_say() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "runs_loops.py", &[]);
}

#[test]
fn what_follows_a_loop_is_the_same_on_all_ranks_if_members_change_at_its_last_step() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "ends_loops.py", &[]);
}

#[test]
fn a_newcomer_has_the_same_bits_before_its_round() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "heals_ahead.py", &[]);
}

#[test]
fn all_that_a_script_trains_travels_with_its_state() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "carries_states.py", &[]);
}

#[test]
fn streams_of_unknown_length_are_read_once_for_any_members() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "reads_streams.py", &[]);
}

#[test]
fn steps_without_a_sum_of_gradients_are_those_of_the_algorithm_for_any_members() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "trains_locally.py", &[]);
}

#[test]
fn a_worker_with_a_loader_saves_whichever_processes_a_signal_ends() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "leaves_with_a_loader.py", &[]);
}

#[test]
fn a_step_has_the_gradient_of_its_global_batch() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "gives_gradients.py", &[]);
}

#[test]
fn ranks_that_differ_end_and_are_named() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "compares_ranks.py", &[]);
}

#[test]
fn sums_in_order_have_the_same_bits_whatever_the_number_of_ranks() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "sums_in_order.py", &[]);
}

#[test]
fn sums_by_nccl_can_be_given_up_fail_and_be_refused() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "sums_by_nccl.py", &[&fake_nccl().display().to_string()]);
}

/// The stand-in for NCCL, built beside this test.
fn fake_nccl() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libfake_nccl.so")
}

/// Runs a script whose ranks meet at an agent's store, without an agent.
fn meet_without_agents(torch: &Torch, name: &str, args: &[&str]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let _store = TcpStore::serve(listener, WorkersStoreLimits::default(), None).unwrap();
    let mut ranks = torch.run(&script(name));
    let ended = ranks.arg(port).args(args).output().unwrap();
    let (said, complaint) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{said}\n{complaint}");
}

/// Ends the training one epoch after the one under way. Returns how many that makes.
fn finish(job: &Job) -> u64 {
    let epochs =
        lines(job).iter().map(|line| if line.is("uses") { line.number("epoch") } else { 0 }).max().unwrap() + 2;
    std::fs::write(job.path("epochs"), epochs.to_string()).unwrap();
    epochs
}

/// The result is that of a training of one node that nothing disturbed, with these words.
async fn is_as_undisturbed(torch: &Torch, words: &[&str], told: &[Line], epochs: u64) {
    let undisturbed = Job::on_etcd("1").await.script(torch, SCRIPT, words);
    undisturbed.write("epochs", &epochs.to_string());
    assert_eq!(undisturbed.start("a").exit(LIMIT).await, 0);
    let (here, there) = (result(told), result(&lines(&undisturbed)));
    assert!((here - there).abs() < 1e-9 * there, "{here}, undisturbed {there}");
}

fn kill(pid: u64) {
    send(u32::try_from(pid).unwrap(), Signal::KILL);
}

/// The worker of a node in a round.
fn pid_of(job: &Job, node: &str, round: u64) -> u64 {
    let told = lines(job);
    let mut of =
        told.iter().filter(|line| line.is("applied") && line.text("node") == node && line.number("round") == round);
    of.next().unwrap_or_else(|| panic!("node {node} has done no step in round {round}: {told:#?}")).number("pid")
}

fn steps(told: &[Line], round: u64) -> BTreeSet<u64> {
    told.iter()
        .filter(|line| line.is("uses") && line.number("round") == round)
        .map(|line| line.number("step"))
        .collect()
}

fn first_step(told: &[Line], round: u64) -> u64 {
    *steps(told, round).first().unwrap()
}

fn last_step(told: &[Line], round: u64) -> u64 {
    *steps(told, round).last().unwrap()
}
