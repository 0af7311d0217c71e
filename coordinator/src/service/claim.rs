//! Which jobs a replica of the coordinator leads: a pure function of a job's records.

use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{LeaderRecord, RoundRecord, RoundState};
use elastic_store::{Guard, Revision};

/// What to do about a job's `leader` key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    /// Nothing.
    Leave,
    /// Write it, if these guards hold.
    Claim(Vec<Guard>),
    /// Delete it, if it is still of this term: there is nothing left to lead.
    Resign(Revision),
}

/// The next move, for the replica that writes `own`.
///
/// Where no one leads, it claims at once. Where an agent leads, it lets the agent finish a round that is forming: to
/// take over then would cost the job a new plan. A paused job forms its round for as long as the pause lasts, so there
/// it does not wait. Another replica is left alone: there is nothing to gain. A job whose nodes speak TLS where this
/// replica does not, or the other way round, is left to its agents: they could not reach it.
pub fn next(job: &Job, own: &LeaderRecord, tls: bool) -> Move {
    let key = job.keys.leader();
    let wanted = job.is_live() && job.unlike(tls).is_none();
    let Some(leader) = &job.leader else {
        return if wanted { Move::Claim(vec![Guard::modified(key, job.vacant)]) } else { Move::Leave };
    };
    if leader.value.node == own.node {
        return if wanted { Move::Leave } else { Move::Resign(leader.modified) };
    }
    let stays = |round: &RoundRecord| round.state == RoundState::Running || round.paused;
    match &job.round {
        Some(round) if wanted && stays(&round.value) && !leader.value.coordinator => {
            let term = Guard::modified(key, leader.modified);
            Move::Claim(vec![term, Guard::modified(job.keys.round(), round.modified)])
        }
        _ => Move::Leave,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::overview::Overview;
    use elastic_rendezvous::job::{Endpoint, JobId, NodeId, samples};
    use elastic_store::KeyValue;

    const SPEC: &str = r#"{"protocol":1,"min_nodes":1,"max_nodes":2,"max_restarts":0,"exclude_after":0,
        "lease_ttl_ms":10000,"last_call_ms":1,"join_timeout_ms":1,"start_timeout_ms":1,"stop_grace_ms":1,
        "drain_grace_ms":1,"margin_ms":1,"takeover_delay_ms":1,"min_round_time_ms":1}"#;

    fn record(node: &str, port: u16, coordinator: bool) -> LeaderRecord {
        LeaderRecord::new(NodeId::from_text(node), Endpoint { host: "h".into(), port }, coordinator)
    }

    fn own() -> LeaderRecord {
        record("coordinator:1", 1, true)
    }

    /// A job with this round state and leader; the leader's term is 3, the round's revision 2.
    fn job(state: &str, leader: Option<LeaderRecord>) -> Job {
        let id: JobId = "J".parse().unwrap();
        let (state, paused) = if state == "paused" { ("forming", true) } else { (state, false) };
        let round = format!(r#"{{"number":1,"generation":1,"state":"{state}","paused":{paused},"reason":"r"}}"#);
        let leader = leader.map(|leader| ("J/leader", serde_json::to_string(&leader).unwrap(), 3));
        let values = [("J/spec", SPEC.to_owned(), 1), ("J/round", round, 2)].into_iter().chain(leader);
        let stored = |(key, value, at): (&str, String, i64)| {
            let at = Revision(at);
            KeyValue { create_revision: at, mod_revision: at, ..samples::stored(key, value) }
        };
        let values: Vec<_> = values.map(stored).collect();
        Overview::of("/elastic", &values).jobs.remove(&id).unwrap()
    }

    #[test]
    fn a_job_without_a_leader_is_claimed_unless_it_has_ended() {
        let absent = Move::Claim(vec![Guard::modified(job("forming", None).keys.leader(), Revision::NONE)]);
        assert_eq!(next(&job("forming", None), &own(), false), absent);
        assert_eq!(next(&job("running", None), &own(), false), absent);
        assert_eq!(next(&job("succeeded", None), &own(), false), Move::Leave);
    }

    #[test]
    fn an_agent_is_relieved_while_the_round_runs_or_is_paused_and_not_while_it_forms() {
        let agent = record("a:1", 9, false);
        let running = job("running", Some(agent.clone()));
        let guards = vec![
            Guard::modified(running.keys.leader(), Revision(3)),
            Guard::modified(running.keys.round(), Revision(2)),
        ];
        assert_eq!(next(&running, &own(), false), Move::Claim(guards.clone()));
        assert_eq!(
            next(&job("paused", Some(agent.clone())), &own(), false),
            Move::Claim(guards),
            "while the job is paused"
        );
        assert_eq!(next(&job("forming", Some(agent)), &own(), false), Move::Leave);
    }

    #[test]
    fn another_replica_is_left_alone() {
        for port in [own().peer.port, 2] {
            assert_eq!(next(&job("running", Some(record("coordinator:2", port, true))), &own(), false), Move::Leave);
        }
    }

    #[test]
    fn a_job_of_another_protocol_version_is_left_alone() {
        let mut job = job("running", None);
        job.protocol.as_mut().unwrap().version += 1;
        assert_eq!(next(&job, &own(), false), Move::Leave);
    }

    #[test]
    fn a_job_is_led_only_where_both_speak_tls_or_neither() {
        for (theirs, ours, led) in
            [(false, false, true), (true, true, true), (true, false, false), (false, true, false)]
        {
            let mut job = job("running", None);
            job.spec.as_mut().unwrap().peer_tls = theirs;
            assert_eq!(next(&job, &own(), ours) != Move::Leave, led, "{theirs} {ours}");
        }
    }

    #[test]
    fn an_ended_job_is_let_go() {
        assert_eq!(next(&job("running", Some(own())), &own(), false), Move::Leave);
        assert_eq!(next(&job("failed", Some(own())), &own(), false), Move::Resign(Revision(3)));
    }
}
