//! Of two that hold the store one may begin again, also while a third comes to them.

use std::panic::catch_unwind;

use rand::Rng;

use super::{Standing, World};

/// A world in which two have held the store for a second, and the name of what they hold.
fn two_serve(seed: u64) -> (World, u64) {
    let mut world = World::new(seed);
    (0..2).for_each(|seat| world.start(seat));
    let cluster = world.serves_within(5_000);
    world.run(1_000);
    (world, cluster)
}

#[test]
fn of_two_one_may_begin_again() {
    for seed in 0..300 {
        let (mut world, cluster) = two_serve(seed);
        let seat = seed as usize % 2;
        world.end(seat);
        world.run(3_000);
        assert!(matches!(world.standing(1 - seat), Standing::Waits(_)), "one alone serves");
        // Also where it is another one that comes.
        world.start(if seed % 3 == 0 { 2 } else { seat });
        world.run(100);
        if seed % 3 == 0 {
            world.start(seat);
        }
        assert_eq!(world.serves_within(8_000), cluster, "what was agreed on is lost");
        world.check_stores();
    }
}

#[test]
fn while_a_third_gets_its_vote_one_of_the_two_may_begin_again() {
    for seed in 0..400 {
        let (mut world, cluster) = two_serve(seed);
        world.start(2);
        let comes = |world: &World| {
            let mut replicas = world.seats.iter().flatten().map(|process| &process.replica);
            replicas.any(|replica| replica.log.voters().1.third_comes != 0)
        };
        while !comes(&world) {
            world.run(1);
        }
        world.run(seed / 2 % 60);
        let seat = seed as usize % 2;
        world.end(seat);
        world.start(seat);
        assert_eq!(world.serves_within(8_000), cluster, "what was agreed on is lost with seed {seed}");
        world.all_vote_within(8_000);
        world.check_stores();
    }
}

/// The leader gives up a third that is silent for a moment, and ends before the other of the two has heard of it.
#[test]
fn a_third_that_is_given_up_costs_nothing_where_the_leader_ends() {
    for seed in 0..200 {
        let (mut world, cluster) = two_serve(seed);
        let leader = if world.standing(0) == Standing::Serves { 0 } else { 1 };
        world.start(2);
        while world.voters(leader).third_comes == 0 {
            world.run(1);
        }
        world.cut.insert((2, leader));
        let until = world.now + 1_500;
        while world.voters(leader).third_comes != 0 {
            world.run(1);
            if world.now < until {
                world.lose_entries(1 - leader);
            }
        }
        world.cut.clear();
        for _ in 0..5 * seed {
            world.lose_entries(1 - leader);
            world.run(1);
        }
        world.end(leader);
        world.start(leader);
        assert_eq!(world.serves_within(20_000), cluster, "what was agreed on is lost with seed {seed}");
        world.all_vote_within(20_000);
        world.check_stores();
    }
}

/// One of the two ends while the third, which is about to get its vote, is cut off: the other waits for that third.
#[test]
fn a_third_that_is_needed_does_not_begin_again() {
    for seed in 0..50 {
        let (mut world, cluster) = two_serve(seed);
        let leader = if world.standing(0) == Standing::Serves { 0 } else { 1 };
        world.start(2);
        while world.voters(2).third_comes == 0 {
            world.lose_entries(1 - leader);
            world.run(1);
        }
        world.end(1 - leader);
        world.start(1 - leader);
        world.cut = (0..2).flat_map(|other| [(2, other), (other, 2)]).collect();
        world.run(12_000);
        world.cut.clear();
        assert_eq!(world.serves_within(20_000), cluster, "what was agreed on is lost with seed {seed}");
        world.all_vote_within(20_000);
    }
}

/// Any one of the two, or the third that comes to them, ends at any time, while ways are cut and letters lost.
fn one_ends(seed: u64) {
    let (mut world, cluster) = two_serve(seed);
    world.lossy = world.choices.random_range(0..15);
    world.start(2);
    let seat = world.choices.random_range(0..3);
    let ends_after = world.choices.random_range(0..20);
    for at in 0..20 {
        if at == ends_after {
            world.end(seat);
        }
        match world.choices.random_range(0..4) {
            0 => world.cut.clear(),
            _ => {
                let way = (world.choices.random_range(0..3), world.choices.random_range(0..3));
                world.cut.insert(way);
            }
        }
        let time = world.choices.random_range(0..600);
        world.run(time);
    }
    world.cut.clear();
    world.start(seat);
    world.run(3_000);
    world.lossy = 0;
    assert_eq!(world.serves_within(25_000), cluster, "what was agreed on is lost");
    world.all_vote_within(20_000);
    world.check_stores();
}

#[test]
fn whichever_ends_while_a_third_comes_nothing_is_lost() {
    for seed in 0..300 {
        assert!(catch_unwind(|| one_ends(seed)).is_ok(), "with seed {seed}");
    }
}
