//! Which jobs a node joins, and as what.

use super::*;
use crate::job::{Protocols, Release};

#[test]
fn a_newcomer_joins_a_job_whose_operators_record_cannot_be_read() {
    for flags in [3, 2] {
        let mut setup = setup();
        setup.spec.max_nodes = flags;
        let mut member = Member::new(setup);
        let _asks = member.step(NOW, MemberInput::Tick);
        let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
        let rubbish = kv(keys().desired(), "rubbish", 8, 8, None);
        let out = member
            .step(NOW, answer(Call::Join, true, 10, vec![Some(spec), Some(round(3, 3, forming())), Some(rubbish)]));
        assert!(out.iter().any(|output| matches!(output, MemberOutput::Grant(_))), "max_nodes {flags}: {out:?}");
    }
}

#[test]
fn a_place_comes_with_the_jobs_own_spec() {
    let mut setup = setup();
    (setup.spec.max_restarts, setup.spec.timings.start_timeout) = (7, Duration::from_secs(1));
    let job: Spec = serde_json::from_value(spec()).unwrap();
    let wish = kv(keys().desired(), r#"{"max_nodes":3}"#, 4, 4, None);
    let (_, start) = placed(setup, sealed_round(), Some(wish));
    assert_eq!(start.spec, job);
}

#[test]
fn a_newcomer_that_cannot_be_heard_is_refused_whatever_an_operator_has_changed() {
    for (theirs, ours) in [(false, true), (true, false), (true, true)] {
        let mut setup = setup();
        setup.spec.peer_tls = ours;
        let mut member = Member::new(setup);
        let _asks = member.step(NOW, MemberInput::Tick);
        let mut job = spec();
        job["peer_tls"] = theirs.into();
        let read = [
            kv(keys().spec(), &job.to_string(), 2, 2, None),
            round(3, 3, forming()),
            kv(keys().desired(), r#"{"max_nodes":3}"#, 4, 4, None),
        ];
        let out = member.step(NOW, answer(Call::Join, true, 10, read.map(Some).to_vec()));
        let refused = out
            .iter()
            .any(|output| matches!(output, MemberOutput::End(End::Refused(why)) if why.starts_with("--peer-cert is ")));
        assert_eq!(refused, theirs != ours, "{theirs} {ours}: {out:?}");
    }
}

#[test]
fn a_job_of_another_protocol_is_left_alone_while_it_lives() {
    let ours = Release { version: "0.1.0".into(), protocols: Protocols { oldest: 1, newest: 2 } };
    let joins = |protocol: u32, state: &str, nodes: i64| {
        let mut setup = setup();
        (setup.spec.protocol, setup.spec.release) = (2, Some(ours.clone()));
        let mut member = Member::new(setup);
        let _asks = member.step(NOW, MemberInput::Tick);
        // Of a later version no one knows what else is there; and an operator's wish excuses nothing.
        let mut job = if protocol > 2 { json!({}) } else { spec() };
        job["protocol"] = protocol.into();
        let mut round_record = forming();
        round_record["state"] = state.into();
        let read = [
            kv(keys().spec(), &job.to_string(), 2, 2, None),
            round(3, 3, round_record),
            kv(keys().desired(), r#"{"max_nodes":3}"#, 4, 4, None),
        ];
        let mut results: Vec<_> = read.into_iter().map(|kv| OpResult::Values(vec![kv])).collect();
        results.extend([OpResult::Values(vec![]), OpResult::Count(nodes)]);
        let result = Ok(TxnResult { succeeded: true, revision: Revision(10), results });
        member.step(NOW, MemberInput::Answered { call: Call::Join, sent: NOW, result })
    };
    let ended = |out: &[MemberOutput]| {
        out.iter().find_map(|output| if let MemberOutput::End(end) = output { Some(end.clone()) } else { None })
    };
    // The older one is joined, and spoken.
    assert!(joins(1, "forming", 1).iter().any(|output| matches!(output, MemberOutput::Grant(_))));
    // A newer one is not, whatever else holds.
    for (state, nodes) in [("forming", 1), ("running", 0), ("failed", 1)] {
        let out = joins(3, state, nodes);
        let Some(End::Refused(why)) = ended(&out) else { panic!("{state}: {out:?}") };
        assert!(why.contains("protocol version 3") && why.contains("0.1.0 (protocol 1 and 2)"), "{why}");
        assert!(!out.iter().any(|output| matches!(output, MemberOutput::Txn(..) | MemberOutput::Grant(_))), "{out:?}");
    }
    assert_eq!(ended(&joins(3, "succeeded", 1)), Some(End::Succeeded));
    assert_eq!(ended(&joins(3, "closed", 0)), Some(End::Closed));
    // After a failure, once no one is left, it begins the next generation, by its own newest.
    let out = joins(3, "failed", 0);
    let begun = out.iter().find_map(|output| match output {
        MemberOutput::Txn(Call::Begin, txn) => Some(format!("{txn:?}")),
        _ => None,
    });
    assert!(begun.is_some(), "{out:?}");
}

#[test]
fn a_node_that_waits_for_others_ends_when_the_store_is_silent_for_join_timeout() {
    let down = || StoreError::Unavailable { endpoints: "e".into(), cause: "refused".into() };
    // Given a node without workers, after whose last lease the store answers nothing
    let (mut member, mut out) = joined(None);
    let over = NOW + Duration::from_secs(60);
    while let Some(at) = member.deadline().filter(|_| !member.is_over()) {
        assert!(!member.is_stuck() && at <= over, "{at:?}");
        let asked: Vec<MemberInput> = out
            .iter()
            .filter_map(|output| match output {
                MemberOutput::Txn(call, _) => {
                    Some(MemberInput::Answered { call: *call, sent: at, result: Err(down()) })
                }
                MemberOutput::Renew(lease) => {
                    Some(MemberInput::Renewed { sent: at, lease: *lease, result: Err(down()) })
                }
                MemberOutput::Grant(_) => Some(MemberInput::Leased { sent: at, result: Err(down()) }),
                _ => None,
            })
            .collect();
        out = asked.into_iter().flat_map(|answer| member.step(at, answer)).collect();
        out.extend(member.step(at, MemberInput::Tick));
    }
    // then it ends
    let end = out.iter().find_map(|output| match output {
        MemberOutput::End(End::StoreLost(why)) => Some(why.as_str()),
        _ => None,
    });
    assert!(end.is_some_and(|why| why.contains("gave up after join_timeout")), "{out:?}");
}

#[test]
fn a_node_that_cannot_join_in_time_ends_with_the_reason_and_does_not_hang() {
    for answers in ["none", "late", "failures"] {
        // Given a node whose read of the job is under way, or fails
        let mut member = Member::new(setup());
        let mut out = member.step(NOW, MemberInput::Tick);
        assert!(matches!(out[..], [MemberOutput::Txn(Call::Join, _)]), "{out:?}");
        let failed = || MemberInput::Answered {
            call: Call::Join,
            sent: NOW,
            result: Err(StoreError::Unavailable { endpoints: "e".into(), cause: "refused".into() }),
        };
        if answers == "failures" {
            member.step(NOW, failed());
        }
        // when join_timeout is over
        let over = NOW + Duration::from_secs(60);
        while let Some(at) = member.deadline().filter(|_| !member.is_over()) {
            assert!(!member.is_stuck() && at <= over, "{answers}: {at:?}");
            let late = answers == "late" && at == over;
            out = member.step(at, if late { failed() } else { MemberInput::Tick });
            if answers == "failures" && out.iter().any(|output| matches!(output, MemberOutput::Txn(..))) {
                member.step(at, failed());
            }
        }
        // then it ends
        let end = out.iter().find_map(|output| match output {
            MemberOutput::End(End::StoreLost(why)) => Some(why.as_str()),
            _ => None,
        });
        assert!(end.is_some_and(|why| why.contains("gave up after join_timeout")), "{answers}: {out:?}");
    }
}

#[test]
fn a_newcomer_asks_a_slow_store_for_its_lease_later() {
    for (answered_in_ms, waits) in [(0, false), (999, false), (1_000, true)] {
        // Given a node that reads the job, which takes so long
        let mut member = Member::new(setup());
        let _asks = member.step(NOW, MemberInput::Tick);
        let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
        let answered = NOW + Duration::from_millis(answered_in_ms);
        let read = answer(Call::Join, true, 10, vec![Some(spec), Some(round(3, 3, forming()))]);
        let mut out = member.step(answered, read);
        let asks = |out: &[MemberOutput]| out.iter().any(|output| matches!(output, MemberOutput::Grant(_)));
        // then it asks for a lease at once, or within as long
        assert_eq!(!asks(&out), waits, "{answered_in_ms}");
        let mut now = answered;
        while !asks(&out) {
            now = member.deadline().unwrap();
            out = member.step(now, MemberInput::Tick);
        }
        assert!(now.since(answered) <= Duration::from_millis(answered_in_ms), "{answered_in_ms}: {now:?}");
    }
}
