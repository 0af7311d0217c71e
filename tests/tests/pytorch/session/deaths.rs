//! Workers and agents that die in a chosen moment of a session's step, one and two at once, and all other faults of a
//! group of four: what stops and does not die, leaves, comes, and an etcd that is away. `make chaos` runs all of it,
//! `make test` some.

use elastic_tests::prelude::*;

use super::fake_nccl;
use super::promises::{all_agree, each_sample_once_an_epoch, no_step_is_lost, result};
use crate::pytorch::trace::{LIMIT, Line, Trace, lines};

const SCRIPT: &str = "dies_in_session.py";

const NODES: [&str; 4] = ["a", "b", "c", "d"];

/// Moments of a step. In the last two a newcomer is being sent the state: one that has it dies, or the newcomer.
const PHASES: [&str; 8] = ["forward", "backward", "first sum", "last sum", "optimizer", "snapshot", "send", "receive"];

/// Who dies, at once.
#[derive(Clone, Copy, Debug)]
enum Who {
    Worker,
    Agent,
    /// The worker of a node, and the agent of another.
    Two,
}

const VICTIMS: [Who; 3] = [Who::Worker, Who::Agent, Who::Two];

#[tokio::test]
#[ignore = "takes a quarter of a minute: make chaos"]
async fn a_state_that_is_being_sent_when_its_only_holder_dies_comes_back_from_memory() {
    let Some(torch) = Torch::find() else { return };
    let mut scene = Scene::start(&torch, &["gpt"]).await;
    scene.work(1).await;
    scene.order("send", &["a"], &[], "KILL");
    scene.agents.insert("b", scene.job.start("b"));
    let (_, round) = scene.struck(&["a"]).await;
    let both = scene.work(2).await;
    let told = lines(&scene.job);
    let done =
        told.iter().filter(|line| line.is("applied") && line.number("round") <= round).map(|line| line.number("step"));
    let done = done.max().unwrap();
    let next =
        told.iter().filter(|line| line.is("uses") && line.number("round") > round).map(|line| line.number("step"));
    let next = next.min().unwrap();
    assert!((done - 1..=done).contains(&next), "{done} steps were done, and then the one after {next}");
    assert_eq!(both.len(), 2);
    scene.ends_as_undisturbed(&torch, "gpt").await;
}

/// The moments that are missing here, a backward pass and its first sum, the next two tests have.
#[tokio::test]
async fn a_gpt_outlives_a_kill_in_most_moments() {
    let Some(torch) = Torch::find() else { return };
    let mut scene = Scene::start(&torch, &["gpt"]).await;
    scene.grows().await;
    for (number, (phase, who)) in PHASES.into_iter().zip(VICTIMS.into_iter().cycle()).enumerate() {
        if !["backward", "first sum"].contains(&phase) {
            scene.dies(phase, who, number).await;
        }
    }
    scene.ends_as_undisturbed(&torch, "gpt").await;
}

/// Sums go over the stand-in for NCCL: what it does with a dead peer's operation is as hard as what NCCL does.
#[tokio::test]
async fn a_gpt_that_sums_by_nccl_outlives_some_deaths() {
    let Some(torch) = Torch::find() else { return };
    let mut scene = Scene::start(&torch, &["gpt", &by_nccl()]).await;
    scene.grows().await;
    scene.dies("first sum", Who::Worker, 0).await;
    scene.dies("last sum", Who::Two, 1).await;
    // NCCL's thread sees deaths by itself, and forgets no sum while all are well.
    let told: Vec<String> = scene.agents.values().map(Agent::output).collect();
    assert!(told.iter().all(|said| !said.contains("NCCL has failed")), "{}", told.join("\n"));
    scene.ends_as_undisturbed(&torch, "gpt").await;
}

#[tokio::test]
async fn a_convolutional_net_outlives_what_stops_or_leaves() {
    let Some(torch) = Torch::find() else { return };
    let mut scene = Scene::start(&torch, &["conv"]).await;
    scene.grows().await;
    scene.dies("backward", Who::Two, 0).await;
    scene.stops_and_leaves().await;
    scene.ends_as_undisturbed(&torch, "conv").await;
}

#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn a_gpt_outlives_every_death() {
    outlives_every_death(&["gpt"]).await;
}

