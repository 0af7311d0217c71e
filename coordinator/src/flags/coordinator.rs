//! The command line of `elastic-coordinator`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use clap_complete::Shell;
use elastic_flags::duration;

use super::{PeerFlags, StoreFlags};

/// Lead every elastic job under a prefix.
///
/// A job needs no coordinator: its agents elect a leader among themselves. A coordinator takes the lead of each running
/// job without a change of its round, so that no training node has the work, and reports on all jobs at one place.
/// Run as many replicas as you like; they keep nothing outside the store. When one ends, agents lead again at once.
#[derive(Debug, Parser)]
#[command(
    name = "elastic-coordinator",
    version,
    after_help = "\
Examples:
  elastic-coordinator --etcd etcd0:2379,etcd1:2379,etcd2:2379 --http 0.0.0.0:9400
  elastic-coordinator --etcd etcd0:2379 --http 127.0.0.1:9400 --http-jobs      a web page of all jobs
  elastic-coordinator --etcd etcd0:2379 --http 0.0.0.0:9400 --http-users users.jsonl --http-cert c.pem --http-key k.pem
  elastic-coordinator --embedded --listen 0.0.0.0:29400 --allow-remote     a store without etcd, for trials
  elastic-coordinator --embedded --members c0:29400,c1:29400,c2:29400 --allow-remote     held by three: on each host
  elastic-coordinator --etcd etcd0:2379 --keep-finished 30d --keep-finished-count 500

Signals: SIGTERM and SIGINT hand all jobs to their agents, then end the process."
)]
pub struct Flags {
    /// Which store, and where in it.
    #[command(flatten)]
    pub store: StoreFlags,

    /// How agents are spoken with.
    #[command(flatten)]
    pub peers: PeerFlags,

    /// Serve an embedded store, in this process's memory, and lead the jobs in it: for trials, production is etcd
    #[arg(long)]
    pub embedded: bool,

    /// Where to serve the embedded store
    #[arg(long, default_value = "127.0.0.1:29400", value_name = "ADDR:PORT")]
    pub listen: SocketAddr,

    /// Hold the embedded store together with two other coordinators, so that any one may be lost: the same three on each
    ///
    /// Each serves at the one that is its own: an address, or a name for all its interfaces. Agents name all three as
    /// --rdzv-endpoint.
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,…", value_parser = member)]
    pub members: Vec<String>,

    /// Serve it without TLS (--peer-cert) on an address that other machines can reach: anyone who does can change all
    /// jobs
    #[arg(long)]
    pub allow_remote: bool,

    /// Where to take agents' pulses [default: 0.0.0.0:29410; 127.0.0.1:29410 with an embedded store on loopback]
    #[arg(long, value_name = "ADDR:PORT")]
    pub peer_listen: Option<SocketAddr>,

    /// Name or address at which agents reach that port [default: the address of the interface that leads to the store]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub peer_address: Option<String>,

    /// Serve /live, /ready and /metrics over HTTP; with --peer-cert over mutual TLS, unless it is loopback or has
    /// --http-cert
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: Option<SocketAddr>,

    /// Serve the jobs there too: a web page at /, a JSON API at /v1/jobs, the same over gRPC
    ///
    /// They only read, and ask for no token: anyone who reaches the port can read all jobs' records, among them what
    /// failed workers wrote to their standard error. With --http-users they are there in any case, for users alone.
    #[arg(long, requires = "http")]
    pub http_jobs: bool,

    /// A further name that --http-jobs is called by over plain HTTP; may be given more than once, `*` is any
    ///
    /// Any address, localhost, this machine's names and --peer-address are taken. A request by another name is refused,
    /// as another site's page could send it through a browser that reaches this port.
    #[arg(long, requires = "http_jobs", value_parser = host_name, value_name = "NAME")]
    pub allowed_host: Vec<String>,

    /// Serve them to these users, who may also change jobs: a file with one JSON object a line
    ///
    /// `elasticctl token NAME --role operate` makes a token and its line. The file holds a hash of each token. It is read
    /// again within a second when it changes; one with a wrong line changes nothing. Needs TLS (--http-cert,
    /// --peer-cert), unless --http is a loopback address or --http-insecure is given.
    #[arg(long, requires = "http", value_name = "FILE")]
    pub http_users: Option<PathBuf>,

