//! `--rdzv-conf k=v,…`: every key, torchrun's and ours. Under our own name, each must be known and given once. torchrun
//! ignores a key that it does not know, and the last of two values counts.

use std::path::PathBuf;
use std::time::Duration;

use elastic_rendezvous::job::{OnStoreLoss, Protocols, Timings};

use super::dialect::Dialect;
use super::error::{Refusal, UsageError};
use super::flags::Setting;
use super::values;
use crate::store::choice::{Credentials, Tls};
use crate::workers_store::WorkersStoreLimits;
use crate::workers_store::rank0_port::StoreHost;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Conf {
    pub(super) timings: Timings,
    join_timeout: Option<Duration>,
    /// torchrun's key for the same.
    timeout: Option<Duration>,
    pub(super) drain_grace: Option<Duration>,
    pub(super) quiesce_timeout: Option<Duration>,
    pub(super) on_store_loss: Option<OnStoreLoss>,
    pub(super) prefix: Option<String>,
    pub(super) job_protocol: Option<u32>,
    pub(super) https: Option<bool>,
    pub(super) tls: Tls,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    pub(super) credentials: Option<Credentials>,
    user: Option<String>,
    password_file: Option<PathBuf>,
    pub(super) is_host: Option<bool>,
    pub(super) v2: bool,
    /// `true`: the agents serve the workers' store. `false`: worker rank 0 serves it.
    agent_store: Option<bool>,
    store_memory: Option<usize>,
    pub(super) open_store: bool,
    pub(super) warnings: Vec<String>,
}

/// Takes the value of a key.
type Take = fn(&mut Conf, &Entry<'_>) -> Result<(), UsageError>;

/// Every key that has a meaning here.
const KEYS: &[(&str, Take)] = &[
    ("join_timeout", |conf, it| it.positive().map(|time| conf.join_timeout = Some(time))),
    ("timeout", |conf, it| it.positive().map(|time| conf.timeout = Some(time))),
    ("last_call_timeout", |conf, it| it.parse(values::duration).map(|time| conf.timings.last_call = time)),
    ("lease_ttl", |conf, it| it.parse(lease_ttl).map(|time| conf.timings.lease_ttl = time)),
    ("margin", |conf, it| it.positive().map(|time| conf.timings.margin = time)),
    ("min_round_time", |conf, it| it.parse(values::duration).map(|time| conf.timings.min_round_time = time)),
    ("takeover_delay", |conf, it| it.parse(values::duration).map(|time| conf.timings.takeover_delay = time)),
    ("start_timeout", |conf, it| it.positive().map(|time| conf.timings.start_timeout = time)),
    ("stop_grace", |conf, it| it.parse(values::duration).map(|time| conf.timings.stop_grace = time)),
    ("drain_grace", |conf, it| it.parse(values::duration).map(|time| conf.drain_grace = Some(time))),
    ("quiesce_timeout", |conf, it| it.parse(values::duration).map(|time| conf.quiesce_timeout = Some(time))),
    ("on_store_loss", |conf, it| it.parse(on_store_loss).map(|what| conf.on_store_loss = Some(what))),
    ("prefix", |conf, it| it.parse(prefix).map(|prefix| conf.prefix = Some(prefix))),
    ("etcd_prefix", |conf, it| it.parse(prefix).map(|prefix| conf.prefix = Some(prefix))),
    ("job_protocol", |conf, it| it.parse(job_protocol).map(|version| conf.job_protocol = Some(version))),
    ("protocol", |conf, it| it.parse(protocol).map(|https| conf.https = Some(https))),
    ("cert", |conf, it| it.path(&mut conf.cert)),
    ("ssl_cert", |conf, it| it.path(&mut conf.cert)),
    ("key", |conf, it| it.path(&mut conf.key)),
    ("ssl_cert_key", |conf, it| it.path(&mut conf.key)),
    ("cacert", |conf, it| it.path(&mut conf.tls.ca)),
    ("ca_cert", |conf, it| it.path(&mut conf.tls.ca)),
    ("user", |conf, it| it.parse(user_name).map(|user| conf.user = Some(user))),
    ("password_file", |conf, it| it.path(&mut conf.password_file)),
    ("is_host", |conf, it| it.parse(boolean).map(|is_host| conf.is_host = Some(is_host))),
    ("store_type", |_, it| it.parse(store_type)),
    ("api", |conf, it| it.parse(api).map(|v2| conf.v2 = v2)),
    ("workers_store", |conf, it| it.parse(workers_store).map(|agent| conf.agent_store = Some(agent))),
    ("workers_store_memory", |conf, it| it.parse(store_memory).map(|bytes| conf.store_memory = Some(bytes))),
    ("workers_store_open", |conf, it| it.parse(boolean).map(|open| conf.open_store = open)),
];

fn take_of(key: &str) -> Option<Take> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, take)| *take)
}

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

    fn positive(&self) -> Result<Duration, UsageError> {
        self.parse(|text| values::some_time(text, "it cannot be zero", "give a time, for example 30s"))
    }

    fn path(&self, to: &mut Option<PathBuf>) -> Result<(), UsageError> {
        *to = Some(PathBuf::from(self.value));
        Ok(())
    }
}

