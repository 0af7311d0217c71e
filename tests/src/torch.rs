//! Finding a Python that has PyTorch. `scripts/torch.sh` installs one.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::processes::dies_with_test;
use crate::requirement::skip;

/// An absolute path of a Python that imports torch. Without it, the one that `scripts/torch.sh` makes is used.
pub const PYTHON_ENV: &str = "ELASTIC_TORCH_PYTHON";
/// What that Python needs in front of `LD_LIBRARY_PATH`, if anything.
pub const LIBRARY_PATH_ENV: &str = "ELASTIC_TORCH_LIBRARY_PATH";
/// An absolute path of a Python that imports torch 1.13.
const OLD_PYTHON_ENV: &str = "ELASTIC_TORCH_1_13_PYTHON";

/// The script `name` of `tests/pytorch`.
pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch").join(name)
}

/// `PYTHONPATH` for what has PyTorch: the agent's package, and what lets PyTorch start sooner
/// (`tests/pytorch/lighter/sitecustomize.py`).
pub fn python_path() -> String {
    format!("{}/../agent/python:{}", env!("CARGO_MANIFEST_DIR"), script("lighter").display())
}

/// A Python that has PyTorch.
#[derive(Debug, Clone)]
pub struct Torch {
    python: PathBuf,
    library_path: Option<OsString>,
}

impl Torch {
    /// The Python to test with. Where there is none, prints why and returns `None`.
    ///
    /// Panics instead if `ELASTIC_REQUIRE_TORCH` is set, or if [`PYTHON_ENV`] names what is not there.
    pub fn find() -> Option<Torch> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(python) = set(PYTHON_ENV) {
            let python = PathBuf::from(python);
            assert!(python.is_absolute() && python.exists(), "{PYTHON_ENV}={} is no Python", python.display());
            return Some(Torch { python, library_path: set(LIBRARY_PATH_ENV) });
        }
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join(".torch");
        // `installed` is written last, when all the rest is there.
        if dir.join("installed").exists() {
            return Some(Torch { python: dir.join("bin/python"), library_path: None });
        }
        skip("TORCH", format_args!("there is no PyTorch: run scripts/torch.sh, or set {PYTHON_ENV}"));
        None
    }

    /// A Python that has Transformers, Lightning and Accelerate, too. `scripts/beside-torch.sh frameworks` installs them.
    /// `None` where there is none; panics instead if `ELASTIC_REQUIRE_FRAMEWORKS` is set.
    pub fn with_frameworks() -> Option<Torch> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join(".frameworks");
        if dir.join("installed").exists() {
            return Some(Torch { python: dir.join("bin/python"), library_path: None });
        }
        skip("FRAMEWORKS", format_args!("there are no frameworks: run scripts/beside-torch.sh frameworks"));
        None
    }

    /// A Python with torch 1.13, which has an older client of the workers' store and can be an old worker. `None` where
    /// there is none; panics instead if `ELASTIC_REQUIRE_TORCH_1_13` is set.
    pub fn old() -> Option<Torch> {
        let named = std::env::var_os(OLD_PYTHON_ENV).filter(|path| !path.is_empty()).map(PathBuf::from);
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join(".torch-debian");
        let python = named.or_else(|| dir.join("installed").exists().then(|| dir.join("bin/python")));
        if python.is_none() {
            let advice = format_args!("there is no torch 1.13: run scripts/torch-debian.sh, or set {OLD_PYTHON_ENV}");
            skip("TORCH_1_13", advice);
        }
        python.map(|python| Torch { python, library_path: None })
    }

    /// Its interpreter.
    pub fn python(&self) -> &Path {
        &self.python
    }

    /// What a process must have in its environment so that it, or an agent's workers, run on this Python.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut all = vec![("PYTHON_EXEC", self.python.clone().into_os_string()), ("PYTHONPATH", python_path().into())];
        if let Some(path) = &self.library_path {
            let mut path = path.clone();
            if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
                path.push(":");
                path.push(rest);
            }
            all.push(("LD_LIBRARY_PATH", path));
        }
        all
    }

    /// A command that runs a script or module with it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.envs(self.environment());
        command
    }

    /// A command that runs torchrun. It runs the module, since the script beside the interpreter names the path it was
    /// made at.
    pub fn torchrun(&self) -> Command {
        let mut command = self.command();
        command.args(["-m", "torch.distributed.run"]);
        command
    }

    /// A command that runs a file. It dies with the test's thread.
    pub fn run(&self, file: &Path) -> Command {
        let mut command = self.command();
        command.arg("-u").arg(file);
        dies_with_test(&mut command);
        command
    }

    /// A command line for an agent's workers that runs a file.
    pub fn program(&self, file: &Path) -> Vec<String> {
        let text = |path: &Path| path.to_str().expect("a path that is UTF-8").to_owned();
        let set = |(name, value): (&str, OsString)| format!("{name}={}", value.to_string_lossy());
        let mut program = vec!["env".to_owned()];
        program.extend(self.environment().into_iter().map(set));
        program.extend([text(&self.python), "-u".into(), text(file)]);
        program
    }

    /// Starts torch's own TCPStore server: a script that prints its port and runs until its standard input ends.
    pub fn serve(&self, file: &Path) -> TorchServer {
        let mut child = self.run(file).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start Python");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("its output");
        BufReader::new(stdout).read_line(&mut line).expect("read its port");
        let port = line.trim().parse().unwrap_or_else(|_| panic!("torch's server says {line:?}, not its port"));
        TorchServer { port, child }
    }
}

/// A process with torch's server. Dropping it ends it.
#[derive(Debug)]
pub struct TorchServer {
    /// Where it listens, on all addresses.
    pub port: u16,
    child: Child,
}

impl TorchServer {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for TorchServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
