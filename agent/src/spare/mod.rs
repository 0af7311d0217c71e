//! A spare host: it goes to whichever of several jobs lacks a node, by running that job's agent. The jobs' leaders know
//! nothing of it; to them it is a node that joins, waits or leaves as any other does.
//!
//! | file | what it does |
//! |---|---|
//! | `job_files.rs` | reads which jobs it may run, and how |
//! | `follow.rs` | follows a job's records, and holds a claim in them |
//! | `choose.rs` | decides where to go: a pure function |

mod choose;
mod follow;
mod job_files;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_rendezvous::job::{JobId, Keys};
use elastic_rendezvous::time::Time;
use elastic_store::etcd::EtcdStore;
use elastic_store::{Revision, Store, StoreError};
use futures::future::OptionFuture;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::cli::SpareOptions;
use crate::machine::identity::{self, IdentityError};
use crate::machine::parent::ends_with_parent;
use crate::store::backend::etcd_config;
use crate::store::choice::StoreChoice;
use crate::workers::signals::{self, Signals};
use choose::{Choice, Standing, choose};
use follow::{Followed, News, PlaceClaim};
use job_files::{BadFile, JobFile};

/// How often the folder is read, and a store that failed is asked again.
const RESCAN: Duration = Duration::from_secs(2);

/// How long a claim may take until the store shows it.
const CLAIM_PATIENCE: Duration = Duration::from_secs(10);

/// How long a job is left alone whose agent failed here; twice as long each further time, up to [`LONGEST_REST`].
const REST: Duration = Duration::from_secs(10);
const LONGEST_REST: Duration = Duration::from_secs(600);

/// Exit codes of an agent that did its part: the job succeeded, it left as planned, the job was closed or has failed.
const DID_ITS_PART: [i32; 4] = [0, 3, 4, 5];

/// Serves the jobs of the folder until a signal ends it. Returns the process's exit code.
pub(crate) async fn run(options: SpareOptions) -> anyhow::Result<u8> {
    let mut signals = Signals::watch(&signals::usual())?;
    let (news, mut inbox) = mpsc::unbounded_channel();
    let mut host = Host::new(options, news)?;
    host.rescan()?;
    tracing::info!(
        name = host.name,
        jobs = host.files.len(),
        "a spare host of the jobs in {}",
        host.options.folder.display()
    );
    let mut rescan = tokio::time::interval(RESCAN);
    loop {
        let again = host.settle(elastic_store::clock::now()).await;
        let again = again.map_or(RESCAN, |at| at.since(elastic_store::clock::now()));
        tokio::select! {
            Some(news) = inbox.recv() => host.heard(elastic_store::clock::now(), news),
            Some(ended) = OptionFuture::from(host.working.as_mut().map(|working| working.agent.wait())) => {
                host.ended(elastic_store::clock::now(), ended);
            }
            caught = signals.next() => {
                host.leave(caught.0, &mut signals).await;
                return Ok(0);
            }
            _ = rescan.tick() => host.keep_looking(),
            () = tokio::time::sleep(again) => {}
        }
    }
}

/// One job of the folder, as this host sees it.
#[derive(Default)]
struct Known {
    followed: Option<Followed>,
    standing: Standing,
    /// Whether this host's node is there.
    here: bool,
    /// The life of the job, which a claim belongs to.
    life: Revision,
    /// How often in a row its agent failed here.
    failures: u32,
    /// The last trouble with its store.
    trouble: Option<String>,
}

/// The agent that runs.
struct Working {
    job: JobId,
    agent: Child,
    /// Whether the host asked it to leave.
    leaves: bool,
}

struct Claimed {
    job: JobId,
    claim: PlaceClaim,
    since: Time,
}

struct Host {
    options: SpareOptions,
    name: String,
    files: BTreeMap<JobId, JobFile>,
    jobs: BTreeMap<JobId, Known>,
    unusable: BTreeSet<BadFile>,
    news: mpsc::UnboundedSender<News>,
    working: Option<Working>,
    claimed: Option<Claimed>,
}

impl Host {
    fn new(options: SpareOptions, news: mpsc::UnboundedSender<News>) -> Result<Host, IdentityError> {
        let unnamed = || identity::unnamed_here(&identity::process_runtime_dir()).map(|name| format!("{name}-spare"));
        let name = options.name.clone().map_or_else(unnamed, Ok)?;
        let (files, jobs, unusable) = Default::default();
        Ok(Host { options, name, files, jobs, unusable, news, working: None, claimed: None })
    }

