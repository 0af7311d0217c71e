//! How the flags of the list are read: the command line, its two spellings of each flag, and how a raw value is found, as
//! with torchrun (torch 2.15), so that its command lines run unchanged.

use std::ffi::OsString;
use std::fmt;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::dialect::Dialect;
use super::error::{Refusal, Stop, UsageError};
use super::help;
use super::list::{Entry, FLAGS, LOGS_SPECS, variable};

/// The positional argument that ends our flags.
const PROGRAM: &str = "PROGRAM";

/// A value as the user wrote it, and the place where it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    /// `--nnodes` or `PET_NNODES`.
    pub(super) name: String,
    pub(super) value: String,
    pub(super) on_command_line: bool,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

impl Setting {
    pub(super) fn parse<T>(&self, read: impl FnOnce(&str) -> Result<T, Refusal>) -> Result<T, UsageError> {
        read(&self.value).map_err(|refusal| {
            let argparse =
                ARGPARSE_CHECKS.iter().any(|name| self.name == format!("--{name}") || self.name == variable(name));
            let refusal = if argparse { refusal.syntax() } else { refusal };
            refusal.of(self)
        })
    }
}

/// torchrun's flags whose values argparse itself checks.
const ARGPARSE_CHECKS: &[&str] = &[
    "master-port",
    "max-restarts",
    "monitor-interval",
    "node-rank",
    "numa-binding",
    "shutdown-timeout",
    "start-method",
];

/// Flags that are the same when empty as when they are not given. torchrun takes these so, and wrappers fill them in from
/// variables that may be unset.
const EMPTY_IS_UNSET: &[&str] = &[
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "log-line-prefix-template",
    LOGS_SPECS,
    "node-name",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
];

pub(super) fn definition(dialect: Dialect) -> Command {
    let mut command = Command::new("elastic-agent")
        .version(env!("CARGO_PKG_VERSION"))
        .about(help::ABOUT)
        .before_help(help::before(dialect))
        .override_usage(format!("{} [FLAGS] PROGRAM [ARGUMENTS]...", dialect.command()))
        .after_help(help::EXAMPLES)
        .infer_long_args(true)
        .args_override_self(true)
        .disable_help_flag(true);
    for entry in FLAGS {
        command = match *entry {
            Entry::Heading(heading) => command.next_help_heading(heading),
            Entry::Flag(name, shape, help) => command.arg(flag(name, shape, help, dialect)),
        };
    }
    command
        .next_help_heading(None)
        .arg(flag(LOGS_SPECS, Some("CLASS"), "", dialect).hide(true))
        // Everything from the first positional argument on is the program's. A `--` before it is dropped, and later
        // ones are kept.
        .arg(Arg::new(PROGRAM).num_args(1..).trailing_var_arg(true).value_parser(ValueParser::os_string()).hide(true))
}

fn flag(name: &'static str, shape: Option<&'static str>, help: &'static str, dialect: Dialect) -> Arg {
    let mut arg = Arg::new(name).long(name).help(help);
    if name.contains('-') {
        arg = arg.alias(name.replace('-', "_"));
    }
    let arg = match shape {
        None => arg.action(ArgAction::SetTrue),
        Some(shape) => arg
            .value_name(shape)
            .action(ArgAction::Set)
            .value_parser(ValueParser::os_string())
            .allow_negative_numbers(true),
    };
    // The abbreviations among these are unique with torchrun, but not here.
    match name {
        "help" => arg.action(ArgAction::Help).short('h').aliases(["h", "he"]),
        "module" => arg.short('m'),
        "node-rank" => arg.aliases(["node-", "node_"]),
        "redirects" => arg.short('r').alias("re"),
        "standalone" => arg.aliases(["with-etcd", "with_etcd"]),
        "tee" => arg.short('t'),
        "use-env" => arg.hide(dialect != Dialect::Launch),
        "verbose" => arg.action(ArgAction::Count).short('v'),
        _ => arg,
    }
}

/// The command line, and the environment that gives its defaults.
pub(super) struct Settings<'a> {
    matches: ArgMatches,
    pub(super) dialect: Dialect,
    env: &'a dyn Fn(&str) -> Option<OsString>,
}

