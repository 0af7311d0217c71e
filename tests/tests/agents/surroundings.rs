//! What an agent finds where it is started: signals that are ignored, folders that are not there, a Python next to it.

use std::os::unix::fs::{MetadataExt, symlink};

use elastic_tests::launcher::Launcher;
use elastic_tests::prelude::*;
use tokio::process::Command;

/// A job of one node, and its agent, started as `nohup` and shells start programs that run on.
fn ignoring(flags: &[&str]) -> (Job, Agent) {
    let job = Job::met_by(&["--standalone"], "1").flag("--max-restarts=1");
    let script = r#"trap "" HUP INT QUIT; exec "$0" "$@""#;
    let agent = job.start_through(&["sh", "-c", script], "a", flags);
    (job, agent)
}

#[tokio::test]
async fn what_nohup_and_a_shells_ampersand_ignore_stays_ignored() {
    let (job, mut agent) = ignoring(&[]);
    let first = job.runs(1, 1).await;
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT] {
        agent.signal(signal);
    }
    // A node that leaves has no second round.
    first.workers[0].kill();
    job.runs(2, 1).await.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}

#[tokio::test]
async fn a_signal_that_is_named_is_handled_though_it_was_ignored() {
    let (job, mut agent) = ignoring(&["--signals-to-handle=SIGHUP"]);
    job.runs(1, 1).await;
    agent.signal(Signal::HUP);
    assert_eq!(agent.exit(LIMIT).await, 3, "{}", agent.output());
}

#[tokio::test]
async fn without_its_runtime_directory_an_agent_takes_another() {
    // The folder of a login node, as Slurm passes it on, and a file.
    let plain = tempfile::NamedTempFile::new().unwrap();
    for missing in ["/run/user/4294967294", plain.path().to_str().unwrap()] {
        let job = Job::met_by(&["--standalone"], "1").env("XDG_RUNTIME_DIR", missing);
        let mut agent = job.start("a");
        job.runs(1, 1).await.exit(0);
        assert_eq!(agent.exit(LIMIT).await, 0);
        let said = agent.output();
        let warning = said.lines().find(|line| line.contains("WARN") && line.contains(missing));
        assert!(warning.is_some_and(|line| line.contains("elastic-agent")), "{said}");
    }
}

#[tokio::test]
async fn a_runtime_directory_that_goes_at_a_logout_is_replaced() {
    let worker = r#"
import shutil
agent()
open(e["TORCHELASTIC_TIMER_FILE"], "w").close()
if round == 1:
    note("socket", e["ELASTIC_AGENT_SOCKET"])
    sys.exit(shutil.rmtree(e["XDG_RUNTIME_DIR"]) or "the user logs out")
# The agent does not listen at the removed path any more.
while (folder / "socket").read_text().strip() in open("/proc/net/unix").read(): time.sleep(0.02)
"#;
    let job = Job::met_by(&["--standalone"], "1").flag("--max-restarts=1").env("TORCHELASTIC_ENABLE_FILE_TIMER", "1");
    let job = job.named("logout").python(worker);
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    let (gone, said) = (job.path("run"), agent.output());
    let warns = |line: &&str| line.contains("WARN") && line.contains(gone.to_str().unwrap());
    let warned: Vec<&str> = said.lines().filter(warns).collect();
    assert!(warned.len() == 2 && warned[1].contains("was removed: workers that start now reach"), "{said}");
}

/// A job of one node whose worker runs this in a shell, and fails once.
fn shell(script: &str) -> Job {
    Job::met_by(&["--standalone"], "1").flag("--max-restarts=1").program(["sh", "-c", script])
}

