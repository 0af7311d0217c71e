//! The `elastic-trainer` program: its tasks, and its other commands.

use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use elastic_trainer::checkpoint::command as checkpoint;
use elastic_trainer::command::{Arguments, Command};
use elastic_trainer::program;

mod bench;

fn main() -> ExitCode {
    program::run(Arguments::command(), |matches, process| match Arguments::from_arg_matches(matches)?.command {
        Command::Digits(flags) => process.train(&*flags),
        Command::Gpt(flags) => process.train(&*flags),
        Command::Generate(generate) => generate.run(&mut io::stdout()),
        Command::Export(export) => export.run(&mut io::stdout()),
        Command::Checkpoint(command) => Ok(checkpoint::run(&command, &mut io::stdout())?),
        #[cfg(feature = "cuda")]
        Command::CheckGpus => check_gpus(),
        Command::BenchAllreduce => Ok(bench::run()?),
    })
}

#[cfg(feature = "cuda")]
fn check_gpus() -> elastic_trainer::Result<()> {
    let surroundings = elastic_trainer::cuda::Surroundings::read(|name| std::env::var(name).ok());
    Ok(elastic_trainer::check::run(&surroundings, &mut io::stdout())?)
}
