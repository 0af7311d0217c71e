//! Rules of a node, each with the case that needs it.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn seconds(seconds: u32) -> Time {
    NOW + SECOND * seconds
}

/// An answer to what was sent at this time.
fn sent_at(sent: Time, input: MemberInput) -> MemberInput {
    match input {
        MemberInput::Answered { call, result, .. } => MemberInput::Answered { call, sent, result },
        other => other,
    }
}

#[test]
fn the_word_of_a_round_in_which_this_node_may_be_evicted_proves_nothing() {
    let mut member = running();
    let proven = member.proofs.round;
    let forms = json!({
        "number": 2, "generation": 1, "state": "forming", "sealed": { "number": 1, "plan": 3, "nodes": 1 }, "reason": "r",
    });
    // Given a round that forms, known from the watch, before its record was read
    member.step(seconds(1), news(round(3, 20, forms)));
    let (proof_age, all_heard) = (Duration::ZERO, None);
    let word = Word { round: 2, revision: Revision(20), running: false, proof_age, all_heard };
    let hears = MemberInput::Word { sent: seconds(2), term: Revision(9), word };
    member.step(seconds(2), hears);
    assert_eq!(member.proofs.round, proven);
}

/// A node whose round was sealed just now, and the store's answer with its place.
fn sealed() -> (Member, MemberInput) {
    let (mut member, _) = joined_to(setup(), forming(), None, None);
    member.step(NOW, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), None]));
    member.step(NOW, news(round(3, 12, sealed_round())));
    let rank = json!({
        "group_rank": 0, "first_rank": 0, "slots": 1, "role_rank_base": 0, "role_world_size": 1, "name": "a",
        "machine": "a", "boot": "b", "peer": { "host": "h", "port": 1 },
    });
    let rank = kv(keys().rank(1, Revision(3), &member.id()), &rank.to_string(), 12, 12, None);
    let seat = answer(Call::Seat, true, 13, vec![Some(round(3, 12, sealed_round())), Some(rank)]);
    (member, seat)
}

#[test]
fn workers_are_not_started_where_the_proofs_are_too_old() {
    for (at, starts) in [(1, true), (9, false)] {
        let (mut member, seat) = sealed();
        let out = member.step(seconds(at), sent_at(seconds(at), seat));
        let started = out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::Start(_))));
        assert_eq!(started, starts, "{at} s: {out:?}");
    }
}

#[test]
fn a_lease_counts_from_when_it_was_asked_for() {
    let mut member = Member::new(setup());
    member.step(NOW, MemberInput::Tick);
    let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
    member.step(NOW, answer(Call::Join, true, 10, vec![Some(spec), Some(round(3, 3, forming()))]));
    member.step(seconds(4), MemberInput::Leased { sent: NOW, result: Ok(LeaseId(7)) });
    member.step(seconds(4), answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), None]));
    assert_eq!(member.proofs.leased, NOW);
}

#[test]
fn a_generation_begins_only_where_no_node_is_left() {
    let mut member = Member::new(setup());
    member.step(NOW, MemberInput::Tick);
    let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
    let failed = json!({ "number": 4, "generation": 1, "state": "failed", "reason": "r" });
    let read = vec![Some(spec), Some(round(3, 9, failed))];
    let mut read = match answer(Call::Join, true, 10, read) {
        MemberInput::Answered { result: Ok(result), .. } => result,
        other => panic!("{other:?}"),
    };
    // The leader, then how many nodes there are, as far as this read tells.
    read.results.extend([OpResult::Values(vec![]), OpResult::Values(vec![]), OpResult::Count(0)]);
    let out = member.step(NOW, MemberInput::Answered { call: Call::Join, sent: NOW, result: Ok(read) });
    let begins = out.iter().find_map(|output| match output {
        MemberOutput::Txn(Call::Begin, txn) => Some(txn),
        _ => None,
    });
    let begins = begins.expect("it begins one");
    assert!(begins.when.contains(&crate::kv::Guard::empty(keys().nodes())), "{out:?}");
    let round = begins.then.iter().find_map(|op| match op {
        crate::kv::Op::Put { key, value, .. } if *key == keys().round() => serde_json::from_slice(value).ok(),
        _ => None,
    });
    assert_eq!(round.map(|round: RoundRecord| (round.generation, round.begins_generation)), Some((2, true)));
}

#[test]
fn a_node_that_missed_a_round_is_no_member_any_more() {
    let forms = |number: u64, sealed: u64| {
        let sealed = json!({ "number": sealed, "plan": 3, "nodes": 1 });
        news(round(
            3,
            20,
            json!({
                "number": number, "generation": 1, "state": "forming", "sealed": sealed, "reason": "r",
            }),
        ))
    };
    for (number, sealed, killed) in [(2, 1, false), (3, 2, true)] {
        let out = running().step(NOW, forms(number, sealed));
        assert_eq!(out.contains(&Command::Kill.into()), killed, "{number}: {out:?}");
    }
}

