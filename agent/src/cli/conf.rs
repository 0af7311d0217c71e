//! `--rdzv-conf k=v,…`: every key, torchrun's and ours, each known and checked.

use std::path::PathBuf;
use std::time::Duration;

use elastic_rendezvous::job::{OnStoreLoss, Protocols, Timings};

use super::error::{Refusal, UsageError};
use super::flags::Setting;
use super::values;
use crate::store::choice::{Credentials, Tls};
use crate::workers_store::WorkersStoreLimits;
use crate::workers_store::rank0_port::StoreHost;

/// All of `--rdzv-conf`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Conf {
    pub(super) timings: Timings,
    pub(super) drain_grace: Option<Duration>,
    pub(super) quiesce_timeout: Option<Duration>,
    pub(super) on_store_loss: Option<OnStoreLoss>,
    pub(super) prefix: Option<String>,
    pub(super) job_protocol: Option<u32>,
    pub(super) https: Option<bool>,
    pub(super) tls: Tls,
    pub(super) credentials: Option<Credentials>,
    pub(super) is_host: Option<bool>,
    pub(super) v2: bool,
    /// `true`: the agents serve the workers' store. `false`: worker rank 0 serves it.
    pub(super) agent_store: Option<bool>,
    pub(super) store_memory: Option<usize>,
    pub(super) open_store: bool,
    pub(super) warnings: Vec<String>,
}

/// Every key that has a meaning here. An alias comes with the key that it means.
const KEYS: &[&str] = &[
    "join_timeout",
    "timeout",
    "last_call_timeout",
    "lease_ttl",
    "margin",
    "min_round_time",
    "takeover_delay",
    "start_timeout",
    "stop_grace",
    "drain_grace",
    "quiesce_timeout",
    "on_store_loss",
    "prefix",
    "etcd_prefix",
    "job_protocol",
    "protocol",
    "cert",
    "ssl_cert",
    "key",
    "ssl_cert_key",
    "cacert",
    "ca_cert",
    "user",
    "password_file",
    "is_host",
    "store_type",
    "api",
    "workers_store",
    "workers_store_memory",
    "workers_store_open",
];

/// torchrun's keys for mechanisms that do not exist here. They are accepted, so that torchrun's command lines run
/// unchanged.
const WITHOUT_EFFECT: &[&str] = &[
    "cas_backoff_max_seconds",
    "close_timeout",
    "heartbeat",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "rank",
    "read_timeout",
];

/// One `k=v`, with what an error message needs.
struct Entry<'a> {
    whole: &'a Setting,
    key: &'a str,
    value: &'a str,
}

impl Entry<'_> {
    fn refuse(&self, refusal: Refusal) -> UsageError {
        refusal.of(format_args!("{} {}={}", self.whole.name, self.key, self.value))
    }

    fn parse<T>(&self, read: impl FnOnce(&str) -> Result<T, Refusal>) -> Result<T, UsageError> {
        read(self.value).map_err(|refusal| self.refuse(refusal))
    }

    fn duration(&self) -> Result<Duration, UsageError> {
        self.parse(values::duration)
    }

    fn positive(&self) -> Result<Duration, UsageError> {
        match self.parse(values::duration)? {
            Duration::ZERO => Err(self.refuse(Refusal::new("it cannot be zero", "give a time, for example 30s"))),
            time => Ok(time),
        }
    }
}

