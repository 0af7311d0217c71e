//! The collectives between threads over real sockets on loopback: right sums, and clear errors when peers go wrong.
#![allow(clippy::unwrap_used)] // The harness may panic as its tests may.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::recorder::Recorder;
use elastic_collective::stop::Stop;
use elastic_collective::tree::{Node, SumPlan, nodes_of};
use elastic_collective::{CollectiveError, Group, GroupConfig, Patience};
use elastic_proto::worker::FailureClass;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};

const PATIENCE: Patience = Patience { form: Duration::from_secs(20), operation: Duration::from_secs(20) };

/// A port that is reserved without a listener, as an agent holds it for its rank 0.
fn hold_port() -> (rustix::fd::OwnedFd, u16) {
    let held = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_reuseaddr(&held, true).unwrap();
    bind(&held, &"127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
    let port = SocketAddr::try_from(rustix::net::getsockname(&held).unwrap()).unwrap().port();
    (held, port)
}

fn config(rank: u32, world_size: u32, master_port: u16) -> GroupConfig {
    GroupConfig {
        job: "test".to_owned(),
        round: 3,
        rank,
        world_size,
        master_addr: "127.0.0.1".to_owned(),
        master_port,
        agent_store: false,
        settings: "nothing in particular".to_owned(),
    }
}

/// Runs `work` as each rank of a world and returns the answers by rank.
fn world<T: Send>(ranks: u32, patience: Patience, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let (_held, port) = hold_port();
    thread::scope(|scope| {
        let rank = |rank| {
            let work = &work;
            scope.spawn(move || work(Group::form(&config(rank, ranks, port), patience, Stop::default()).unwrap()))
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers whose sum depends, in its last bits, on the order of additions.
fn numbers(of: u32, length: usize) -> Vec<f32> {
    let mut random = SmallRng::seed_from_u64(of.into());
    (0..length).map(|_| random.random::<f32>() - 0.5).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The sum under a node, straight from the tree's definition.
fn tree_sum(node: Node, length: usize) -> Vec<f32> {
    match node.children() {
        None => numbers(node.first, length),
        Some((left, right)) => {
            tree_sum(left, length).iter().zip(tree_sum(right, length)).map(|(left, right)| left + right).collect()
        }
    }
}

#[test]
fn the_ordered_sum_has_the_same_bits_on_every_world() {
    let cases =
        [(8, 1000), (8, 200_003), (6, 3), (5, 77), (1, 10), (12, 0), (3, 140_000), (7, 8192), (6, 8193), (5, 500_001)];
    for (shards, length) in cases {
        let expected = tree_sum(Node::root(shards), length);
        for ranks in 1..=5 {
            let results = world(ranks, PATIENCE, |mut group| {
                let nodes = nodes_of(group.rank(), ranks, shards);
                let partials: Vec<_> = nodes.into_iter().map(|node| tree_sum(node, length)).collect();
                let rest: Vec<&[f32]> = partials.iter().skip(1).map(Vec::as_slice).collect();
                let own = || partials.first().cloned().unwrap_or(vec![f32::NAN; length]);
                let (mut owned, mut sum, vote) = (own(), own(), 1 << group.rank());
                let to_owners = group.sum_to_owners(shards, &rest, &mut owned, vote).unwrap();
                let to_all = group.ordered_sum(shards, &rest, &mut sum, vote).unwrap();
                group.leave();
                (owned, sum, [to_owners, to_all])
            });
            let plan = SumPlan { world_size: ranks, shards, elements: length };
            for (rank, (owned, sum, votes)) in (0..).zip(results) {
                assert_eq!(bits(&sum), bits(&expected), "{shards} shards of {length} on {ranks} ranks");
                for chunk in (0..ranks).filter(|first| [*first, plan.second(*first)].contains(&rank)) {
                    let chunk = plan.owned_chunk(chunk);
                    assert_eq!(bits(&owned[chunk.clone()]), bits(&expected[chunk]), "rank {rank} of {ranks}");
                }
                assert_eq!(votes, [(1 << ranks) - 1; 2], "every vote reaches every rank");
            }
        }
    }
}

#[test]
fn pieces_go_where_they_are_expected() {
    // Each rank but the last sends each other two pieces, whose bytes say from where and to where.
    let piece = |from: usize, to: usize, number: usize| vec![(16 * from + to) as u8; 70_000 * number + to];
    let ranks = 4;
    let results = world(ranks as u32, PATIENCE, |mut group| {
        let rank = group.rank() as usize;
        let others = || (0..ranks).filter(|other| *other != rank);
        let sent: Vec<_> = others().flat_map(|to| [0, 1].map(|number| (to, piece(rank, to, number)))).collect();
        let mut got: Vec<_> =
            others().flat_map(|from| [0, 1].map(|number| (from, vec![255; 70_000 * number + rank]))).collect();
        let out = sent.iter().filter(|_| rank < 3).map(|(to, piece)| (*to, &piece[..])).collect();
        let into = got.iter_mut().filter(|(from, _)| *from < 3).map(|(from, piece)| (*from, &mut piece[..])).collect();
        group.pass(1, out, into).unwrap();
        group.leave();
        got
    });
    for (rank, got) in results.into_iter().enumerate() {
        for (number, (from, bytes)) in got.into_iter().enumerate().filter(|(_, (from, _))| *from < 3) {
            assert!(bytes == piece(from, rank, number % 2), "from {from} to {rank}");
        }
    }
}

#[test]
fn parts_that_the_ranks_hold_reach_all() {
    for ends in [vec![10], vec![0, 700_000], vec![300_000, 300_000, 900_001], vec![1, 2, 3, 4]] {
        let (ranks, &length) = (ends.len(), ends.last().unwrap());
        let whole: Vec<u8> = (0..length).map(|place| (place * 7) as u8).collect();
        let results = world(ranks as u32, PATIENCE, |mut group| {
            let rank = group.rank() as usize;
            let own = rank.checked_sub(1).map_or(0, |before| ends[before])..ends[rank];
            let mut data = vec![0; length];
            data[own.clone()].copy_from_slice(&whole[own]);
            group.share(&ends, &mut data).unwrap();
            group.leave();
            data
        });
        assert!(results.iter().all(|data| *data == whole), "{ends:?}");
    }
}

#[test]
fn a_broadcast_reaches_all() {
    for ranks in 1..=6 {
        let results = world(ranks, PATIENCE, |mut group| {
            let mut data = vec![group.rank() as u8; 100_000];
            if group.rank() == 0 {
                data.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
            }
            group.broadcast(&mut data).unwrap();
            group.barrier().unwrap();
            group.leave();
            data
        });
        let expected: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
        assert!(results.iter().all(|data| *data == expected), "{ranks} ranks");
    }
}

#[test]
fn every_rank_learns_each_ones_number() {
    for ranks in 1..=5 {
        let number = |rank: u32| [u64::MAX - u64::from(rank), u64::from(rank)];
        let results = world(ranks, PATIENCE, |mut group| {
            let all = group.gather(number(group.rank())).unwrap();
            group.leave();
            all
        });
        let expected: Vec<[u64; 2]> = (0..ranks).map(number).collect();
        assert!(results.iter().all(|all| *all == expected), "{results:?}");
    }
}

#[test]
fn those_that_hold_the_state_give_it_to_the_others() {
    let whole = |length: usize| -> Vec<u8> { (0..length).map(|i| (i % 251) as u8).collect() };
    for ranks in 1..=4 {
        let results = world(ranks, PATIENCE, |mut group| {
            let mut right = true;
            for holders in 1u32..1 << ranks {
                let holds: Vec<bool> = (0..ranks).map(|rank| holders >> rank & 1 == 1).collect();
                for length in [0, 1, 3, 4096, 1_000_003] {
                    let own = holds[group.rank() as usize];
                    let mut data = if own { whole(length) } else { vec![255; length] };
                    group.spread(&holds, &mut data).unwrap();
                    right &= data == whole(length);
                }
            }
            group.leave();
            right
        });
        assert_eq!(results, vec![true; ranks as usize]);
    }
}

#[test]
fn no_worker_passes_a_barrier_before_all_are_there() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let arrived = AtomicU32::new(0);
    world(5, PATIENCE, |mut group| {
        for turn in 1..=50 {
            arrived.fetch_add(1, Ordering::SeqCst);
            group.barrier().unwrap();
            assert!(arrived.load(Ordering::SeqCst) >= 5 * turn);
        }
        group.leave();
    });
}

type Operation = (&'static str, fn(&mut Group) -> Result<(), CollectiveError>);

/// The sum of a shard for each rank.
fn sum(group: &mut Group, numbers: usize) -> Result<(), CollectiveError> {
    group.ordered_sum(group.world_size(), &[], &mut vec![1.0; numbers], 0).map(drop)
}

const OPERATIONS: [Operation; 4] = [
    ("small", |group| sum(group, 8)),
    ("gathering", |group| group.gather([1; 8]).map(drop)),
    ("broadcast", |group| group.broadcast(&mut vec![0; 20_000_000])),
    ("ordered", |group| {
        let (shards, data) = (4, vec![1.0; 3_000_000]);
        let nodes = nodes_of(group.rank(), group.world_size(), shards).len();
        group.ordered_sum(shards, &vec![&data[..]; nodes.saturating_sub(1)], &mut data.clone(), 0).map(drop)
    }),
];

#[test]
fn a_dead_peer_is_named_at_once() {
    for (name, operation) in OPERATIONS {
        let results = world(4, PATIENCE, |mut group| {
            if group.rank() == 2 {
                return None; // The group is dropped, and its sockets with it, as by a SIGKILL.
            }
            let started = Instant::now();
            // A broadcast may succeed without rank 2; the following ones cannot.
            let error = (0..10).find_map(|_| operation(&mut group).err()).expect("an operation without rank 2 fails");
            // Keep the sockets until the others have had time to name the lost rank.
            Some((error, started.elapsed(), group))
        });
        for (error, took, _group) in results.into_iter().flatten() {
            assert!(matches!(error, CollectiveError::PeerLost { rank: 2, .. }), "{name}: {error}");
            assert_eq!(error.class(), FailureClass::Peer);
            assert!(took < PATIENCE.operation / 2, "{name} took {took:?}");
        }
    }
}

#[test]
fn a_stalled_peer_is_named_after_the_deadline() {
    let patience = Patience { operation: Duration::from_millis(300), ..PATIENCE };
    for (name, operation) in OPERATIONS {
        let results = world(3, patience, |mut group| {
            if group.rank() == 1 {
                return (None, group); // Its sockets stay open and silent.
            }
            let started = Instant::now();
            let error = operation(&mut group).err();
            (error.map(|error| (error, started.elapsed())), group)
        });
        let errors: Vec<_> = results.iter().filter_map(|(error, _)| error.as_ref()).collect();
        assert!(!errors.is_empty(), "{name} cannot succeed");
        for (error, took) in errors {
            assert!(matches!(error, CollectiveError::Stalled { .. }), "{name}: {error}");
            assert!(*took >= Duration::from_millis(300) && *took < Duration::from_secs(10), "{name} took {took:?}");
        }
        if let (Some((CollectiveError::Stalled { ranks, .. }, _)), _) = &results[0] {
            assert!(ranks.contains(&1), "{name}: rank 0 waits for {ranks:?}");
        }
    }
}

#[test]
fn a_record_names_the_operation_that_was_given_up_and_who_was_waited_for() {
    let patience = Patience { operation: Duration::from_millis(300), ..PATIENCE };
    // A dead peer's sockets close; a frozen peer's stay open.
    for frozen in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let all_have_summed = Barrier::new(3);
        let results = world(3, PATIENCE, |group| {
            let recorder = Recorder::new(Some(folder.path()));
            let mut group = group.recorded_by(&recorder);
            sum(&mut group, 8).unwrap();
            all_have_summed.wait();
            let mut group = group.with_patience(patience);
            if group.rank() == 2 {
                return (None, frozen.then_some(group));
            }
            let rank = group.rank();
            let error = group.gather([1]).unwrap_err();
            let path = recorder.write(&config(rank, 3, 0), &error.to_string()).unwrap().unwrap();
            (Some((path, error.to_string())), Some(group))
        });
        for (rank, (survivor, _)) in results.iter().enumerate() {
            let Some((path, error)) = survivor else { continue };
            let record: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            assert_eq!((&record["rank"], &record["error"]), (&rank.into(), &error.as_str().into()));
            let [first, last] = &record["operations"].as_array().unwrap()[..] else { panic!("{record}") };
            assert_eq!((&first["operation"], &first["state"]), (&"ordered sum".into(), &"done".into()));
            assert_eq!((&last["operation"], &last["state"]), (&"gathering".into(), &"given up".into()));
            assert_eq!((&last["number"], &last["round"]), (&2.into(), &3.into()));
            let peers = last["peers"].as_array().unwrap();
            let silent = peers.iter().find(|peer| peer["rank"] == 2).unwrap();
            assert_eq!((&silent["owes"], &silent["received"]), (&true.into(), &0.into()), "{record}");
        }
    }
}

#[test]
fn a_raised_stop_ends_the_wait() {
    let (_held, port) = hold_port();
    let stop = Stop::default();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| Group::form(&config(0, 2, port), PATIENCE, stop.clone()).unwrap_err());
        stop.raise();
        assert!(matches!(waiting.join().unwrap(), CollectiveError::Stopped));
    });
}

#[test]
fn peers_that_do_not_belong_are_refused_and_hear_why() {
    type Change = (fn(&mut GroupConfig), &'static str);
    let changes: [Change; 5] = [
        (|config| config.round = 4, "this is round 3 of job test, not round 4"),
        (|config| config.job = "other".to_owned(), "this is job test, not other"),
        (|config| config.settings = "--batch 7".to_owned(), "--batch 7"),
        (|config| config.world_size = 3, "2 ranks, not 3"),
        (|config| config.rank = 4, "does not expect a rank 4"),
    ];
    let (_held, port) = hold_port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&config(0, 2, port), PATIENCE, Stop::default()).map(Group::leave));
        for (change, reason) in changes {
            // Given a peer of another world, when it says hello, then it gets the reason why it is refused.
            let mut foreign = config(1, 2, port);
            change(&mut foreign);
            let error = Group::form(&foreign, PATIENCE, Stop::default()).unwrap_err();
            assert!(matches!(&error, CollectiveError::Refused { rank: 0, .. }), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        }
        // And strangers, silent or not, do no harm: the right peer is still accepted.
        let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut loud = TcpStream::connect(("127.0.0.1", port)).unwrap();
        loud.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(loud.read(&mut [0]).unwrap_or(0), 0, "the stranger is shown the door");
        Group::form(&config(1, 2, port), PATIENCE, Stop::default()).unwrap().leave();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn peers_that_never_come_are_named() {
    let patience = Patience { form: Duration::from_millis(200), ..PATIENCE };
    let (_held, port) = hold_port();
    let error = Group::form(&config(0, 3, port), patience, Stop::default()).unwrap_err();
    assert!(matches!(&error, CollectiveError::Missing { ranks, .. } if *ranks == [1, 2]), "{error}");
    let error = Group::form(&config(1, 3, port), patience, Stop::default()).unwrap_err();
    assert!(matches!(&error, CollectiveError::Unreachable { rank: 0, .. }), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn a_member_that_dies_before_the_group_is_complete_is_named() {
    let (_held, port) = hold_port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&config(0, 3, port), PATIENCE, Stop::default()).unwrap_err());
        // Rank 1 says hello and leaves again. The first time it may leave before rank 0 listens.
        let short = Patience { form: Duration::from_millis(100), ..PATIENCE };
        while !zero.is_finished() {
            Group::form(&config(1, 3, port), short, Stop::default()).unwrap_err();
        }
        let error = zero.join().unwrap();
        assert!(matches!(error, CollectiveError::PeerLost { rank: 1, .. }), "{error}");
    });
}

#[test]
fn a_taken_master_port_is_explained() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Group::form(&config(0, 2, port), PATIENCE, Stop::default()).unwrap_err();
    assert!(error.to_string().contains("another program has MASTER_PORT"), "{error}");
}

