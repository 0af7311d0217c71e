//! Which Python runs the workers' script. The table in `docs/reference.md` has the order.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::{CommandError, find, runnable};

/// The agent's own program, and the word that it was called by.
#[derive(Debug, Clone)]
pub(crate) struct AgentProgram {
    pub path: PathBuf,
    pub called: OsString,
}

impl AgentProgram {
    /// That of this process. `None` if the system does not say it.
    pub(crate) fn this() -> Option<AgentProgram> {
        let path = std::env::current_exe().ok()?;
        Some(AgentProgram { path, called: std::env::args_os().next().unwrap_or_default() })
    }
}

/// A Python, and where it was found.
pub(super) struct Interpreter {
    pub(super) path: PathBuf,
    pub(super) found: &'static str,
    /// What was set to lead to another one and does not.
    pub(super) passed_over: Option<String>,
}

impl Interpreter {
    fn of(path: PathBuf, found: &'static str) -> Interpreter {
        Interpreter { path, found, passed_over: None }
    }
}

/// The names of Python, in the order of the search on PATH.
const NAMES: [&str; 2] = ["python3", "python"];

pub(super) fn python(
    script: &OsStr,
    env: &dyn Fn(&str) -> Option<OsString>,
    agent: Option<&AgentProgram>,
) -> Result<Interpreter, CommandError> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    let path = set("PATH");
    if let Some(named) = set("PYTHON_EXEC") {
        return match find(&named, path.as_deref()) {
            Ok(path) => Ok(Interpreter::of(path, "PYTHON_EXEC")),
            Err(problem) => Err(CommandError::Interpreter { path: named.into(), problem }),
        };
    }
    if let Some(python) = agent.and_then(|agent| beside(agent, path.as_deref())) {
        return Ok(Interpreter::of(python, "in the environment of elastic-agent"));
    }
    let mut passed_over = None;
    if let Some(bin) = set("VIRTUAL_ENV").map(|prefix| Path::new(&prefix).join("bin")) {
        let python = bin.join("python");
        match runnable(&python) {
            // On PATH, its place there counts, as in a shell.
            Ok(()) if is_on(path.as_deref(), &bin) => {}
            Ok(()) => return Ok(Interpreter::of(python, "VIRTUAL_ENV")),
            Err(problem) => {
                let python = python.display();
                passed_over = Some(format!("VIRTUAL_ENV has no effect: it leads to {python}, which {problem}"));
            }
        }
    }
    let on_path = || NAMES.iter().find_map(|name| find(OsStr::new(name), path.as_deref()).ok());
    let conda = || {
        let python = Path::new(&set("CONDA_PREFIX")?).join("bin/python");
        runnable(&python).is_ok().then_some(Interpreter::of(python, "CONDA_PREFIX"))
    };
    match on_path().map(|path| Interpreter::of(path, "on PATH")).or_else(conda) {
        Some(found) => Ok(Interpreter { passed_over, ..found }),
        None => Err(CommandError::NoPython { script: script.to_owned() }),
    }
}

fn is_on(path: Option<&OsStr>, folder: &Path) -> bool {
    path.is_some_and(|path| std::env::split_paths(path).any(|entry| entry == folder))
}

/// The Python of the environment that the agent is installed in: the one that torchrun would use. `None` where the agent
/// is a tool in an environment of its own, as `pipx` and `uv tool` install it.
fn beside(agent: &AgentProgram, path: Option<&OsStr>) -> Option<PathBuf> {
    let bin = agent.path.parent()?;
    let (prefix, python) = (bin.parent()?, bin.join("python"));
    let settings = fs::read_to_string(prefix.join("pyvenv.cfg"));
    if !(settings.is_ok() || prefix.join("conda-meta").exists()) || runnable(&python).is_err() {
        return None;
    }
    let a_tool = settings.is_ok_and(|settings| is_alone(prefix, &settings)) && is_linked(agent, bin, path);
    (!a_tool).then_some(python)
}

/// Whether the agent was called through a link in another folder, such as `~/.local/bin`.
fn is_linked(agent: &AgentProgram, bin: &Path, path: Option<&OsStr>) -> bool {
    let folder = find(&agent.called, path).ok().and_then(|called| called.parent()?.canonicalize().ok());
    folder.is_some_and(|folder| bin.canonicalize().is_ok_and(|bin| bin != folder))
}

/// The beginnings of what is in an environment without packages for a script: the agent's own, and those that make
/// environments.
const NO_PACKAGES: [&str; 10] = [
    "__pycache__",
    "_distutils_hack",
    "_virtualenv",
    "distutils-precedence",
    "elastic",
    "pip",
    "pkg_resources",
    "setuptools",
    "uv",
    "wheel",
];

/// Whether a virtual environment holds no packages for a script.
fn is_alone(prefix: &Path, settings: &str) -> bool {
    let systems = |line: &str| {
        line.split_once('=').is_some_and(|(key, value)| {
            key.trim() == "include-system-site-packages" && value.trim().eq_ignore_ascii_case("true")
        })
    };
    let entries = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let packages = ["lib", "lib64"].into_iter().flat_map(|lib| entries(prefix.join(lib)));
    let mut packages = packages.flat_map(|version| entries(version.path().join("site-packages")));
    let for_scripts = |name: OsString| !NO_PACKAGES.iter().any(|known| name.to_string_lossy().starts_with(known));
    !settings.lines().any(systems) && !packages.any(|entry| for_scripts(entry.file_name()))
}
