//! Which job a spare host should go to: a pure function of what the jobs' records say and the time. It claims, starts
//! and stops nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::{JobId, Vacancy};
use elastic_rendezvous::time::Time;

/// How long a job must lack a node before an idle host goes there: an agent that is started again by its supervisor is
/// back sooner.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// How long a job must be below its minimum before a host that is at work leaves another for it: idle ones go first.
pub(super) const YIELD: Duration = Duration::from_secs(5);

/// What is known of one job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Standing {
    /// Its room for this host; none if there is nothing to do there.
    pub(super) vacancy: Option<Vacancy>,
    /// Whether this host's node has a place there, or may get one in the round that forms.
    pub(super) placed: bool,
    /// Since when there has been a place that no other spare host has claimed.
    open_since: Option<Time>,
    /// Since when there has been one without which the job cannot run.
    short_since: Option<Time>,
    /// Not to go there before this time: its agent has failed here.
    pub(super) not_before: Option<Time>,
}

impl Standing {
    /// Takes in what the job's records say now.
    pub(super) fn saw(&mut self, now: Time, own: &str, vacancy: Option<Vacancy>, placed: bool) {
        let since = |before: Option<Time>, open: bool| if open { before.or(Some(now)) } else { None };
        self.open_since = since(self.open_since, vacancy.as_ref().is_some_and(|job| ahead(job, own) < job.places()));
        self.short_since = since(self.short_since, vacancy.as_ref().is_some_and(|job| ahead(job, own) < job.short()));
        (self.vacancy, self.placed) = (vacancy, placed);
    }

    /// When this host may go there for a place that has been open since then.
    fn due(&self, since: Option<Time>, patience: Duration) -> Option<Time> {
        let due = since? + patience;
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }
}

/// How many spare hosts have claimed a place before this one.
fn ahead(vacancy: &Vacancy, own: &str) -> usize {
    vacancy.coming.iter().position(|spare| spare == own).unwrap_or(vacancy.coming.len())
}

/// Whether a claim holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// The store does not show it yet.
    Unseen,
    /// There is a place for this host.
    Holds,
    /// Others were first, or the place is taken.
    Lost,
}

/// What has become of this host's claim.
pub(super) fn claim(standing: &Standing, own: &str) -> ClaimState {
    match &standing.vacancy {
        None => ClaimState::Lost,
        Some(vacancy) if !vacancy.coming.iter().any(|spare| spare == own) => ClaimState::Unseen,
        Some(vacancy) if ahead(vacancy, own) < vacancy.places() => ClaimState::Holds,
        Some(_) => ClaimState::Lost,
    }
}

/// What a spare host should do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// Go to this job, for this reason.
    Go(JobId, String),
    /// Stay, and look again at this time, if one is named.
    Stay(Option<Time>),
}

/// Where a host that is at work in the job `at`, or idle, should go.
///
/// Jobs below their minimum come first, then those of higher priority. A host that waits in a full job goes wherever
/// it is of use. One that has a place leaves it only for a job below its minimum: one of higher priority; or of the
/// same, if the job that it leaves keeps its minimum.
pub(super) fn choose(now: Time, jobs: &BTreeMap<JobId, Standing>, at: Option<&JobId>) -> Choice {
    if at.is_some_and(|job| !jobs.contains_key(job)) {
        // Its file is gone. What it does there it does to the end.
        return Choice::Stay(None);
    }
    let held = at.and_then(|job| jobs.get(job)).filter(|held| held.placed);
    let others = jobs.iter().filter(|(job, _)| Some(*job) != at);
    let due = |standing: &Standing| match held {
        None => standing.due(standing.open_since, SETTLE),
        Some(held) if may_leave(held, standing) => standing.due(standing.short_since, YIELD),
        Some(_) => None,
    };
    let due: Vec<(Time, &JobId, &Standing)> =
        others.filter_map(|(job, standing)| Some((due(standing)?, job, standing))).collect();
    let rank = |standing: &Standing| {
        let priority = standing.vacancy.as_ref().map_or(0, |vacancy| vacancy.priority);
        (standing.short_since.is_some(), priority)
    };
    let ready = due.iter().filter(|(at, ..)| *at <= now);
    // Of equals the first by its id: `max_by_key` takes the last.
    match ready.rev().max_by_key(|(_, _, standing)| rank(standing)) {
        Some((_, job, standing)) => Choice::Go((*job).clone(), reason(standing)),
        None => Choice::Stay(due.iter().map(|(at, ..)| *at).min()),
    }
}

/// Whether a host may leave the job where it has a place for another one, if that cannot run.
fn may_leave(held: &Standing, other: &Standing) -> bool {
    let (Some(held), Some(other)) = (&held.vacancy, &other.vacancy) else { return false };
    let keeps_minimum = held.here >= held.min;
    other.priority > held.priority || other.priority == held.priority && keeps_minimum
}