#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn a_gpt_that_sums_by_nccl_outlives_every_death() {
    outlives_every_death(&["gpt", &by_nccl()]).await;
}

#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn a_convolutional_net_outlives_every_death() {
    outlives_every_death(&["conv"]).await;
}

/// What has the script sum over the stand-in for NCCL.
fn by_nccl() -> String {
    format!("nccl={}", fake_nccl().display())
}

async fn outlives_every_death(words: &[&str]) {
    let Some(torch) = Torch::find() else { return };
    let mut scene = Scene::start(&torch, words).await;
    // No one announces it: three come at once.
    scene.grows().await;
    scene.every_kill().await;
    scene.stops_and_leaves().await;
    scene.etcd_is_away(Duration::from_secs(30)).await;
    scene.ends_as_undisturbed(&torch, words[0]).await;
}

struct Scene {
    job: Job,
    agents: BTreeMap<&'static str, Agent>,
    trace: Trace,
    orders: u64,
    /// What happened, and how long the survivors' next step took.
    seen: Vec<(String, Duration)>,
}

impl Scene {
    async fn start(torch: &Torch, words: &[&str]) -> Scene {
        let job = Job::on_etcd("1:4").await.flag("--max-restarts=1000").flag("--exclude-after=0").flag("--warm-up=120");
        // Workers that are forked must outlive deaths, too.
        let job = job
            .flag("--preload=torch,torch._dynamo,elastic_agent.torch")
            .conf("takeover_delay", "60s")
            .script(torch, SCRIPT, words);
        let agents = BTreeMap::from([("a", job.start("a"))]);
        let trace = Trace::of(&job);
        Scene { job, agents, trace, orders: 0, seen: Vec::new() }
    }

    /// The newest round, once `size` nodes have done two steps in it: their workers, by node.
    async fn work(&self, size: u64) -> BTreeMap<String, u64> {
        self.trace.until(&format!("{size} work"), |told| workers(told, size)).await
    }

    async fn grows(&mut self) {
        let before = self.work(1).await;
        for node in &NODES[1..] {
            self.agents.insert(node, self.job.start(node));
        }
        let after = self.work(4).await;
        // One may come while another is met. Then a step that was begun is begun again.
        assert_eq!(after["a"], before["a"]);
    }

    /// A planned change: the first step of each round follows the last of the round before.
    fn nothing_was_repeated(&self) {
        let told = self.trace.lines();
        let round = told.iter().map(|line| line.number("round")).max().unwrap();
        let steps = |round: u64| told.iter().filter(move |line| line.is("uses") && line.number("round") == round);
        let first = steps(round).map(|line| line.number("step")).min().unwrap();
        let before = (1..round).rev().find_map(|round| steps(round).map(|line| line.number("step")).max()).unwrap();
        assert_eq!(before + 1, first, "round {round}");
    }

    async fn every_kill(&mut self) {
        for (number, phase) in PHASES.into_iter().enumerate() {
            for who in VICTIMS {
                self.dies(phase, who, number).await;
            }
        }
    }

    /// Faults that kill nothing.
    async fn stops_and_leaves(&mut self) {
        self.a_worker_stops().await;
        self.a_node_stops().await;
        self.a_node_leaves().await;
    }

    async fn dies(&mut self, phase: &str, who: Who, turn: usize) {
        let node = |at: usize| NODES[(turn + at) % 4];
        let newcomers = match (phase, who) {
            ("receive", Who::Two) => vec![node(0), node(1)],
            ("receive", _) => vec![node(0)],
            ("send", _) => vec![node(2)],
            _ => Vec::new(),
        };
        let (workers, agents) = match who {
            Who::Worker => (vec![node(0)], vec![]),
            Who::Agent => (vec![], vec![node(0)]),
            Who::Two => (vec![node(0)], vec![node(1)]),
        };
        for newcomer in &newcomers {
            self.agents.get_mut(newcomer).unwrap().kill();
        }
        let before = self.work(4 - newcomers.len() as u64).await;

        // When the victims die in that moment
        self.order(phase, &workers, &agents, "KILL");
        for newcomer in &newcomers {
            self.agents.insert(newcomer, self.job.start(newcomer));
        }
        let victims = [&workers[..], &agents].concat();
        let (at, round) = self.struck(&victims).await;

        // Then the survivors continue, and with them those that come back
        let survivors: BTreeSet<&str> =
            before.keys().map(String::as_str).filter(|node| !victims.contains(node)).collect();
        self.survivors_continue(&format!("{phase}, {who:?}"), &survivors, at, round).await;
        for agent in agents {
            self.agents.get_mut(agent).unwrap().kill();
            self.agents.insert(agent, self.job.start(agent));
        }
        let after = self.work(4).await;
        for (node, pid) in &before {
            assert_eq!(after[node] == *pid, survivors.contains(node.as_str()), "the worker of {node}");
        }
    }