pub(super) fn parse(setting: &Setting) -> Result<Conf, UsageError> {
    let mut conf = Conf::default();
    let (mut join_timeout, mut timeout) = (None, None);
    let (mut cert, mut key, mut user, mut password_file) = (None, None, None, None);
    let entries = entries(setting)?;
    for entry in &entries {
        let timings = &mut conf.timings;
        match entry.key {
            "join_timeout" => join_timeout = Some(entry.positive()?),
            "timeout" => timeout = Some(entry.positive()?),
            "last_call_timeout" => timings.last_call = entry.duration()?,
            "lease_ttl" => timings.lease_ttl = entry.parse(lease_ttl)?,
            "margin" => timings.margin = entry.positive()?,
            "min_round_time" => timings.min_round_time = entry.duration()?,
            "takeover_delay" => timings.takeover_delay = entry.duration()?,
            "start_timeout" => timings.start_timeout = entry.positive()?,
            "stop_grace" => timings.stop_grace = entry.duration()?,
            "drain_grace" => conf.drain_grace = Some(entry.duration()?),
            "quiesce_timeout" => conf.quiesce_timeout = Some(entry.duration()?),
            "on_store_loss" => conf.on_store_loss = Some(entry.parse(on_store_loss)?),
            "prefix" | "etcd_prefix" => conf.prefix = Some(entry.parse(prefix)?),
            "job_protocol" => conf.job_protocol = Some(entry.parse(job_protocol)?),
            "protocol" => conf.https = Some(entry.parse(protocol)?),
            "cert" | "ssl_cert" => cert = Some(PathBuf::from(entry.value)),
            "key" | "ssl_cert_key" => key = Some(PathBuf::from(entry.value)),
            "cacert" | "ca_cert" => conf.tls.ca = Some(PathBuf::from(entry.value)),
            "user" => user = Some(entry.parse(user_name)?),
            "password_file" => password_file = Some(PathBuf::from(entry.value)),
            "is_host" => conf.is_host = Some(entry.parse(boolean)?),
            "store_type" => entry.parse(store_type)?,
            "api" => conf.v2 = entry.parse(api)?,
            "workers_store" => conf.agent_store = Some(entry.parse(workers_store)?),
            "workers_store_memory" => conf.store_memory = Some(entry.parse(store_memory)?),
            "workers_store_open" => conf.open_store = entry.parse(boolean)?,
            key => conf.warnings.push(format!("{} {key}: accepted, but it has no effect in this agent", setting.name)),
        }
    }
    conf.timings.join_timeout = join_timeout.or(timeout).unwrap_or(conf.timings.join_timeout);
    conf.tls.client = both(setting, ("cert", cert), ("key", key))?;
    conf.credentials = both(setting, ("user", user), ("password_file", password_file))?
        .map(|(user, password_file)| Credentials { user, password_file });
    Ok(conf)
}

impl Conf {
    /// Whether an agent or worker rank 0 serves the workers' store. `disabled` is torchrun's
    /// `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`. The key takes precedence over this variable.
    pub(super) fn store_host(&self, disabled: bool) -> StoreHost {
        let limits = WorkersStoreLimits::default();
        match self.agent_store.unwrap_or(!disabled) {
            true => {
                StoreHost::Agent(WorkersStoreLimits { memory: self.store_memory.unwrap_or(limits.memory), ..limits })
            }
            false => StoreHost::Workers,
        }
    }
}

