//! What survivors of a death in any phase of a step come to.

mod trainers;

use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use elastic_collective::identity::RunIdentity;
use elastic_collective::stop::Stop;
use elastic_collective::tree::nodes_of;
use elastic_collective::{GroupConfig, Patience};
use proptest::prelude::*;

use super::super::skipped;
use super::*;
use crate::data::{Data, Order, SampleError};
use crate::engine::feed::Feed;
use crate::engine::gradient::{GradientTask, Work};
use crate::engine::interruption::Interruption;
use crate::engine::state::State;
use crate::engine::{Ranks, choose};
use crate::model::{Gradient, Tensor};
use crate::random::{mix, unit};
use crate::settings::{Environment, OptimizerState, Settings, Unreadable};
use crate::{Step, settings::device::Device};

const PARAMETERS: usize = 20_000;

/// Its gradient depends on samples, parameters and places.
struct Wide(Vec<Tensor>);

impl Model for Wide {
    type Batch = Vec<u64>;
    type Replica = ();

    fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    fn init(&self, _seed: u64) -> crate::Result<Vec<f32>> {
        Ok((0..PARAMETERS as u64).map(|place| unit(mix(place)) - 0.5).collect())
    }

    fn replica(&self) -> crate::Result<()> {
        Ok(())
    }

    fn gradient(
        &self,
        _: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<u64>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> crate::Result<f32> {
        let key = batch.iter().fold(7, |key, sample| mix(key ^ sample));
        for (place, parameter) in parameters.iter().enumerate() {
            gradient[place] = unit(key ^ place as u64) - 0.5 + 0.1 * parameter;
        }
        Ok(unit(key))
    }
}

struct Numbers;

impl Data for Numbers {
    type Batch = Vec<u64>;

    fn samples(&self) -> u64 {
        1000
    }

    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<u64>) -> std::result::Result<(), SampleError> {
        if let Some(sample) = samples.iter().find(|sample| *sample % 10 == 3) {
            return Err(SampleError::damaged(*sample, "in a test"));
        }
        samples.clone_into(batch);
        Ok(())
    }
}

/// Where a rank is in a step when the group ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// It has its sums, but does not know that all have.
    Summed,
    /// It has moved what it owns, and has half of what others have moved.
    Moved,
    /// It has it all.
    Gathered,
}

fn settings(optimizer_state: OptimizerState) -> Settings {
    let settings = Settings { device: Device::Cpu, clip: Some(0.2), bucket_mb: 0.04, ..Settings::default() };
    Settings { optimizer_state, unreadable: Unreadable::Skip, ..settings }
}

fn run_of<'a>(settings: &'a Settings, model: &'a Wide, feed: &'a Feed<'a, Vec<u64>>) -> Run<'a, Wide> {
    Run {
        settings,
        identity: RunIdentity::default(),
        init: None,
        model,
        optimizer: settings.optimizer(),
        data: &Numbers,
        feed,
        order: Order::new(7, Numbers.samples()),
        schedule: settings.steps(Numbers.samples()),
    }
}

/// A rank's state before the first step.
fn begin<'a>(run: &Run<'a, Wide>) -> Held<'a, Wide> {
    let environment = Environment::read(|_| None).unwrap();
    let mut held = Held::nothing(choose(run.settings, &environment, run.model).unwrap(), run.model, run.settings);
    held.state = State::new(run.model.init(0).unwrap(), &run.optimizer);
    held.taken(Holding::Reached, None).unwrap();
    held
}

fn reduce(held: &mut Held<'_, Wide>, run: &Run<'_, Wide>, group: &mut Group) {
    let (shards, stop) = (run.settings.shards.get(), Stop::default());
    let task = GradientTask {
        model: run.model,
        parameters: held.state.parameters(),
        work: Work::Gradient,
        feed: run.feed,
        order: &run.order,
        batch: run.schedule.batch_after(held.state.step),
        later: Vec::new(),
        shards,
        micro_batch: None,
        interruption: &Interruption::new(&stop, 1),
    };
    let nodes = nodes_of(group.rank(), group.world_size(), shards);
    let reduced = held.engine.reduce(&task, Ranks { group, nodes: &nodes, vote: &mut || 0 }).unwrap();
    held.skipped = skipped(run.feed, group).unwrap();
    assert_ne!(held.skipped, Some(0));
    let along = run.along(held.state.step, held.skipped);
    held.engine.commit(group, held.state.step + 1, &along, reduced.loss).unwrap();
}

fn step(held: &mut Held<'_, Wide>, run: &Run<'_, Wide>, group: &mut Group) {
    reduce(held, run, group);
    held.move_owned(run).unwrap();
    held.gather(group).unwrap();
}

