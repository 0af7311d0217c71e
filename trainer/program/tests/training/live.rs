//! Workers that go from round to round in the same process: what they hold in memory, and what they give to others.

use std::path::Path;
use std::time::Duration;

use elastic_proto::worker::ToWorker;

use crate::agent::{assignment, start_group, start_member};
use crate::worker::{Worker, checksum, last_step, places, trace, train, wait_for};

/// Training that takes longer than a test needs to strike, also on an idle machine.
const FLAGS: &str = "--epochs 400 --hidden 32 --optimizer sgd --momentum 0.9 --nesterov --lr 0.01";

/// Time to quiesce, far more than a test needs.
const AMPLE: Duration = Duration::from_secs(40);

fn traced(folder: &Path) -> String {
    format!("{FLAGS} --trace {}", folder.join("trace").display())
}

/// Waits for all workers, which must succeed with the undisturbed run's parameters. Returns what rank 0 printed.
fn all_reach_the_undisturbed_end(workers: Vec<Worker>) -> String {
    let mut printed = String::new();
    for worker in workers {
        printed += &worker.succeeds().0;
    }
    assert_eq!(checksum(&printed), format!("{:08x}", train(FLAGS, 1, 0).checksum()));
    printed
}

/// The step after which the group of a round began.
fn begun(folder: &Path, round: u64) -> u64 {
    let lines = trace(&folder.join("trace"));
    let begin = lines.iter().find(|line| line["event"] == "begin" && line["round"] == round).unwrap();
    begin["step"].as_u64().unwrap()
}

#[test]
fn at_a_planned_change_all_quiesce_after_the_same_step_and_a_newcomer_gets_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("loss.svg");
    let flags = format!("{} --plot {}", traced(folder.path()), plot.display());
    let group = start_group(folder.path(), &flags, 1, 3, None);
    group[0].0.step_reached(20);

    // When one hears that a round is forming, and the others a little later
    group[1].0.forming(2, AMPLE);
    let boundary = group[1].0.quiesced(2);
    group[0].0.forming(2, AMPLE);
    group[2].0.forming(2, AMPLE);
    assert_eq!((group[0].0.quiesced(2), group[2].0.quiesced(2)), (boundary, boundary));

    // Then with a newcomer they continue from there
    let places = places(2, 4);
    for ((agent, _), place) in group.iter().zip(&places) {
        agent.assign(place);
    }
    let (_newcomers_agent, newcomer) = start_member(folder.path(), &flags, places[3].clone(), None);
    let (_agents, mut workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    workers.push(newcomer);
    let printed = all_reach_the_undisturbed_end(workers);
    assert_eq!(begun(folder.path(), 2), boundary);
    // And rank 0 prints how long the change took.
    assert!(printed.contains("s lost to a change of the group\n"), "{printed}");
    assert!(std::fs::read_to_string(plot).unwrap().contains(">3→4<"));
}

#[test]
fn survivors_of_a_kill_lose_no_step_and_give_their_state_to_the_successor() {
    let folder = tempfile::tempdir().unwrap();
    let flags = traced(folder.path());
    // Rank 0 is among the victims: then the state comes from others.
    let mut group = start_group(folder.path(), &flags, 1, 4, None);
    for (round, victim) in [(2, 2), (3, 0)] {
        let reached = last_step(&folder.path().join("trace"), "step").unwrap_or(0);
        wait_for("some steps", || last_step(&folder.path().join("trace"), "step").filter(|step| *step > reached + 20));
        group[victim].1.signal(rustix::process::Signal::KILL);
        let survivors = || (0..4).filter(|rank| *rank != victim).map(|rank| &group[rank].0);
        survivors().for_each(|agent| agent.forming(round, AMPLE));
        let furthest = survivors().map(|agent| agent.quiesced(round)).max().unwrap();
        let places = places(round, 4);
        for (rank, place) in places.iter().enumerate() {
            if rank == victim {
                group[rank] = start_member(folder.path(), &flags, place.clone(), None);
            } else {
                group[rank].0.assign(place);
            }
        }
        wait_for("the next round", || {
            trace(&folder.path().join("trace")).iter().any(|line| line["round"] == round).then_some(())
        });
        assert_eq!(begun(folder.path(), round), furthest);
    }
    let (_agents, workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    all_reach_the_undisturbed_end(workers);
}

#[test]
fn a_step_that_cannot_end_is_given_up_in_half_the_time_to_quiesce() {
    let folder = tempfile::tempdir().unwrap();
    let flags = traced(folder.path());
    let mut group = start_group(folder.path(), &flags, 1, 3, None);
    group[0].0.step_reached(20);
    // Given a peer that says nothing, as on a host that is gone
    let (_agent, silent) = group.pop().unwrap();
    silent.signal(rustix::process::Signal::STOP);
    for (agent, _) in &group {
        agent.forming(2, Duration::from_secs(1));
    }
    let places = places(2, 2);
    for ((agent, _), place) in group.iter().zip(&places) {
        agent.quiesced(2);
        agent.assign(place);
    }
    let (_agents, workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    all_reach_the_undisturbed_end(workers);
}

#[test]
fn a_round_that_never_comes_together_is_left_for_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let flags = traced(folder.path());
    let group = start_group(folder.path(), &flags, 1, 2, None);
    group[0].0.step_reached(20);
    let tell = |round| group.iter().for_each(|(agent, _)| agent.forming(round, AMPLE));
    tell(2);
    let steps: Vec<u64> = group.iter().map(|(agent, _)| agent.quiesced(2)).collect();
    // Given places beside a third worker, which does not appear
    for ((agent, _), place) in group.iter().zip(&places(2, 3)) {
        agent.assign(place);
    }
    tell(3);
    assert_eq!(group.iter().map(|(agent, _)| agent.quiesced(3)).collect::<Vec<_>>(), steps);
    for ((agent, _), place) in group.iter().zip(&places(3, 2)) {
        agent.assign(place);
    }
    let (_agents, workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    all_reach_the_undisturbed_end(workers);
}

#[test]
fn no_rank_goes_back_behind_the_committed_checkpoint() {
    // Given a checkpoint of the last step, and a worker at an earlier step
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{FLAGS} --checkpoint-every 1000000 --checkpoint-dir {}", folder.path().display());
    let (agent, worker) = start_group(folder.path(), &flags, 7, 1, None).remove(0);
    assert!(worker.end().0.success());
    let committed = agent.last_commit();
    let (agent, worker) = start_group(folder.path(), &traced(folder.path()), 1, 1, None).remove(0);
    agent.step_reached(1);
    agent.forming(2, AMPLE);
    assert!(agent.quiesced(2) < committed.step);
    // When its next round resumes from that checkpoint, then so does the worker
    let place = assignment(&places(2, 1)[0], Some(committed.clone()));
    agent.say(&ToWorker::Assignment(place));
    all_reach_the_undisturbed_end(vec![worker]);
    assert_eq!(begun(folder.path(), 2), committed.step);
}

#[test]
fn a_worker_at_rest_ends_when_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let (agent, worker) = start_group(folder.path(), &traced(folder.path()), 1, 1, None).remove(0);
    agent.step_reached(1);
    agent.forming(2, AMPLE);
    let step = agent.quiesced(2);
    worker.signal(rustix::process::Signal::TERM);
    assert_eq!(worker.end().0.code(), Some(143));
    assert_eq!(last_step(&folder.path().join("trace"), "step"), Some(step), "it did nothing more");
}
