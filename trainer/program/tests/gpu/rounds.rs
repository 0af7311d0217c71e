//! NCCL from round to round, on the doubles of the driver and of NCCL: when it is tried again after a failure, and what
//! the trace says. Agents are threads of the test.

use std::fs;
use std::path::Path;
use std::time::Duration;

use elastic_trainer::Environment;
use serde_json::Value;

use crate::agent::{Agent, Commits};
use crate::nccl::{Worker, all_end, with_nccl};
use crate::training::{checksum, printed};
use crate::worker::{places, trace, wait_for};

/// Time to quiesce, far more than a test needs.
const AMPLE: Duration = Duration::from_secs(40);

/// Long enough for five rounds. A rank whose peers fail in NCCL waits for a part of the timeout.
const FLAGS: &str = "digits --epochs 80 --hidden 8 --batch 200 --shards 3 --peer-timeout 4";

/// A worker on GPU 0 with an agent of its own, which can be given faults through a file.
fn start(folder: &Path, flags: &str, place: &Environment) -> (Agent, Worker) {
    let agent = Agent::start(folder, place, None, Commits::Granted);
    let (socket, round) = (agent.socket.display().to_string(), place.round.to_string());
    let fault = folder.join("fault").display().to_string();
    let variables = [
        ("ELASTIC_AGENT_SOCKET", &socket[..]),
        ("ELASTIC_ROUND", &round),
        ("TORCHELASTIC_RUN_ID", "test"),
        ("FAKE_NCCL_FAULT", &fault),
    ];
    let ranks = (place.rank as usize, place.world_size as usize);
    let worker = Worker::start(flags, ranks, place.master_port, &variables);
    (agent, worker)
}

/// Makes this worker's NCCL refuse the next communicator.
fn spoil(folder: &Path, worker: &Worker) {
    let fault = format!("{} FAKE_NCCL_FAIL=ncclCommInitRankConfig:2\n", worker.child.id());
    fs::write(folder.join("part"), fault).unwrap();
    fs::rename(folder.join("part"), folder.join("fault")).unwrap();
}

/// Waits for the trace's line for the begin of a round, and returns it.
fn begun(folder: &Path, round: u64) -> Value {
    let is_it = |line: &Value| line["event"] == "begin" && line["round"] == round;
    wait_for("the round", || trace(&folder.join("trace")).into_iter().rfind(is_it))
}

#[test]
fn a_later_round_tries_nccl_again_and_waits_longer_after_each_failure() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{} --trace {}", with_nccl(FLAGS), folder.path().join("trace").display());
    let mut group: Vec<_> = places(1, 2).iter().map(|place| start(folder.path(), &flags, place)).collect();
    // NCCL fails for one of them in the second round and in the third. The fourth does not try it, though a newcomer
    // knows nothing of that. The fifth does.
    let rounds = [(1, 2, "nccl", 0), (2, 2, "tcp", 1), (3, 2, "tcp", 2), (4, 3, "tcp", 2), (5, 3, "nccl", 2)];
    for (round, ranks, collectives, failures) in rounds {
        if round > 1 {
            if round < 4 {
                spoil(folder.path(), &group[1].1);
            }
            group.iter().for_each(|(agent, _)| agent.forming(round, AMPLE));
            for (agent, _) in &group {
                agent.quiesced(round);
            }
            let places = places(round, ranks);
            for ((agent, _), place) in group.iter().zip(&places) {
                agent.assign(place);
            }
            let newcomers = places.iter().skip(group.len()).map(|place| start(folder.path(), &flags, place));
            group.extend(newcomers.collect::<Vec<_>>());
        }
        let begin = begun(folder.path(), round);
        assert_eq!(
            (&begin["collectives"], &begin["nccl_failures"]),
            (&collectives.into(), &failures.into()),
            "{begin}"
        );
    }
    let (_agents, workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    let (printed_by_first, logs) = all_end(workers);
    assert_eq!(checksum(&printed_by_first), checksum(&printed(&format!("{FLAGS} --device cuda:0"), "")));
    // Each worker logs one line for each failure in its rounds, and one line when NCCL works again.
    let over_tcp = |logged: &str| -> Vec<String> {
        let lines = logged.lines().filter(|line| line.contains("WARN gradients are summed over TCP"));
        lines.map(|line| line.rsplit("; ").next().unwrap().to_owned()).collect()
    };
    let again = |round: u64| format!("NCCL is tried again in round {round}");
    for (logged, expected) in logs.iter().zip([&[3, 5][..], &[3, 5], &[5]]) {
        assert_eq!(over_tcp(logged), expected.iter().map(|round| again(*round)).collect::<Vec<_>>(), "{logged}");
        assert_eq!(logged.matches("gradients are summed over NCCL again").count(), 1, "{logged}");
    }
}
