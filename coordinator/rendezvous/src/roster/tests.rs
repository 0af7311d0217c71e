//! Whether the indexes say what a look at every node would.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::job::{Fate, NodeRecord, RankRecord};

fn id(node: u8) -> NodeId {
    NodeId::new(["own", "a", "b", "c", "c"][usize::from(node) % 5], &node.to_string())
}

fn time(at: u8) -> Time {
    Time::ZERO + Duration::from_secs(u64::from(at))
}

fn about(node: &NodeId) -> serde_json::Value {
    serde_json::json!({
        "name": node.name(), "incarnation": "1", "machine": "m", "boot": "b", "host": "h",
        "peer": { "host": "h", "port": 1 }, "slots": 1, "role": "r", "phase": "waiting",
        "group_rank": 0, "first_rank": 0, "role_rank_base": 0, "role_world_size": 1,
    })
}

fn present(node: &NodeId, x: u8, y: u8) -> Present {
    const PHASES: [Phase; 4] = [Phase::Waiting, Phase::Running, Phase::Done, Phase::Failed];
    let mut record: NodeRecord = serde_json::from_value(about(node)).unwrap();
    record.phase = PHASES[usize::from(x) % 4];
    record.round = (!y.is_multiple_of(3)).then(|| u64::from(y % 3));
    record.warms_up = x.is_multiple_of(2);
    record.place = (x % 5 > 2).then(|| u32::from(y % 2));
    let created = Revision(i64::from(x % 7));
    Present { record, created, modified: Revision(i64::from(y)), arrived: time(y), said: time(x) }
}

fn member(node: &NodeId, x: u8, y: u8) -> SealedMember {
    let rank: RankRecord = serde_json::from_value(about(node)).unwrap();
    let fate = [Fate::Unknown, Fate::Fenced, Fate::Dead][usize::from(x) % 3];
    let evicted = y.is_multiple_of(4).then(|| Evicted { at: time(x), fate });
    SealedMember {
        rank,
        started: false,
        absent: x.is_multiple_of(3).then(|| time(x)),
        left: y.is_multiple_of(3),
        evicted,
    }
}

fn happens(roster: &mut Roster, (what, node, x, y): (u8, u8, u8, u8)) {
    let node = id(node);
    match what {
        0 | 1 => roster.put(&node, present(&node, x, y)),
        2 => roster.remove(&node),
        3 | 4 => roster.seat(&node, member(&node, x, y)),
        5 => roster.change_member(&node, |it| *it = member(&node, x, y)),
        6 => roster.change_contact(&node, |contact| contact.opened = (!x.is_multiple_of(4)).then(|| time(y))),
        7 => roster.change_contact(&node, |contact| contact.dead = x.is_multiple_of(2)),
        8 if x == 0 => roster.dissolve(),
        _ => {
            roster.heard(&node, time(y), u64::from(x % 4), (!x.is_multiple_of(3)).then(|| time(y)));
        }
    }
}

/// The same nodes, taken in again.
fn rebuilt(old: &Roster) -> Roster {
    let mut new = Roster::new(old.own.clone());
    old.members.iter().for_each(|(node, member)| new.seat(node, member.clone()));
    old.nodes.iter().for_each(|(node, present)| new.put(node, present.clone()));
    old.contacts.iter().for_each(|(node, contact)| new.change_contact(node, |it| *it = *contact));
    new
}

proptest! {
    #[test]
    fn a_roster_that_was_changed_is_as_one_that_was_read(
        events in prop::collection::vec((0..12u8, 0..8u8, any::<u8>(), any::<u8>()), 0..60)
    ) {
        let mut roster = Roster::new(id(0));
        for event in events {
            happens(&mut roster, event);
            prop_assert_eq!(&roster, &rebuilt(&roster));
        }
        // And its answers are those of a look at every node.
        let newcomers: Vec<_> = roster.nodes.keys().filter(|node| {
            roster.is_placeless(node) && !roster.contacts.get(*node).is_some_and(|contact| contact.dead)
        }).collect();
        prop_assert_eq!(roster.count_newcomers(), newcomers.len());
        prop_assert_eq!(roster.all_warm_up(), roster.nodes.values().all(|it| it.record.warms_up));
        let echoes = roster.members.iter().filter(|(node, it)| **node != roster.own && it.evicted.is_none());
        let echoes: Vec<_> =
            echoes.map(|(node, _)| roster.contacts.get(node).and_then(|contact| contact.echoed)).collect();
        let oldest = echoes.iter().copied().try_fold(None, |oldest: Option<Time>, echoed| {
            echoed.map(|echoed| Some(oldest.map_or(echoed, |oldest| oldest.min(echoed))))
        });
        prop_assert_eq!(roster.all_echoed(), oldest);
        let dead = |node: &NodeId| roster.contacts.get(node).is_some_and(|contact| contact.dead);
        let fate = |member: &SealedMember| member.evicted.map(|evicted| evicted.fate);
        let unsettled = roster.members.iter().filter(|(node, it)| fate(it) == Some(Fate::Unknown) && !dead(node));
        prop_assert_eq!(roster.last_unsettled(), unsettled.filter_map(|(_, it)| Some(it.evicted?.at)).max());
        let stopped = |says: Says| says.is_some_and(|(of, phase)| of == 1 && phase == Phase::Waiting);
        let says = |node: &NodeId| roster.nodes.get(node).and_then(|it| Some((it.record.round?, it.record.phase)));
        let doubtful = roster.members.iter().filter(|(node, it)| {
            !dead(node) && fate(it) != Some(Fate::Dead) && !it.left && !stopped(says(node))
        });
        let last = doubtful.map(|(_, it)| it.evicted.map(|evicted| evicted.at)).max();
        prop_assert_eq!(roster.last_doubtful(stopped), last);
    }
}
