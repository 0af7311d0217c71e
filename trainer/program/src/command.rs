//! The command line of `elastic-trainer`.

use clap::{Parser, Subcommand};
use elastic_models::tasks::{digits, gpt};
use elastic_trainer::program::CheckpointCommand;

/// Elastic data-parallel training: the worker that elastic-agent starts
///
/// Started by hand it trains alone. Started by elastic-agent it finds its peers by RANK, WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT. When its group changes, it keeps its process and its state, and sends the state to newcomers. If no
/// worker holds a state, training resumes from the job's committed checkpoint. The result is the same, bit for bit,
/// however many workers took part and whenever they came and went.
#[derive(Debug, Parser)]
#[command(name = "elastic-trainer", version, max_term_width = 100)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `elastic-trainer` does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a multi-layer perceptron to read hand-written digits
    ///
    /// Examples:
    ///
    ///   elastic-trainer digits
    ///
    ///   elastic-agent --nproc_per_node=2 … elastic-trainer digits --checkpoint-dir=/shared/digits
    #[command(verbatim_doc_comment)]
    Digits(Box<digits::Flags>),
    /// Train a GPT on a text, on a file of tokens, or on generated text whose entropy is known
    ///
    /// Examples:
    ///
    ///   elastic-trainer gpt --text shakespeare.txt --checkpoint-dir /tmp/gpt
    ///   elastic-trainer generate /tmp/gpt --prompt 'The '
    ///
    ///   elastic-agent --nproc_per_node=2 … elastic-trainer gpt --tokens train.bin \
    ///     --val-tokens val.bin --size gpt2 --checkpoint-dir=/shared/gpt
    ///
    /// Without a file, the text is a Markov source's. The two tokens before say which four may follow,
    /// with chances 1/2, 1/4, 1/8 and 1/8. No model can get below a loss of 1.75 bits (1.2130), plus a
    /// little for the first token of a window. Each line prints that sum with the loss.
    #[command(verbatim_doc_comment)]
    Gpt(Box<gpt::Flags>),
    /// Print text that a trained GPT writes
    Generate(gpt::Generate),
    /// Write a GPT's checkpoint as a folder that transformers loads (GPT2LMHeadModel.from_pretrained)
    Export(gpt::Export),
    /// List, verify, export or prune checkpoints
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Run a matrix product on each GPU and check the result
    ///
    /// Takes seconds, and prints a line for each GPU that CUDA_VISIBLE_DEVICES leaves. The exit code is 1
    /// if a GPU fails or there is none.
    ///
    /// Example:
    ///
    ///   elastic-agent --preflight --preflight-command='elastic-trainer check-gpus' …
    #[cfg(feature = "cuda")]
    #[command(verbatim_doc_comment)]
    CheckGpus,
    /// Run as one rank of the all-reduce benchmark
    #[command(hide = true)]
    BenchAllreduce,
}
