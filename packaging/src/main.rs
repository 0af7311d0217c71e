//! `elastic-packaging DIRECTORY`: writes the manual pages and the completions of all programs, from the definitions that
//! their `--help` comes from, where packages have them below their prefix.
//!
//! ```text
//! share/man/man1/elasticctl.1, elasticctl-jobs.1, …
//! share/bash-completion/completions/elasticctl
//! share/zsh/site-functions/_elasticctl
//! share/fish/vendor_completions.d/elasticctl.fish
//! ```

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::builder::styling::Styles;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use elastic_coordinator::flags::{coordinator, operator};
use elastic_program::command::Arguments;

/// Where a shell looks for the completions of a program, below the prefix.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/{}"),
    (Shell::Zsh, "share/zsh/site-functions/_{}"),
    (Shell::Fish, "share/fish/vendor_completions.d/{}.fish"),
];

#[allow(clippy::print_stderr)]
fn main() -> ExitCode {
    let done = match std::env::args_os().nth(1) {
        Some(directory) => write_all(Path::new(&directory)),
        None => Err(anyhow::anyhow!("a directory is missing: elastic-packaging DIRECTORY")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("elastic-packaging: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn programs() -> Vec<Command> {
    let agent = elastic_agent::command();
    vec![agent, coordinator::Flags::command(), operator::Flags::command(), Arguments::command()]
}

fn write_all(prefix: &Path) -> anyhow::Result<()> {
    for program in programs() {
        let name = program.get_name().to_owned();
        for (shell, place) in SHELLS {
            let script = completion(shell, program.clone(), &name).with_context(|| format!("{name} in {shell}"))?;
            write(&prefix.join(place.replace("{}", &name)), &script)?;
        }
        manual(&prefix.join("share/man/man1"), program.styles(Styles::plain()), &name)?;
    }
    Ok(())
}

/// The agent takes a program and its arguments, and makes its own script.
fn completion(shell: Shell, mut program: Command, name: &str) -> anyhow::Result<Vec<u8>> {
    let script = if name == "elastic-agent" {
        elastic_agent::completion(&shell.to_string()).context("elastic-agent has none")?.into_bytes()
    } else {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut program, name, &mut script);
        script
    };
    ensure!(!script.is_empty(), "it is empty");
    Ok(script)
}

/// A page for the program and one for each of its visible commands: `elastic-trainer-checkpoint-list.1`.
fn manual(directory: &Path, program: Command, name: &str) -> anyhow::Result<()> {
    let mut program = in_short(program).disable_help_subcommand(true);
    // Flags that hold for every command belong on every page.
    program.build();
    pages(directory, &program, name)
}

/// Where all is said of a program at once, its page's first line has the words up to the first stop.
fn in_short(program: Command) -> Command {
    let Some(all) = program.get_about().map(ToString::to_string).filter(|all| all.contains("\n\n")) else {
        return program;
    };
    let short = all.split([':', '.']).next().unwrap_or_default().to_owned();
    program.about(short).long_about(all)
}

fn pages(directory: &Path, command: &Command, name: &str) -> anyhow::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        pages(directory, inner, &format!("{name}-{}", inner.get_name()))?;
    }
    let called = command.get_bin_name().unwrap_or(name).to_owned();
    let page = clap_mangen::Man::new(command.clone().display_name(name.to_owned()).bin_name(called))
        .section("1")
        .source(format!("elastic {}", env!("CARGO_PKG_VERSION")))
        .manual("elastic");
    let mut text = Vec::new();
    page.render(&mut text).with_context(|| format!("the page of {name}"))?;
    write(&directory.join(format!("{name}.1")), &text)
}

fn write(path: &PathBuf, bytes: &[u8]) -> anyhow::Result<()> {
    let directory = path.parent().context("a file has a directory")?;
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut file = fs::File::create(path).with_context(|| format!("write {}", path.display()))?;
    file.write_all(bytes).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All files that are written, by their paths below the prefix.
    fn written() -> std::collections::BTreeMap<String, String> {
        let directory = tempfile::tempdir().unwrap();
        write_all(directory.path()).unwrap();
        let mut files = std::collections::BTreeMap::new();
        let mut folders = vec![directory.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else {
                    let path = entry.path().strip_prefix(directory.path()).unwrap().display().to_string();
                    files.insert(path, fs::read_to_string(entry.path()).unwrap());
                }
            }
        }
        files
    }

    #[test]
    fn every_program_has_a_page_and_three_completions() {
        let files = written();
        for name in ["elastic-agent", "elastic-coordinator", "elasticctl", "elastic-trainer"] {
            let page = &files[&format!("share/man/man1/{name}.1")];
            assert!(page.contains(".TH") && page.contains(".SH OPTIONS"), "{name}: {page:.500}");
            for (_, place) in SHELLS {
                let script = &files[&place.replace("{}", name)];
                assert!(script.contains(name), "{name}: {script:.500}");
            }
        }
        assert!(files["share/man/man1/elastic-agent.1"].contains(r"\-\-rdzv\-endpoint"));
        assert!(files["share/bash-completion/completions/elasticctl"].contains("drop-checkpoint"));
    }

    #[test]
    fn a_page_begins_with_one_sentence() {
        for (path, page) in written().iter().filter(|(path, _)| path.ends_with(".1")) {
            let (_, rest) = page.split_once(".SH NAME\n").unwrap();
            let (name, _) = rest.split_once(".SH ").unwrap();
            assert!(!name.trim().contains("\n\n") && name.len() < 240, "{path}: {name}");
        }
        assert!(
            written()["share/man/man1/elastic-agent.1"].contains("The command line wins"),
            "the page has the long help too"
        );
    }

    #[test]
    fn each_command_that_is_shown_has_a_page_and_hidden_ones_have_none() {
        let files = written();
        for name in ["elasticctl-drain", "elastic-trainer-digits", "elastic-trainer-checkpoint"] {
            assert!(files.contains_key(&format!("share/man/man1/{name}.1")), "{name}: {:?}", files.keys());
        }
        let drain = &files["share/man/man1/elasticctl-drain.1"];
        assert!(drain.contains("elasticctl drain") && drain.contains(r"\-\-etcd"), "{drain}");
        assert!(
            files.keys().all(|path| !path.contains("trainer-bench") && !path.contains("help")),
            "{:?}",
            files.keys()
        );
    }
}
