//! Single letters, and what one replica makes of them.

use elastic_proto::replication::entry::What;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::{Append, Ask, Entry, Hello, Letter, Place, Snapshot, Took, Voters};
use elastic_rendezvous::time::Time;

use super::super::{Output, Replica};
use super::{endpoints, one_put};
use crate::embedded::command;
use crate::embedded::hub::FIRST_LEASE;
use crate::embedded::mvcc::{Limits, Mvcc};

#[test]
fn a_state_that_comes_late_undoes_nothing_that_follows_it() {
    let mut replica = Replica::new(&endpoints(), 1, 5, Time::ZERO);
    let (life, endpoints) = (replica.life(), replica.tick(Time::from_millis(200)));
    let Some(Output::Send(_, Letter { endpoints, .. })) = endpoints.first().cloned() else { panic!("it is silent") };
    let mut receive = |body: Body| {
        let of = Letter { life: 9, to: life, cluster: 4, term: 2, to_seat: 1, endpoints, ..Letter::default() };
        replica.receive(Time::from_millis(300), Letter { body: Some(body), ..of });
        (replica.log.last().index, replica.commit)
    };
    let voters = Voters { lives: vec![9, life, 0], ..Voters::default() };
    let entry = |what| Entry { term: 2, what: Some(what) };
    let mut entries = vec![entry(What::Voters(voters.clone()))];
    entries.extend((2..7).map(|at| entry(What::Command(command::at(Time::from_millis(at), command::tick())))));
    assert_eq!(receive(Body::Append(Append { prev: None, entries, commit: 2 })), (6, 2));
    let late = Snapshot { place: Some(Place { index: 4, term: 2 }), voters: Some(voters), state: Vec::new() };
    assert_eq!(receive(Body::Snapshot(late)), (6, 4));
}

#[test]
fn letters_that_cannot_be_are_not_read() {
    let mut replica = Replica::new(&endpoints(), 1, 5, Time::ZERO);
    let Some(Output::Send(_, own)) = replica.tick(Time::from_millis(200)).into_iter().next() else { panic!("silent") };
    let of = Letter { seat: 0, life: 9, to: own.life, cluster: 4, term: 2, to_seat: 1, ..own };
    let few = Voters { lives: vec![replica.life()], third_comes: 0 };
    let place = |index| Some(Place { index, term: 2 });
    let state = |index, voters| Body::Snapshot(Snapshot { place: place(index), voters, state: Vec::new() });
    let entries = vec![Entry { term: 2, what: Some(What::Voters(few.clone())) }];
    let whole = Voters { lives: vec![9, replica.life(), 0], third_comes: 0 };
    let took = Body::Took(Took { index: u64::MAX, refused: true });
    for (term, body) in [
        (2, state(5, Some(few))),
        (2, state(5, None)),
        (2, state(u64::MAX, Some(whole.clone()))),
        (u64::MAX, state(5, Some(whole))),
        (2, Body::Append(Append { prev: None, entries, commit: 0 })),
        (2, took),
    ] {
        let letter = Letter { term, body: Some(body), ..of.clone() };
        assert_eq!(replica.receive(Time::from_millis(300), letter.clone()), [], "{letter:?}");
    }
    for ended in 1..1000 {
        let letter = Letter { to: 0, body: Some(Body::Hello(Hello { ended })), ..of.clone() };
        replica.receive(Time::from_millis(300), letter);
    }
    assert!(replica.ended.len() <= 1, "{:?}", replica.ended);
    replica.tick(Time::from_millis(20_000));
}

#[test]
fn one_that_is_asked_for_its_vote_is_needed() {
    let mut replica = Replica::new(&endpoints(), 1, 5, Time::ZERO);
    let life = replica.life();
    let Some(Output::Send(_, own)) = replica.tick(Time::from_millis(200)).into_iter().next() else { panic!("silent") };
    let of = Letter { seat: 0, life: 9, to: life, cluster: 4, term: 2, to_seat: 1, ..own };
    let place = |index| Some(Place { index, term: 2 });
    let voters = Some(Voters { lives: vec![9, 8, 0], third_comes: 0 });
    let state = Body::Snapshot(Snapshot { place: place(5), voters, state: Vec::new() });
    replica.receive(Time::from_millis(300), Letter { body: Some(state), ..of.clone() });
    let ask = Body::Ask(Ask { pre: true, last: place(6) });
    replica.receive(Time::from_millis(9_000), Letter { term: 3, body: Some(ask), ..of });
    replica.tick(Time::from_millis(12_000));
    assert_eq!(replica.life(), life, "it begins again while another waits for its vote");
    replica.tick(Time::from_millis(20_000));
    assert_ne!(replica.life(), life);
}

#[test]
fn letters_of_another_group_or_for_another_seat_are_not_read() {
    let mut replica = Replica::new(&endpoints(), 0, 7, Time::ZERO);
    let other: Vec<String> = ["a:1", "b:1", "d:1"].map(str::to_owned).to_vec();
    let mut stranger = Replica::new(&other, 1, 5, Time::ZERO);
    let letters = stranger.tick(Time::from_millis(300));
    assert!(!letters.is_empty());
    for output in letters {
        let Output::Send(_, letter) = output else { panic!("{output:?}") };
        assert!(!replica.knows(&letter));
        assert_eq!(replica.receive(Time::from_millis(400), letter), []);
    }
}

#[test]
fn a_full_store_fits_into_a_letter() {
    let limits = Limits { live_bytes: 1 << 20, history_bytes: 1 << 20, ..Limits::default() };
    let mut store = Mvcc::new(limits.clone(), FIRST_LEASE);
    for at in 0..20_000_u32 {
        // The second half overwrites keys, so that each event has two records.
        let key = if at < 10_000 { at } else { at % 1_000 };
        let put = etcd_client::proto::PbPutRequest { key: key.to_be_bytes().to_vec(), ..Default::default() };
        command::carry_out(&mut store, &command::at(Time::ZERO, command::txn(&one_put(put))));
    }
    let (saved, held) = (store.saved().len(), store.size());
    assert!(held > (1 << 20) * 9 / 5, "it is not full: {held}");
    assert!(saved <= held && limits.saved_bytes() - (64 << 20) >= held, "{saved} bytes of {held}");
}