/// Round 2 forms; round 1 was sealed by this plan.
fn second_forms(modified: i64, plan: i64) -> KeyValue {
    let sealed = json!({ "number": 1, "plan": plan, "nodes": 1 });
    let record = json!({ "number": 2, "generation": 1, "state": "forming", "sealed": sealed, "reason": "r" });
    round(3, modified, record)
}

#[test]
fn workers_of_a_round_that_the_restored_store_holds_otherwise_are_killed_at_once() {
    for (plan, command) in [(3, Command::Quiesce(setup().spec.timings.stop_grace)), (7, Command::Kill)] {
        // Given a node at work in round 1, when round 2 forms after the round 1 of this plan
        let out = running().step(NOW, news(second_forms(20, plan)));
        // then its workers may wait for round 2 only where the plan is the one that they work by.
        assert!(out.contains(&command.into()), "plan {plan}: {out:?}");
    }
}

#[test]
fn a_node_whose_workers_ended_reads_its_key_now_and_then() {
    let failure = serde_json::from_value(json!({ "class": "lost", "message": "m" })).unwrap();
    for outcome in [Outcome::Done, Outcome::Failed(failure)] {
        // Given a node whose workers have ended, and whose key says so
        let mut member = running();
        member.step(NOW, GroupReport::Ended { round: 1, outcome }.into());
        member.step(NOW, answer(Call::Own, true, 20, vec![Some(round(3, 12, sealed_round())), None]));
        member.step(NOW, GroupReport::Stopped { master: None }.into());
        // when nothing comes of it for longer than a lease lasts
        let ttl = member.spec().timings.lease_ttl;
        let reads = (1..=20).any(|beat| {
            let out = member.step(NOW + ttl * beat / 10, MemberInput::Tick);
            out.iter().any(|output| matches!(output, MemberOutput::Txn(Call::ReadBack, _)))
        });
        // then it reads what the store holds: a restored one may not have what it said.
        assert!(reads);
    }
}

#[test]
fn a_node_that_the_restored_round_does_not_have_wants_a_place_like_a_newcomer() {
    // Given a node that waits for round 2, whose round 1 was sealed otherwise after the store was restored
    let mut member = running();
    member.step(NOW, news(second_forms(13, 3)));
    member.step(NOW, MemberInput::Agent(GroupReport::Quiesced { master: None, whole: true }));
    let restored = || second_forms(20, 7);
    member.step(NOW, news(restored()));
    member.step(NOW, answer(Call::Own, true, 21, vec![Some(restored()), None]));
    assert_eq!(member.wanted().map(|own| own.round), Some(Some(2)));
    // when it finds no place of its own there
    member.step(NOW, answer(Call::Seat, true, 22, vec![Some(restored()), None]));
    // then its workers end
    member.step(NOW, MemberInput::Agent(GroupReport::Stopped { master: None }));
    assert_eq!(member.wanted().map(|own| own.round), Some(None));
}

