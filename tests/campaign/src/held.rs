//! A guard that is frozen with its workers: whether a round begins while they live, and whether their agent ends it.

use elastic_tests::prelude::*;

use anyhow::Result;
use elastic_rendezvous::job::{NodeRecord, RoundState};

use super::checker::rests;
use super::history::Observer;
use super::hosts::send;
use super::nodes::{Node, Process};
use super::scene::Missed;
use super::tracer::has_ended;

/// What workers reported before they were frozen has reached the store by then.
const REPORTED: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Held {
    node: String,
    pids: Vec<u32>,
    /// The round that they work in.
    round: u64,
    /// When they were frozen, since the job began.
    since: Duration,
    /// Whether they had come to rest just before.
    rested: bool,
}

impl Held {
    /// Freezes the guard and the workers of a node in this round.
    pub(crate) fn new(node: &Node, round: u64, since: Duration) -> Held {
        let pids = [Process::Guard, Process::Worker].map(|of| node.processes(of)).concat();
        pids.iter().for_each(|&pid| send(pid, Signal::STOP));
        Held { node: node.host.name.clone(), pids, round, since, rested: false }
    }

    fn left(&self) -> Vec<u32> {
        self.pids.iter().copied().filter(|&pid| !has_ended(pid)).collect()
    }

    /// What is wrong now: as frozen workers cannot come to rest, no other round may begin before they are gone.
    pub(crate) fn look(&mut self, observer: &Observer) -> Option<String> {
        let events = observer.events();
        let of_node = |node: &NodeRecord| node.name == self.node && rests(node, self.round);
        self.rested |= observer.elapsed() < self.since + REPORTED && events.nodes().iter().any(of_node);
        let next = events.round().filter(|round| round.state == RoundState::Running && round.number > self.round)?;
        let left = self.left();
        if left.is_empty() || self.rested {
            return None;
        }
        // Once is enough.
        self.round = next.number;
        Some(format!("round {} begins while {left:?} of {} are there from one before", next.number, self.node))
    }

    /// Lets them continue. None of them is left by then.
    pub(crate) fn let_go(&self) -> Result<Option<String>> {
        let left = self.left();
        left.iter().for_each(|&pid| send(pid, Signal::CONT));
        if self.rested {
            return Err(Missed.into());
        }
        Ok((!left.is_empty()).then(|| format!("{} has not ended its frozen guard: {left:?} are there", self.node)))
    }
}
