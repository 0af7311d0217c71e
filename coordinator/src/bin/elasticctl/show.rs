//! Jobs, nodes and events as people read them. Programs read [`elastic_rendezvous::job::json`].

use crate::silence::Silent;
use crate::table::{printable, table};
use elastic_coordinator::nodes::gone;
use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{
    EventRecord, Faults, JobId, JobState, LeaderRecord, NodeId, NodeRecord, ProgressRecord, Protocols, RoundState,
    Tombstone, Versioned,
};
use elastic_rendezvous::time::date::utc;

/// All jobs, a line each.
pub(crate) fn jobs(overview: &Overview) -> String {
    let rows: Vec<_> = overview.jobs.iter().filter_map(|(id, job)| line(id, job)).collect();
    if rows.is_empty() {
        return "no jobs\n".to_owned();
    }
    let mut text =
        table(&["JOB", "STATE", "ROUND", "NODES", "MIN:MAX", "WORKERS", "STEP", "RESTARTS", "LEADER", "REASON"], &rows);
    for (id, job) in &overview.jobs {
        text.extend(unusual_protocol(job).map(|told| format!("{id}: {}\n", printable(&told))));
    }
    text
}

/// What to know of a job whose protocol is not the newest of this build.
fn unusual_protocol(job: &Job) -> Option<String> {
    let (version, newest) = (job.protocol.as_ref()?.version, Protocols::OURS.newest);
    let older =
        || format!("the job speaks protocol version {version} until it starts again, and the newest here is {newest}");
    job.refusal().or_else(|| (version < newest).then(older))
}

/// A release, as a node or a leader tells it.
fn release(told: Option<&str>) -> String {
    told.unwrap_or("not told").to_owned()
}

pub(crate) fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

fn line(id: &JobId, job: &Job) -> Option<Vec<String>> {
    let round = &job.round.as_ref()?.value;
    let running = round.state == RoundState::Running;
    Some(vec![
        id.to_string(),
        JobState::from(round).to_string(),
        round.number.to_string(),
        nodes_here(job),
        or_dash(job.range().map(|(min, max)| format!("{min}:{max}"))),
        or_dash(running.then_some(round.world_size)),
        step(job),
        restarts(job),
        or_dash(job.leader.as_ref().map(|leader| who_leads(&leader.value))),
        round.reason.clone(),
    ])
}

/// A job's nodes: those of its round while one runs, and its spares.
pub(crate) fn nodes_here(job: &Job) -> String {
    let running = job.round.as_ref().map(|round| &round.value).filter(|round| round.state == RoundState::Running);
    let Some(round) = running else { return job.nodes.len().to_string() };
    let size = round.group_world_size;
    let members = match u32::try_from(gone(job).count()) {
        Ok(gone @ 1..) => format!("{} of {size}", size.saturating_sub(gone)),
        _ => size.to_string(),
    };
    match job.spares().count() {
        0 => members,
        spares => format!("{members} (+{spares})"),
    }
}

/// Restarts charged to a job, and how many it may have.
pub(crate) fn restarts(job: &Job) -> String {
    let restarts = job.round.as_ref().map_or(0, |round| round.value.restarts);
    job.spec.as_ref().map_or_else(|| restarts.to_string(), |spec| format!("{restarts}/{}", spec.max_restarts))
}

/// The step that a job's workers have reported.
pub(crate) fn step(job: &Job) -> String {
    or_dash(job.progress.as_ref().map(|ProgressRecord { step, total_steps, .. }| match total_steps {
        Some(total) => format!("{step}/{total}"),
        None => step.to_string(),
    }))
}

