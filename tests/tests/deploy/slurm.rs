//! `examples/train.sbatch` submitted to a real Slurm: Debian's, with a controller and two nodes on this machine. How
//! Slurm schedules, and GPUs, are not tested.

use std::os::unix::process::CommandExt;

use elastic_tests::prelude::*;

use super::deploy;

const LIMIT: Duration = Duration::from_secs(60);

/// Does steps until it may finish. On SIGTERM it saves, or with `ignore-signals` does not hear it.
const WORKER: &str = r#"
import os, pathlib, signal, sys, time
folder, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
rank, restarts = os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
saved = folder / f"saved-{rank}"
step = first = int(saved.read_text()) if saved.exists() else 0
asked = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "ignore-signals" else lambda *_: asked.append(1))
with open(folder / "starts", "a") as file: file.write(f"{restarts} {rank} {first}\n")
while not asked and not (folder / "finish").exists():
    time.sleep(0.05)
    step += 1
saved.write_text(str(step))
"#;

/// A Slurm of two nodes, with a partition whose jobs give way to those of another. Dropping it ends all of its processes:
/// they are in a PID namespace of their own.
struct Slurm {
    dir: TempDir,
    root: PathBuf,
    process: Process,
}

impl Slurm {
    /// None, with the reason printed, where there is no Slurm; `ELASTIC_REQUIRE_SLURM` makes that a failure.
    async fn start() -> Option<Slurm> {
        let root = binary("elastic-agent").parent()?.parent()?.join("slurm");
        if !root.join("usr/sbin/slurmctld-wlm").is_file() {
            skip("SLURM", "Slurm is not there: scripts/slurm.sh fetches it");
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skip("SLURM", "only root can start Slurm's daemons");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("elastic-slurm-").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("state")).unwrap();
        std::fs::write(dir.path().join("slurm.conf"), configuration(dir.path(), &root)).unwrap();
        // munged wants a key of at least 32 bytes that no one else can read.
        let daemons = r#"
            umask 077
            head -c 1024 /dev/urandom > munge.key
            "$0/usr/sbin/munged" --foreground --force --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" \
                --pid-file="$PWD/munge.pid" --log-file="$PWD/munge.log" --seed-file="$PWD/munge.seed" &
            until [ -S munge.socket ]; do sleep 0.05; done
            "$0/usr/sbin/slurmctld-wlm" -D &
            for node in node0 node1; do
                "$0/usr/sbin/slurmd-wlm" -D -N "$node" -d "$0/usr/sbin/slurmstepd-wlm" &
            done
            wait"#;
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", daemons]).arg(&root);
        command.current_dir(dir.path()).envs(environment(dir.path(), &root)).process_group(0);
        let process = Process::spawn("slurm", command, &dir.path().join("daemons.log"));
        let slurm = Slurm { process, dir, root };
        eventually("both nodes are idle", LIMIT, async || {
            let nodes = slurm.run("sinfo", &["--noheader", "--Node", "--partition=train", "--format=%T"]).await.ok()?;
            (nodes == "idle\nidle\n").then_some(())
        })
        .await;
        Some(slurm)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a program of Slurm's: what it prints.
    async fn run(&self, program: &str, args: &[&str]) -> Result<String, String> {
        self.run_with(program, args, &[]).await
    }

    async fn run_with(&self, program: &str, args: &[&str], env: &[(&str, &str)]) -> Result<String, String> {
        let mut command = tokio::process::Command::new(self.root.join("usr/bin").join(program));
        command.args(args).current_dir(self.dir.path()).envs(environment(self.dir.path(), &self.root));
        let done = command.envs(env.iter().copied()).kill_on_drop(true).output().await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    }

    /// Submits the example unchanged, with a worker that takes `mode`: the job's id.
    async fn submit(&self, etcd: &EtcdServer, mode: &str) -> String {
        std::fs::write(self.path("worker.py"), WORKER).unwrap();
        let (script, worker) = (deploy("../examples/train.sbatch"), self.path("worker.py"));
        let (script, worker) = (script.to_str().unwrap(), worker.to_str().unwrap());
        let folder = self.path("").display().to_string();
        // This machine has no GPUs that Slurm knows of.
        let args = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=5", "--output=train.log"];
        let worker = [script, "--local-addr=127.0.0.1", worker, &folder, mode];
        let endpoint = etcd.address();
        let env = [("BACKEND", "etcd"), ("ENDPOINT", endpoint.as_str()), ("WORKERS", "1")];
        self.run_with("sbatch", &[&args[..], &worker].concat(), &env).await.unwrap().trim().to_owned()
    }

    /// Workers that have started: how often Slurm had restarted the job, the rank, after which step.
    fn starts(&self) -> Vec<[u32; 3]> {
        let text = std::fs::read_to_string(self.path("starts")).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let fields = |line: &str| line.split(' ').map(|field| field.parse().unwrap()).collect::<Vec<u32>>();
        whole.lines().map(|line| fields(line).try_into().unwrap()).collect()
    }

    async fn trains(&self, workers: usize) -> Vec<[u32; 3]> {
        eventually(&format!("{workers} workers have started"), LIMIT, async || {
            Some(self.starts()).filter(|starts| starts.len() >= workers)
        })
        .await
    }

    /// Waits until Slurm says these of a job.
    async fn says(&self, job: &str, words: &[&str]) {
        eventually(&format!("job {job} has {words:?}"), LIMIT, async || {
            let shown = self.run("scontrol", &["--oneliner", "show", "job", job]).await.ok()?;
            words.iter().all(|word| shown.split_whitespace().any(|found| found == *word)).then_some(())
        })
        .await;
    }

    /// Whether a worker is alive. The ids that they know are those of their namespace, so they are found by their
    /// command: Python, with the script.
    fn has_workers(&self) -> bool {
        let script = self.path("worker.py").display().to_string();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let commands = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
        commands.map(|command| String::from_utf8_lossy(&command).into_owned()).any(|command| {
            let mut words = command.split('\0');
            words.next().is_some_and(|program| program.contains("python")) && words.any(|word| word == script)
        })
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        self.process.kill();
        if std::thread::panicking() {
            for name in ["daemons.log", "controller.log", "train.log", "starts"] {
                eprintln!("--- {name}\n{}", std::fs::read_to_string(self.path(name)).unwrap_or_default());
            }
        }
    }
}

/// What Slurm's programs, and the jobs, find in their environment.
fn environment(dir: &Path, root: &Path) -> Vec<(&'static str, String)> {
    let ours = binary("elastic-agent").parent().unwrap().display().to_string();
    let inherited = std::env::var("PATH").unwrap_or_default();
    let libraries = libraries(root);
    vec![
        ("SLURM_CONF", dir.join("slurm.conf").display().to_string()),
        ("LD_LIBRARY_PATH", format!("{}:{}", libraries.display(), libraries.join("slurm-wlm").display())),
        ("PATH", format!("{ours}:{}:{inherited}", root.join("usr/bin").display())),
        ("XDG_RUNTIME_DIR", dir.display().to_string()),
        ("TMPDIR", dir.display().to_string()),
    ]
}

fn libraries(root: &Path) -> PathBuf {
    root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
}

fn configuration(dir: &Path, root: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let host = host.trim().split('.').next().unwrap();
    let [controller, first, second] = [free_port(), free_port(), free_port()];
    let (plugins, dir) = (libraries(root).join("slurm-wlm"), dir.display());
    format!(
        "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmUser=root\n\
         AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={dir}/munge.socket\nPluginDir={plugins}\n\
         StateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool-%n\n\
         SlurmctldPidFile={dir}/controller.pid\nSlurmdPidFile={dir}/%n.pid\n\
         SlurmctldLogFile={dir}/controller.log\nSlurmdLogFile={dir}/%n.log\n\
         ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n\
         SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nSchedulerType=sched/builtin\n\
         JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
         PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nKillWait=2\n\
         NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1\n\
         NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1\n\
         PartitionName=train Nodes=node[0-1] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20\n\
         PartitionName=urgent Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF\n",
        plugins = plugins.display()
    )
}

#[tokio::test]
async fn a_job_that_gives_way_saves_and_continues_later() {
    let Some(slurm) = Slurm::start().await else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    // Given a job that trains on both nodes, when a more urgent one needs them,
    let job = slurm.submit(&etcd, "save").await;
    let starts = slurm.trains(2).await;
    assert!(starts.iter().all(|[restarts, _, first]| (*restarts, *first) == (0, 0)), "{starts:?}");
    let urgent = ["--parsable", "--partition=urgent", "--nodes=2", "--time=5", "--output=urgent.log"];
    let wait = "--wrap=until [ -e finish ]; do sleep 0.05; done";
    let urgent = slurm.run("sbatch", &[&urgent[..], &[wait]].concat()).await.unwrap().trim().to_owned();
    // then its workers get SIGTERM with the agents and save, and it is queued again.
    slurm.says(&urgent, &["JobState=RUNNING"]).await;
    slurm.says(&job, &["JobState=PENDING", "Restarts=1"]).await;
    assert!(!slurm.has_workers(), "a worker of a job that gave way");
    let saved: [u32; 2] =
        ["saved-0", "saved-1"].map(|name| std::fs::read_to_string(slurm.path(name)).unwrap().parse().unwrap());
    assert!(saved.iter().all(|&step| step > 0), "{saved:?}");

    // When the nodes are free, it continues from there, and succeeds. Slurm lets a job rest for two minutes before it
    // starts again, unless it is configured otherwise; nodes refuse it in the second in which it ended.
    slurm.says(&urgent, &["RunTime=00:00:03"]).await;
    slurm.run("scancel", &[&urgent]).await.unwrap();
    slurm.run("scontrol", &["update", &format!("jobid={job}"), "starttime=now"]).await.unwrap();
    for [restarts, rank, first] in slurm.trains(4).await.split_off(2) {
        assert_eq!((restarts, first), (1, saved[rank as usize]), "rank {rank}");
    }
    std::fs::write(slurm.path("finish"), "").unwrap();
    slurm.says(&job, &["JobState=COMPLETED", "ExitCode=0:0", "Restarts=1"]).await;
}

#[tokio::test]
async fn a_job_that_is_cancelled_leaves_no_process_and_does_not_come_back() {
    let Some(slurm) = Slurm::start().await else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (number, mode) in [(1, "save"), (2, "ignore-signals")] {
        let job = slurm.submit(&etcd, mode).await;
        slurm.trains(2 * number).await;
        slurm.run("scancel", &[&job]).await.unwrap();
        eventually("no worker is left", LIMIT, async || (!slurm.has_workers()).then_some(())).await;
        slurm.says(&job, &["JobState=CANCELLED", "Restarts=0"]).await;
        let queue = slurm.run("squeue", &["--noheader"]).await.unwrap();
        assert_eq!(queue, "", "{mode}");
    }
}
