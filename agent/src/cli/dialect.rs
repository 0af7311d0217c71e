//! Whose command line it is: the launcher that this program replaces, by the name it is called by or by its first
//! word.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use tracing::Level;

use crate::workers::slots::WorkerCount;

/// The launcher whose command line this is, and whose defaults hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// Our own.
    #[default]
    Own,
    /// torchrun of torch 2.15, and launchers made from it.
    Torchrun,
    /// `python -m torch.distributed.launch` of torch 2.15. It passes `--local-rank` to workers.
    Launch,
    /// `python -m torchelastic.distributed.launch` of torchelastic 0.2.2.
    Torchelastic,
}

/// First words that choose a dialect.
const WORDS: [(&str, Dialect); 3] = [
    ("torchrun-compat", Dialect::Torchrun),
    ("launch-compat", Dialect::Launch),
    ("torchelastic-compat", Dialect::Torchelastic),
];

/// Names of links to this program that choose a dialect.
const LINKS: [(&str, Dialect); 5] = [
    ("torchrun", Dialect::Torchrun),
    ("torch.distributed.run", Dialect::Torchrun),
    ("bagua.distributed.run", Dialect::Torchrun),
    ("torch.distributed.launch", Dialect::Launch),
    ("torchelastic.distributed.launch", Dialect::Torchelastic),
];

impl Dialect {
    /// The dialect of a whole command line, and its words after the ones that chose it.
    ///
    /// Only the very first word can choose a dialect. So a program of such a name can still be run: after `--`, after
    /// any flag, or as `./NAME`.
    pub fn of(argv: impl IntoIterator<Item = OsString>) -> (Dialect, Vec<OsString>) {
        let mut words = argv.into_iter().peekable();
        let called = words.next().unwrap_or_default();
        let link = Path::new(&called).file_name().and_then(|name| named(&LINKS, name));
        let dialect = match link {
            Some(dialect) => dialect,
            None => match words.peek().and_then(|word| named(&WORDS, word)) {
                Some(dialect) => {
                    words.next();
                    dialect
                }
                None => Dialect::Own,
            },
        };
        (dialect, words.collect())
    }

    /// The command that a user types to get this dialect.
    pub(super) fn command(self) -> &'static str {
        match self {
            Dialect::Own => "elastic-agent",
            Dialect::Torchrun => "elastic-agent torchrun-compat",
            Dialect::Launch => "elastic-agent launch-compat",
            Dialect::Torchelastic => "elastic-agent torchelastic-compat",
        }
    }

    pub(super) fn workers(self) -> WorkerCount {
        if self == Dialect::Torchelastic { WorkerCount::Auto } else { WorkerCount::Count(1) }
    }

    pub(super) fn backend(self) -> &'static str {
        if self == Dialect::Torchelastic { "etcd" } else { "static" }
    }

    pub(super) fn max_restarts(self) -> u32 {
        if self == Dialect::Torchelastic { 3 } else { 0 }
    }

    /// After how many restarts a program that fails the same way right after each start is given up. Who calls us by
    /// another launcher's name is promised as many restarts as that one makes.
    pub(super) fn failed_starts(self) -> Option<u32> {
        (self == Dialect::Own).then_some(3)
    }

    /// The default log level. torchrun logs only warnings and errors.
    pub(super) fn log_level(self) -> Level {
        match self {
            Dialect::Torchrun | Dialect::Launch => Level::WARN,
            Dialect::Own | Dialect::Torchelastic => Level::INFO,
        }
    }

    /// The exit code of a mistake. Python's argparse ends with 2. A mistake that argparse lets through ends torchrun
    /// with 1, as any exception does.
    pub(super) fn exit_code(self, syntax: bool) -> u8 {
        if syntax || self == Dialect::Own { 2 } else { 1 }
    }
}

fn named(names: &[(&str, Dialect)], name: &OsStr) -> Option<Dialect> {
    names.iter().find(|(known, _)| *known == name).map(|(_, dialect)| *dialect)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> (Dialect, String) {
        let (dialect, rest) = Dialect::of(line.split(' ').map(OsString::from));
        (dialect, rest.join(OsStr::new(" ")).into_string().unwrap())
    }

    #[test]
    fn the_name_or_the_first_word_chooses() {
        let table = [
            ("elastic-agent --nnodes=2 t.py", Dialect::Own, "--nnodes=2 t.py"),
            ("/usr/bin/elastic-agent torchrun-compat t.py", Dialect::Torchrun, "t.py"),
            ("elastic-agent launch-compat t.py", Dialect::Launch, "t.py"),
            ("elastic-agent torchelastic-compat t.py", Dialect::Torchelastic, "t.py"),
            ("/opt/bin/torchrun --nnodes=2 t.py", Dialect::Torchrun, "--nnodes=2 t.py"),
            ("bagua.distributed.run t.py", Dialect::Torchrun, "t.py"),
            ("torch.distributed.launch t.py", Dialect::Launch, "t.py"),
            ("torchelastic.distributed.launch t.py", Dialect::Torchelastic, "t.py"),
            // Programs with such a name.
            ("elastic-agent ./torchrun-compat x", Dialect::Own, "./torchrun-compat x"),
            ("elastic-agent -- torchrun-compat x", Dialect::Own, "-- torchrun-compat x"),
            ("elastic-agent --no-python torchrun-compat", Dialect::Own, "--no-python torchrun-compat"),
            ("torchrun torchrun-compat x", Dialect::Torchrun, "torchrun-compat x"),
            ("elastic-agent torchrun x", Dialect::Own, "torchrun x"),
        ];
        for (line, dialect, rest) in table {
            assert_eq!(of(line), (dialect, rest.to_owned()), "{line}");
        }
    }
}