impl<'a> Settings<'a> {
    /// Reads `argv`, which is given without the agent's own name.
    pub(super) fn read(
        dialect: Dialect,
        argv: impl IntoIterator<Item = OsString>,
        env: &'a dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Settings<'a>, Stop> {
        let argv = std::iter::once(OsString::from("elastic-agent")).chain(argv);
        let mut definition = definition(dialect);
        match definition.try_get_matches_from_mut(argv) {
            Ok(matches) => Ok(Settings { matches, dialect, env }),
            Err(error) => Err(explain(&error, &definition)),
        }
    }

    /// The program and its arguments, unchanged.
    pub(super) fn program(&self) -> Vec<OsString> {
        self.matches.get_many::<OsString>(PROGRAM).into_iter().flatten().cloned().collect()
    }

    pub(super) fn env(&self, name: &str) -> Option<OsString> {
        (self.env)(name).filter(|value| !value.is_empty())
    }

    /// Whether a flag is on the command line itself.
    pub(super) fn on_command_line(&self, name: &str) -> bool {
        self.matches.value_source(name) == Some(ValueSource::CommandLine)
    }

    /// A flag's raw value: that of the command line, else that of its variable. An empty variable counts as unset, and so
    /// do some empty flags.
    fn raw(&self, name: &str) -> Option<(String, OsString)> {
        if self.on_command_line(name) {
            let given = self.matches.get_one::<OsString>(name);
            let given = given.filter(|value| !(value.is_empty() && EMPTY_IS_UNSET.contains(&name)));
            return given.map(|value| (format!("--{name}"), value.clone()));
        }
        self.env(&variable(name)).map(|value| (variable(name), value))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<Setting>, UsageError> {
        let Some((source, value)) = self.raw(name) else { return Ok(None) };
        match value.into_string() {
            Ok(value) => Ok(Some(Setting { name: source, value, on_command_line: self.on_command_line(name) })),
            Err(value) => Err(Refusal::new("it is not UTF-8", "write it in UTF-8")
                .of(format_args!("{source}={}", value.to_string_lossy()))),
        }
    }

    pub(super) fn parsed<T>(
        &self,
        name: &str,
        read: impl FnOnce(&str) -> Result<T, Refusal>,
    ) -> Result<Option<T>, UsageError> {
        self.text(name)?.map(|setting| setting.parse(read)).transpose()
    }

    /// A flag's value as a path, which may hold any bytes.
    pub(super) fn path(&self, name: &str) -> Option<OsString> {
        self.raw(name).map(|(_, value)| value)
    }

    /// Whether a switch is on. As with torchrun, its variable is a number.
    pub(super) fn switch(&self, name: &str) -> Result<bool, UsageError> {
        if self.on_command_line(name) {
            return Ok(true);
        }
        Ok(self.number(name)? != 0)
    }

    /// How often a flag that counts was given.
    pub(super) fn occurrences(&self, name: &str) -> Result<u8, UsageError> {
        if self.on_command_line(name) {
            return Ok(self.matches.get_count(name));
        }
        Ok(self.number(name)?.clamp(0, 255) as u8)
    }

    fn number(&self, name: &str) -> Result<i64, UsageError> {
        let variable = variable(name);
        let Some(value) = self.env(&variable) else { return Ok(0) };
        let text = value.to_string_lossy();
        text.trim().parse().map_err(|_| {
            Refusal::new("it is not a number", "set 1 to switch it on, 0 to leave it off")
                .of(format_args!("{variable}={text}"))
        })
    }
}

/// Turns clap's error into one line.
pub(super) fn explain(error: &clap::Error, definition: &Command) -> Stop {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => texts.first().cloned(),
        _ => None,
    };
    let flag = context(ContextKind::InvalidArg).unwrap_or_else(|| "command line".into());
    // If a value is missing, clap names the flag with its shape: `--nnodes <N|MIN:MAX>`.
    let name = flag.split([' ', '=']).next().unwrap_or(&flag).to_owned();
    let refusal = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => return Stop::Show(error.to_string()),
        ErrorKind::UnknownArgument => unknown(&name, context(ContextKind::SuggestedArg), definition),
        ErrorKind::InvalidValue => Refusal::new("its value is missing", format!("write {name}=VALUE")),
        ErrorKind::TooManyValues => Refusal::new("it takes no value", format!("write {name} alone")),
        _ => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            Refusal::new(line, "see elastic-agent --help")
        }
    };
    Stop::Usage(refusal.syntax().of(name))
}

fn unknown(name: &str, suggested: Option<String>, definition: &Command) -> Refusal {
    let prefix = name.trim_start_matches('-').replace('_', "-");
    let candidates: Vec<String> = definition
        .get_arguments()
        .filter_map(Arg::get_long)
        .filter(|long| name.starts_with("--") && long.starts_with(&prefix))
        .map(|long| format!("--{long}"))
        .collect();
    let advice = match suggested {
        _ if candidates.len() > 1 => {
            return Refusal::new("it is short for several flags", format!("write one of {}", candidates.join(", ")));
        }
        Some(flag) => format!("did you mean `{flag}`? Put the program's own flags after the program"),
        None => "see elastic-agent --help; put the program's own flags after the program".into(),
    };
    Refusal::new("no such flag", advice)
}
