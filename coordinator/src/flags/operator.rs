//! The command line of `elasticctl`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use elastic_flags::duration;

use super::{PeerFlags, StoreFlags};
use crate::service::http::users::Role;
use elastic_rendezvous::job::{JobId, Requester};

/// Show elastic's jobs and change them.
///
/// elasticctl reads and writes the store that the agents use. It needs no coordinator. Three commands also connect to
/// the agents: `logs` reads from them, `doctor JOB` tries their ports, and `delete` asks whether they have ended. The
/// job's leader does what you ask for.
#[derive(Debug, Parser)]
#[command(
    name = "elasticctl",
    version,
    after_help = "\
Examples:
  elasticctl jobs                          all jobs, their rounds and why those came to be
  elasticctl describe train                one job: nodes, ranks, leader, checkpoint, evictions
  elasticctl top                           all jobs on this terminal, as they change
  elasticctl events train -f               its history, and what happens from now on
  elasticctl logs train 7 -f               what rank 7 prints, also after a restart
  elasticctl drain train gpu7              gpu7 leaves at a round's end, and stays away until undrain
  elasticctl exclude train gpu7            gpu7 gets no place, and its agent waits, until include
  elasticctl set train --max 8             grow or shrink a running job
  elasticctl pause train                   stop its workers, and keep its agents, until resume
  elasticctl doctor train                  what is wrong with etcd and with a job, and what to type
  elasticctl certs authority pki           a private authority for TLS among agents and coordinators
  elasticctl certs node pki gpu1 gpu2      certificates of two nodes
  elasticctl token anna --role operate     let anna change jobs over the coordinator's API
  elasticctl delete train                  forget a job that has ended; checkpoint files stay
  elasticctl delete --finished --older-than 30d --dry-run
  elasticctl jobs -o json | jq '.[] | select(.state == \"running\") | .job'

Exit status: 0 if done, 1 if it could not be done or doctor found something that fails, 2 for flags that make no sense."
)]
pub struct Flags {
    /// What is asked.
    #[command(subcommand)]
    pub command: Command,

    /// Which store, and where in it.
    #[command(flatten)]
    pub store: StoreFlags,

    /// How agents are spoken with.
    #[command(flatten)]
    pub peers: PeerFlags,

    /// Who asks, for the job's history [default: the user and the host]
    #[arg(long = "as", value_parser = person, value_name = "NAME", global = true)]
    pub by: Option<String>,

    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table, global = true)]
    pub output: Output,
}

/// How `elasticctl` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    Table,
    /// For programs: the records as stored; events as one object a line
    Json,
}

