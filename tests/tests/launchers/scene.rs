//! A launcher, started as users start it, and a folder in which its workers write what the test looks at.

use elastic_tests::prelude::*;

/// Long enough for several torchruns to start on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Clone)]
pub(crate) enum Launcher {
    /// elastic-agent under torchrun's name: with torchrun's defaults and exit codes.
    ElasticAgent,
    Torchrun(Torch),
}

/// torchrun. It must be installed where its tests are asked for.
pub(crate) fn torchrun() -> Launcher {
    Launcher::Torchrun(Torch::find().expect("torchrun comes with PyTorch"))
}

/// Makes one test of each case for each launcher. The tests of torchrun run only on request, since it takes seconds to
/// start. The cases after `beyond torchrun` are those that torchrun fails. Each names a part of the message of the step
/// that fails, so that a slow start does not count as that failure. When torchrun passes such a case, its test fails,
/// and the documents have to be changed. For the cases after `tested in agents` our agent has tests there.
macro_rules! cases {
    ($($name:ident)* $(; beyond torchrun: $($beyond:ident = $failure:literal)*)?
        $(; tested in agents: $($tested:ident = $why:literal)*)?) => {
        mod elastic_agent {
            use crate::launchers::scene::Launcher;
            $(#[tokio::test] async fn $name() { super::$name(Launcher::ElasticAgent).await })*
            $($(#[tokio::test] async fn $beyond() { super::$beyond(Launcher::ElasticAgent).await })*)?
        }
        mod torchrun {
            use crate::launchers::scene::torchrun;
            $(#[tokio::test] #[ignore = "make test-torchrun"] async fn $name() { super::$name(torchrun()).await })*
            $($(
                #[tokio::test] #[ignore = "make test-torchrun"] #[should_panic(expected = $failure)]
                async fn $beyond() { super::$beyond(torchrun()).await }
            )*)?
            $($(
                #[tokio::test] #[ignore = "make test-torchrun"] #[should_panic(expected = $why)]
                async fn $tested() { super::$tested(torchrun()).await }
            )*)?
        }
    };
}
pub(crate) use cases;

/// A folder, what runs in it, and by whom.
pub(crate) struct Scene {
    dir: TempDir,
    pub(crate) launcher: Launcher,
    env: Vec<(String, String)>,
}

impl Scene {
    /// Workers run this shell script, in the folder.
    pub(crate) fn new(launcher: Launcher, worker: &str) -> Scene {
        let dir = tempfile::Builder::new().prefix("elastic-launcher-").tempdir().unwrap();
        let scene = Scene { dir, launcher, env: Vec::new() };
        scene.write("worker.sh", &format!("#!/bin/bash\ncd {}\n{worker}\n", scene.path("").display()));
        std::fs::set_permissions(scene.path("worker.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
        scene
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Scene {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Lets workers be Python scripts that need PyTorch.
    pub(crate) fn with(self, torch: &Torch) -> Scene {
        let scene = torch
            .environment()
            .into_iter()
            .fold(self, |scene, (name, value)| scene.env(name, value.to_str().expect("a variable that is UTF-8")));
        let dir = scene.path("").display().to_string();
        scene.env("TEST_DIR", &dir)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// What is in a file; nothing, if it is not there.
    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// All that launchers, and workers whose streams go there, have printed.
    pub(crate) fn log(&self) -> String {
        self.read("log")
    }

    /// Starts a launcher whose workers run the script.
    pub(crate) fn start(&self, flags: &[&str]) -> Process {
        self.start_with(flags, &[])
    }

    /// Starts a launcher whose workers run the script with these arguments.
    pub(crate) fn start_with(&self, flags: &[&str], arguments: &[&str]) -> Process {
        let script = self.path("worker.sh");
        let program = [&[script.to_str().unwrap()], arguments].concat();
        self.start_program(&[flags, &["--no-python"]].concat(), &program)
    }

    pub(crate) fn start_program(&self, flags: &[&str], program: &[&str]) -> Process {
        self.start_in(&[], flags, program)
    }

    /// Starts a launcher with variables of its own.
    pub(crate) fn start_in(&self, env: &[(&str, &str)], flags: &[&str], program: &[&str]) -> Process {
        let mut command = match &self.launcher {
            Launcher::ElasticAgent => {
                let mut command = Command::new(binary("elastic-agent"));
                command.arg("torchrun-compat");
                command
            }
            Launcher::Torchrun(torch) => torch.torchrun(),
        };
        remove_settings(&mut command);
        command.args(flags).args(program).current_dir(self.path(""));
        command.env("OMP_NUM_THREADS", "1").env("XDG_RUNTIME_DIR", self.path("")).env_remove("LOGLEVEL");
        command.envs(self.env.iter().map(|(name, value)| (name, value))).envs(env.iter().copied());
        Process::spawn("launcher", command, &self.path("log"))
    }

    /// Runs a launcher to its end: its exit code.
    pub(crate) async fn run(&self, flags: &[&str]) -> i32 {
        self.end(&mut self.start(flags)).await
    }

    /// Waits for its end: the exit code, or minus the signal.
    pub(crate) async fn end(&self, running: &mut Process) -> i32 {
        running.exit(PATIENCE).await
    }

    pub(crate) async fn end_well<'a>(&self, launchers: impl IntoIterator<Item = &'a mut Process>) {
        for launcher in launchers {
            assert_eq!(self.end(launcher).await, 0);
        }
    }

    pub(crate) async fn eventually<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        eventually(what, PATIENCE, || std::future::ready(condition())).await
    }

    /// Waits until this file is there, with something in it.
    pub(crate) async fn appears(&self, name: &str) {
        self.eventually(&format!("{name} is written"), || (!self.read(name).is_empty()).then_some(())).await;
    }

    /// Waits until there are these ranks: see [`Scene::ranks`].
    pub(crate) async fn has_ranks<const N: usize>(&self, ranks: [&str; N]) {
        let (what, ranks) = (format!("the ranks are {ranks:?}"), names(ranks));
        self.eventually(&what, || (ranks.is_subset(&self.ranks())).then_some(())).await;
    }

    /// Names of the files that begin with `rank-`, without that.
    pub(crate) fn ranks(&self) -> BTreeSet<String> {
        let files = std::fs::read_dir(self.dir.path()).unwrap().flatten();
        files.filter_map(|file| Some(file.file_name().to_str()?.strip_prefix("rank-")?.to_owned())).collect()
    }

    /// The living processes of launchers, of workers, and of what those have started.
    fn living(&self) -> Vec<Pid> {
        let own = self.dir.path().as_os_str().as_encoded_bytes();
        let of_ours = |pid: &Pid| {
            let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap_or_default();
            environment.windows(own.len()).any(|window| window == own)
        };
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).filter(of_ours).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log\n{}", self.log());
        }
        let begun = Instant::now();
        if matches!(self.launcher, Launcher::ElasticAgent) {
            // Every launcher has ended by now, so its processes must end too.
            while !self.living().is_empty() && begun.elapsed() < PATIENCE && !std::thread::panicking() {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(std::thread::panicking() || self.living().is_empty(), "left behind: {:?}", self.living());
        }
        for pid in self.living() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

pub(crate) const ALONE: &str = "--standalone";

pub(crate) fn names<const N: usize>(ranks: [&str; N]) -> BTreeSet<String> {
    ranks.map(str::to_owned).into()
}

/// The flags by which several nodes of a job find each other.
pub(crate) struct Rendezvous {
    /// The endpoint, as `host:port`.
    pub(crate) endpoint: String,
    flags: Vec<String>,
}

impl Rendezvous {
    /// By `c10d`: the first node serves the store.
    pub(crate) fn c10d() -> Rendezvous {
        Rendezvous::at("c10d", &format!("127.0.0.1:{}", free_port()))
    }

    fn at(backend: &str, endpoint: &str) -> Rendezvous {
        let by = [format!("--rdzv_backend={backend}"), format!("--rdzv_endpoint={endpoint}")];
        let more = ["--rdzv_id=j", "--local_addr=127.0.0.1", "--rdzv_conf=last_call_timeout=1,min_round_time=0"];
        Rendezvous { endpoint: endpoint.to_owned(), flags: by.into_iter().chain(more.map(str::to_owned)).collect() }
    }

    /// On an etcd that speaks both of its APIs. torchrun uses the older API, by its backend `torchruns`: `etcd` or
    /// `etcd-v2`.
    pub(crate) async fn etcd(launcher: &Launcher, torchruns: &str) -> (EtcdServer, Rendezvous) {
        let server = EtcdServer::start(EtcdOptions::with_v2()).await;
        let backend = if matches!(launcher, Launcher::ElasticAgent) { "etcd" } else { torchruns };
        let rendezvous = Rendezvous::at(backend, &server.address());
        (server, rendezvous)
    }

    pub(crate) fn and<'a>(&'a self, flags: &[&'a str]) -> Vec<&'a str> {
        self.flags.iter().map(String::as_str).chain(flags.iter().copied()).collect()
    }
}

/// Whether a process of this id runs and is not a zombie.
pub(crate) fn is_alive(pid: &str) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid.trim()).join("status")).unwrap_or_default();
    !pid.trim().is_empty() && status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}