    /// Reads the folder again, and follows what is to be followed.
    fn rescan(&mut self) -> Result<(), BadFile> {
        let (files, unusable) = job_files::read(&self.options.folder)?;
        let unusable: BTreeSet<BadFile> = unusable.into_iter().collect();
        for bad in unusable.difference(&self.unusable) {
            tracing::warn!("{bad}; ignoring the file until it changes");
        }
        self.unusable = unusable;
        self.jobs.retain(|job, _| files.contains_key(job));
        for (job, file) in &files {
            let known = self.jobs.entry(job.clone()).or_default();
            if let Some(followed) = &mut known.followed
                && let Some(error) = followed.end()
            {
                known.followed = None;
                known.in_trouble(job, &error);
            }
            if self.files.get(job) != Some(file) {
                known.followed = None;
            }
            if known.followed.is_none() {
                match follow(file, node_name(file, &self.name), self.news.clone()) {
                    Ok(followed) => known.followed = Some(followed),
                    Err(error) => known.in_trouble(job, &error),
                }
            }
        }
        self.files = files;
        Ok(())
    }

    /// Reads the folder again. What was known holds while it cannot be read.
    fn keep_looking(&mut self) {
        if let Err(error) = self.rescan()
            && self.unusable.insert(error.clone())
        {
            tracing::warn!("{error}; keeping the jobs known before");
        }
    }

    fn heard(&mut self, now: Time, news: News) {
        let Some(known) = self.jobs.get_mut(&news.job) else { return };
        let own = self.files.get(&news.job).map_or(self.name.as_str(), |file| node_name(file, &self.name));
        known.standing.saw(now, own, news.vacancy, news.placed);
        (known.here, known.life, known.trouble) = (news.here, news.life, None);
    }

    /// Does what is to be done now. Returns when to look again.
    async fn settle(&mut self, now: Time) -> Option<Time> {
        match self.claimed.take() {
            Some(claimed) => self.pursue(now, claimed).await,
            None => {
                let at = self.working.as_ref().map(|working| &working.job);
                let standings = self.jobs.iter().map(|(job, known)| (job.clone(), known.standing.clone())).collect();
                match choose(now, &standings, at) {
                    Choice::Stay(until) => until,
                    Choice::Go(job, reason) => {
                        tracing::info!(%job, "{job} lacks a node: {reason}");
                        self.claim(now, job);
                        Some(now + CLAIM_PATIENCE)
                    }
                }
            }
        }
    }

    fn claim(&mut self, now: Time, job: JobId) {
        let (Some(known), Some(file)) = (self.jobs.get(&job), self.files.get(&job)) else { return };
        let Some(followed) = &known.followed else { return };
        let claim = PlaceClaim::make(followed, node_name(file, &self.name), known.life);
        self.claimed = Some(Claimed { job, claim, since: now });
    }

    /// Follows a claim up: to the job, once the claim holds and the host is free.
    async fn pursue(&mut self, now: Time, claimed: Claimed) -> Option<Time> {
        let Claimed { job, claim, since } = claimed;
        let own = self.files.get(&job).map_or(self.name.as_str(), |file| node_name(file, &self.name));
        let (state, here) = match self.jobs.get(&job) {
            Some(known) => (choose::claim(&known.standing, own), known.here),
            None => (choose::ClaimState::Lost, false),
        };
        let works_there = self.working.as_ref().is_some_and(|working| working.job == job);
        let patience = since + CLAIM_PATIENCE;
        match state {
            // It has served its purpose.
            _ if works_there && here => claim.withdraw().await,
            choose::ClaimState::Unseen if works_there || now < patience => {
                self.claimed = Some(Claimed { job, claim, since });
                return Some(patience).filter(|_| !works_there);
            }
            choose::ClaimState::Holds => {
                match &mut self.working {
                    Some(working) if works_there || working.leaves => {}
                    Some(working) => {
                        tracing::info!(from = %working.job, to = %job, "leaving {} for {job}", working.job);
                        working.leaves = true;
                        working.tell(Signal::TERM);
                    }
                    None => self.start(now, &job),
                }
                self.claimed = Some(Claimed { job, claim, since });
            }
            choose::ClaimState::Lost | choose::ClaimState::Unseen => {
                tracing::info!(%job, "{job} no longer needs this host");
                claim.withdraw().await;
            }
        }
        None
    }