/// A rank that has settled in its first group, and done two steps there.
fn two_steps<'a>(run: &Run<'a, Wide>, mut group: Group) -> (Held<'a, Wide>, Group) {
    let mut held = begin(run);
    held.settle(run, &mut group, true).unwrap();
    (0..2).for_each(|_| step(&mut held, run, &mut group));
    (held, group)
}

/// Ends a group once all its ranks are here.
fn leave(mut group: Group) {
    group.barrier().unwrap();
    group.leave();
}

fn form(rank: u32, world_size: u32, master_port: u16) -> Group {
    let (job, master_addr, settings) = ("test".to_owned(), "127.0.0.1".to_owned(), String::new());
    let config =
        GroupConfig { job, round: 1, rank, world_size, master_addr, master_port, agent_store: false, settings };
    let time = Duration::from_secs(30);
    Group::form(&config, Patience { form: time, operation: time }, Stop::default()).unwrap()
}

fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The whole state after each of some steps, by one rank that keeps all of it.
fn undisturbed(model: &Wide, steps: usize) -> Vec<State> {
    let settings = settings(OptimizerState::Whole);
    let feed = Feed::new(&Numbers, &settings);
    let run = run_of(&settings, model, &feed);
    let (mut held, mut group) = (begin(&run), form(0, 1, port()));
    let mut states = vec![held.state.clone()];
    for _ in 0..steps {
        step(&mut held, &run, &mut group);
        states.push(held.state.clone());
    }
    states
}

/// Ends a step in a phase. This rank has the step's sums.
fn end_in(phase: Phase, held: &mut Held<'_, Wide>, run: &Run<'_, Wide>, after: &State) {
    if phase == Phase::Summed {
        return;
    }
    held.move_owned(run).unwrap();
    let owned: Vec<_> = held.state.owned().to_vec();
    for place in (0..PARAMETERS).filter(|place| !owned.iter().any(|range| range.contains(place))) {
        match phase {
            Phase::Gathered => held.state.flat[place] = after.flat[place],
            _ if place % 2 == 0 => held.state.flat[place] = f32::NAN,
            _ => {}
        }
    }
    held.sharding.as_mut().unwrap().fresh = phase == Phase::Gathered || !held.is_cut();
}

