//! Training that continues through changes of its group: survivors keep their processes and what they hold in memory.

use std::io::{Read, Seek, SeekFrom};
use std::time::UNIX_EPOCH;

use elastic_tests::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const LONG: Duration = Duration::from_secs(60);

/// The longest time from a kill to the next step that counts. The aim is a second and a half, but test machines are
/// busy.
const RECOVERY: Duration = Duration::from_secs(15);

/// Two workers on the first node, one on each of the others.
const NODES: [(&str, u32); 3] = [("a", 2), ("b", 1), ("c", 1)];
const RANKS: u64 = 4;

/// Holds the last hundred lines of a trace.
const TAIL: u64 = 16 * 1024;

/// A worker, by its node and its local rank.
pub(crate) type Worker = (String, u32);

pub(crate) fn workers(job: &Job) -> BTreeMap<Worker, u32> {
    let folder = job.path("run").into_os_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let found = processes.filter_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let of_trainer = std::fs::read_link(process.path().join("exe")).ok()?.ends_with("elastic-trainer");
        let environment = std::fs::read(process.path().join("environ")).ok()?;
        let text = String::from_utf8_lossy(&environment);
        let variable = |name: &str| {
            let mut all = text.split('\0');
            all.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
        };
        let own = variable("XDG_RUNTIME_DIR")?.as_str() == folder;
        let worker = (variable("ELASTIC_NODE")?, variable("ELASTIC_LOCAL_RANK")?.parse().ok()?);
        (of_trainer && own).then_some((worker, pid))
    });
    found.collect()
}

