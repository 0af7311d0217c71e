//! The `elastic-trainer` program: its tasks, and its other commands.

use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use elastic_program::command::{Arguments, Command};
use elastic_trainer::program;

mod bench;

fn main() -> ExitCode {
    program::run(Arguments::command(), |matches, process| match Arguments::from_arg_matches(matches)?.command {
        Command::Digits(flags) => process.train(&*flags),
        Command::Gpt(flags) => process.train(&*flags),
        Command::Generate(generate) => generate.run(&mut io::stdout()),
        Command::Export(export) => export.run(&mut io::stdout()),
        Command::Checkpoint(command) => process.checkpoint(&command),
        #[cfg(feature = "cuda")]
        Command::CheckGpus => Ok(elastic_program::check::run(&mut io::stdout())?),
        Command::BenchAllreduce => Ok(bench::run()?),
    })
}
