//! The jobs that a spare host may run: a file for each in one folder, with the words that stand after `elastic-agent`
//! on the job's command line. Reads files alone; nothing is started.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use elastic_rendezvous::job::JobId;
use uuid::Uuid;

use crate::cli::{self, Dialect, Options, Stop};
use crate::store::choice::StoreChoice;

pub(super) const ENDING: &str = "job";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobFile {
    /// Variables for the agent, `NAME=VALUE` before its flags.
    pub(super) environment: Vec<(String, String)>,
    /// The agent's arguments, as written in the file.
    pub(super) arguments: Vec<String>,
    pub(super) options: Options,
}

/// A file that cannot be used, or the folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub(super) struct BadFile {
    path: PathBuf,
    problem: String,
}

/// All jobs of a folder, and the files that cannot be used.
pub(super) fn read(folder: &Path) -> Result<(BTreeMap<JobId, JobFile>, Vec<BadFile>), BadFile> {
    let bad = |path: &Path, problem: String| BadFile { path: path.to_owned(), problem };
    let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = entries.map_err(|error| bad(folder, format!("{error}; name a folder with a file for each job")))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == ENDING));
    paths.sort();
    let (mut jobs, mut unusable) = (BTreeMap::new(), Vec::new());
    for path in paths {
        let text = fs::read_to_string(&path).map_err(|error| error.to_string());
        match text.and_then(|text| parse(&text, &|name| std::env::var_os(name))) {
            Ok(job) if jobs.contains_key(&job.options.job) => {
                unusable.push(bad(&path, format!("job {} has a file already", job.options.job)));
            }
            Ok(job) => drop(jobs.insert(job.options.job.clone(), job)),
            Err(problem) => unusable.push(bad(&path, problem)),
        }
    }
    Ok((jobs, unusable))
}

/// A job from its file's text: the words of a shell's command line, over as many lines as one likes, `#` begins a
/// comment.
fn parse(text: &str, env: &dyn Fn(&str) -> Option<OsString>) -> Result<JobFile, String> {
    let words = shlex::split(text).ok_or("a quote is not closed")?;
    let mut words = words.into_iter().peekable();
    let mut environment = Vec::new();
    while let Some((name, value)) = words.peek().and_then(|word| variable(word)) {
        environment.push((name, value));
        words.next();
    }
    words.next_if(|word| word == "elastic-agent");
    let arguments: Vec<String> = words.collect();
    let own = |name: &str| environment.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.into());
    let env = |name: &str| own(name).or_else(|| env(name));
    let argv = arguments.iter().map(OsString::from);
    let options = cli::parse(Dialect::Own, argv, &env, Uuid::nil()).map_err(|stop| match stop {
        Stop::Show(_) => "it asks for help; write the flags and the program of a job".to_owned(),
        Stop::Usage(error) => error.to_string(),
    })?;
    match &options.store.choice {
        StoreChoice::Etcd { v2: false, .. } => Ok(JobFile { environment, arguments, options }),
        _ => Err("a spare host finds jobs on etcd's v3 API alone; write --rdzv-backend=etcd --rdzv-endpoint=…".into()),
    }
}

/// `NAME=VALUE`, as it may stand before a command in a shell.
fn variable(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = name.chars().all(plain) && name.starts_with(|c: char| !c.is_ascii_digit());
    is_name.then(|| (name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: &str = "--rdzv-backend=etcd --rdzv-endpoint=etcd0 --rdzv-id=J";

    fn parsed(text: &str) -> Result<JobFile, String> {
        parse(text, &|_| None)
    }

    #[test]
    fn a_file_is_a_command_line_over_several_lines() {
        let text =
            format!("# The large one.\nNCCL_DEBUG=INFO A='b c'\nelastic-agent {FLAGS}\n  --nnodes=8 train.py 'x y'\n");
        let job = parsed(&text).unwrap();
        assert_eq!(job.environment, [("NCCL_DEBUG".into(), "INFO".into()), ("A".into(), "b c".into())]);
        assert_eq!(job.options.job.to_string(), "J");
        assert_eq!(job.options.spec.max_nodes, 8);
        assert_eq!(job.arguments.last().map(String::as_str), Some("x y"));
        assert_eq!(parsed(&format!("{FLAGS} --nnodes=8 train.py")).unwrap().environment, []);
        let by_variable = parsed(&format!("PET_NNODES=2:3 {FLAGS} train.py")).unwrap();
        assert_eq!(by_variable.options.spec.max_nodes, 3);
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        for (text, word) in [
            ("--standalone train.py", "etcd's v3 API alone"),
            ("--rdzv-backend=etcd-v2 --rdzv-endpoint=e train.py", "etcd's v3 API alone"),
            (FLAGS, "no program is named"),
            ("--rdzv-id='J", "a quote is not closed"),
            ("--help", "asks for help"),
        ] {
            let problem = parsed(text).unwrap_err();
            assert!(problem.contains(word), "{text}: {problem}");
        }
    }

    #[test]
    fn a_folder_gives_its_jobs_and_names_the_files_it_cannot_use() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("a.job", &format!("{FLAGS} train.py"));
        write("b.job", &format!("{FLAGS} other.py"));
        write("c.job", "--nnodes=x");
        write("notes.txt", "not a job");
        let (jobs, unusable) = read(folder.path()).unwrap();
        assert_eq!(jobs.keys().map(ToString::to_string).collect::<Vec<_>>(), ["J"]);
        assert_eq!(jobs.values().next().unwrap().options.workers.program.name, "train.py");
        let unusable: Vec<String> = unusable.iter().map(ToString::to_string).collect();
        assert!(unusable[0].ends_with("b.job: job J has a file already"), "{unusable:?}");
        assert!(unusable[1].contains("c.job: --nnodes=x"), "{unusable:?}");
        let missing = read(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(missing.starts_with("/no/such/folder: "), "{missing}");
    }
}
