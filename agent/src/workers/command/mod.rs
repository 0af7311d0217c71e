//! The workers' command line: which interpreter or program, and each worker's arguments. It is checked before the node
//! joins, so that a typing error costs one node a second and does not cost the job a round.

mod python;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::output::template;

pub(crate) use python::AgentProgram;

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
    #[error("PYTHON_EXEC leads to {path:?}, which {problem}; correct it or unset it")]
    Interpreter { path: PathBuf, problem: &'static str },
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
    /// Where the Python that runs it was found, if one does.
    found: Option<&'static str>,
    /// What was set to lead to another Python and does not.
    passed_over: Option<String>,
}

impl WorkerCommand {
    /// Finds the interpreter or program that runs `program`. `env` looks up the agent's environment.
    pub(crate) fn resolve(
        program: &Program,
        env: &dyn Fn(&str) -> Option<OsString>,
        agent: Option<&AgentProgram>,
    ) -> Result<WorkerCommand, CommandError> {
        let Program { kind, name, args } = program;
        let before: &[&str] = match kind {
            ProgramKind::Executable => {
                let program = executable(name, env)?;
                return Ok(WorkerCommand { program, args: args.clone(), found: None, passed_over: None });
            }
            ProgramKind::RunPath => &["-u", "-c", RUN_PATH],
            ProgramKind::Module => &["-u", "-m"],
            ProgramKind::Script => &["-u"],
        };
        // Python reads a script named `-` from its standard input.
        if *kind != ProgramKind::Module && name != "-" {
            check_script(name)?;
        }
        let before = before.iter().map(OsString::from).chain([name.clone()]);
        let python::Interpreter { path, found, passed_over } = python::python(name, env, agent)?;
        let args = before.chain(args.iter().cloned()).collect();
        Ok(WorkerCommand { program: path, args, found: Some(found), passed_over })
    }

    /// Logs which program the workers run, and why that one.
    pub(crate) fn announce(&self) {
        let program = self.program.display();
        match (&self.passed_over, self.found) {
            (Some(passed_over), _) => tracing::warn!("{passed_over}; workers run {program}"),
            (None, Some(found)) => tracing::info!("workers run {program} ({found})"),
            (None, None) => tracing::info!("workers run {program}"),
        }
    }

    /// One worker's arguments, without the program itself.
    pub(crate) fn args(&self, local_rank: u32, rank: u32) -> Vec<OsString> {
        self.args.iter().map(|arg| expand(arg, local_rank, rank)).collect()
    }
}

/// Runs the first argument as `__main__`. The arguments after it become its own.
const RUN_PATH: &str = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";

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
