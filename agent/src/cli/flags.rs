//! Every flag: its name, its help, its `PET_*` variable, and how a raw value is found.
//!
//! The flags, their two spellings and their environment defaults are those of torchrun (torch 2.15), so that its
//! command lines run unchanged.

use std::ffi::OsString;
use std::fmt;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::dialect::Dialect;
use super::error::{Refusal, Stop, UsageError};
use super::help;

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

/// An entry of the list of flags.
enum Entry {
    Heading(&'static str),
    /// A flag: its name, what `--help` shows for its value if it takes one, and its help.
    Flag(&'static str, Option<&'static str>, &'static str),
}

const fn value(name: &'static str, shape: &'static str, help: &'static str) -> Entry {
    Entry::Flag(name, Some(shape), help)
}

const fn switch(name: &'static str, help: &'static str) -> Entry {
    Entry::Flag(name, None, help)
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

/// torchrun's flag that names a class of a Python package. It is known, and refused.
pub(super) const LOGS_SPECS: &str = "logs-specs";

/// Every flag, after its heading in `--help`.
const FLAGS: &[Entry] = &[
    Entry::Heading("Nodes and workers"),
    value("nnodes", "N|MIN:MAX", help::NNODES),
    value("nproc-per-node", "N|auto|gpu|cpu|xpu", help::NPROC),
    value("node-name", "NAME", help::NODE_NAME),
    value("role", "NAME", help::ROLE),
    value("numa-binding", "MODE", help::NUMA_BINDING),
    switch("virtual-local-rank", help::VIRTUAL_LOCAL_RANK),
    Entry::Heading("Rendezvous"),
    value("rdzv-backend", "etcd|etcd-v2|c10d|static", help::BACKEND),
    value("rdzv-endpoint", "HOST[:PORT],…", help::ENDPOINT),
    value("rdzv-id", "ID", help::ID),
    value("rdzv-conf", "KEY=VALUE,…", help::CONF),
    switch("standalone", help::STANDALONE),
    value("node-rank", "RANK", help::NODE_RANK),
    value("master-addr", "HOST", help::MASTER_ADDR),
    value("master-port", "PORT", help::MASTER_PORT),
    value("local-addr", "HOST", help::LOCAL_ADDR),
    value("peer-port", "[ADDRESS:]PORT", help::PEER_PORT),
    value("peer-cert", "FILE", help::PEER_CERT),
    value("peer-key", "FILE", help::PEER_KEY),
    value("peer-ca", "FILE", help::PEER_CA),
    switch("insecure", help::INSECURE),
    switch("require-peer-tls", help::REQUIRE_PEER_TLS),
    switch("pin-interface", help::PIN_INTERFACE),
    Entry::Heading("Failures and restarts"),
    value("max-restarts", "N", help::MAX_RESTARTS),
    value("restarts-without-progress", "N", help::RESTARTS_WITHOUT_PROGRESS),
    value("exclude-after", "N", help::EXCLUDE_AFTER),
    value("restart-policy", "failures|all", help::RESTART_POLICY),
    value("on-store-loss", "wait|fence", help::ON_STORE_LOSS),
    value("shutdown-timeout", "TIME", help::SHUTDOWN_TIMEOUT),
    value("signals-to-handle", "NAME,…", help::SIGNALS),
    value("drain-grace", "TIME", help::DRAIN_GRACE),
    value("warm-up", "TIME", help::WARM_UP),
    switch("preflight", help::PREFLIGHT),
    value("preflight-command", "COMMAND", help::PREFLIGHT_COMMAND),
    value("preflight-peer-bandwidth", "RATE", help::PREFLIGHT_PEER_BANDWIDTH),
    value("preflight-timeout", "TIME", help::PREFLIGHT_TIMEOUT),
    value("progress-timeout", "TIME", help::PROGRESS_TIMEOUT),
    value("health-port", "[ADDRESS:]PORT", help::HEALTH_PORT),
    value("monitor-interval", "SECONDS", help::MONITOR_INTERVAL),
    Entry::Heading("Program"),
    switch("module", help::MODULE),
    switch("no-python", help::NO_PYTHON),
    switch("run-path", help::RUN_PATH),
    switch("use-env", help::USE_ENV),
    value("start-method", "METHOD", help::START_METHOD),
    Entry::Heading("Logs"),
    value("log-dir", "DIR", help::LOG_DIR),
    value("redirects", "STREAMS", help::REDIRECTS),
    value("tee", "STREAMS", help::TEE),
    value("log-line-prefix-template", "TEXT", help::LOG_LINE_PREFIX),
    value("local-ranks-filter", "RANK,…", help::LOCAL_RANKS_FILTER),
    value("duplicate-stdout-filters", "WORD,…", help::DUPLICATE_STDOUT),
    value("duplicate-stderr-filters", "WORD,…", help::DUPLICATE_STDERR),
    value("log-rotate", "SIZE[:KEEP]", help::LOG_ROTATE),
    value("log-attempts", "N", help::LOG_ATTEMPTS),
    value("report", "text|json", help::REPORT),
    switch("verbose", help::VERBOSE),
    switch("json-logs", help::JSON_LOGS),
    value("event-log-handler", "HANDLER", help::EVENT_LOG_HANDLER),
    Entry::Heading("Other"),
    switch("help", help::HELP),
    value("print-completion", "SHELL", help::PRINT_COMPLETION),
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

/// Whether a flag takes a value. None: there is no such flag.
pub(super) fn takes_value(name: &str) -> Option<bool> {
    let known = |entry: &Entry| match *entry {
        Entry::Flag(flag, shape, _) if flag == name => Some(shape.is_some()),
        _ => None,
    };
    FLAGS.iter().find_map(known)
}

/// The environment variable that holds a flag's default.
pub(super) fn variable(name: &str) -> String {
    format!("PET_{}", name.replace('-', "_").to_ascii_uppercase())
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