    /// Serve --http over TLS, with the certificates in this PEM file; read again when it changes
    #[arg(long, requires = "http", requires = "http_key", value_name = "FILE")]
    pub http_cert: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, requires = "http_cert", value_name = "FILE")]
    pub http_key: Option<PathBuf>,

    /// Take users' tokens over plain HTTP on an address that is not loopback: a proxy before it does TLS
    #[arg(long, requires = "http_users")]
    pub http_insecure: bool,

    /// How long its leadership outlives a host that falls silent, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=600), value_name = "SECONDS")]
    pub lease_ttl: u64,

    /// Delete jobs that ended longer ago than this: 12h, 30d [default: keep them for ever]
    ///
    /// All of a job's records go: its history, its result, its resume point. Checkpoint files stay.
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub keep_finished: Option<Duration>,

    /// Delete all but the last N jobs that have ended [default: keep all]
    ///
    /// With --keep-finished a job is deleted once either says so.
    #[arg(long, value_name = "N")]
    pub keep_finished_count: Option<usize>,

    /// Its log as one JSON object a line
    #[arg(long)]
    pub json_logs: bool,

    /// Print a script by which a shell completes these flags, and end
    #[arg(long, value_name = "SHELL")]
    pub print_completion: Option<Shell>,
}

/// A host's name, or `*`.
fn host_name(text: &str) -> Result<String, &'static str> {
    let fits = text == "*" || text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) && !text.is_empty();
    fits.then(|| text.to_owned()).ok_or("write a name alone, without http:// and without a port, or *")
}

fn member(text: &str) -> Result<String, &'static str> {
    let port = text.rsplit_once(':').and_then(|(host, port)| port.parse().ok().filter(|_| !host.is_empty()));
    port.filter(|&port: &u16| port != 0).map(|_| text.to_owned()).ok_or("write HOST:PORT")
}

impl Flags {
    /// Reads a command line, which begins with the program's name. An error prints itself and ends the process by its
    /// `exit`.
    pub fn read(argv: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Flags, clap::Error> {
        let mut command = Flags::command();
        let matches = command.try_get_matches_from_mut(argv)?;
        // clap's own rules cannot say this. To them a variable such as ELASTIC_ETCD, which is set for all programs, rules
        // a flag out as a flag does. And they drop a `requires` whose target is ruled out.
        let given = |flag: &str| matches.value_source(flag) == Some(ValueSource::CommandLine);
        let embedded = given("embedded");
        if embedded && given("etcd") {
            let message = "'--embedded' cannot be used with '--etcd': the store is in this process or in etcd";
            return Err(command.error(ErrorKind::ArgumentConflict, message));
        }
        if let Some(flag) = ["listen", "members", "allow_remote"].into_iter().find(|flag| given(flag) && !embedded) {
            let message = format!("'--{}' needs '--embedded': it is about that store", flag.replace('_', "-"));
            return Err(command.error(ErrorKind::MissingRequiredArgument, message));
        }
        let mut flags = Flags::from_arg_matches(&matches)?;
        // Each has the place of its address.
        flags.members.sort();
        flags.members.dedup();
        if given("members") && (flags.members.len() != 3 || given("listen")) {
            let message =
                "'--members' names three different HOST:PORT, and this one's is among them, without '--listen'";
            return Err(command.error(ErrorKind::ValueValidation, message));
        }
        Ok(flags)
    }

    /// Where the embedded store is, if this process holds it.
    pub fn embedded_at(&self) -> Vec<String> {
        match (self.embedded, &self.members[..]) {
            (false, _) => Vec::new(),
            (true, []) => vec![self.listen.to_string()],
            (true, members) => members.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Flags, String> {
        let words = format!("elastic-coordinator {line}");
        Flags::read(words.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_of_the_embedded_store_need_it() {
        assert!(read("").is_ok_and(|flags| !flags.embedded));
        assert!(
            read("--embedded --members c:1,a:1,b:1").is_ok_and(|flags| flags.embedded_at() == ["a:1", "b:1", "c:1"])
        );
        assert!(read("--embedded --listen 0.0.0.0:1 --allow-remote").is_ok_and(|flags| flags.allow_remote));
        for (line, expected) in [
            ("--embedded --etcd a:1", "'--embedded' cannot be used with '--etcd'"),
            ("--etcd a:1 --allow-remote", "'--allow-remote' needs '--embedded'"),
            ("--etcd a:1 --listen 0.0.0.0:1", "'--listen' needs '--embedded'"),
            ("--listen 0.0.0.0:1", "'--listen' needs '--embedded'"),
            ("--members a:1,b:1,c:1", "'--members' needs '--embedded'"),
            ("--embedded --members a:1,b:1", "three different HOST:PORT"),
            ("--embedded --members a:1,b:1,a:1", "three different HOST:PORT"),
            ("--embedded --members a:1,b:1,c:1 --listen 0.0.0.0:1", "without '--listen'"),
            ("--embedded --members a:1,b:1,c", "write HOST:PORT"),
        ] {
            let refused = read(line).unwrap_err();
            assert!(refused.contains(expected), "{line}: {refused}");
        }
    }
}
