use elastic_rendezvous::job::samples;

use super::*;

fn record(name: &str, boot: &str, phase: Phase) -> NodeRecord {
    let peer = Endpoint { host: format!("host-{name}"), port: 4000 };
    let (machine, boot, host) = ("same-image".into(), boot.into(), "host".into());
    NodeRecord { machine, boot, host, peer, phase, ..samples::node(name) }
}

fn names(records: &[NodeRecord], turn: u64) -> Vec<String> {
    choose(records, "own", turn).iter().map(|peer| peer.node.name().to_owned()).collect()
}

#[test]
fn nodes_of_other_machines_are_asked_each_time_beginning_with_another() {
    let records = [
        record("a", "other", Phase::Running),
        record("b", "own", Phase::Running),
        record("c", "other", Phase::Done),
        record("d", "another", Phase::Waiting),
        record("e", "third", Phase::Draining),
    ];
    for (turn, expected) in [(0, ["a", "d", "e"]), (1, ["d", "e", "a"]), (2, ["e", "a", "d"]), (3, ["a", "d", "e"])] {
        assert_eq!(names(&records, turn), expected, "turn {turn}");
    }
    assert_eq!(choose(&records, "own", 1)[0].to_string(), "node d at host-d:4000");
    assert_eq!(names(&records[1..3], u64::MAX), [""; 0]);
    assert_eq!(names(&[], 7), [""; 0]);
    let many: Vec<_> = (0..100).map(|n| record(&format!("n{n:02}"), "other", Phase::Running)).collect();
    assert_eq!(names(&many, 99).len(), ASKED);
    assert_eq!(names(&many, 99)[..2], ["n99", "n00"]);
}

const NEEDED: BitRate = BitRate(1_000_000_000);

/// Nodes that were asked, by their rates in Mbit/s.
fn tried(rates: &[Option<u64>]) -> Vec<Tried> {
    let peer = |n: usize| choose(&[record(&format!("n{n}"), "other", Phase::Running)], "own", 0).remove(0);
    let rate = |rate: &Option<u64>| rate.map(|rate| BitRate(rate * 1_000_000)).ok_or_else(|| "it is busy".to_owned());
    rates.iter().enumerate().map(|(n, of)| (peer(n), rate(of))).collect()
}

#[test]
fn the_best_of_three_decides_and_who_was_not_measured_does_not_count() {
    use State::{Fit, Unfit, Unknown};
    for (rates, settled, state, seen) in [
        (&[][..], false, Unknown, "bandwidth to a node of the job: no node of it is on another machine yet"),
        (&[None, None], false, Unknown, "bandwidth to a node of the job: none could be measured"),
        (&[Some(1000)], true, Fit, "1 Gbit/s from node n0 at host-n0:4000, of 1 Gbit/s needed"),
        (&[Some(999)], false, Unfit, "999 Mbit/s from node n0 at host-n0:4000, of 1 Gbit/s needed: look at the speed"),
        (&[Some(0)], false, Unfit, "0 bit/s from node n0"),
        (&[Some(94), Some(1100)], true, Fit, "94 Mbit/s from node n0 at host-n0:4000, 1.1 Gbit/s from node n1"),
        (&[Some(94), None, Some(90)], false, Unfit, "94 Mbit/s from node n0 at host-n0:4000, 90 Mbit/s from node n2"),
        (&[Some(94), None, Some(90), Some(80)], true, Unfit, ", 80 Mbit/s from node n3 at host-n3:4000, of 1 Gbit/s"),
    ] {
        let tried = tried(rates);
        let found = verdict(&Ok(tried.clone()), NEEDED);
        assert_eq!((is_settled(&tried, NEEDED), found.state), (settled, state), "{rates:?}: {found}");
        assert!(found.to_string().contains(seen), "{rates:?}: {found}");
    }
    let found = verdict(&Err("no answer".into()), NEEDED);
    assert_eq!((found.state, found.to_string()), (Unknown, "bandwidth to a node of the job: no answer".into()));
}

#[test]
fn a_rate_is_written_in_the_unit_that_fits_and_never_rounded_up() {
    for (rate, text) in [
        (0, "0 bit/s"),
        (999, "999 bit/s"),
        (1_500, "1.5 kbit/s"),
        (999_999_999, "999.9 Mbit/s"),
        (1_000_000_000, "1 Gbit/s"),
        (2_550_000_000, "2.5 Gbit/s"),
        (1_000_000_000_000, "1000 Gbit/s"),
    ] {
        assert_eq!(BitRate(rate).to_string(), text);
    }
}