#[test]
fn a_node_that_the_store_refuses_follows_its_leader_until_another_leads_or_it_is_let_in() {
    let gone = || Event::Delete { key: keys().leader(), revision: Revision(30) };
    let gone = || MemberInput::Watched(WatchUpdate::Events(vec![gone()]));
    let leaves = |out: &[MemberOutput]| out.contains(&MemberOutput::Pulse(None));
    let denied = || StoreError::Denied { endpoints: "e".into(), cause: "permission denied".into() };
    // Given a node that the store does not refuse, then it leaves a leader whose key is gone at once
    assert!(leaves(&running().step(NOW, gone())));

    // Given one whose renewals and writes it refuses
    let refused = || {
        let mut member = running();
        let at = NOW + member.spec().timings.renewal() * 2;
        let renews = member.step(at, MemberInput::Tick);
        assert!(renews.contains(&MemberOutput::Renew(LeaseId(7))), "{renews:?}");
        member.step(at, MemberInput::Renewed { sent: at, lease: LeaseId(7), result: Err(denied()) });
        let out = member.step(at, gone());
        assert!(!leaves(&out), "{out:?}");
        (member, at)
    };
    // then the leader's word that all members are heard keeps its workers alive
    let (mut member, at) = refused();
    let lives_until = member.fence_point().unwrap();
    let (proof_age, all_heard) = (SECOND * 5, Some(SECOND));
    let word = Word { round: 1, revision: member.round().unwrap().modified, running: true, proof_age, all_heard };
    let out = member.step(at + SECOND * 8, MemberInput::Word { sent: at + SECOND * 8, term: Revision(9), word });
    assert!(member.fence_point().unwrap() > lives_until, "{out:?}");
    assert!(campaign(&out).is_none());
    // and when a write is answered, it takes the leader for gone, and campaigns in the end
    let record = || Some(round(3, 12, sealed_round()));
    let mut out = member.step(at + SECOND * 8, answer(Call::Own, true, 31, vec![record(), None]));
    assert!(leaves(&out), "{out:?}");
    for tick in 0..40 {
        out.extend(member.step(at + SECOND * 8 + SECOND / 4 * tick, MemberInput::Tick));
    }
    assert!(campaign(&out).is_some(), "{out:?}");

    // A renewal that is answered tells it the same
    let (mut member, at) = refused();
    let later = at + member.spec().timings.renewal();
    assert!(member.step(later, MemberInput::Tick).contains(&MemberOutput::Renew(LeaseId(7))));
    let renewed = MemberInput::Renewed { sent: later, lease: LeaseId(7), result: Ok(true) };
    assert!(leaves(&member.step(later, renewed)));

    // Another leader is followed at once
    let (mut member, at) = refused();
    let other = json!({ "node": "c:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let out = member.step(at, news(kv(keys().leader(), &other, 31, 31, Some(LeaseId(3)))));
    assert!(out.iter().any(|output| matches!(output, MemberOutput::Pulse(Some((Revision(31), _))))), "{out:?}");
}

#[test]
fn a_node_that_has_lost_its_store_asks_it_for_nothing_more_while_its_workers_end() {
    let lost = || StoreError::Lost { cause: "another store".into() };
    let asks = |out: &[MemberOutput]| {
        out.iter()
            .any(|output| matches!(output, MemberOutput::Txn(..) | MemberOutput::Renew(_) | MemberOutput::Grant(_)))
    };
    for renewal in [true, false] {
        // Given a node whose leader is gone, and which campaigns
        let mut member = running();
        let out = member.step(NOW, MemberInput::LeaderDead(Revision(9)));
        let (now, out) = until_it_campaigns(&mut member, out);
        assert!(campaign(&out).is_some());
        // when the store turns out to be another one
        let out = if renewal {
            let at = NOW + member.spec().timings.renewal() * 2;
            let renews = member.step(at, MemberInput::Tick);
            let lease = renews.iter().find_map(|output| match output {
                MemberOutput::Renew(lease) => Some(*lease),
                _ => None,
            });
            let lease = lease.expect("it renews its lease");
            member.step(at, MemberInput::Renewed { sent: at, lease, result: Err(lost()) })
        } else {
            member.step(now, MemberInput::Answered { call: Call::Campaign, sent: now, result: Err(lost()) })
        };
        // then its workers are killed, and until they are gone it asks for nothing.
        assert!(out.contains(&Command::Kill.into()), "{out:?}");
        assert!(!asks(&out), "{out:?}");
        for second in 1..60 {
            let out = member.step(now + Duration::from_secs(second), MemberInput::Tick);
            assert!(!asks(&out), "{out:?}");
        }
        let out = member.step(now + Duration::from_secs(60), GroupReport::Stopped { master: None }.into());
        assert!(out.iter().any(|output| matches!(output, MemberOutput::End(End::StoreLost(_)))), "{out:?}");
    }
}

#[test]
fn a_node_that_only_waits_reads_its_key_once_in_a_lease() {
    let (mut member, _) = joined(None);
    let mut out = member.step(NOW, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), None]));
    let own = serde_json::to_string(&member.wanted().unwrap()).unwrap();
    let own = kv(keys().node(&member.id()), &own, 11, 11, Some(LeaseId(7)));
    let (mut reads, mut now) = (0, NOW);
    while now < seconds(60) {
        for output in std::mem::take(&mut out) {
            let input = match output {
                MemberOutput::Txn(Call::ReadBack, _) => {
                    reads += 1;
                    let read = vec![Some(round(3, 3, forming())), None, Some(own.clone()), None];
                    sent_at(now, answer(Call::ReadBack, true, 20, read))
                }
                MemberOutput::Renew(lease) => MemberInput::Renewed { sent: now, lease, result: Ok(true) },
                _ => continue,
            };
            out.extend(member.step(now, input));
        }
        now = member.deadline().unwrap().max(now);
        out.extend(member.step(now, MemberInput::Tick));
    }
    assert!((5..=6).contains(&reads), "{reads}");
}

#[test]
fn a_node_that_starts_workers_proves_its_round_again_before_their_fence_point() {
    // Given a node whose place was read just now, and that says nothing while its workers start
    let (mut member, seat) = sealed();
    member.step(NOW, seat);
    assert_eq!(member.mode_name(), "starting");
    assert!(member.timers.get(Timer::Prove).is_some_and(|at| at <= seconds(4)));
}

#[test]
fn a_member_that_waits_for_the_next_round_proves_it_often() {
    // Given a member whose workers have ended for round 2: it may warm up others, which have a fence point at once
    let mut member = running();
    member.step(NOW, news(second_forms(13, 3)));
    member.step(NOW, GroupReport::Stopped { master: None }.into());
    member.step(NOW, answer(Call::Own, true, 21, vec![Some(second_forms(13, 3)), None]));
    assert_eq!((member.mode_name(), member.workers), ("waiting", Workers::None));
    assert!(member.timers.get(Timer::Prove).is_some_and(|at| at <= seconds(4)));
}