    /// Orders deaths for a step to come. With another signal than KILL they only stop.
    fn order(&mut self, phase: &str, workers: &[&str], agents: &[&str], signal: &str) {
        self.orders += 1;
        let done = self.trace.lines().iter().map(|line| line.number("step")).max().unwrap_or(0);
        // A newcomer has done none, and one that has the state sends it as soon as the newcomer comes.
        let step = if ["send", "receive"].contains(&phase) { 0 } else { done + 4 };
        let order = json!({
            "number": self.orders, "phase": phase, "step": step, "workers": workers, "agents": agents, "signal": signal,
        });
        std::fs::write(self.job.path("order.new"), order.to_string()).unwrap();
        std::fs::rename(self.job.path("order.new"), self.job.path("order")).unwrap();
    }

    /// Waits until all victims have told that they die now: the time of the last one, and its round.
    async fn struck(&self, victims: &[&str]) -> (f64, u64) {
        self.trace
            .until(&format!("{victims:?} are struck"), |told| {
                let ordered = |line: &&Line| line.is("struck") && line.number("number") == self.orders;
                let struck: Vec<&Line> = told.iter().filter(ordered).collect();
                let last = struck.iter().max_by(|a, b| a.real("at").total_cmp(&b.real("at")))?;
                (struck.len() == victims.len()).then(|| (last.real("at"), last.number("round")))
            })
            .await
    }

    /// Waits until all survivors have done a step after what happened `at` that time in that round.
    async fn survivors_continue(&mut self, what: &str, survivors: &BTreeSet<&str>, at: f64, round: u64) -> Duration {
        assert!(!survivors.is_empty());
        let last = self
            .trace
            .until(&format!("the survivors continue: {what}"), |told| {
                let mut next: BTreeMap<&str, f64> = BTreeMap::new();
                for line in told.iter().filter(|line| line.is("applied") && line.number("round") > round) {
                    next.entry(line.text("node")).or_insert(line.real("at"));
                }
                let of_survivors: Option<Vec<f64>> = survivors.iter().map(|node| next.get(node).copied()).collect();
                of_survivors.map(|times| times.into_iter().fold(0.0, f64::max))
            })
            .await;
        let took = Duration::from_secs_f64(last - at);
        self.saw(what, took);
        took
    }

    fn saw(&mut self, what: &str, took: Duration) {
        println!("| {what} | {:.2} s |", took.as_secs_f64());
        self.seen.push((what.to_owned(), took));
    }

    /// All four work again, and these nodes' workers are those from before.
    async fn keep_their_workers(&self, nodes: [&str; 3], before: &BTreeMap<String, u64>) {
        let after = self.work(4).await;
        for node in nodes {
            assert_eq!(after[node], before[node], "the worker of {node}");
        }
    }

    /// A worker that does not answer, of an agent that does.
    async fn a_worker_stops(&mut self) {
        let before = self.work(4).await;
        self.order("forward", &["b"], &[], "STOP");
        let (at, round) = self.struck(&["b"]).await;
        self.survivors_continue("a worker stops", &BTreeSet::from(["a", "c", "d"]), at, round).await;
        self.keep_their_workers(["a", "c", "d"], &before).await;
    }

    /// A node that does not answer, as a frozen host.
    async fn a_node_stops(&mut self) {
        let before = self.work(4).await;
        self.order("backward", &[], &["c"], "STOP");
        let (at, round) = self.struck(&["c"]).await;
        self.survivors_continue("a node stops", &BTreeSet::from(["a", "b", "d"]), at, round).await;
        self.agents["c"].signal(Signal::CONT);
        send(before["c"] as u32, Signal::CONT);
        self.keep_their_workers(["a", "b", "d"], &before).await;
    }