/// What `elasticctl` is asked.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List all jobs
    Jobs,
    /// Show one job: its round, progress, nodes, ranks, leader, checkpoint, evictions
    Describe {
        /// The job, as the agents' --rdzv-id says
        job: String,
    },
    /// Watch all jobs on this terminal, or one, as they change: state, steps, loss, goodput, nodes, failures
    ///
    /// Up and down choose a job, Enter opens it, Esc goes back, q ends it. Steps and losses are there where workers
    /// report them. GOODPUT is which part of the time since the first step went into steps that had not been done before.
    Top {
        /// A job to begin with
        job: Option<String>,
    },
    /// Show a job's history: joins, losses, failures, rounds with their reasons (the last 256)
    Events {
        /// The job
        job: String,
        /// Continue until interrupted
        #[arg(short, long)]
        follow: bool,
    },
    /// Show what a job's workers print, of one rank or of all, without going to their hosts
    ///
    /// Each node's agent is asked on its peer port, so run it where those ports are reached, as on one of the nodes. Only
    /// who can read the job's keys in the store can do so: the agents ask for a proof.
    ///
    /// Agents tell what is in their log files (--redirects, --tee). Without these flags the end of standard error is
    /// there, where the agent's own is no terminal, and standard output is not. Jobs that meet by --rdzv-backend=etcd-v2
    /// have no such call.
    Logs(LogsFlags),
    /// Have a node leave as planned: the others form a round without it, and its agent ends
    ///
    /// Nodes of this name get no place in the job until `elasticctl undrain`: an agent that is started there meanwhile
    /// ends at once, saying so. With fewer nodes left than the job's minimum it waits for others.
    Drain {
        /// The job
        job: String,
        /// The node's name, as `elasticctl describe` shows it, or its host's name if no other node is there
        node: String,
    },
    /// Let a drained node take part again, once its agent is started
    Undrain {
        /// The job
        job: String,
        /// The node's name
        node: String,
    },
    /// Leave a node out: the others form a round without it, and its agent stays and waits
    ///
    /// Nodes of this name get no place in the job until `elasticctl include`, or until the job begins again. Their
    /// workers are stopped as for a planned leave. The job itself excludes nodes that fail again and again (the agents'
    /// --exclude-after), for a time; `elasticctl describe` shows who is excluded, and why.
    Exclude {
        /// The job
        job: String,
        /// The node's name, as `elasticctl describe` shows it; it need not be here
        node: String,
    },
    /// Let an excluded node take part again, also one that was excluded for its failures
    Include {
        /// The job
        job: String,
        /// The node's name
        node: String,
    },
    /// Take a node's place away at once, whatever it does: its agent kills its workers and ends
    ///
    /// For a node that hangs or harms the others. It has no time to save: `drain` is the planned way. An agent that is
    /// started there again may take part; `exclude` keeps it out. If its agent does not hear of it, the others wait until
    /// its workers must have stopped, as for a node that is lost.
    Evict {
        /// The job
        job: String,
        /// The node's name or id
        node: String,
    },
    /// Change how many nodes a job may have, or its priority, while it runs
    ///
    /// It overrides what its agents were started with until the job begins again. A lower maximum takes effect at once:
    /// the nodes that came last become spares.
    Set {
        /// The job
        job: String,
        /// Fewest nodes
        #[arg(long, required_unless_present_any = ["max", "priority"], value_name = "NODES")]
        min: Option<u32>,
        /// Most nodes
        #[arg(long, value_name = "NODES")]
        max: Option<u32>,
        /// Which jobs get spare hosts first (`elastic-agent spare`): those with the highest; 0 unless set
        #[arg(long, allow_negative_numbers = true, value_name = "N")]
        priority: Option<i32>,
    },
    /// Stop a job's workers until it is resumed: its machines are free, its agents stay and wait
    ///
    /// Workers have the time of a planned leave (--drain-grace) to save, and a checkpoint committed in it counts. It
    /// costs no restart, and however long it takes, join_timeout does not end the job. Nodes may leave and join
    /// meanwhile. The pause outlives restarts of agents, of etcd and of the leader.
    Pause {
        /// The job
        job: String,
    },
    /// Let a paused job continue: the next round forms at once, from its newest checkpoint, with the ranks that it had
    Resume {
        /// The job
        job: String,
    },
    /// End a job: its workers are stopped and its agents leave
    Close {
        /// The job
        job: String,
    },
    /// Delete a job that has ended: all its records, so that its id can be used again. Checkpoint files stay
    ///
    /// Its history and its resume point go, too: started again, it begins from its first step. Files that a checkpoint
    /// consists of are not touched. A job that runs, or has agents that have not left yet, is refused: close it
    /// (`elasticctl close`), wait until its agents have left, then delete it. To know that they have left, elasticctl
    /// asks their ports: run it where it reaches them. Where a host does not answer, the job can be deleted about an
    /// hour after its end.
    Delete {
        /// The job
        // clap drops a `requires` whose target is ruled out, so each flag for many jobs has to rule out the one.
        #[arg(required_unless_present = "finished", conflicts_with_all = ["finished", "older_than"])]
        job: Option<String>,
        /// All jobs that have ended, if they ended longer ago than --older-than
        #[arg(long, requires = "older_than")]
        finished: bool,
        /// Time since their end, by the clock of this machine: 90m, 12h, 7d
        #[arg(long, value_parser = duration, requires = "finished", value_name = "TIME")]
        older_than: Option<Duration>,
        /// Only say what would be deleted
        #[arg(long)]
        dry_run: bool,
    },
    /// Have a job that has failed begin from its first step when it is started again, as when its files are lost
    ///
    /// Only the job's resume point is dropped; checkpoint files are left alone. A trainer that looks for files by itself
    /// may still find them.
    DropCheckpoint {
        /// The job
        job: String,
    },
    /// Make a token for a user of the coordinator's API and page: prints its line for the file of --http-users
    ///
    /// The token itself is printed to standard error, once: it is kept nowhere. Add the line to the file, and the token
    /// holds within a second; take the line out, and it holds no longer. No store is asked.
    Token {
        /// The user's name, as it will be in jobs' histories
        #[arg(value_parser = person)]
        name: String,
        /// What the user may do
        #[arg(long, value_enum, default_value_t = Role::Read)]
        role: Role,
        /// The only job that the user sees and touches; may be given more than once [default: all jobs]
        #[arg(long, value_name = "JOB")]
        job: Vec<JobId>,
        /// How long the token holds: 12h, 30d [default: until its line is taken out]
        #[arg(long, value_parser = duration, value_name = "TIME")]
        expires: Option<Duration>,
    },
    /// Make a private authority and certificates, for mutual TLS among agents and coordinators
    ///
    /// No store is asked.
    Certs(CertsFlags),
    /// Look at what jobs depend on, and say what is wrong and what to type
    ///
    /// Each endpoint of etcd is asked by itself: does its name resolve, does its port accept, do TLS and the password
    /// fit, which release is it, how full and how fast is it. Then the cluster: leader, members, alarms. Then until when
    /// certificates are good (etcd's, ours, the CA's, and those of --peer-cert and --peer-ca), and how far etcd's
    /// clocks are from this machine's. To measure a write, keys under PREFIX/v1/doctor/ are written and deleted.
    ///
    /// Each line is ok, a warning (it works, and will cost something some day), failed, or unknown (there was no
    /// answer). The exit status is 1 if a line failed.
    ///
    /// With JOB also: its state, who leads it, why a node waits, and whether the ports that its nodes reach each
    /// other through accept a connection from here. Run it on one of the nodes for that.
    Doctor {
        /// A job to look at too
        job: Option<String>,
    },
    /// Print a script by which a shell completes these commands and flags
    ///
    /// Packages have it already. For bash: source <(elasticctl completion bash). No store is asked.
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// A name for people.
fn person(text: &str) -> Result<String, String> {
    let fits = Requester::is_name(text);
    let most = Requester::LONGEST_NAME;
    fits.then(|| text.to_owned()).ok_or_else(|| format!("a name has 1 to {most} bytes, without control characters"))
}

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
    /// The workers of this node alone: its name, its id, or its host's name if no other node is there
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// The workers of this round, as far as their agents are still there; without it the newest ones
    #[arg(long, value_name = "N")]
    pub round: Option<u64>,
}