/// Steps a second, in three digits or more.
pub(crate) fn rate(steps_per_second: f64) -> String {
    let decimals = match steps_per_second {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{steps_per_second:.decimals$}")
}

pub(crate) fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

/// How far a job has come, in a sentence.
fn progress(record: &ProgressRecord) -> String {
    let mut text = format!("step {}", record.step);
    if let Some(total) = record.total_steps.filter(|total| *total > 0) {
        text.push_str(&format!(" of {total} ({})", percent(record.step as f64 / total as f64)));
    }
    for (name, value) in [
        ("epoch", record.epoch.map(|epoch| epoch.to_string())),
        ("loss", record.loss.map(|loss| format!("{loss:.4}"))),
        ("steps a second:", record.steps_per_second.map(rate)),
        ("goodput", record.goodput().map(percent)),
        ("at", Some(format!("{} UTC", &utc(record.at_ms)[..19]))),
    ] {
        text.extend(value.map(|value| format!(", {name} {value}")));
    }
    text
}

fn who_leads(leader: &LeaderRecord) -> String {
    if leader.coordinator { format!("coordinator {}", leader.peer) } else { leader.node.name().to_owned() }
}

/// A job, of whose nodes these have been silent for so long.
pub(crate) fn describe(id: &JobId, job: &Job, silent: &Silent) -> String {
    let mut text = String::new();
    let mut say = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!("{name:<12}{}\n", printable(&value)));
        }
    };
    let round = job.round.as_ref().map(|round| &round.value);
    say("job", Some(id.to_string()));
    say("protocol", unusual_protocol(job));
    let here = job.nodes.keys().filter(|node| !silent.contains_key(node)).count();
    let nobody = here == 0 && round.is_some_and(|round| !round.state.is_final());
    say("state", job.state().map(|state| format!("{state}{}", if nobody { ", but no node is here" } else { "" })));
    say("reason", round.map(|round| round.reason.clone()));
    say("round", round.map(|round| format!("{} (generation {})", round.number, round.generation)));
    say("workers", round.filter(|round| round.world_size > 0).map(|round| round.world_size.to_string()));
    say("progress", job.progress.as_ref().map(progress));
    say("master", round.and_then(|round| round.master.as_ref()).map(ToString::to_string));
    say("nodes", job.range().map(|(min, max)| format!("{here} here, {min} to {max} wanted")));
    let gone: Vec<_> = gone(job).map(|(node, _)| node.name()).collect();
    say("gone", (!gone.is_empty()).then(|| format!("{}: no sign of life for longer than a lease", gone.join(", "))));
    let forgiven = job.spec.as_ref().map_or_else(String::new, |spec| format!(" of {}", spec.max_restarts));
    say("restarts", round.map(|round| format!("{}{forgiven}", round.restarts)));
    let leader = job.leader.as_ref();
    say("leader", leader.map(|leader| format!("{} since revision {}", who_leads(&leader.value), leader.modified)));
    let releases = job.releases();
    if releases.len() > 1 {
        let all: Vec<_> = releases.iter().map(|told| release(*told)).collect();
        say("releases", Some(format!("{}: an upgrade is under way", all.join(", "))));
    }
    let checkpoint = job.checkpoint.as_ref().map(|at| &at.value);
    say("checkpoint", checkpoint.map(|at| format!("step {} of round {}, at {}", at.step, at.round, at.path)));
    if let Some(desired) = job.desired.as_ref().map(|desired| &desired.value) {
        say("closed", desired.closed.then(|| "asked for".to_owned()));
        say("paused", desired.paused.then(|| format!("asked for; elasticctl resume {id} continues it")));
        say("drained", (!desired.drain.is_empty()).then(|| desired.drain.join(", ")));
        say("excluded", (!desired.exclude.is_empty()).then(|| desired.exclude.join(", ")));
        say("asked last", desired.asked.as_ref().map(|asked| format!("by {} at {} UTC", asked.by, utc(asked.at_ms))));
    }
    let faults: Vec<_> = round.iter().flat_map(|round| &round.faults).map(|faults| told(job, faults)).collect();
    say("faults", (!faults.is_empty()).then(|| faults.join(", ")));
    if let Some(cause) = round.and_then(|round| round.cause.as_ref()) {
        let node = cause.node.as_ref().map(|node| format!("{}: ", node.name())).unwrap_or_default();
        say("cause", Some(format!("{node}{}", cause.message)));
    }
    if !job.nodes.is_empty() {
        text.push('\n');
        text.push_str(&nodes(job, silent));
    }
    let waits = job.waiting();
    let why = |(id, node): (&_, &Versioned<NodeRecord>)| Some(vec![node.value.name.clone(), waits.of(id)?.to_string()]);
    let waiting: Vec<_> = job.nodes.iter().filter_map(why).collect();
    if !waiting.is_empty() {
        text.push('\n');
        text.push_str(&table(&["WAITS", "WHY"], &waiting));
    }
    if !job.evicted.is_empty() {
        let row = |(node, stone): (&NodeId, &Tombstone)| {
            vec![node.to_string(), stone.round.to_string(), stone.reason.clone()]
        };
        let rows: Vec<_> = job.evicted.iter().map(row).collect();
        text.push('\n');
        text.push_str(&table(&["EVICTED", "FROM ROUND", "REASON"], &rows));
    }
    text
}

fn told(job: &Job, faults: &Faults) -> String {
    let desired = job.desired.as_ref().map(|desired| &desired.value);
    let back = faults
        .excluded
        .is_some_and(|exclusion| desired.is_some_and(|desired| desired.takes_back(&faults.node, exclusion)));
    if back { format!("{} was excluded and is taken back", faults.node) } else { faults.to_string() }
}

fn nodes(job: &Job, silent: &Silent) -> String {
    let mixed = job.releases().len() > 1;
    let mut lines: Vec<_> = job
        .nodes
        .iter()
        .map(|(id, node)| {
            let rank = job.rank(id);
            let record = &node.value;
            let ranks = rank.map(|rank| match rank.slots {
                0 | 1 => rank.first_rank.to_string(),
                slots => format!("{}-{}", rank.first_rank, rank.first_rank + slots - 1),
            });
            let mut row = vec![
                record.name.clone(),
                silent
                    .get(id)
                    .map_or_else(|| record.phase.to_string(), |time| format!("silent for {} s", time.as_secs())),
                or_dash(record.round),
                or_dash(rank.map(|rank| rank.group_rank)),
                or_dash(ranks),
                record.slots.to_string(),
                record.host.clone(),
                record.peer.to_string(),
                record.failure.as_ref().map(|failure| failure.message.clone()).unwrap_or_default(),
            ];
            if mixed {
                row.insert(1, release(record.release.as_ref().map(|release| release.version.as_str())));
            }
            (rank.map_or(u32::MAX, |rank| rank.group_rank), node.created, row)
        })
        .collect();
    lines.sort();
    let rows: Vec<_> = lines.into_iter().map(|(_, _, row)| row).collect();
    let mut header = vec!["NODE", "PHASE", "ROUND", "GROUP RANK", "RANKS", "SLOTS", "HOST", "PEER", "FAILURE"];
    if mixed {
        header.insert(1, "RELEASE");
    }
    table(&header, &rows)
}

pub(crate) fn events_header() -> String {
    format!("{:<24} {:<6} {:<10} REASON", "TIME (UTC)", "ROUND", "STATE")
}

pub(crate) fn event_line(event: &EventRecord) -> String {
    let evicted: Vec<&str> = event.evicted.iter().map(|node| node.name()).collect();
    let evicted = if evicted.is_empty() { String::new() } else { format!(" (evicted: {})", evicted.join(", ")) };
    format!(
        "{:<24} {:<6} {:<10} {}{evicted}",
        utc(event.at_ms),
        event.round,
        event.state.to_string(),
        printable(&event.reason)
    )
}
