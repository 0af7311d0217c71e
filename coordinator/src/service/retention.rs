//! Which jobs that have ended are kept no longer: a pure function of their records. What deleting one takes is in
//! [`crate::removal`].
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{JobId, Phase};

/// How long jobs that have ended are kept. The default keeps all of them for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    /// Those that ended longer ago than this are deleted.
    pub keep: Option<Duration>,
    /// Of those that have ended, all but this many are deleted, those that ended first at first.
    pub count: Option<usize>,
}

impl Policy {
    /// Whether it deletes nothing, ever.
    pub fn keeps_all(self) -> bool {
        self.keep.is_none() && self.count.is_none()
    }
}

/// The jobs to be deleted, the one that ended first at first. `now_ms` is the wall clock's: milliseconds since the Unix
/// epoch.
///
/// A job counts once it has ended and no one is there: no node that is not done, and no leader, be it another replica
/// that still tidies up. One whose end no history tells is kept, and so is one of another protocol version.
pub fn expired(jobs: &BTreeMap<JobId, Job>, now_ms: u64, policy: Policy) -> Vec<JobId> {
    let mut ended: Vec<(u64, &JobId)> =
        jobs.iter().filter(|(_, job)| is_over(job)).filter_map(|(id, job)| Some((job.ended_ms()?, id))).collect();
    ended.sort_by_key(|(at, id)| (Reverse(*at), *id));
    let too_old = |at: u64| policy.keep.is_some_and(|keep| Duration::from_millis(now_ms.saturating_sub(at)) > keep);
    let too_many = |place: usize| policy.count.is_some_and(|count| place >= count);
    let gone = ended.iter().enumerate().filter(|(place, (at, _))| too_old(*at) || too_many(*place));
    gone.map(|(_, (_, id))| (*id).clone()).rev().collect()
}

fn is_over(job: &Job) -> bool {
    let ours = job.spec.is_some() && job.refusal().is_none();
    let nobody = job.leader.is_none() && job.nodes.values().all(|node| node.value.phase == Phase::Done);
    ours && nobody
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::overview::Overview;
    use elastic_rendezvous::job::samples;
    use elastic_store::KeyValue;

    const NOW: u64 = 1_000_000_000;
    const SPEC: &str = r#"{"protocol":1,"min_nodes":1,"max_nodes":2,"max_restarts":0,"exclude_after":0,"lease_ttl_ms":1,
        "last_call_ms":1,"join_timeout_ms":1,"start_timeout_ms":1,"stop_grace_ms":1,"drain_grace_ms":1,"margin_ms":1,
        "takeover_delay_ms":1,"min_round_time_ms":1}"#;
    const LEADER: &str = r#"{"node":"coordinator:2","peer":{"host":"h","port":2},"coordinator":true}"#;

    fn node(phase: &str) -> String {
        format!(
            r#"{{"name":"a","incarnation":"1","machine":"m","boot":"b","host":"h","peer":{{"host":"h","port":1}},
                "slots":1,"role":"default","phase":"{phase}","round":1}}"#
        )
    }

    /// A job's keys: its state, how many seconds ago it ended, and what else there is.
    fn job(id: &str, state: &str, ago: Option<u64>, more: &[(&str, &str)]) -> Vec<KeyValue> {
        let round = format!(r#"{{"number":1,"generation":1,"state":"{state}","reason":"r"}}"#);
        let mut keys = vec![("spec".to_owned(), SPEC.to_owned()), ("round".to_owned(), round)];
        if let Some(ago) = ago {
            // One line before its end, and its end.
            for (number, at) in [(1, 1), (2, NOW - ago * 1000)] {
                let event = format!(r#"{{"at_ms":{at},"round":1,"state":"{state}","reason":"r"}}"#);
                keys.push((format!("events/{number:012}"), event));
            }
        }
        keys.extend(more.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        keys.into_iter().map(|(key, value)| samples::stored(&format!("{id}/{key}"), value)).collect()
    }

    fn expire(jobs: &[Vec<KeyValue>], policy: Policy) -> Vec<String> {
        let overview = Overview::of("/elastic", &jobs.concat());
        expired(&overview.jobs, NOW, policy).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn age_and_count_say_what_goes_oldest_first() {
        let jobs = [
            job("young", "succeeded", Some(10), &[]),
            job("old", "failed", Some(100), &[]),
            job("older", "closed", Some(200), &[]),
            job("runs", "running", Some(300), &[]),
        ];
        let secs = |keep| Some(Duration::from_secs(keep));
        for (keep, count, gone) in [
            (None, None, &[][..]),
            (secs(200), None, &[]),
            (secs(199), None, &["older"]),
            (secs(50), None, &["older", "old"]),
            (secs(0), None, &["older", "old", "young"]),
            (None, Some(3), &[]),
            (None, Some(1), &["older", "old"]),
            (None, Some(0), &["older", "old", "young"]),
            (secs(150), Some(2), &["older"]),
            (secs(50), Some(3), &["older", "old"]),
        ] {
            assert_eq!(expire(&jobs, Policy { keep, count }), gone, "{keep:?} {count:?}");
        }
    }

    #[test]
    fn a_job_is_kept_where_somebody_is_there_or_its_end_is_not_known() {
        let everything = Policy { keep: None, count: Some(0) };
        let other_version = SPEC.replace(r#""protocol":1"#, r#""protocol":2"#);
        for (what, ago, more, goes) in [
            ("nothing more", Some(9), &[][..], true),
            ("a node that ended well", Some(9), &[("nodes/a:1", &node("done")[..])], true),
            ("a node that has not left", Some(9), &[("nodes/a:1", &node("running"))], false),
            ("another replica at work", Some(9), &[("leader", LEADER)], false),
            ("no history", None, &[], false),
            ("another version's", Some(9), &[("spec", &other_version)], false),
        ] {
            assert_eq!(!expire(&[job("J", "failed", ago, more)], everything).is_empty(), goes, "{what}");
        }
    }

    #[test]
    fn a_clock_that_is_behind_deletes_nothing_by_age() {
        let overview = Overview::of("/elastic", &job("J", "failed", Some(0), &[]));
        let policy = Policy { keep: Some(Duration::ZERO), count: None };
        assert!(expired(&overview.jobs, NOW - 5_000, policy).is_empty());
        assert_eq!(expired(&overview.jobs, NOW + 1, policy).len(), 1);
    }
}
