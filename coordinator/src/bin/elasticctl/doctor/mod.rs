//! `elasticctl doctor`: looks at what agents and coordinators depend on, and says what is wrong and what to type.
//!
//! | module | what it is |
//! |---|---|
//! | `look` | asks etcd's members, each by itself and within a bound of time |
//! | `etcd` | judges what they answered |
//! | `greet` | has a server show its certificate and its clock |
//! | `certificates`, `clocks` | judge these |
//! | `reach` | reads a job and tries its peers' ports |
//! | `job` | judges what was found of it |
//! | `finding` | the result, and its two printings |
//!
//! What judges is pure: it is given what was seen.

mod certificates;
mod clocks;
mod etcd;
pub(crate) mod finding;
mod greet;
mod job;
mod look;
mod reach;

use std::time::Duration;

use elastic_coordinator::flags::{PeerFlags, StoreFlags};
use elastic_store::clock::epoch_ms;

use self::finding::Finding;
use self::look::{Cluster, Endpoint};

/// Looks at etcd and, where one is named, at a job.
pub(crate) async fn examine(flags: &StoreFlags, peers: &PeerFlags, job: Option<&str>) -> Vec<Finding> {
    let cluster = match look::look(flags, peers).await {
        Ok(cluster) => cluster,
        Err(error) => {
            let unusable = Finding::failed("flags", "elasticctl", error.to_string());
            return vec![unusable.advise("correct the flag or the variable; elasticctl --help lists them")];
        }
    };
    let Some(id) = job else { return judge(&cluster, etcd::SMALLEST_LEASE) };
    match reach::look(flags, id).await {
        Ok(seen) => {
            let lease = seen.job.spec.as_ref().map_or(etcd::SMALLEST_LEASE, |spec| spec.timings.lease_ttl);
            let mut findings = judge(&cluster, lease);
            findings.extend(job::judge(&seen));
            findings.extend(greet::coordinator(&seen.job).await.map(|(at, clock)| clocks::judge(&at, &clock)));
            findings
        }
        Err(error) => {
            let mut findings = judge(&cluster, etcd::SMALLEST_LEASE);
            findings.push(job::unread(id, &error));
            findings
        }
    }
}

/// What is said of the store, and of the way to it.
fn judge(cluster: &Cluster, lease: Duration) -> Vec<Finding> {
    let mut findings = etcd::judge(cluster, lease);
    let greetings = cluster.endpoints.iter().filter_map(|endpoint| endpoint.greeting.as_ref());
    let shown = greetings.map(|greeting| &greeting.shown).chain(&cluster.files);
    findings.extend(shown.flat_map(|shown| certificates::judge(shown, epoch_ms())));
    // Why one that does not answer tells no time either, is said already.
    let clock = |endpoint: &Endpoint| {
        let clock = &endpoint.greeting.as_ref()?.clock;
        let answers = endpoint.answers.as_ref().is_some_and(Result::is_ok);
        (clock.is_ok() || answers).then(|| clocks::judge(&endpoint.address, clock))
    };
    findings.extend(cluster.endpoints.iter().filter_map(clock));
    findings
}
