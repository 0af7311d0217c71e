//! How long leases last, and when one is exchanged.

use super::super::timers::Timer;
use super::*;

const TTL: Duration = Duration::from_secs(10);

fn asked(out: &[MemberOutput]) -> Option<Duration> {
    out.iter().find_map(|output| if let MemberOutput::Grant(ttl) = output { Some(*ttl) } else { None })
}

#[test]
fn a_newcomer_asks_a_slow_store_later_and_for_a_longer_lease() {
    for (answered_in_ms, ttl, waits) in [(0, TTL, false), (999, TTL, false), (1_000, 3 * TTL, true)] {
        // Given a node that reads the job, which takes so long
        let mut member = Member::new(setup());
        let _asks = member.step(NOW, MemberInput::Tick);
        let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
        let answered = NOW + Duration::from_millis(answered_in_ms);
        let read = answer(Call::Join, true, 10, vec![Some(spec), Some(round(3, 3, forming()))]);
        let mut out = member.step(answered, read);
        // then it asks at once for a lease as the job has them, or within as long for one of thrice that
        assert_eq!(asked(&out).is_none(), waits, "{answered_in_ms}");
        let mut now = answered;
        while asked(&out).is_none() {
            now = member.deadline().unwrap();
            out = member.step(now, MemberInput::Tick);
        }
        assert_eq!(asked(&out), Some(ttl), "{answered_in_ms}");
        assert!(now.since(answered) <= Duration::from_millis(answered_in_ms), "{answered_in_ms}: {now:?}");
        // and renews it as often as it needs that
        out = member.step(now, MemberInput::Leased { sent: now, result: Ok(LeaseId(7)) });
        assert!(!out.contains(&MemberOutput::Renew(LeaseId(7))));
        assert_eq!(member.timers.get(Timer::Lease), Some(now + ttl / 5), "{answered_in_ms}");
    }
}

/// Carries a member on, whose leases and records the store keeps and whose leader is `b`, for a minute: which leases it
/// asked for and which it renewed, each with how many seconds had passed. The first `failing` requests fail.
fn carried(member: &mut Member, mut failing: u32) -> (Vec<(u64, Duration)>, Vec<(u64, LeaseId)>, Vec<Option<LeaseId>>) {
    let leader = json!({ "node": "b:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let leader = kv(keys().leader(), &leader, 9, 9, Some(LeaseId(9)));
    let (mut grants, mut renewals, mut on) = (Vec::new(), Vec::new(), Vec::new());
    let (mut now, mut revision) = (NOW, 20);
    while now < NOW + Duration::from_secs(60) {
        let mut out = member.step(now, MemberInput::Tick);
        while let Some(output) = out.pop() {
            let passed = now.since(NOW).as_secs();
            out.extend(match output {
                MemberOutput::Grant(ttl) => {
                    grants.push((passed, ttl));
                    let failed = StoreError::Unavailable { endpoints: "e".into(), cause: "away".into() };
                    let fails = failing > 0;
                    failing = failing.saturating_sub(1);
                    let result = if fails { Err(failed) } else { Ok(LeaseId(8)) };
                    member.step(now, MemberInput::Leased { sent: now, result })
                }
                MemberOutput::Renew(lease) => {
                    renewals.push((passed, lease));
                    member.step(now, MemberInput::Renewed { sent: now, lease, result: Ok(true) })
                }
                MemberOutput::Txn(call, txn) => {
                    on.extend(txn.then.iter().filter_map(|op| match op {
                        crate::kv::Op::Put { lease, .. } => Some(*lease),
                        _ => None,
                    }));
                    revision += 1;
                    let read = vec![Some(round(3, 12, sealed_round())), Some(leader.clone())];
                    let MemberInput::Answered { result, .. } = answer(call, true, revision, read) else { continue };
                    member.step(now, MemberInput::Answered { call, sent: now, result })
                }
                _ => continue,
            });
        }
        now = now + Duration::from_millis(500);
    }
    (grants, renewals, on)
}

#[test]
fn a_longer_lease_is_exchanged_for_a_usual_one_while_the_node_runs() {
    for (what, failing, first) in [("the store grants it", 0, 30), ("it is away at first", 1, 30)] {
        // Given a node that runs on the longer lease that it came with
        let mut member = running();
        member.lasts = 3 * TTL;
        let (grants, renewals, on) = carried(&mut member, failing);
        // then it asks for another once that is as old as it lasts, and its key moves to that
        assert_eq!(grants.first(), Some(&(first, TTL)), "{what}");
        assert_eq!(grants.len(), 1 + failing as usize, "{what}: {grants:?}");
        assert!(on.contains(&Some(LeaseId(8))), "{what}: {on:?}");
        assert_eq!(renewals.last().map(|(_, lease)| *lease), Some(LeaseId(8)), "{what}");
        // and until then the old one is renewed as any, also where the store was away meanwhile
        let old = renewals.iter().filter(|(_, lease)| *lease == LeaseId(7)).count();
        assert!(old >= 14, "{what}: {renewals:?}");
        assert_eq!(member.mode_name(), "running", "{what}");
    }
    for (what, changes) in [
        ("a usual lease", (|member: &mut Member| member.lasts = TTL) as fn(&mut Member)),
        ("a leader, on whose lease its other key hangs too", |member: &mut Member| {
            member.leadership.own_term = Some(Revision(9));
        }),
    ] {
        let mut member = running();
        member.lasts = 3 * TTL;
        changes(&mut member);
        let (grants, ..) = carried(&mut member, 0);
        assert!(grants.is_empty(), "{what}: {grants:?}");
    }
}