#[tokio::test]
async fn a_working_directory_that_is_renamed_during_the_run_stays_the_workers() {
    let job =
        shell("[ -e ../moved ] || { touch ../moved mine; mv ../here ../there; mkdir ../here; exit 1; }; [ -e mine ]");
    std::fs::create_dir(job.path("here")).unwrap();
    let mut agent = job.start_through(&["sh", "-c", r#"cd here && exec "$0" "$@""#], "a", &[]);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}

#[tokio::test]
async fn a_log_folder_that_is_removed_during_the_run_is_made_again() {
    let job =
        shell("[ -e removed ] || { touch removed; rm -rf logs; exit 1; }; echo the second run").flag("--redirects=3");
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    let run = std::fs::read_dir(job.path("logs")).unwrap().next().expect("the run's folder").unwrap().path();
    assert_eq!(std::fs::read_to_string(run.join("attempt_1/0/stdout.log")).unwrap(), "the second run\n");
}

#[tokio::test]
async fn an_agent_lives_where_a_file_may_grow_no_further() {
    // In a thousandth of what the worker says.
    let job =
        shell("for line in $(seq 20000); do echo a line of output; done; [ -e again ] || { touch again; exit 1; }");
    let job = job.flag("--tee=3");
    let mut agent = job.start_through(&["sh", "-c", r#"ulimit -f 64; exec "$0" "$@""#], "a", &[]);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}

#[tokio::test]
async fn standard_output_and_error_that_are_one_file_keep_their_order() {
    let job = shell("for at in $(seq 300); do echo line $at out; echo line $at err >&2; done");
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    let output = agent.output();
    let said: Vec<&str> = output.lines().filter(|line| line.starts_with("line ")).collect();
    let wanted: Vec<String> = (1..=300).flat_map(|at| [format!("line {at} out"), format!("line {at} err")]).collect();
    assert_eq!(said, wanted);
}

fn log_directories(launcher: &Launcher) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(launcher.path(".")).unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("torchelastic_")).collect()
}

#[tokio::test]
async fn a_log_directory_that_was_not_asked_for_and_nothing_is_in_goes_when_the_job_succeeds() {
    let launcher = Launcher::default();
    assert_eq!(launcher.run("elastic-agent", &["--standalone", "--no-python", "true"]).await.code, 0);
    assert_eq!(log_directories(&launcher), [""; 0].map(PathBuf::from));
    let to_file = ["--standalone", "--redirects=3", "--no-python", "echo", "hello"];
    assert_eq!(launcher.run("elastic-agent", &to_file).await.code, 0);
    let [written] = &log_directories(&launcher)[..] else { panic!("something was written") };
    assert_eq!(std::fs::metadata(written).unwrap().mode() & 0o777, 0o700, "it is no one else's to read");
    assert_eq!(launcher.run("elastic-agent", &["--standalone", "--no-python", "false"]).await.code, JOB_FAILED);
    assert_eq!(log_directories(&launcher).len(), 2, "a failure's stays");
}

#[tokio::test]
async fn without_a_place_for_logs_that_was_not_asked_for_a_job_runs() {
    let launcher = Launcher::default().env("TMPDIR", "/dev/null/absent");
    let ended = launcher.run("elastic-agent", &["--standalone", "--no-python", "echo", "hello"]).await;
    assert_eq!((ended.code, ended.lines()), (0, vec!["hello"]), "{ended:?}");
    let warns = |line: &str| line.contains("WARN") && line.contains("/dev/null/absent") && line.contains("--log-dir");
    assert!(ended.stderr.lines().any(warns), "{ended:?}");
    // A TMPDIR that does not exist is a mistake. The agent does not make that folder.
    let missing = launcher.path("missing");
    let launcher = Launcher::default().env("TMPDIR", missing.to_str().unwrap());
    let ended = launcher.run("elastic-agent", &["--standalone", "--no-python", "echo", "hello"]).await;
    assert_eq!((ended.code, ended.lines()), (0, vec!["hello"]), "{ended:?}");
    let warns = |line: &str| line.contains("WARN") && line.contains(missing.to_str().unwrap());
    assert!(ended.stderr.lines().any(warns) && !missing.exists(), "{ended:?}");
    let asked = launcher.run("elastic-agent", &["--standalone", "--log-dir=/dev/null/x", "--no-python", "true"]).await;
    assert_eq!(asked.code, 1, "{asked:?}");
}

#[tokio::test]
async fn a_password_that_everyone_on_the_host_can_read_is_warned_of() {
    let launcher = Launcher::default();
    let file = launcher.path("password");
    std::fs::write(&file, "secret").unwrap();
    let conf = format!("--rdzv-conf=user=u,password_file={},join_timeout=1s", file.display());
    for (mode, warned) in [(0o644, true), (0o640, false), (0o600, false)] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let flags = ["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", &conf, "--rdzv-id=j", "--no-python", "true"];
        let ended = launcher.run("elastic-agent", &flags).await;
        let warns = |line: &str| line.contains("WARN") && line.contains(file.to_str().unwrap());
        assert_eq!(ended.stderr.lines().any(warns), warned, "{mode:o}: {ended:?}");
    }
}

#[tokio::test]
async fn a_health_port_of_torchruns_variable_that_is_in_use_is_passed_over() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let launcher = Launcher::default().env("TORCHELASTIC_HEALTH_CHECK_PORT", &port);
    let ended = launcher.run("torchrun", &["--standalone", "--no-python", "echo", "hello"]).await;
    assert_eq!((ended.code, ended.lines()), (0, vec!["hello"]), "{ended:?}");
    let warns = |line: &str| line.contains("WARN") && line.contains("TORCHELASTIC_HEALTH_CHECK_PORT has no effect");
    assert!(ended.stderr.lines().any(warns), "{ended:?}");
    let asked = launcher.run("elastic-agent", &["--standalone", "--health-port", &port, "--no-python", "true"]).await;
    assert!(asked.code == 1 && asked.stderr.contains("--health-port"), "{asked:?}");
}

#[tokio::test]
async fn variables_of_other_systems_reach_the_workers() {
    let launcher = Launcher::default();
    // Such names are of Windows' shells, and WSL passes them on.
    let script = r#"import os, sys; os.execve(sys.argv[1], sys.argv[1:], {**os.environ, "=C:": "here"})"#;
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(binary("elastic-agent"));
    command.args(["--standalone", "--log-dir=/dev/null", "--no-python", "env"]);
    command.env("XDG_RUNTIME_DIR", launcher.path("run"));
    let run = within("the agent ends", LIMIT, command.output()).await.unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(said.lines().any(|line| line == "=C:=here"), "{}", String::from_utf8_lossy(&run.stderr));
}

/// Runs a standalone job in a mount namespace after these commands. `None` where that is not allowed.
async fn mounted(mounts: &str, env: &[(&str, &str)]) -> Option<Output> {
    let may = Command::new("unshare").args(["--mount", "sh", "-c", mounts]).output().await;
    if !may.is_ok_and(|may| may.status.success()) {
        skip("MOUNTS", format_args!("nothing can be mounted here: {mounts}"));
        return None;
    }
    let script = format!(r#"{mounts} && exec "$0" --standalone --log-dir=/dev/null --no-python echo hello"#);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).arg(binary("elastic-agent"));
    command.env_remove("XDG_RUNTIME_DIR").envs(env.iter().copied());
    Some(within("the agent ends", LIMIT, command.output()).await.unwrap())
}

fn says_hello(run: &Output) {
    assert!(run.status.success() && run.stdout.starts_with(b"hello"), "{run:?}");
}

#[tokio::test]
async fn a_proc_with_processes_alone_is_enough() {
    let Some(run) = mounted("mount -t proc -o subset=pid proc /proc", &[]).await else { return };
    says_hello(&run);
}

#[tokio::test]
async fn where_only_tmpdir_can_be_written_runtime_files_are_there() {
    let folder = tempfile::Builder::new().prefix("e").tempdir_in("/dev/shm").unwrap();
    let mounts = "for at in /tmp /run; do mount -t tmpfs -o ro none $at; done";
    let tmpdir = folder.path().to_str().unwrap();
    let Some(run) = mounted(mounts, &[("TMPDIR", tmpdir)]).await else { return };
    says_hello(&run);
    let mut made = std::fs::read_dir(folder.path()).unwrap().flatten();
    assert!(made.any(|entry| entry.file_name().to_string_lossy().starts_with("elastic-agent-")));
}

#[tokio::test]
async fn a_long_runtime_directory_is_passed_over() {
    let base = tempfile::tempdir().unwrap();
    let long = base.path().join("x".repeat(60));
    std::fs::create_dir(&long).unwrap();
    let job = Job::met_by(&["--standalone"], "1").env("XDG_RUNTIME_DIR", &long);
    let mut agent = job.start("a");
    job.runs(1, 1).await.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0);
    assert!(!agent.output().contains("runtime directory"), "{}", agent.output());
}

/// A prefix with the agent and a Python that says which it is.
struct Prefix(tempfile::TempDir);

impl Prefix {
    fn new(mark: &str) -> Prefix {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let (built, installed) = (binary("elastic-agent"), bin.join("elastic-agent"));
        std::fs::hard_link(&built, &installed).or_else(|_| std::fs::copy(&built, &installed).map(drop)).unwrap();
        std::fs::write(bin.join("python"), "#!/bin/sh\necho \"$0\"\n").unwrap();
        std::fs::set_permissions(bin.join("python"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(dir.path().join(mark), "").unwrap();
        std::fs::create_dir_all(dir.path().join("lib/python3/site-packages/torch")).unwrap();
        Prefix(dir)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The Python that workers of the agent at `agent` ran.
    async fn python(&self, agent: PathBuf, env: &[(&str, PathBuf)]) -> String {
        let mut command = Command::new(agent);
        command.args(["--standalone", "--log-dir=/dev/null", "-m", "train"]).env_remove("VIRTUAL_ENV");
        command.env_remove("PYTHON_EXEC").env_remove("LOGLEVEL").env("XDG_RUNTIME_DIR", self.0.path());
        let run = within("the agent ends", LIMIT, command.envs(env.iter().cloned()).output()).await.unwrap();
        let said = String::from_utf8_lossy(&run.stdout).trim().to_owned();
        let log = String::from_utf8_lossy(&run.stderr).into_owned();
        let lines = log.lines().filter(|line| line.contains(&said)).count();
        assert!(run.status.success() && lines == 1, "the log names it once: {log}");
        let stale = env.iter().any(|(name, at)| *name == "VIRTUAL_ENV" && !at.exists());
        let warns = |line: &str| line.contains("WARN") && line.contains("VIRTUAL_ENV has no effect");
        assert_eq!(log.lines().any(warns), stale, "{log}");
        said
    }
}

#[tokio::test]
async fn in_an_environment_that_is_not_activated_its_python_runs_the_workers() {
    for mark in ["pyvenv.cfg", "conda-meta"] {
        let (venv, other) = (Prefix::new(mark), Prefix::new("pyvenv.cfg"));
        let own = venv.at("bin/python");
        assert_eq!(venv.python(venv.at("bin/elastic-agent"), &[]).await, own.to_str().unwrap());
        symlink(venv.at("bin/elastic-agent"), other.at("agent")).unwrap();
        assert_eq!(venv.python(other.at("agent"), &[]).await, own.to_str().unwrap(), "by a link from elsewhere");

        let activated = venv.python(venv.at("bin/elastic-agent"), &[("VIRTUAL_ENV", other.at(""))]).await;
        assert_eq!(PathBuf::from(activated), own, "as torchrun does there, also when another one is activated");

        // Installed as a tool, with a link on PATH and no packages for scripts
        std::fs::remove_dir(venv.at("lib/python3/site-packages/torch")).unwrap();
        let linked = venv.python(other.at("agent"), &[("VIRTUAL_ENV", other.at(""))]).await;
        let python = if mark == "conda-meta" { own } else { other.at("bin/python") };
        assert_eq!(PathBuf::from(linked), python, "{mark}");
    }
}

#[tokio::test]
async fn an_environment_that_is_gone_is_warned_of_and_the_next_python_runs() {
    let other = Prefix::new("pyvenv.cfg");
    let env = [("VIRTUAL_ENV", PathBuf::from("/gone")), ("PATH", other.at("bin"))];
    assert_eq!(other.python(binary("elastic-agent"), &env).await, other.at("bin/python").to_str().unwrap());
}

#[tokio::test]
async fn a_preloaded_library_may_start_a_thread() {
    let job = Job::met_by(&["--standalone"], "1");
    let source = r#"
#include <pthread.h>
#include <unistd.h>
static void *idle(void *nothing) { for (;;) pause(); return nothing; }
__attribute__((constructor)) static void begin(void) { pthread_t thread; pthread_create(&thread, 0, idle, 0); }
"#;
    job.write("thread.c", source);
    let library = job.path("thread.so");
    compile_library(&job.path("thread.c"), &library, &["-pthread"]);
    let job = job.env("LD_PRELOAD", library);
    let mut agent = job.start("a");
    let round = job.runs(1, 1).await;
    // The guard has that thread too, and sees ends nevertheless.
    round.workers[0].kill();
    agent.signal(Signal::TERM);
    assert_ne!(agent.exit(LIMIT).await, 0);
    job.none_is_left(LIMIT).await;
}