pub(super) fn parse(setting: &Setting, dialect: Dialect) -> Result<Conf, UsageError> {
    let mut conf = Conf::default();
    for entry in entries(setting, dialect, &mut conf.warnings)? {
        match take_of(entry.key) {
            Some(take) => take(&mut conf, &entry)?,
            None => conf
                .warnings
                .push(format!("{} {}: accepted, but it has no effect in this agent", setting.name, entry.key)),
        }
    }
    conf.timings.join_timeout = conf.join_timeout.or(conf.timeout).unwrap_or(conf.timings.join_timeout);
    conf.tls.client = both(setting, ("cert", conf.cert.take()), ("key", conf.key.take()))?;
    conf.credentials = both(setting, ("user", conf.user.take()), ("password_file", conf.password_file.take()))?
        .map(|(user, password_file)| Credentials { user, password_file });
    Ok(conf)
}

impl Conf {
    /// Whether an agent or worker rank 0 serves the workers' store. `disabled` is torchrun's
    /// `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`. The key takes precedence over this variable.
    pub(super) fn store_host(&self, disabled: bool) -> StoreHost {
        if !self.agent_store.unwrap_or(!disabled) {
            return StoreHost::Workers;
        }
        let limits = WorkersStoreLimits::default();
        StoreHost::Agent(WorkersStoreLimits { memory: self.store_memory.unwrap_or(limits.memory), ..limits })
    }
}

/// The entries that count, each key once.
fn entries<'a>(
    setting: &'a Setting,
    dialect: Dialect,
    warnings: &mut Vec<String>,
) -> Result<Vec<Entry<'a>>, UsageError> {
    const SHAPE: &str = "write KEY=VALUE,KEY=VALUE, for example lease_ttl=10,last_call_timeout=5s";
    let mut entries: Vec<Entry<'_>> = Vec::new();
    for pair in setting.value.split(',').map(str::trim) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let entry = Entry { whole: setting, key: key.trim(), value: value.trim() };
        if entry.key.is_empty() || entry.value.is_empty() {
            let missing = if entry.key.is_empty() { "the key is missing" } else { "the value is missing" };
            return Err(Refusal::new(format!("{missing} in `{pair}`"), SHAPE).of(setting));
        }
        let mut refuse = |refusal: UsageError| match dialect {
            Dialect::Own => Err(refusal),
            _ => {
                warnings.push(refusal.to_string());
                Ok(())
            }
        };
        if take_of(entry.key).is_none() && !WITHOUT_EFFECT.contains(&entry.key) {
            let unknown = Refusal::new("no such key", advice_for(entry.key));
            refuse(unknown.of(format_args!("{} {}", setting.name, entry.key)))?;
            continue;
        }
        if let Some(earlier) = entries.iter().position(|earlier| earlier.key == entry.key) {
            refuse(entry.refuse(Refusal::new("the key is given twice", "keep one of them")))?;
            entries.remove(earlier);
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
    let names: Vec<&str> = KEYS.iter().map(|(key, _)| *key).collect();
    let nearest = names.iter().map(|key| (strsim::jaro_winkler(key, &unknown), key)).max_by(|a, b| a.0.total_cmp(&b.0));
    match nearest {
        Some((likeness, key)) if likeness > 0.8 => format!("did you mean `{key}`?"),
        _ => format!("the keys are {}", names.join(", ")),
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
    values::one_of(text, "is not known", &[("wait", OnStoreLoss::Wait), ("fence", OnStoreLoss::Fence)])
}

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

/// torchrun's `protocol` of etcd. Returns whether it is https.
fn protocol(text: &str) -> Result<bool, Refusal> {
    values::one_of(text, "is not known", &[("http", false), ("https", true)])
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
    values::one_of(text, "is not an API of etcd", &[("v3", false), ("v2", true)])
}

fn workers_store(text: &str) -> Result<bool, Refusal> {
    values::one_of(text, "is not known", &[("agent", true), ("workers", false)])
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
