//! What whole trainers do of it: their copies, and how they end.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::super::keeper::Copying;
use super::super::super::{Caller, Ready};
use super::*;

/// Where a trainer saves, and how often.
fn saving_settings(folder: &Path) -> Settings {
    let checkpoint_every = 2.try_into().unwrap();
    Settings { checkpoint_dir: Some(folder.to_owned()), checkpoint_every, ..settings(OptimizerState::Sharded) }
}

/// Has a trainer for each rank do two steps, and then what it is to do.
fn after_two_steps(settings: &Settings, world_size: u32, then: impl Fn(&mut Trainer<'_, Wide>, Group) + Sync) {
    let model = Wide(Tensor::sequence([("a", vec![PARAMETERS])]));
    let (port, all) = (port(), Barrier::new(world_size as usize));
    on_each_rank(world_size, |rank| {
        let feed = Feed::new(&Numbers, settings);
        let environment = Environment::read(|name| match name {
            "RANK" => Some(rank.to_string()),
            "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
            "MASTER_PORT" => Some(port.to_string()),
            "WORLD_SIZE" => Some(world_size.to_string()),
            _ => None,
        });
        let environment = environment.unwrap();
        let engine = choose(settings, &environment, &model).unwrap();
        let (mut agent, stop, mut out) = (None, Stop::default(), io::sink());
        let ready = Ready { model: &model, feed: &feed, init: None, engine };
        let caller = Caller { rescue: Vec::new(), out: &mut out, observer: None };
        let mut trainer = Trainer::new(settings, &environment, None, &mut agent, &stop, ready, caller);
        let mut group = form(rank, world_size, port);
        trainer.held.state = State::new(model.init(0).unwrap(), &trainer.run.optimizer);
        trainer.held.taken(Holding::Reached, None).unwrap();
        trainer.agree(&mut group).unwrap();
        (0..2).for_each(|_| step(&mut trainer.held, &trainer.run, &mut group));
        all.wait();
        then(&mut trainer, group);
    });
}

fn begin_copy(trainer: &mut Trainer<'_, Wide>, group: &mut Group) -> Result<Option<Copying>, TrainError> {
    let Trainer { run, held, keeper, membership, .. } = trainer;
    keeper.saving().into_iter().for_each(|saving| saving.writer().wait(Duration::from_secs(60)));
    keeper.begin_copy(run, &membership.config, held, group)
}

#[test]
fn a_copy_is_made_of_the_step_that_a_round_begins_after() {
    let folder = tempfile::tempdir().unwrap();
    after_two_steps(&saving_settings(folder.path()), 4, |trainer, mut group| {
        trainer.held.sharding.iter_mut().for_each(|sharding| sharding.assembles = false);
        trainer.agree(&mut group).unwrap();
        assert_eq!(begin_copy(trainer, &mut group).unwrap().is_some(), group.rank() == 0);
        leave(group);
    });
}

#[test]
fn a_copy_that_a_death_prevents_stays_due() {
    let folder = tempfile::tempdir().unwrap();
    let settings = saving_settings(folder.path());
    after_two_steps(&settings, 4, |trainer, mut group| {
        trainer.held.sharding.iter_mut().for_each(|sharding| sharding.assembles = true);
        if group.rank() > 0 {
            return group.leave();
        }
        assert!(!trainer.keeper.will_copy(&settings, 3));
        assert!(begin_copy(trainer, &mut group).is_err());
        assert!(trainer.keeper.will_copy(&settings, 3));
    });
}

#[test]
fn no_rank_ends_before_rank_0_has_the_last_state() {
    let there = AtomicBool::new(false);
    after_two_steps(&settings(OptimizerState::Sharded), 4, |trainer, mut group| {
        if group.rank() > 0 {
            trainer.keep_last(&mut group).unwrap();
            assert!(there.load(Ordering::SeqCst));
            return group.leave();
        }
        trainer.held.assemble(&mut group, Some(&mut vec![0.0; 3 * PARAMETERS])).unwrap();
        // Others that do not wait are gone by then.
        thread::sleep(Duration::from_millis(300));
        there.store(true, Ordering::SeqCst);
        leave(group);
    });
}

#[test]
fn those_that_leave_hand_over_before_the_last_state_is_saved() {
    after_two_steps(&settings(OptimizerState::Sharded), 3, |trainer, mut group| {
        trainer.membership.drains = group.rank() > 0;
        if group.rank() == 2 {
            // It dies when it has handed over.
            let stay = group.gather([1]).unwrap().iter().map(|[leaves]| *leaves == 0).collect::<Vec<_>>();
            trainer.held.hand_over(&mut group, &stay).unwrap();
            return;
        }
        let error = trainer.hand_over(&mut group, 0).unwrap_err();
        assert!(matches!(error, TrainError::Collective(_)), "{error}");
        assert_eq!(trainer.held.is_cut(), group.rank() > 0);
    });
}

/// Has a trainer save what it can, while its node drains and no peer is left.
fn part_alone(trainer: &mut Trainer<'_, Wide>, group: Group) {
    group.leave();
    trainer.membership.draining = true;
    trainer.part(None, TrainError::LeftAlone { round: 1, waited: Duration::ZERO });
}

#[test]
fn each_of_two_saves_without_the_other() {
    let folder = tempfile::tempdir().unwrap();
    after_two_steps(&saving_settings(folder.path()), 2, |trainer, group| {
        if group.rank() > 0 {
            return group.leave();
        }
        part_alone(trainer, group);
        assert!(folder.path().join("committed").exists());
    });
}

#[test]
fn a_rank_that_ends_alone_saves_the_newest_state_that_it_has_whole() {
    let (folder, all) = (tempfile::tempdir().unwrap(), Barrier::new(4));
    after_two_steps(&saving_settings(folder.path()), 4, |trainer, mut group| {
        let mut copying = begin_copy(trainer, &mut group).unwrap();
        keeper::during(copying.as_mut(), &[], || ());
        trainer.keeper.end_copy(copying).unwrap();
        step(&mut trainer.held, &trainer.run, &mut group);
        all.wait();
        if group.rank() > 0 {
            return group.leave();
        }
        part_alone(trainer, group);
        assert!(folder.path().join("committed").exists());
    });
}