fn entries(setting: &Setting) -> Result<Vec<Entry<'_>>, UsageError> {
    const SHAPE: &str = "write KEY=VALUE,KEY=VALUE, for example lease_ttl=10,last_call_timeout=5s";
    let mut entries: Vec<Entry<'_>> = Vec::new();
    for pair in setting.value.split(',').map(str::trim) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let entry = Entry { whole: setting, key: key.trim(), value: value.trim() };
        if entry.key.is_empty() || entry.value.is_empty() {
            let missing = if entry.key.is_empty() { "the key is missing" } else { "the value is missing" };
            return Err(Refusal::new(format!("{missing} in `{pair}`"), SHAPE).of(setting));
        }
        if !KEYS.contains(&entry.key) && !WITHOUT_EFFECT.contains(&entry.key) {
            return Err(
                Refusal::new("no such key", advice_for(entry.key)).of(format_args!("{} {}", setting.name, entry.key))
            );
        }
        if entries.iter().any(|earlier| earlier.key == entry.key) {
            return Err(entry.refuse(Refusal::new("the key is given twice", "keep one of them")));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn advice_for(unknown: &str) -> String {
    if unknown == "password" {
        return "a command line can be read by everyone on the host: use password_file=PATH".into();
    }
    let unknown = unknown.to_ascii_lowercase().replace('-', "_");
    let nearest = KEYS.iter().map(|key| (strsim::jaro_winkler(key, &unknown), key)).max_by(|a, b| a.0.total_cmp(&b.0));
    match nearest {
        Some((likeness, key)) if likeness > 0.8 => format!("did you mean `{key}`?"),
        _ => format!("the keys are {}", KEYS.join(", ")),
    }
}

fn both<A, B>(
    setting: &Setting,
    (a_name, a): (&str, Option<A>),
    (b_name, b): (&str, Option<B>),
) -> Result<Option<(A, B)>, UsageError> {
    let alone = |there: &str, missing: &str| {
        Err(Refusal::new(format!("{there} comes without {missing}"), "give both or neither").of(setting))
    };
    match (a, b) {
        (Some(a), Some(b)) => Ok(Some((a, b))),
        (None, None) => Ok(None),
        (Some(_), None) => alone(a_name, b_name),
        (None, Some(_)) => alone(b_name, a_name),
    }
}

fn lease_ttl(text: &str) -> Result<Duration, Refusal> {
    let ttl = values::duration(text)?;
    if ttl < Duration::from_secs(1) || ttl.subsec_nanos() != 0 {
        return Err(Refusal::new(
            "the store counts leases in whole seconds",
            "give a whole number of seconds from 1 on",
        ));
    }
    Ok(ttl)
}

pub(super) fn on_store_loss(text: &str) -> Result<OnStoreLoss, Refusal> {
    match text {
        "wait" => Ok(OnStoreLoss::Wait),
        "fence" => Ok(OnStoreLoss::Fence),
        other => Err(Refusal::new(format!("`{other}` is not known"), "give `wait` or `fence`")),
    }
}

/// torchrun's `protocol` is http or https.
fn job_protocol(text: &str) -> Result<u32, Refusal> {
    let ours = Protocols::OURS;
    text.parse().ok().filter(|version| ours.include(*version)).ok_or_else(|| {
        let release = env!("CARGO_PKG_VERSION");
        Refusal::new(
            format!("elastic-agent {release} speaks protocol version {ours}"),
            "leave it out to begin jobs with the newest, or give the version that all agents of the job speak",
        )
    })
}

fn protocol(text: &str) -> Result<bool, Refusal> {
    match text {
        "http" => Ok(false),
        "https" => Ok(true),
        other => Err(Refusal::new(format!("`{other}` is not known"), "give `http` or `https`")),
    }
}

fn boolean(text: &str) -> Result<bool, Refusal> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(true),
        "0" | "false" | "f" | "no" | "n" => Ok(false),
        other => Err(Refusal::new(format!("`{other}` is neither true nor false"), "give `true` or `false`")),
    }
}

fn store_type(text: &str) -> Result<(), Refusal> {
    match text {
        "tcp" => Ok(()),
        other => Err(Refusal::new(
            format!("a store of type `{other}` is not served"),
            "leave it out: the endpoint's agent serves the store over TCP",
        )),
    }
}

fn api(text: &str) -> Result<bool, Refusal> {
    match text {
        "v3" => Ok(false),
        "v2" => Ok(true),
        other => Err(Refusal::new(format!("`{other}` is not an API of etcd"), "give `v3` or `v2`")),
    }
}

fn workers_store(text: &str) -> Result<bool, Refusal> {
    match text {
        "agent" => Ok(true),
        "workers" => Ok(false),
        other => Err(Refusal::new(format!("`{other}` is not known"), "give `agent` or `workers`")),
    }
}

fn store_memory(text: &str) -> Result<usize, Refusal> {
    match elastic_flags::size(text)? {
        bytes if bytes >= 1 << 20 => Ok(usize::try_from(bytes).unwrap_or(usize::MAX)),
        _ => Err(Refusal::new("less than 1MiB is too little to work with", "leave it out, or give more")),
    }
}

fn user_name(text: &str) -> Result<String, Refusal> {
    if text.contains(':') {
        return Err(Refusal::new("it holds a `:`", "give the name alone, and the password by password_file=PATH"));
    }
    Ok(text.to_owned())
}

/// Reads a key prefix, normalised to `/a/b`.
fn prefix(text: &str) -> Result<String, Refusal> {
    let trimmed = text.trim_matches('/');
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:@+=/".contains(c);
    if trimmed.is_empty() || trimmed.contains("//") || !trimmed.chars().all(allowed) {
        return Err(Refusal::new("it is no key prefix", "write /NAME/NAME of letters, digits and `._-:@+=`"));
    }
    Ok(format!("/{trimmed}"))
}