fn phases() -> impl Strategy<Value = Vec<Phase>> {
    let phase = prop_oneof![Just(Phase::Summed), Just(Phase::Moved), Just(Phase::Gathered)];
    prop::collection::vec(phase, 5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn a_death_in_any_phase_loses_no_step(
        before in 2u32..6, victim in 0u32..6, after in 1u32..6, sums in any::<bool>(), phases in phases(),
    ) {
        let model = Wide(Tensor::sequence([("a", vec![PARAMETERS - 40]), ("b", vec![40])]));
        let (states, settings) = (undisturbed(&model, 5), settings(OptimizerState::Sharded));
        let (victim, first, second) = (victim % before, port(), port());
        let survivors: Vec<u32> = (0..before).filter(|rank| *rank != victim).collect();
        let has_moved = sums && survivors.iter().any(|rank| phases[*rank as usize] != Phase::Summed);
        let rank = |rank: u32| {
            let feed = Feed::new(&Numbers, &settings);
            let run = run_of(&settings, &model, &feed);
            let mut held = if rank < before {
                let (mut held, mut group) = two_steps(&run, form(rank, before, first));
                assert_eq!(held.state.checksum(), states[2].checksum());
                if sums {
                    reduce(&mut held, &run, &mut group);
                    end_in(phases[rank as usize], &mut held, &run, &states[3]);
                }
                leave(group);
                held
            } else {
                Held { holding: Holding::Nothing, ..begin(&run) }
            };
            let place = survivors.iter().copied().chain(before..before + after).position(|survivor| survivor == rank);
            let Some(place) = place.filter(|place| (*place as u32) < after) else { return };
            let mut group = form(place as u32, after, second);
            let settled = held.settle(&run, &mut group, true);
            let is_lost = matches!(settled, Err(TrainError::OwnersLost { .. } | TrainError::Collective(_)));
            if (after as usize) < survivors.len() && is_lost {
                // Those that would have it all have no place. One that finds this out first is missed by the others.
                return;
            }
            let (at, _) = settled.unwrap();
            assert_eq!(at, if has_moved && survivors.len() <= after as usize { 3 } else { at });
            assert!((2..4).contains(&at));
            assert_eq!(held.state.checksum(), states[at as usize].checksum());
            let end = at as usize + 2;
            (0..2).for_each(|_| step(&mut held, &run, &mut group));
            let mut whole = vec![f32::NAN; states[end].flat.len()];
            held.assemble(&mut group, (place == 0).then_some(&mut whole[..])).unwrap();
            assert_eq!(held.state.checksum(), states[end].checksum());
            assert!(place > 0 || whole == states[end].flat, "the optimizer's numbers too");
            leave(group);
        };
        on_each_rank(before + after.saturating_sub(before - 1), rank);
    }
}

/// A thread for each rank.
fn on_each_rank(world_size: u32, rank: impl Fn(u32) + Sync) {
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..world_size).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Goes as far as to have moved what moves, and takes none of it in.
fn half_settle(held: &Held<'_, Wide>, mut group: Group, both: &Barrier) {
    let Some(Sharding { cut, shares, fresh, .. }) = held.sharding.clone() else { unreachable!() };
    let own = Told { step: Some(held.state.step), summed: None, shares: shares.clone(), fresh, last: None };
    let told: Vec<Told> = group.gather(own.words()).unwrap().iter().map(Told::heard).collect();
    let sums = group.gather(shards::checksums(&held.state, cut, shares[0])).unwrap();
    let right = shards::right(&told, &sums, held.state.step, group.rank() as usize).unwrap();
    let plan = Plan::to_reshard(&told, &right, cut).unwrap();
    let places = Places::whole(PARAMETERS);
    let mut flat = vec![0.0; 3 * PARAMETERS];
    plan.carry_out(&mut group, &held.state, (&mut flat, &places)).unwrap();
    both.wait();
}

#[test]
fn what_a_rank_owned_stays_until_all_have_theirs() {
    // All ranks change places. Of two nothing arrives, and one of these is gone.
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (states, settings, ports) =
        (undisturbed(&model, 2), settings(OptimizerState::Sharded), [port(), port(), port()]);
    let both = Barrier::new(2);
    let rank = |rank: u32| {
        let feed = Feed::new(&Numbers, &settings);
        let run = run_of(&settings, &model, &feed);
        let (mut held, group) = two_steps(&run, form(rank, 4, ports[0]));
        leave(group);
        let mut group = form((rank + 1) % 4, 4, ports[1]);
        match rank {
            1 | 3 => half_settle(&held, group, &both),
            _ => {
                let error = held.settle(&run, &mut group, true).unwrap_err();
                assert!(matches!(error, TrainError::Collective(_)), "{error}");
            }
        }
        if rank < 3 {
            let mut group = form(rank, 3, ports[2]);
            assert_eq!(held.settle(&run, &mut group, true).unwrap().0, 2);
            let mut whole = vec![f32::NAN; 3 * PARAMETERS];
            held.assemble(&mut group, Some(&mut whole)).unwrap();
            assert!(whole == states[2].flat);
            leave(group);
        }
    };
    on_each_rank(4, rank);
}

#[test]
fn a_rank_with_other_numbers_takes_those_of_the_others() {
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (states, settings, port) = (undisturbed(&model, 2), settings(OptimizerState::Sharded), port());
    let rank = |rank: u32| {
        let feed = Feed::new(&Numbers, &settings);
        let run = run_of(&settings, &model, &feed);
        let (mut held, mut group) = two_steps(&run, form(rank, 4, port));
        // A parameter of one rank changes: it takes all from the others.
        held.state.flat[7] += if rank == 1 { 1.0 } else { 0.0 };
        assert_eq!(held.settle(&run, &mut group, true).unwrap(), (2, 1));
        assert_eq!(held.state.checksum(), states[2].checksum());
        // Of two that differ in the optimizer's numbers, neither is known to be right.
        *held.state.flat.last_mut().unwrap() += if rank == 2 { 1.0 } else { 0.0 };
        let error = held.settle(&run, &mut group, true).unwrap_err();
        assert!(matches!(error, TrainError::Split { step: 2, .. }), "{error}");
        group.leave();
    };
    on_each_rank(4, rank);
}

#[test]
fn ranks_continue_from_a_snapshot_if_both_owners_of_a_part_are_gone() {
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (states, settings, ports) = (undisturbed(&model, 3), settings(OptimizerState::Sharded), [port(), port()]);
    let rank = |rank: u32| {
        let feed = Feed::new(&Numbers, &settings);
        let run = run_of(&settings, &model, &feed);
        let (mut held, group) = two_steps(&run, form(rank, 4, ports[0]));
        leave(group);
        if [1, 3].contains(&rank) {
            // Another worker, which found the state after the first step in its agent's memory.
            held = begin(&run);
            held.state = states[1].clone();
            held.taken(Holding::Rescued, None).unwrap();
        }
        let mut group = form(rank, 4, ports[1]);
        assert_eq!(held.settle(&run, &mut group, true).unwrap(), (1, 2));
        (0..2).for_each(|_| step(&mut held, &run, &mut group));
        let mut whole = vec![f32::NAN; 3 * PARAMETERS];
        held.assemble(&mut group, Some(&mut whole)).unwrap();
        assert!(whole == states[3].flat);
        leave(group);
    };
    on_each_rank(4, rank);
}

/// Settles by hand, and sends other numbers than those that were compared.
fn settle_with_damage(held: &mut Held<'_, Wide>, group: &mut Group) {
    let Some(Sharding { cut, shares, fresh, .. }) = held.sharding.clone() else { unreachable!() };
    let own = Told { step: Some(held.state.step), summed: None, shares: shares.clone(), fresh, last: None };
    let told: Vec<Told> = group.gather(own.words()).unwrap().iter().map(Told::heard).collect();
    let sums = group.gather(shards::checksums(&held.state, cut, shares[0])).unwrap();
    let right = shards::right(&told, &sums, held.state.step, group.rank() as usize).unwrap();
    let plan = Plan::to_reshard(&told, &right, cut).unwrap();
    let compared = held.state.flat.clone();
    held.state.flat[compared.len() - 1] += 1.0;
    plan.carry_out(group, &held.state, (&mut [], &Places::whole(PARAMETERS))).unwrap();
    held.state.flat = compared;
    group.gather(shards::checksums(&held.state, cut, shares[0])).unwrap();
}

#[test]
fn numbers_that_arrive_damaged_are_asked_for_again() {
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (states, settings, ports) = (undisturbed(&model, 2), settings(OptimizerState::Sharded), [port(), port()]);
    on_each_rank(4, |rank| {
        let feed = Feed::new(&Numbers, &settings);
        let run = run_of(&settings, &model, &feed);
        let (mut held, group) = two_steps(&run, form(rank, 4, ports[0]));
        leave(group);
        if rank == 3 {
            held = begin(&run);
            held.holding = Holding::Nothing;
        }
        let mut group = form(rank, 4, ports[1]);
        // The only one that has what the newcomer lacks
        if rank == 1 {
            settle_with_damage(&mut held, &mut group);
        } else {
            let error = held.settle(&run, &mut group, true).unwrap_err();
            assert!(matches!(error, TrainError::Damaged { step: 2 }), "{error}");
        }
        assert_eq!(held.settle(&run, &mut group, true).unwrap(), (2, 1));
        let mut whole = vec![f32::NAN; 3 * PARAMETERS];
        held.assemble(&mut group, Some(&mut whole)).unwrap();
        assert!(whole == states[2].flat);
        leave(group);
    });
}

#[test]
fn what_was_handed_over_is_compared_before_the_rest_is_dropped() {
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (states, settings, ports) = (undisturbed(&model, 2), settings(OptimizerState::Sharded), [port(), port()]);
    on_each_rank(4, |rank| {
        let feed = Feed::new(&Numbers, &settings);
        let run = run_of(&settings, &model, &feed);
        let (mut held, mut group) = two_steps(&run, form(rank, 4, ports[0]));
        let stay = [true, true, false, false];
        held.hand_over(&mut group, &stay).unwrap();
        group.leave();
        if !stay[rank as usize] {
            return;
        }
        assert!(!held.is_cut() && held.state.flat == states[2].flat);
        let Some(Sharding { cut, .. }) = held.sharding else { unreachable!() };
        let theirs = cut.chunks(Share { world_size: 4, rank: 1 }).remove(0);
        let place = held.state.places().of(0, &theirs).start;
        held.state.flat[place] += if rank == 0 { 1.0 } else { 0.0 };
        let mut group = form(rank, 2, ports[1]);
        let error = held.settle(&run, &mut group, true).unwrap_err();
        assert!(matches!(error, TrainError::Damaged { step: 2 }), "{error}");
        // Between them they still have all that they owned before.
        assert_eq!(held.settle(&run, &mut group, true).unwrap(), (2, 2));
        assert!(held.state.flat == states[2].flat);
        leave(group);
    });
}

#[test]
fn a_rank_tells_of_its_newest_shares_once_each() {
    let share = |world_size| Share { world_size, rank: 1 };
    let shares = (3..9).map(share).chain([share(7)]).fold(Vec::new(), shards::with);
    assert_eq!(shares, [5, 6, 7, 8].map(share));
    let told = Told { step: Some(1), summed: None, shares, fresh: true, last: None };
    assert_eq!(Told::heard(&told.words()), told);
}
