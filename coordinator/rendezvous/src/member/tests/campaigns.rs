//! When a node campaigns, and what it knows of the leader before.

use super::*;
use crate::kv::Guard;

#[test]
fn a_leader_record_without_a_holder_is_warned_of_and_replaced() {
    let record = json!({ "node": "b:1", "peer": { "host": "mute", "port": 1 } }).to_string();
    let key = keys().leader();
    for (what, value, lease) in [
        ("rubbish", "rubbish", None),
        ("rubbish on a lease", "rubbish", Some(LeaseId(9))),
        ("a leader without a lease, which may accept and never answer", record.as_str(), None),
    ] {
        // Given such a record, at the time of joining
        let (mut member, out) = joined(Some(kv(key.clone(), value, 9, 9, lease)));
        let (at, out) = until_it_campaigns(&mut member, out);
        assert!(at < NOW + Duration::from_secs(5), "{what}");
        // then it is replaced, if it is still there, and is named once
        assert_eq!(campaign(&out).unwrap().when, [Guard::modified(&key, Revision(9))], "{what}");
        let warns = |output: &&MemberOutput| matches!(output, MemberOutput::Warn(line) if line.contains(&key));
        assert_eq!(out.iter().filter(warns).count(), 1, "{what}: {out:?}");
        assert!(!out.iter().any(|output| matches!(output, MemberOutput::Pulse(Some(_)))), "{what}");

        // Given it later, over a leader that was there
        let held = kv(key.clone(), &record, 8, 8, Some(LeaseId(9)));
        let (mut member, _) = joined(Some(held));
        assert!(member.leadership.leader.is_some(), "{what}");
        let out = member.step(NOW, news(kv(key.clone(), value, 8, 12, lease)));
        let (at, out) = until_it_campaigns(&mut member, out);
        assert!(at < NOW + Duration::from_secs(5), "{what}");
        assert_eq!(campaign(&out).unwrap().when, [Guard::modified(&key, Revision(12))], "{what}");
    }
    // A leader with a lease is left alone.
    let (_, out) = joined(Some(kv(key, &record, 9, 9, Some(LeaseId(9)))));
    assert_eq!(campaign(&out), None);
}

#[test]
fn a_leader_s_end_has_few_campaign_at_once_however_many_there_are() {
    // From the first campaign until its outcome has come to all.
    let heard = Duration::from_millis(20);
    for (members, most) in [(3_u32, 3), (100, 40), (1_000, 40), (4_000, 80)] {
        // Given a round of so many
        let mut sealed = sealed_round();
        sealed["sealed"]["nodes"] = json!(members);
        // when its leader dies,
        let campaigns = |seed: u64, after: Duration| {
            let mut member = running_in(MemberSetup { seed, ..setup() }, sealed.clone());
            member.step(NOW, MemberInput::LeaderDead(Revision(9)));
            campaign(&member.step(NOW + after, MemberInput::Tick)).is_some()
        };
        // Seeds as nodes have them.
        let count = |after| (0..members).filter(|node| campaigns(u64::from(32_768 + node) << 8 | 1, after)).count();
        // then somebody campaigns soon, and few do before they hear of it
        assert!(count(heard * 5) > 0, "{members}");
        assert!(count(heard) <= most, "{members}: {}", count(heard));
    }
}

#[test]
fn newcomers_whom_the_store_keeps_waiting_spread_their_campaigns() {
    let leader = json!({ "node": "b:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let leader = || Some(kv(keys().leader(), &leader, 9, 9, Some(LeaseId(9))));
    for (answered_in, most) in [(0, 50), (900, 900), (8_000, 2_000)] {
        let now = NOW + Duration::from_millis(answered_in);
        let pauses = (1..=40).map(|seed| {
            // Given newcomers to a job without a round, whose keys were written in that time
            let (mut member, _) = joined_to(MemberSetup { seed: seed << 8, ..setup() }, forming(), None, leader());
            member.step(now, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), leader()]));
            // and renewals, which some releases answer first, take none
            member.step(now, MemberInput::Renewed { sent: now, lease: LeaseId(7), result: Ok(true) });
            // when their leader dies
            let out = member.step(now, MemberInput::LeaderDead(Revision(9)));
            assert!(campaign(&out).is_none());
            let mut next = || member.step(member.deadline().expect("it campaigns"), MemberInput::Tick);
            assert!((0..1_000).any(|_| campaign(&next()).is_some()), "it campaigns");
            member
        });
        let last = pauses.map(|member| member.timers.get(Timer::Campaign).expect("set").since(now)).max();
        let last = last.expect("nodes").as_millis();
        assert!((most / 2..=most).contains(&last), "{answered_in}: {last}");
    }
}