/// The whole lines of a growing file that begin at this byte or later.
fn lines_from(path: &Path, begin: u64) -> Vec<Value> {
    let Ok(mut file) = File::open(path) else { return Vec::new() };
    file.seek(SeekFrom::Start(begin.saturating_sub(1))).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    // The text before the first newline is the end of an earlier line, unless the file begins here.
    let text = if begin == 0 { &text[..] } else { text.split_once('\n').map_or("", |(_, lines)| lines) };
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The last line of a trace that tells of a step, once `fits` does.
pub(crate) async fn step(trace: &Path, what: &str, limit: Duration, fits: impl Fn(&Value) -> bool) -> Value {
    eventually(what, limit, async || {
        let tail = lines_from(trace, length(trace).saturating_sub(TAIL));
        tail.into_iter().rfind(|line| line["event"] == "step").filter(|line| fits(line))
    })
    .await
}

pub(crate) fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap()
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

struct ChaosRun {
    job: Job,
    trace: std::path::PathBuf,
    agents: BTreeMap<&'static str, Agent>,
    dice: SmallRng,
    total: u64,
    recoveries: Vec<u64>,
}

impl ChaosRun {
    fn begin(etcd: &EtcdServer, flags: &[&str], total: u64, seed: u64) -> ChaosRun {
        // Each failure of a worker costs a restart, so there must be enough; and chance may kill the same node's each
        // time.
        let job = Job::on(etcd, "1:3")
            .flag("--max-restarts=1000")
            .flag("--exclude-after=0")
            .conf("last_call_timeout", "100ms");
        let trace = job.path("trace");
        let job = job.trainer([&["digits"], flags].concat());
        let (agents, dice) = (BTreeMap::new(), SmallRng::seed_from_u64(seed));
        let mut run = ChaosRun { job, trace, agents, dice, total, recoveries: Vec::new() };
        for (node, _) in NODES {
            run.start(node);
        }
        run
    }

    fn start(&mut self, node: &'static str) {
        let slots = NODES.iter().find(|(name, _)| *name == node).unwrap().1;
        let slots = format!("--nproc-per-node={slots}");
        let ahead: &[&str] = if self.dice.random_range(0..2) == 0 { &["--warm-up=60"] } else { &[] };
        let agent = self.job.start_with(node, &[&[slots.as_str()], ahead].concat());
        self.agents.insert(node, agent);
    }

    async fn step(&self, what: &str, limit: Duration, fits: impl Fn(&Value) -> bool) -> Value {
        step(&self.trace, what, limit, fits).await
    }

    /// All four ranks train, each in a process of its own, and none in one of those that were killed: they may take a
    /// moment to die. `None`: the training is over before.
    async fn is_whole(&self, dead: &[u32]) -> Option<BTreeMap<Worker, u32>> {
        let ends = |line: &Value| number(line, "step") == self.total;
        let whole = |line: &Value| line["world_size"] == RANKS;
        let last = self.step("all four ranks train", LONG, |line| whole(line) || ends(line)).await;
        eventually("four workers live", LONG, async || {
            if ends(&last) || ends(&self.step("a step", LONG, |_| true).await) {
                return Some(None);
            }
            let all = workers(&self.job);
            (all.len() == 4 && !all.values().any(|pid| dead.contains(pid))).then_some(Some(all))
        })
        .await
    }

    /// Kills a worker or an agent, sometimes another one soon after, and sees the others continue. Nodes come back.
    async fn strike(&mut self) {
        let Some(before) = self.is_whole(&[]).await else { return };
        let round = number(&self.step("a step", LONG, |_| true).await, "round");
        let mut victims: Vec<Worker> = Vec::new();
        let (at, told) = (now_ms(), length(&self.trace));
        self.kill(&before, &mut victims);
        if self.dice.random_range(0..3) == 0 {
            // The second kill comes at a random moment of the recovery from the first.
            tokio::time::sleep(Duration::from_millis(self.dice.random_range(0..250))).await;
            self.kill(&before, &mut victims);
        }
        let next = self.step("training continues", RECOVERY, |line| number(line, "round") > round).await;
        let took = lines_from(&self.trace, told)
            .iter()
            .find(|line| line["event"] == "step" && number(line, "round") > round)
            .map_or(0, |line| number(line, "time_ms").saturating_sub(at));
        eprintln!("killed {victims:?}: the next step, {}, came {took} ms later", next["step"]);
        self.recoveries.push(took);
        for (node, _) in NODES {
            if self.agents.get_mut(node).is_none_or(Agent::is_gone) {
                self.start(node);
            }
        }
        // Then the group is whole again, and who was not killed is the same process.
        let dead: Vec<u32> = victims.iter().map(|victim| before[victim]).collect();
        let Some(after) = self.is_whole(&dead).await else { return };
        for (worker, pid) in &before {
            assert!(victims.contains(worker) || after[worker] == *pid, "{worker:?} was {pid}: {after:?}");
        }
    }

    fn kill(&mut self, before: &BTreeMap<Worker, u32>, victims: &mut Vec<Worker>) {
        let living: Vec<(&Worker, &u32)> = before.iter().filter(|(worker, _)| !victims.contains(worker)).collect();
        let (worker, pid) = living[self.dice.random_range(0..living.len())];
        let node = NODES.iter().find(|(node, _)| *node == worker.0).unwrap().0;
        if self.dice.random_range(0..3) == 0 {
            self.agents.get_mut(node).unwrap().kill();
            let own = before.keys().filter(|other| other.0 == node);
            victims.extend(own.cloned());
        } else {
            // It may have ended at this moment, with its agent.
            send(*pid, Signal::KILL);
            victims.push(worker.clone());
        }
    }

    /// Waits for the end, and looks at the whole history.
    async fn ends_as(mut self, undisturbed: &Undisturbed) {
        for agent in self.agents.values_mut() {
            assert_eq!(agent.exit(LONG).await, 0);
        }
        let lines = json_lines(&self.trace);
        let (mut done, mut writer) = (0, None);
        for line in &lines {
            if line["event"] == "begin" {
                let (step, pid) = (number(line, "step"), number(line, "pid"));
                // A step that only a dead rank had done is lost. What rank 0 has done is not lost when another rank
                // dies.
                let lost = done - step.min(done);
                assert!(lost <= u64::from(writer.is_some_and(|writer| writer != pid)), "after {done} came {line}");
                writer = Some(pid);
            } else if line["event"] == "step" {
                done = number(line, "step");
            }
        }
        let printed: String = self.agents.values().map(Agent::output).collect();
        undisturbed.is_same(&lines, &printed);
        self.recoveries.sort_unstable();
        let (count, most) = (self.recoveries.len(), self.recoveries.last().copied().unwrap_or_default());
        eprintln!("{count} kills; to the next step: median {} ms, at most {most} ms", self.recoveries[count / 2]);
    }
}

/// A run that nothing disturbs, of one process.
pub(crate) struct Undisturbed {
    /// By step, in bits.
    losses: BTreeMap<u64, u64>,
    parameters: String,
}

impl Undisturbed {
    pub(crate) fn steps(&self) -> usize {
        self.losses.len()
    }

    /// Sees that these steps of another run have the same losses, bit for bit.
    pub(crate) fn begins_as(&self, steps: &[Value]) {
        let differs = steps
            .iter()
            .find(|line| self.losses.get(&number(line, "step")) != Some(&line["loss"].as_f64().unwrap().to_bits()));
        assert!(differs.is_none() && !steps.is_empty(), "the loss of a step differs: {differs:?}");
    }

    /// The same of another run that has come to its end, and of its parameters. Of a step that was done twice,
    /// the last time counts.
    pub(crate) fn is_same(&self, trace: &[Value], printed: &str) {
        let steps = trace.iter().filter(|line| line["event"] == "step");
        let counted: BTreeMap<u64, u64> =
            steps.map(|line| (number(line, "step"), line["loss"].as_f64().unwrap().to_bits())).collect();
        let differs = self.losses.iter().find(|(step, loss)| counted.get(step) != Some(loss));
        assert!(differs.is_none() && counted.len() == self.losses.len(), "the loss of a step differs: {differs:?}");
        assert!(printed.contains(&self.parameters), "not {}", self.parameters);
    }
}

pub(crate) fn undisturbed(flags: &[&str], trace: &Path) -> Undisturbed {
    let mut command = Command::new(binary("elastic-trainer"));
    let output = command.arg("digits").args(flags).arg(format!("--trace={}", trace.display())).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let parameters = printed.lines().find(|line| line.starts_with("parameters ")).unwrap().to_owned();
    let steps = json_lines(trace).into_iter().filter(|line| line["event"] == "step");
    let losses = steps.map(|line| (number(&line, "step"), line["loss"].as_f64().unwrap().to_bits())).collect();
    Undisturbed { losses, parameters }
}

/// Kills processes at this many moments, spread over the training's progress, and compares the end with the end of an
/// undisturbed run.
async fn churn(flags: &[&str], kills: u64, seed: u64) {
    eprintln!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = undisturbed(flags, &folder.path().join("trace"));
    let total = undisturbed.losses.len() as u64;
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let mut run = ChaosRun::begin(&etcd, flags, total, seed);
    for kill in 0..kills {
        let from = total * (kill + 1) / (kills + 2);
        let from = from + run.dice.random_range(0..total / (kills + 2) / 2);
        run.step("training gets on", LONG, |line| number(line, "step") >= from).await;
        let last = number(&run.step("a step", LONG, |_| true).await, "step");
        // A node that comes back must find the job: hundreds of steps take a tenth of a second.
        if last >= total * 4 / 5 {
            break;
        }
        run.strike().await;
    }
    let struck = run.recoveries.len() as u64;
    assert!(struck * 2 >= kills, "the run is too short: {struck} of {kills} kills, and it is almost over");
    run.ends_as(&undisturbed).await;
}

fn seed() -> u64 {
    std::env::var("ELASTIC_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(now_ms)
}

#[tokio::test]
async fn training_lives_through_kills_and_growth() {
    churn(&["--epochs=600", "--hidden=64"], 4, seed()).await;
}

/// `make chaos` runs it.
#[tokio::test]
#[ignore = "takes minutes"]
async fn training_lives_through_minutes_of_chaos() {
    churn(&["--epochs=26000", "--hidden=64"], 60, seed()).await;
}
