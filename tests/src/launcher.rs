//! The agent run to its end under any name and environment, as launch scripts run it. Jobs that a test acts on while
//! they run are [`crate::agents::Job`]s.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::processes::{binary, fake_nvml};
use crate::wait::within;

/// A folder from which agents are run, and what they are run with.
pub struct Launcher {
    dir: TempDir,
    env: Vec<(String, String)>,
    input: Option<PathBuf>,
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; minus the signal if one ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ended {
    /// The lines of standard output, sorted: workers write in any order.
    pub fn lines(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

impl Default for Launcher {
    fn default() -> Launcher {
        let dir = tempfile::Builder::new().prefix("elastic-launch-").tempdir().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("run")).expect("a runtime directory");
        Launcher { dir, env: Vec::new(), input: None }
    }
}

impl Launcher {
    /// Sets a variable for all runs.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Launcher {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Gives later runs this file of its folder as their standard input.
    #[must_use]
    pub fn reads(mut self, name: &str) -> Launcher {
        self.input = Some(self.path(name));
        self
    }

    /// A path in its folder, in which agents and workers run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file into its folder.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("write a file");
    }

    /// Compiles a stand-in for NVIDIA's management library, with these GPUs in C's notation, and has agents find it.
    #[must_use]
    pub fn gpus(self, gpus: &str) -> Launcher {
        fake_nvml(self.dir.path(), gpus);
        let folder = self.dir.path().display().to_string();
        self.env("LD_LIBRARY_PATH", &folder)
    }

    /// Starts the agent under the name `name`: through a link, unless that is the agent's own name.
    pub fn start(&self, name: &str, args: &[&str]) -> Child {
        let program = if name == "elastic-agent" { binary(name) } else { self.path(name) };
        if !program.exists() {
            symlink(binary("elastic-agent"), &program).expect("link to the agent");
        }
        let mut command = Command::new(program);
        let set = |name: &String| {
            let ours = ["PET_", "TORCH", "CUDA_", "HIP_", "ZE_"].iter().any(|start| name.starts_with(start));
            ours || ["LOGLEVEL", "PYTHON_EXEC", "VIRTUAL_ENV", "OMP_NUM_THREADS"].contains(&name.as_str())
        };
        for (name, _) in std::env::vars().filter(|(name, _)| set(name)) {
            command.env_remove(name);
        }
        command.args(args).current_dir(self.dir.path()).env("XDG_RUNTIME_DIR", self.path("run"));
        command.env("TMPDIR", self.dir.path()).env("OMP_NUM_THREADS", "1");
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let input = |path: &PathBuf| std::fs::File::open(path).expect("the input").into();
        command
            .stdin(self.input.as_ref().map_or_else(Stdio::null, input))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.spawn().expect("start an agent")
    }

    /// Runs the agent by the name `name` until it ends.
    pub async fn run(&self, name: &str, args: &[&str]) -> Ended {
        end(self.start(name, args)).await
    }
}

/// Waits for the end of what [`Launcher::start`] started.
pub async fn end(child: Child) -> Ended {
    use std::os::unix::process::ExitStatusExt;
    let output = within("the agent ends", Duration::from_secs(60), child.wait_with_output()).await.expect("its output");
    Ended {
        code: output.status.code().unwrap_or_else(|| -output.status.signal().unwrap_or_default()),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
