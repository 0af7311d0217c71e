//! TorchElastic's rendezvous, with agents of ours and a model of torchrun's mixed in one job: every schedule comes from
//! a seed, so a seed repeats it. The package `tests` runs a real etcd and a real torchrun.
//!
//! ```text
//! ELASTIC_SEED=123 cargo test -p elastic-simulation --test mixed replay -- --ignored --nocapture
//! ```

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod etcd;
mod network;
mod ours;
mod schedule;
mod torchrun;
mod world;

use schedule::{Ran, play};

/// Seeds of each part of the suite.
const PART: u64 = 250;

fn check(seed: u64) -> Ran {
    let ran = play(seed, false);
    if ran.breach.is_some() {
        let ran = play(seed, true);
        let (promise, what) = ran.breach.expect("the same seed breaks the same promise");
        let end: Vec<&str> = ran.story.lines().rev().take(150).collect();
        let end: Vec<&str> = end.into_iter().rev().collect();
        panic!(
            "seed {seed} breaks the promise \"{promise}\": {what}\n\n{}\n\n{}\n\nto repeat it: ELASTIC_SEED={seed} \
             cargo test -p elastic-simulation --test mixed replay -- --ignored --nocapture",
            ran.scenario,
            end.join("\n")
        );
    }
    ran
}

mod one_thousand_seeds {
    /// Every part meets what there is to meet.
    fn part(number: u64) {
        let (mut mixed, mut shut, mut versions) = (0, 0, 0);
        for seed in number * super::PART..(number + 1) * super::PART {
            let ran = super::check(seed);
            mixed += u64::from(ran.mixed);
            shut += u64::from(ran.closed_by_torchrun);
            versions += ran.versions;
        }
        assert!(mixed > super::PART / 3, "{mixed} groups were mixed");
        // Where torchrun's own defects end the job, nothing is shown.
        assert!(shut < super::PART / 20, "torchrun closed {shut} jobs");
        assert!(versions > super::PART * 3, "{versions} versions");
    }

    macro_rules! parts {
        ($($name:ident: $number:literal,)*) => { $(
            #[test]
            fn $name() {
                part($number);
            }
        )* };
    }

    parts! {
        one: 0,
        two: 1,
        three: 2,
        four: 3,
    }
}

/// Plays the seed of the environment variable `ELASTIC_SEED`, telling everything.
#[test]
#[ignore = "plays one seed, for people"]
fn replay() {
    let seed = number("ELASTIC_SEED").expect("ELASTIC_SEED says which seed to play");
    let ran = play(seed, true);
    println!("{}\n{}", ran.scenario, ran.story);
    assert_eq!(ran.breach, None, "seed {seed}");
}

/// The number in an environment variable; none where it is not set.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text} is no number of a seed: {error}")))
}

/// Plays as many seeds as the environment variable `ELASTIC_SEEDS` says, from `ELASTIC_FROM` on: for long searches.
#[test]
#[ignore = "takes as long as ELASTIC_SEEDS says"]
fn search() {
    let count = number("ELASTIC_SEEDS").expect("ELASTIC_SEEDS says how many seeds to play");
    let from = number("ELASTIC_FROM").unwrap_or(0);
    let mut broken = 0;
    for seed in from..from + count {
        if let Some((promise, what)) = play(seed, false).breach {
            println!("seed {seed} breaks the promise \"{promise}\": {what:.300}");
            broken += 1;
        }
    }
    assert_eq!(broken, 0, "of {count} seeds");
}

#[test]
fn a_seed_is_played_the_same_way_twice() {
    for seed in 0..5 {
        let (one, two) = (play(seed, true), play(seed, true));
        assert!(!one.story.is_empty());
        assert_eq!(one.story, two.story);
    }
}
