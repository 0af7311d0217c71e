//! `elasticctl doctor`: looks at what agents and coordinators depend on, and says what is wrong and what to type.
//!
//! | module | what it is |
//! |---|---|
//! | `look` | asks etcd's members, each by itself and within a bound of time |
//! | `etcd` | judges what they answered |
//! | `reach` | reads a job and tries its peers' ports |
//! | `job` | judges what was found of it |
//! | `finding` | the result, and its two printings |
//!
//! What judges is pure: it is given what was seen.

mod etcd;
pub(crate) mod finding;
mod job;
mod look;
mod reach;

use elastic_coordinator::flags::StoreFlags;

use self::finding::{Finding, State};

/// Looks at etcd and, where one is named, at a job.
pub(crate) async fn examine(flags: &StoreFlags, job: Option<&str>) -> Vec<Finding> {
    let cluster = match look::look(flags).await {
        Ok(cluster) => cluster,
        Err(error) => {
            let unusable = Finding::new(State::Failed, "flags", "elasticctl", error.to_string());
            return vec![unusable.advise("correct the flag or the variable; elasticctl --help lists them")];
        }
    };
    let Some(id) = job else { return etcd::judge(&cluster, etcd::SMALLEST_LEASE) };
    match reach::look(flags, id).await {
        Ok(seen) => {
            let lease = seen.job.spec.as_ref().map_or(etcd::SMALLEST_LEASE, |spec| spec.timings.lease_ttl);
            let mut findings = etcd::judge(&cluster, lease);
            findings.extend(job::judge(&seen));
            findings
        }
        Err(error) => {
            let mut findings = etcd::judge(&cluster, etcd::SMALLEST_LEASE);
            findings.push(job::unread(id, &error));
            findings
        }
    }
}