/// What to make.
#[derive(Debug, Clone, Args)]
pub struct CertsFlags {
    /// What.
    #[command(subcommand)]
    pub what: CertsCommand,
}

/// What `elasticctl certs` makes.
#[derive(Debug, Clone, Subcommand)]
pub enum CertsCommand {
    /// Make an authority: ca.pem, which every host gets, and ca-key.pem, which stays where it is
    ///
    /// Anyone who has ca-key.pem can make certificates of nodes, and so become one. Keep the folder off the nodes.
    Authority {
        /// A folder, made if it is not there; an authority in it is never overwritten
        folder: PathBuf,
        /// How long it is good for: 365d, 12h
        #[arg(long, value_parser = duration, default_value = "3650d", value_name = "TIME")]
        valid: Duration,
    },
    /// Make a certificate and its key for each name: NAME.pem and NAME-key.pem
    ///
    /// Each lets its holder act as a node, as a coordinator, or as an operator who reads logs: name them after the
    /// hosts and people that get them. Agents and coordinators do not compare the names. Other clients do, such as
    /// etcdctl and Prometheus: give the host's name or address for them, and further ones after a comma (gpu1,10.0.0.1).
    Node {
        /// The authority's folder, where the files are put too
        folder: PathBuf,
        /// Whom they are for
        #[arg(required = true, value_name = "NAME[,NAME…]")]
        names: Vec<String>,
        /// How long they are good for: 365d, 12h; no longer than the authority
        #[arg(long, value_parser = duration, default_value = "365d", value_name = "TIME")]
        valid: Duration,
        /// Replace existing files, each atomically: running programs read the new ones within a second
        #[arg(long)]
        renew: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deletes(line: &str) -> Result<(Option<String>, Option<Duration>), String> {
        match Flags::try_parse_from(format!("elasticctl delete {line}").split_whitespace()) {
            Ok(Flags { command: Command::Delete { job, older_than, .. }, .. }) => Ok((job, older_than)),
            Ok(other) => panic!("{line}: {other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn one_job_is_deleted_by_name_and_many_by_age() {
        let week = Duration::from_secs(7 * 86_400);
        assert_eq!(deletes("J"), Ok((Some("J".into()), None)));
        assert_eq!(deletes("--finished --older-than 7d"), Ok((None, Some(week))));
        for line in ["J --older-than 7d", "--older-than 7d J", "J --finished", "J --finished --older-than 7d"] {
            let refused = deletes(line).unwrap_err();
            assert!(refused.contains("cannot be used with"), "{line}: {refused}");
        }
        for line in ["", "--older-than 7d", "--finished"] {
            let refused = deletes(line).unwrap_err();
            assert!(refused.contains("required"), "{line}: {refused}");
        }
    }
}
