//! Scenes: what the small agent does, and how a test starts it. The assertions are in the tests.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::future::Future;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use elastic_agent::for_tests::{self, Event, Exited, GuardClient, GuardClientError, SpawnError, WorkerSpec};
use libtest_mimic::Trial;
use rustix::process::Signal;

use crate::deny;

/// Environment variable that names the scene to play.
pub(crate) const NAME: &str = "SUPERVISION_SCENE";

type Play = fn(Agent) -> Pin<Box<dyn Future<Output = ()>>>;

pub(crate) struct Scene {
    name: &'static str,
    play: Play,
    /// Whether it is a test of its own, and not a part that an outer test starts.
    pub(crate) alone: bool,
}

impl Scene {
    pub(crate) fn alone(name: &'static str, play: Play) -> Scene {
        Scene { name, play, alone: true }
    }

    pub(crate) fn part(name: &'static str, play: Play) -> Scene {
        Scene { name, play, alone: false }
    }

    pub(crate) fn trial(self) -> Trial {
        Trial::test(self.name, move || {
            let status = command(self.name).status().map_err(|e| e.to_string())?;
            if status.success() { Ok(()) } else { Err(format!("the scene ended with {status}").into()) }
        })
    }
}

/// Makes a list of scenes. Each name is that of an `async fn name(agent: Agent)`.
#[macro_export]
macro_rules! scenes {
    ($kind:ident: $($name:ident),* $(,)?) => {
        vec![$($crate::scene::Scene::$kind(stringify!($name), |agent| Box::pin($name(agent)))),*]
    };
}

pub(crate) fn all() -> Vec<Scene> {
    use crate::{deaths, nursery, output, starts, stops};
    [stops::scenes(), starts::scenes(), output::scenes(), deaths::scenes(), nursery::scenes()]
        .into_iter()
        .flatten()
        .collect()
}

/// The agent that plays a scene.
pub(crate) struct Agent {
    pub(crate) guard: GuardClient,
    pub(crate) guard_pid: i32,
    /// Events that came while another one was waited for.
    pub(crate) earlier: VecDeque<Event>,
    pub(crate) directory: tempfile::TempDir,
    /// A file that this process holds open as if it had been started with it.
    pub(crate) inherited: PathBuf,
    /// When `main` began.
    pub(crate) began: Instant,
    /// How long starting the guard took.
    pub(crate) guards_start: Duration,
}

pub(crate) fn play(name: &str) -> ExitCode {
    let began = Instant::now();
    deny::as_told();
    let inherited = tempfile::NamedTempFile::new().unwrap();
    rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
    let guard = for_tests::start_guard().unwrap();
    let guard_pid = only_child();
    let guards_start = began.elapsed();
    let scene = all().into_iter().find(|scene| scene.name == name).expect("a scene of this name");
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let guard = GuardClient::new(guard).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (earlier, inherited) = (VecDeque::new(), inherited.path().to_owned());
        let agent = Agent { guard, guard_pid, earlier, directory, inherited, began, guards_start };
        tokio::time::timeout(Duration::from_secs(60), (scene.play)(agent))
            .await
            .expect("the scene ends within a minute");
    });
    ExitCode::SUCCESS
}

/// The process that this one has started.
fn only_child() -> i32 {
    let me = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{me}/task/{me}/children")).unwrap();
    children.trim().parse().expect("one child")
}

pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(NAME, name);
    command
}

/// Starts a scene for an outer test, which reads the scene's output.
pub(crate) fn start(name: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = command(name).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

impl Agent {
    /// A shell script as a worker. `$DIR` is the directory for its files.
    pub(crate) fn script(&self, local_rank: u32, script: &str) -> WorkerSpec {
        spec(local_rank, &["sh", "-c", script], self.directory.path())
    }

    pub(crate) async fn spawn(&mut self, local_rank: u32, script: &str) -> i32 {
        let spec = self.script(local_rank, script);
        self.start(spec).await.unwrap()
    }

    /// Starts a worker, and returns its process id as soon as its program runs.
    pub(crate) async fn start(&mut self, spec: WorkerSpec) -> Result<i32, SpawnError> {
        let asked_for = spec.local_rank;
        self.guard.begin_spawn(spec)?;
        loop {
            match self.guard.next_event().await {
                Event::Started { local_rank, pid } if local_rank == asked_for => return Ok(pid),
                Event::NotStarted { local_rank, refused } if local_rank == asked_for => return Err(refused.explain()),
                Event::GuardLost { .. } => return Err(GuardClientError::GuardLost.into()),
                other => self.earlier.push_back(other),
            }
        }
    }

    /// Stops everything, and waits until nothing is left.
    pub(crate) async fn stop_all(&mut self, signal: Signal, grace: Duration) -> Result<(), GuardClientError> {
        self.guard.begin_stop(signal, grace);
        loop {
            match self.guard.next_event().await {
                Event::Stopped => return Ok(()),
                Event::GuardLost { .. } => return Err(GuardClientError::GuardLost),
                other => self.earlier.push_back(other),
            }
        }
    }

    pub(crate) async fn next_event(&mut self) -> Event {
        match self.earlier.pop_front() {
            Some(event) => event,
            None => self.guard.next_event().await,
        }
    }

    /// The next event, which must be an exit.
    pub(crate) async fn exited(&mut self) -> Exited {
        match self.next_event().await {
            Event::Exited(exited) => exited,
            other => panic!("expected an exit, got {other:?}"),
        }
    }

    pub(crate) fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(file)).unwrap_or_default()
    }

    /// Waits for a worker to write a whole line into a file of its directory.
    pub(crate) async fn line_in(&self, file: &str) -> String {
        loop {
            if let Some((line, _)) = self.read(file).split_once('\n') {
                return line.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) async fn pid_in(&self, file: &str) -> i32 {
        self.line_in(file).await.trim().parse().unwrap()
    }
}

pub(crate) fn spec(local_rank: u32, argv: &[&str], directory: &Path) -> WorkerSpec {
    let mut env = BTreeMap::from([("DIR".into(), directory.as_os_str().to_owned())]);
    env.insert(OsString::from("PATH"), std::env::var_os("PATH").unwrap());
    WorkerSpec {
        local_rank,
        argv: argv.iter().map(OsString::from).collect(),
        env,
        cwd: directory.to_owned(),
        stdio: for_tests::Stdio::default(),
        cpus: for_tests::CpuSet::default(),
    }
}

/// Whether no process has this id, not even a zombie.
pub(crate) fn gone(pid: i32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}