fn reason(standing: &Standing) -> String {
    match &standing.vacancy {
        Some(Vacancy { here, min, .. }) if here < min => format!("it has {here} of at least {min} nodes"),
        Some(Vacancy { here, max, .. }) => format!("it has {here} of {max} nodes"),
        None => "it has ended".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "spare";

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    /// A job of 2 to 4 nodes that has had so many nodes, and these claims, since second 0.
    fn job(here: u32, priority: i32, coming: &[&str]) -> Standing {
        let coming = coming.iter().map(ToString::to_string).collect();
        let mut standing = Standing::default();
        standing.saw(at(0), OWN, Some(Vacancy { priority, min: 2, max: 4, here, coming }), false);
        standing
    }

    fn placed(standing: Standing) -> Standing {
        Standing { placed: true, ..standing }
    }

    fn goes(now: u64, jobs: Vec<Standing>, in_first: bool) -> Option<usize> {
        let names: Vec<JobId> = (0..jobs.len()).map(|number| format!("job-{number}").parse().unwrap()).collect();
        let jobs: BTreeMap<JobId, Standing> = names.iter().cloned().zip(jobs).collect();
        match choose(at(now), &jobs, names.first().filter(|_| in_first)) {
            Choice::Go(job, _) => names.iter().position(|name| *name == job),
            Choice::Stay(_) => None,
        }
    }

    #[test]
    fn an_idle_host_goes_where_a_node_is_lacking() {
        let full = || job(4, 9, &[]);
        for (what, jobs, goes_to) in [
            ("no job lacks a node", vec![full(), full()], None),
            ("one has room", vec![full(), job(3, 0, &[])], Some(1)),
            ("another spare is on its way for that place", vec![full(), job(3, 0, &["other"])], None),
            ("there is room for both", vec![full(), job(2, 0, &["other"])], Some(1)),
            ("below the minimum is before room", vec![job(3, 9, &[]), job(1, 0, &[])], Some(1)),
            ("then the priority decides", vec![job(1, 0, &[]), job(1, 5, &[]), job(1, 5, &[])], Some(1)),
            (
                "a spare is on its way to the short one, and it has room",
                vec![job(1, 0, &["o"]), job(3, 9, &[])],
                Some(1),
            ),
            ("the job has ended", vec![Standing::default()], None),
        ] {
            assert_eq!(goes(1, jobs, false), goes_to, "{what}");
        }
    }

    #[test]
    fn it_waits_whether_the_lost_node_comes_back() {
        let jobs = BTreeMap::from([("J".parse().unwrap(), job(3, 0, &[]))]);
        assert_eq!(choose(at(0), &jobs, None), Choice::Stay(Some(at(1))));
        assert_eq!(choose(at(1), &jobs, None), Choice::Go("J".parse().unwrap(), "it has 3 of 4 nodes".into()));
        let mut back = job(3, 0, &[]);
        let full = back.vacancy.clone().map(|vacancy| Vacancy { here: 4, ..vacancy });
        back.saw(at(1), OWN, full, false);
        let lost_again = back.vacancy.clone().map(|vacancy| Vacancy { here: 3, ..vacancy });
        back.saw(at(3), OWN, lost_again, false);
        assert_eq!(goes(3, vec![back], false), None, "its time begins again");
    }

    #[test]
    fn a_host_with_a_place_leaves_it_only_for_a_job_that_cannot_run() {
        for (what, held, other, leaves) in [
            ("room is no reason", job(4, 0, &[]), job(3, 9, &[]), false),
            ("the other cannot run, and this job keeps its minimum", job(2, 0, &[]), job(1, 0, &[]), true),
            ("both would be short", job(1, 0, &[]), job(1, 0, &[]), false),
            ("the other is more important", job(1, 0, &[]), job(1, 1, &[]), true),
            ("the other is less important", job(3, 1, &[]), job(1, 0, &[]), false),
            ("an idle host is on its way", job(3, 0, &[]), job(1, 9, &["idle"]), false),
        ] {
            assert_eq!(goes(5, vec![placed(held.clone()), other.clone()], true), leaves.then_some(1), "{what}");
            assert_eq!(goes(4, vec![placed(held), other], true), None, "{what}: idle hosts go first");
        }
    }

    #[test]
    fn a_host_that_waits_in_a_full_job_goes_where_it_is_of_use() {
        assert_eq!(goes(1, vec![job(4, 9, &[]), job(3, 0, &[])], true), Some(1));
    }

    #[test]
    fn it_ends_what_it_does_in_a_job_whose_file_is_gone() {
        let jobs = BTreeMap::from([("J".parse().unwrap(), job(1, 0, &[]))]);
        assert_eq!(choose(at(9), &jobs, Some(&"gone".parse().unwrap())), Choice::Stay(None));
    }

    #[test]
    fn it_stays_away_from_a_job_whose_agent_failed_here() {
        let failed = Standing { not_before: Some(at(30)), ..job(1, 9, &[]) };
        assert_eq!(goes(29, vec![failed.clone(), job(3, 0, &[])], false), Some(1));
        assert_eq!(goes(30, vec![failed, job(3, 0, &[])], false), Some(0));
    }

    #[test]
    fn of_claims_the_first_hold() {
        for (coming, held) in [
            (&[][..], ClaimState::Unseen),
            (&["spare"], ClaimState::Holds),
            (&["a", "spare"], ClaimState::Holds),
            (&["a", "b", "spare"], ClaimState::Lost),
        ] {
            assert_eq!(claim(&job(2, 0, coming), OWN), held, "{coming:?}");
        }
        assert_eq!(claim(&Standing::default(), OWN), ClaimState::Lost, "the job has ended");
    }
}