#[test]
fn ranks_in_different_operations_say_so() {
    let errors = world(2, PATIENCE, |mut group| {
        let numbers = [4, 5][group.rank() as usize];
        (sum(&mut group, numbers).unwrap_err(), group)
    });
    let out_of_step = |error: &CollectiveError| matches!(error, CollectiveError::OutOfStep { .. });
    assert!(errors.iter().any(|(error, _)| out_of_step(error)), "{errors:?}");
}

/// Passes bytes on between a rank that dials this port, which it returns, and the rank that listens at `port`, also if
/// that one listens later: so many bytes at a time, and a pause after each.
fn slow_wire(port: u16, bytes: usize, pause: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().port();
    // The threads end with their connections, or with the test's process.
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let dial = || {
                thread::sleep(Duration::from_millis(5));
                TcpStream::connect(("127.0.0.1", port))
            };
            let Some(far) = std::iter::repeat_with(dial).take(4000).find_map(Result::ok) else { continue };
            for (mut from, mut to) in
                [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far.try_clone().unwrap(), near)]
            {
                thread::spawn(move || {
                    let mut buffer = vec![0; bytes];
                    while let Ok(got @ 1..) = from.read(&mut buffer) {
                        if to.write_all(&buffer[..got]).is_err() {
                            return;
                        }
                        thread::sleep(pause);
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    here
}

#[test]
fn an_operation_may_take_longer_than_peers_are_waited_for_while_bytes_flow() {
    let patience = Patience { operation: Duration::from_millis(600), ..PATIENCE };
    let broadcast = |group: &mut Group, numbers: usize| group.broadcast(&mut vec![1; 4 * numbers]);
    type Operation = fn(&mut Group, usize) -> Result<(), CollectiveError>;
    // Bytes at a time, so that each takes about two seconds
    let cases: [(&str, Operation, usize, usize); 3] = [
        ("small", sum, 8 << 10, 1 << 10),
        ("large", sum, 1 << 20, 128 << 10),
        ("broadcast", broadcast, 2 << 20, 256 << 10),
    ];
    thread::scope(|scope| {
        for (name, operation, numbers, bytes) in cases {
            scope.spawn(move || {
                let (_held, port) = hold_port();
                let wire = slow_wire(port, bytes, Duration::from_millis(60));
                let results = thread::scope(|scope| {
                    let ranks = [(0, port), (1, wire)].map(|(rank, port)| {
                        scope.spawn(move || {
                            let mut group = Group::form(&config(rank, 2, port), PATIENCE, Stop::default()).unwrap();
                            group.barrier().unwrap();
                            let mut group = group.with_patience(patience);
                            let begun = Instant::now();
                            let result = operation(&mut group, numbers);
                            // No rank leaves before all bytes have arrived.
                            group.with_patience(PATIENCE).barrier().unwrap();
                            result.map(|()| begun.elapsed())
                        })
                    });
                    ranks.map(|rank| rank.join().unwrap())
                });
                let took = results.map(|result| result.unwrap_or_else(|error| panic!("{name}: {error}")));
                assert!(took.iter().any(|took| *took > patience.operation), "{name} was too quick: {took:?}");
            });
        }
    });
}

#[test]
fn peers_with_long_settings_meet_and_hear_that_they_differ() {
    let form = |rank, port, settings: &str| {
        let config = GroupConfig { settings: settings.to_owned(), ..config(rank, 2, port) };
        Group::form(&config, Patience { form: Duration::from_secs(3), ..PATIENCE }, Stop::default())
    };
    let long = "layer ".repeat(20_000);
    let (_held, port) = hold_port();
    thread::scope(|scope| {
        let zero = scope.spawn(|| form(0, port, &long).map(Group::leave));
        let error = form(1, port, &format!("{long}more")).unwrap_err();
        assert!(matches!(&error, CollectiveError::Refused { rank: 0, .. }), "{error}");
        form(1, port, &long).unwrap().leave();
        zero.join().unwrap().unwrap();
    });
}
