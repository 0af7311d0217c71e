//! The flags of `elasticctl logs`.

use clap::Args;

/// Whose output to show, and how much of it.
#[derive(Debug, Clone, Args)]
pub struct LogsFlags {
    /// The job
    pub job: String,
    /// The worker of this rank alone, without a prefix; without it all ranks, each line after its rank
    pub rank: Option<u32>,
    /// Continue until the job has ended, with the workers of later rounds too
    #[arg(short, long, conflicts_with = "round")]
    pub follow: bool,
    /// How many of the last lines to begin with, of each worker's standard output and of its standard error
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub lines: u32,
    /// The workers of this node alone, by the name that `elasticctl describe` shows
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// The workers of this round, as far as their agents are still there; without it the newest ones
    #[arg(long, value_name = "N")]
    pub round: Option<u64>,
}
