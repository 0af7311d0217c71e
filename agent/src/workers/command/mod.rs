//! The workers' command line: which interpreter or program, and each worker's arguments. It is checked before the node
//! joins, so that a typing error costs one node a second and does not cost the job a round.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::output::template;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    /// `python -u PROGRAM`.
    Script,
    /// `python -u -m PROGRAM`.
    Module,
    /// The program itself.
    Executable,
    /// By Python's `runpy.run_path`, as `__main__`.
    RunPath,
}

/// The program that a worker runs, as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    pub kind: ProgramKind,
    pub name: OsString,
    /// All arguments after it, and the arguments that a launcher puts before those.
    pub args: Vec<OsString>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CommandError {
    #[error(
        "no Python to run {script:?} with: neither python3 nor python is on PATH; set PYTHON_EXEC or VIRTUAL_ENV, or \
         use --no-python for a program that needs none"
    )]
    NoPython { script: OsString },
    #[error("{variable} leads to {path:?}, which {problem}; correct it or unset it")]
    Interpreter { variable: &'static str, path: PathBuf, problem: &'static str },
    #[error("script {path:?} {problem}; check the path, or use -m for a module and --no-python for a program on PATH")]
    Script { path: PathBuf, problem: &'static str },
    #[error("program {name:?} {problem}; check its path, PATH and its execute permission")]
    Program { name: OsString, problem: &'static str },
}

/// The command that every worker of this node runs. Macros in its arguments are not expanded yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerCommand {
    pub program: PathBuf,
    args: Vec<OsString>,
}

impl WorkerCommand {
    /// Finds the interpreter or program that runs `program`. `env` looks up the agent's environment, and `agent` is the
    /// agent's executable.
    pub(crate) fn resolve(
        program: &Program,
        env: &dyn Fn(&str) -> Option<OsString>,
        agent: Option<&Path>,
    ) -> Result<WorkerCommand, CommandError> {
        let Program { kind, name, args } = program;
        let before: &[&str] = match kind {
            ProgramKind::Executable => {
                return Ok(WorkerCommand { program: executable(name, env)?, args: args.clone() });
            }
            ProgramKind::RunPath => &["-u", "-c", RUN_PATH],
            ProgramKind::Module => &["-u", "-m"],
            ProgramKind::Script => &["-u"],
        };
        if *kind != ProgramKind::Module {
            check_script(name)?;
        }
        let before = before.iter().map(OsString::from).chain([name.clone()]);
        Ok(WorkerCommand { program: python(name, env, agent)?, args: before.chain(args.iter().cloned()).collect() })
    }

    /// One worker's arguments, without the program itself.
    pub(crate) fn args(&self, local_rank: u32, rank: u32) -> Vec<OsString> {
        self.args.iter().map(|arg| expand(arg, local_rank, rank)).collect()
    }
}

/// Runs the first argument as `__main__`. The arguments after it become its own.
const RUN_PATH: &str = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";

fn python(
    script: &OsStr,
    env: &dyn Fn(&str) -> Option<OsString>,
    agent: Option<&Path>,
) -> Result<PathBuf, CommandError> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    if let Some(named) = set("PYTHON_EXEC") {
        return find(&named, set("PATH").as_deref()).map_err(|problem| CommandError::Interpreter {
            variable: "PYTHON_EXEC",
            path: named.into(),
            problem,
        });
    }
    if let Some(venv) = set("VIRTUAL_ENV") {
        let path = Path::new(&venv).join("bin/python");
        return match runnable(&path) {
            Ok(()) => Ok(path),
            Err(problem) => Err(CommandError::Interpreter { variable: "VIRTUAL_ENV", path, problem }),
        };
    }
    if let Some(python) = agent.and_then(beside) {
        return Ok(python);
    }
    let path = set("PATH");
    ["python3", "python"]
        .iter()
        .find_map(|name| find(OsStr::new(name), path.as_deref()).ok())
        .ok_or_else(|| CommandError::NoPython { script: script.to_owned() })
}

/// The marks of a Python environment's directory: venv's file, or conda's folder.
const ENVIRONMENT: [&str; 2] = ["pyvenv.cfg", "conda-meta"];

/// The Python of the environment that the agent is installed in. The user has chosen that environment's packages for
/// the job, whether or not it is activated.
fn beside(agent: &Path) -> Option<PathBuf> {
    let bin = agent.parent()?;
    let python = bin.join("python");
    let prefix = bin.parent().filter(|prefix| ENVIRONMENT.iter().any(|mark| prefix.join(mark).exists()));
    (prefix.is_some() && runnable(&python).is_ok()).then_some(python)
}

fn executable(name: &OsStr, env: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, CommandError> {
    find(name, env("PATH").as_deref()).map_err(|problem| CommandError::Program { name: name.to_owned(), problem })
}

/// Checks that the script exists. If its name holds a macro, the name differs by worker, and Python itself reports a
/// missing script.
fn check_script(name: &OsStr) -> Result<(), CommandError> {
    let path = Path::new(name);
    // Python also runs a directory or archive that has a `__main__`.
    if name.as_bytes().contains(&b'$') || path.exists() {
        return Ok(());
    }
    Err(CommandError::Script { path: path.into(), problem: "does not exist" })
}

/// Finds a program as execvp does: a name with a slash is a path, and any other name is looked up on PATH.
fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, &'static str> {
    if name.as_bytes().contains(&b'/') {
        return runnable(Path::new(name)).map(|()| PathBuf::from(name));
    }
    let mut problem = "is not on PATH";
    for directory in std::env::split_paths(path.unwrap_or(OsStr::new("/usr/bin:/bin"))) {
        // An empty entry means the working directory.
        let directory = if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory };
        match runnable(&directory.join(name)) {
            Ok(()) => return Ok(directory.join(name)),
            Err("does not exist") => {}
            Err(other) => problem = other,
        }
    }
    Err(problem)
}

fn runnable(path: &Path) -> Result<(), &'static str> {
    match path.metadata() {
        Err(_) => Err("does not exist"),
        Ok(metadata) if metadata.is_dir() => Err("is a directory"),
        Ok(_) if rustix::fs::access(path, Access::EXEC_OK).is_err() => Err("is not executable"),
        Ok(_) => Ok(()),
    }
}

/// The macros of an argument: `${local_rank}`, which torchrun has, and `${rank}`.
fn expand(arg: &OsStr, local_rank: u32, rank: u32) -> OsString {
    template::substitute(arg, |name| match name {
        "local_rank" => Some(local_rank.to_string()),
        "rank" => Some(rank.to_string()),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
