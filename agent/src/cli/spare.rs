//! The command line of `elastic-agent spare`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, Command};
use tracing::Level;

use super::error::{Refusal, Stop};
use super::{AgentLog, LONGEST_NODE, flags, level, values};

/// The first word that chooses it. A program of this name is run by `./spare`, or after a flag or `--`.
pub(super) const WORD: &str = "spare";

const ABOUT: &str = "\
Makes this host a spare of several jobs: it stays idle until one of them lacks a node, and takes part in that job until \
the job ends or another one cannot run without it.

FOLDER holds a file for each job, NAME.job, with what follows `elastic-agent` on the job's other nodes; NAME=VALUE \
before it sets a variable. Lines may be broken anywhere, and # begins a comment. Files may come, go and change at any \
time. The jobs meet on etcd's v3 API.

A job that cannot run for want of nodes comes first, then the job of higher priority (elasticctl set JOB --priority N). \
A host at work leaves its job only for one that cannot run, of higher priority, or of the same priority if its own job \
keeps its minimum of nodes.";

const EXAMPLES: &str = "\
Example:
  /etc/elastic/spare.d/gpt2.job:
    --rdzv-backend=etcd --rdzv-endpoint=etcd0,etcd1,etcd2 --rdzv-id=gpt2
    --nnodes=8 --nproc-per-node=gpu --max-restarts=10 /srv/train/gpt2.py

  elastic-agent spare /etc/elastic/spare.d

SIGTERM ends it: a job that it takes part in loses the node as planned. Exit codes: 0 it was told to end, 1 it could not \
begin, 2 the command line is wrong.";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpareOptions {
    pub folder: PathBuf,
    /// The host's name in the jobs. Without it, the host's own with `-spare`.
    pub name: Option<String>,
    pub log: AgentLog,
}

fn definition() -> Command {
    let switch = |name| Arg::new(name).long(name).action(ArgAction::SetTrue);
    Command::new("elastic-agent spare")
        .about(ABOUT)
        .override_usage("elastic-agent spare [FLAGS] FOLDER")
        .after_help(EXAMPLES)
        .arg(Arg::new("FOLDER").required(true).value_parser(ValueParser::path_buf()).help("Folder of the jobs' files"))
        .arg(Arg::new("node-name").long("node-name").value_name("NAME").help(
            "This host's name in the jobs; it must be another in each host [default: the host's name with -spare]",
        ))
        .arg(Arg::new("verbose").long("verbose").short('v').action(ArgAction::Count).help("Log more; -vv still more"))
        .arg(switch("json-logs").help("Write the log as JSON"))
}

/// Parses the words from [`WORD`] on.
pub(super) fn parse(argv: Vec<OsString>, env: &dyn Fn(&str) -> Option<OsString>) -> Result<SpareOptions, Stop> {
    let mut definition = definition();
    let matches = definition.try_get_matches_from_mut(argv).map_err(|error| flags::explain(&error, &definition))?;
    let mut warnings = Vec::new();
    let name = matches.get_one::<String>("node-name");
    let name = name.map(|name| values::id(name, LONGEST_NODE)).transpose();
    let named = env("LOGLEVEL").filter(|value| !value.is_empty());
    Ok(SpareOptions {
        folder: matches.get_one::<PathBuf>("FOLDER").cloned().unwrap_or_default(),
        name: name.map_err(|refusal: Refusal| refusal.of("--node-name"))?,
        log: AgentLog {
            level: level(matches.get_count("verbose"), named, Level::INFO, &mut warnings),
            json: matches.get_flag("json-logs"),
            warnings,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<SpareOptions, Stop> {
        parse(line.split(' ').map(OsString::from).collect(), &|_| None)
    }

    #[test]
    fn a_folder_is_all_it_needs() {
        let options = parsed("spare /etc/elastic/spare.d").unwrap();
        assert_eq!(
            (options.folder, options.name, options.log.level),
            ("/etc/elastic/spare.d".into(), None, Level::INFO)
        );
        assert_eq!(parsed("spare -- d").unwrap().folder, PathBuf::from("d"), "as the unit for systemd writes it");
        let options = parsed("spare --node-name=s1 -v d").unwrap();
        assert_eq!((options.name.as_deref(), options.log.level), (Some("s1"), Level::DEBUG));
    }

    #[test]
    fn mistakes_are_one_line() {
        for (line, word) in
            [("spare", "FOLDER"), ("spare --foldr=x d", "--foldr"), ("spare --node-name=a/b d", "--node-name")]
        {
            let Stop::Usage(error) = parsed(line).unwrap_err() else { panic!("{line}: help is shown") };
            let text = error.to_string();
            assert!(text.contains(word) && !text.contains('\n'), "{line}: {text}");
        }
        assert!(matches!(parsed("spare --help"), Err(Stop::Show(text)) if text.contains("FOLDER holds a file")));
    }
}