    fn start(&mut self, now: Time, job: &JobId) {
        let Some(file) = self.files.get(job) else { return };
        match begin(file, &self.name) {
            Ok(agent) => {
                tracing::info!(%job, pid = agent.id(), "taking part in {job}");
                self.working = Some(Working { job: job.clone(), agent, leaves: false });
            }
            Err(error) => self.rest(now, job, &format!("cannot start its agent: {error:#}")),
        }
    }

    /// Leaves a job alone for a while.
    fn rest(&mut self, now: Time, job: &JobId, why: &str) {
        let Some(known) = self.jobs.get_mut(job) else { return };
        let pause = (REST * 2u32.saturating_pow(known.failures.min(10))).min(LONGEST_REST);
        known.failures += 1;
        known.standing.not_before = Some(now + pause);
        tracing::warn!(%job, "{why}; not going there for {pause:?}");
    }

    fn ended(&mut self, now: Time, status: std::io::Result<ExitStatus>) {
        let Some(Working { job, .. }) = self.working.take() else { return };
        let code = status.as_ref().ok().and_then(ExitStatus::code);
        if let Some(code) = code.filter(|code| DID_ITS_PART.contains(code)) {
            tracing::info!(%job, "this host's part in {job} is over (exit code {code})");
            if let Some(known) = self.jobs.get_mut(&job) {
                known.failures = 0;
            }
            return;
        }
        let how = match status {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with exit code {code}, and says why above"),
                (None, signal) => format!("was ended by signal {}", signal.unwrap_or_default()),
            },
            Err(error) => format!("ended in an unknown way: {error}"),
        };
        self.rest(now, &job, &format!("the agent of {job} {how}"));
    }

    /// Ends: the agent that runs gets the signal, and each further one.
    async fn leave(&mut self, signal: Signal, signals: &mut Signals) {
        if let Some(Claimed { claim, .. }) = self.claimed.take() {
            claim.withdraw().await;
        }
        let Some(working) = &mut self.working else {
            return tracing::info!("a signal ends this spare host");
        };
        tracing::info!(job = %working.job, "a signal ends this spare host: leaving {}", working.job);
        working.tell(signal);
        loop {
            tokio::select! {
                _ = working.agent.wait() => return,
                caught = signals.next() => working.tell(caught.0),
            }
        }
    }
}

impl Known {
    fn in_trouble(&mut self, job: &JobId, error: &StoreError) {
        let text = error.to_string();
        if self.trouble.as_ref() != Some(&text) {
            tracing::warn!(%job, "{text}; trying again every {RESCAN:?}");
            self.trouble = Some(text);
        }
    }
}

impl Working {
    fn tell(&self, signal: Signal) {
        let pid = self.agent.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        if let Some(pid) = pid {
            // Who has ended needs no signal.
            let _ = kill_process(pid, signal);
        }
    }
}

fn node_name<'a>(file: &'a JobFile, host: &'a str) -> &'a str {
    file.options.node_name.as_deref().unwrap_or(host)
}

fn follow(file: &JobFile, host: &str, news: mpsc::UnboundedSender<News>) -> Result<Followed, StoreError> {
    let StoreChoice::Etcd { endpoints, tls, credentials, .. } = &file.options.store.choice else {
        return Err(StoreError::Invalid("the job does not meet on etcd".into()));
    };
    let store: Arc<dyn Store> =
        Arc::new(EtcdStore::connect(etcd_config(endpoints, tls.as_ref(), credentials.as_ref())?)?);
    let prefix = file.options.store.prefix.as_deref().unwrap_or(Keys::DEFAULT_PREFIX);
    Ok(Followed::begin(store, prefix, &file.options.job, host, news))
}

/// Starts a job's agent. It leaves the job if this process dies.
fn begin(file: &JobFile, host: &str) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("find this program")?;
    let mut command = Command::new(&program);
    // A process group of its own: a terminal's Ctrl-C reaches this process, which passes it on once.
    // Called by the same word as this process, it finds the same Python.
    command.arg0(std::env::args_os().next().unwrap_or_default());
    command.process_group(0).envs(file.environment.iter().map(|(name, value)| (name, value)));
    if file.options.node_name.is_none() {
        command.args(["--node-name", host]);
    }
    command.args(&file.arguments);
    ends_with_parent(&mut command, Signal::TERM);
    command.spawn().with_context(|| format!("start {}", program.display()))
}
