//! The flags of `elasticctl certs`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use elastic_flags::duration;

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
        /// Take the place of files that are there, at once for each file: running programs read them within a second
        #[arg(long)]
        renew: bool,
    },
}
