//! How far a job has come: told by its workers, kept in the store, shown by `elasticctl`.

use elastic_tests::prelude::*;

use super::watchdog::get;

/// In round 1 does steps 1 to 30, and then rank 1 fails. Later it continues after step 20, to step 60.
const WORKER: &str = r#"
say = agent()
for step in range(1, 31) if round == 1 else range(21, 61):
    # Rank 1 knows more steps: only the first node tells the job's.
    say(type="progress", step=step + 1000 * rank, epoch=2, total_steps=100, **(dict(loss=0.25) if step % 10 else {}))
    time.sleep(0.03)
# The agents read what came before this.
say(type="barrier", id=1, name="steps-done")
while not any(message["type"] == "barrier_passed" for message in heard): time.sleep(0.02)
while not (folder / f"go-{round}").exists(): time.sleep(0.02)
sys.exit(round == 1 and rank == 1)
"#;

#[tokio::test]
async fn steps_are_kept_over_rounds_and_shown() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").python(WORKER);
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let start = |name, port| job.start_with(name, &[&format!("--health-port={port}")]);
    let mut agents = [start("a", &ports[0]), start("b", &ports[1])];

    // Given a round whose last steps are younger than the last record, when it ends
    let told = async |round: u64, step: u64| {
        eventually(&format!("step {step} of round {round} is reported"), LIMIT, async || {
            job.record("progress").await.filter(|told| told["round"] == round && told["step"] == step)
        })
        .await
    };
    job.write("go-1", "");
    // Then the store knows them,
    let first = told(1, 30).await;
    assert_eq!((&first["total_steps"], &first["epoch"], &first["loss"]), (&100.into(), &2.into(), &0.25.into()));
    assert_eq!((&first["generation"], &first["furthest_step"]), (&1.into(), &30.into()));

    // and Prometheus hears the job's goodput, from its first node alone,
    let mark = "\nelastic_agent_goodput_ratio{";
    eventually("one node tells the goodput", LIMIT, async || {
        let told = [get(&ports[0], "/metrics").await, get(&ports[1], "/metrics").await];
        let values = told.iter().filter_map(|text| text.split_once(mark)?.1.split_once("} ")?.1.lines().next());
        let values: Vec<f64> = values.map(|value| value.parse().unwrap()).collect();
        (values.len() == 1 && values[0] > 0.0 && values[0] <= 1.0).then_some(())
    })
    .await;

    // and after the next one the job's last step; a quarter of them was done before.
    job.write("go-2", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
    let last = told(2, 60).await;
    assert_eq!(last["since_ms"], first["since_ms"]);
    let spent = |told: &serde_json::Value| told["productive_ms"].as_u64().unwrap();
    assert!(spent(&first) >= 29 * 20 && spent(&last) >= spent(&first) + 29 * 20, "{first} {last}");
    let whole = last["at_ms"].as_u64().unwrap() - last["since_ms"].as_u64().unwrap();
    assert!(spent(&last) < whole, "rendezvous and lost steps are not productive: {last}");

    let text = job.ctl_ok(&["describe", "job"]).await;
    assert!(text.contains("step 60 of 100 (60 %), epoch 2, loss 0.2500, steps a second: "), "{text}");
    let text = job.ctl_ok(&["jobs"]).await;
    assert!(text.contains("60/100"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&job.ctl_ok(&["describe", "job", "-o", "json"]).await).unwrap();
    assert!(json["progress"]["goodput"].as_f64().is_some_and(|goodput| goodput > 0.0 && goodput < 1.0), "{json}");
}

/// Does one step more in the second round than in the first, and no more in any later one; then fails.
const STUCK: &str = r#"
say = agent()
for step in range(6, 7 + min(round, 2)): say(type="progress", step=step)
sys.exit("the next sample cannot be read")
"#;

#[tokio::test]
async fn a_job_that_keeps_failing_at_the_same_step_ends() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=50").flag("--restarts-without-progress=2");
    let job = job.python(STUCK);
    let mut agent = job.start("a");
    assert_eq!(exits(std::slice::from_mut(&mut agent)).await, [JOB_FAILED]);

    let output = agent.output();
    let reason = "the next sample cannot be read (exit code 1); \
                  no new step after step 8 in 2 restarts (--restarts-without-progress)";
    assert!(output.contains(reason), "{output}");
    let round = job.record("round").await.unwrap();
    // Step 7, step 8, and twice no further.
    assert_eq!((&round["number"], &round["restarts"], &round["state"]), (&4.into(), &3.into(), &"failed".into()));
    assert_eq!((&round["cause"]["step"], &round["advance"]["furthest_step"]), (&8.into(), &8.into()));
}

#[tokio::test]
async fn a_job_whose_program_fails_the_same_way_right_after_each_start_ends() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let script = "echo 'ModuleNotFoundError: No module named tranformers' >&2; exit 1";
    let job = Job::on(&etcd, "1").flag("--max-restarts=50").flag("--exclude-after=0").program(["sh", "-c", script]);
    let mut agent = job.start("a");
    assert_eq!(exits(std::slice::from_mut(&mut agent)).await, [JOB_FAILED]);

    let output = agent.output();
    let reason = "No module named tranformers (exit code 1); \
                  the same failure within a minute of the start in 3 restarts in a row, and no new step: \
                  --restarts-without-progress says how many such restarts there may be";
    assert!(output.contains(reason), "{output}");
    let round = job.record("round").await.unwrap();
    assert_eq!((&round["restarts"], &round["state"]), (&3.into(), &"failed".into()));

    // Who says how many there may be has them.
    let patient = Job::on(&etcd, "1").named("patient").flag("--max-restarts=50").flag("--exclude-after=0");
    let patient = patient.flag("--restarts-without-progress=5").program(["sh", "-c", script]);
    assert_eq!(exits(std::slice::from_mut(&mut patient.start("a"))).await, [JOB_FAILED]);
    assert_eq!(patient.record("round").await.unwrap()["restarts"], 5);
}