    async fn a_node_leaves(&mut self) {
        let before = self.work(4).await;
        self.job.ctl_ok(&["drain", "job", "d"]).await;
        assert_eq!(self.agents.get_mut("d").unwrap().exit(LIMIT).await, 3);
        let after = self.work(3).await;
        assert!(after.iter().all(|(node, pid)| before[node] == *pid));
        self.nothing_was_repeated();
        self.job.ctl_ok(&["undrain", "job", "d"]).await;
        self.agents.insert("d", self.job.start("d"));
        self.work(4).await;
        self.nothing_was_repeated();
    }

    /// etcd is away for this long; and again, with a worker that dies meanwhile.
    async fn etcd_is_away(&mut self, time: Duration) {
        let before = self.work(4).await;
        self.job.etcd_mut().kill();
        self.trains_for(time).await;
        self.job.etcd_mut().restart().await;
        self.trains_for(time / 3).await;
        assert_eq!(self.work(4).await, before);

        self.job.etcd_mut().kill();
        self.order("last sum", &["b"], &[], "KILL");
        let (at, round) = self.struck(&["b"]).await;
        let begun = Instant::now();
        eventually("etcd is away for a while", 2 * time, async || (begun.elapsed() >= time).then_some(())).await;
        self.job.etcd_mut().restart().await;
        let away = begun.elapsed();
        let survivors = BTreeSet::from(["a", "c", "d"]);
        let took = self.survivors_continue("a worker dies while etcd is away", &survivors, at, round).await;
        self.saw("the same, from etcd's return on", took.saturating_sub(away));
        self.keep_their_workers(["a", "c", "d"], &before).await;
    }

    /// For this long steps are done, each within a second or two of the one before.
    async fn trains_for(&self, time: Duration) {
        let newest =
            || self.trace.lines().iter().filter(|line| line.is("applied")).map(|line| line.number("step")).max();
        let begun = Instant::now();
        while begun.elapsed() < time {
            let before = newest();
            eventually("a step is done", Duration::from_secs(5), async || (newest() > before).then_some(())).await;
        }
    }

    async fn ends_as_undisturbed(mut self, torch: &Torch, model: &str) {
        let epochs = self.trace.lines().iter().filter(|line| line.is("uses")).map(|line| line.number("epoch")).max();
        let epochs = epochs.unwrap() + 2;
        std::fs::write(self.job.path("epochs"), epochs.to_string()).unwrap();
        assert!(exits_within(LIMIT, self.agents.values_mut()).await.iter().all(|&code| code == 0));
        let told = lines(&self.job);
        each_sample_once_an_epoch(&told, epochs);
        no_step_is_lost(&told);
        let here = all_agree(&told);

        let undisturbed = Job::on_etcd("1").await.script(torch, SCRIPT, &[model]);
        std::fs::write(undisturbed.path("epochs"), epochs.to_string()).unwrap();
        assert_eq!(undisturbed.start("a").exit(3 * LIMIT).await, 0);
        let alone = lines(&undisturbed);
        let farthest =
            all_agree(&alone).iter().map(|(step, there)| ((here[step] - there) / there).abs()).fold(0.0, f64::max);
        println!(
            "{} steps, {} rounds; {farthest:e} from the undisturbed training at most",
            here.len(),
            told.last().unwrap().number("round")
        );
        assert!(farthest < 1e-9, "it differs from the undisturbed training by {farthest:e}");
        assert!((result(&told) - result(&alone)).abs() < 1e-9 * result(&alone));
        println!("\n{model}");
        for (what, took) in &self.seen {
            println!("| {what} | {:.2} s |", took.as_secs_f64());
        }
    }
}

/// The workers of the newest round, by node, if it is of `size` and each has done two steps in it.
fn workers(told: &[Line], size: u64) -> Option<BTreeMap<String, u64>> {
    let round = told.iter().map(|line| line.number("round")).max()?;
    let mut steps: BTreeMap<(&str, u64), u64> = BTreeMap::new();
    for line in told.iter().filter(|line| line.is("applied")) {
        if line.number("round") == round && line.number("size") == size {
            *steps.entry((line.text("node"), line.number("pid"))).or_default() += 1;
        }
    }
    let all = steps.len() as u64 == size && steps.values().all(|&steps| steps >= 2);
    all.then(|| steps.into_keys().map(|(node, pid)| (node.to_owned(), pid)).collect())
}