#[test]
fn members_campaign_before_nodes_without_a_place() {
    let leader = json!({ "node": "b:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let leader = kv(keys().leader(), &leader, 8, 8, Some(LeaseId(9)));
    let first = |mut member: Member, term: i64| {
        let out = member.step(NOW, MemberInput::LeaderDead(Revision(term)));
        until_it_campaigns(&mut member, out).0.since(NOW)
    };
    let newcomer = joined_to(setup(), sealed_round(), None, Some(leader.clone())).0;
    assert!(first(newcomer, 8) >= Duration::from_millis(100));
    assert!(first(running(), 9) <= Duration::from_millis(50));
    // Where no node has one yet, no node waits for others.
    let first_of_all = joined_to(setup(), forming(), None, Some(leader)).0;
    assert!(first(first_of_all, 8) <= Duration::from_millis(50));
}

#[test]
fn a_leader_that_resigned_lets_others_campaign_first() {
    // Given a node that led
    let mut member = running();
    let dead = member.step(NOW, MemberInput::LeaderDead(Revision(9)));
    let (now, _) = until_it_campaigns(&mut member, dead);
    let out = member.step(now, answer(Call::Campaign, true, 31, vec![]));
    assert!(out.iter().any(|output| matches!(output, MemberOutput::Lead(..))), "{out:?}");
    // when its key goes, before its lease or with it
    let pause = |mut member: Member, now: Time| {
        let gone = Event::Delete { key: keys().leader(), revision: Revision(40) };
        let out = member.step(now, MemberInput::Watched(WatchUpdate::Events(vec![gone])));
        until_it_campaigns(&mut member, out).0.since(now)
    };
    let lease = member.spec().timings.lease_ttl;
    // then
    assert!(pause(member.clone(), now) >= Duration::from_secs(2));
    assert!(pause(member, now + lease) <= Duration::from_millis(50));
}

#[test]
fn a_new_leader_knows_whom_it_follows_and_since_when_that_is_silent() {
    let word = Word {
        round: 1,
        revision: Revision(12),
        running: true,
        proof_age: Duration::ZERO,
        all_heard: Some(Duration::ZERO),
    };
    let later = NOW + Duration::from_secs(2);
    // Given a node that has heard its leader, or never has since it got its lease
    for (heard, silent_since) in [(Some(later), later), (None, NOW)] {
        let mut member = running();
        if let Some(heard) = heard {
            member.step(heard, MemberInput::Word { sent: NOW, term: Revision(9), word });
        }
        // when the leader's key goes, and it is elected
        let now = NOW + Duration::from_secs(9);
        let gone = Event::Delete { key: keys().leader(), revision: Revision(30) };
        let out = member.step(now, MemberInput::Watched(WatchUpdate::Events(vec![gone])));
        let (now, _) = until_it_campaigns(&mut member, out);
        let out = member.step(now, answer(Call::Campaign, true, 31, vec![]));
        // then
        let former = Former { node: NodeId::from_text("b:1"), dead: false, silent_since };
        assert!(out.contains(&MemberOutput::Lead(Revision(31), Some(former))), "{out:?}");
    }
}

#[test]
fn a_newcomer_opens_its_stream_to_the_leader_once_its_key_is_written() {
    let leader = json!({ "node": "b:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let leader = || Some(kv(keys().leader(), &leader, 9, 9, Some(LeaseId(9))));
    let opened = |out: &[MemberOutput]| {
        let pulses = out.iter().filter(|output| matches!(output, MemberOutput::Pulse(Some(_))));
        pulses.count()
    };
    let (mut member, out) = joined(leader());
    assert_eq!(opened(&out), 0, "{out:?}");
    let out = member.step(NOW, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), leader()]));
    assert_eq!(opened(&out), 1, "{out:?}");
    // And to no leader twice, though it reads that its key is there.
    let own = serde_json::to_string(&member.wanted().unwrap()).unwrap();
    let own = kv(keys().node(&member.id()), &own, 11, 11, Some(LeaseId(7)));
    member.step(NOW, MemberInput::Watched(WatchUpdate::Snapshot { revision: Revision(21), values: vec![] }));
    let read = vec![Some(round(3, 3, forming())), leader(), Some(own), None];
    let out = member.step(NOW, answer(Call::ReadBack, true, 22, read));
    assert_eq!(member.own.created(), Some(Revision(11)));
    assert_eq!(opened(&out), 0, "{out:?}");
    // To the next one it does.
    let next = json!({ "node": "c:1", "peer": { "host": "h", "port": 2 } }).to_string();
    let out = member.step(NOW, news(kv(keys().leader(), &next, 9, 30, Some(LeaseId(10)))));
    assert_eq!(opened(&out), 1, "{out:?}");
}
