//! What hears of the run, over all rounds of this process: the trace, the account of its time, the plot, the lines for
//! people, and the program's own observer.

use std::fs::{self, OpenOptions};
use std::time::Instant;

use elastic_proto::worker::Checkpoint;
use tracing::warn;

use super::TrainError;
use super::account::Account;
use super::observer::{Event, Observer};
use super::plot::{self, Point};
use super::report::Lines;
use super::trace::Trace;
use crate::settings::Settings;

/// One worker's history.
pub(super) struct History<'a> {
    settings: &'a Settings,
    /// On rank 0.
    trace: Option<Trace>,
    pub(super) account: Account,
    pub(super) lines: Lines<'a>,
    /// Each step once, with its last result. They are kept only if a plot is wanted.
    seen: Vec<Point>,
    own: Option<&'a mut dyn Observer>,
    /// Samples that were left out of steps, if they may be. A step that was done again counts again.
    pub(super) skipped: Option<u64>,
}

impl<'a> History<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        account: Account,
        lines: Lines<'a>,
        own: Option<&'a mut dyn Observer>,
    ) -> History<'a> {
        History { settings, trace: None, account, lines, seen: Vec::new(), own, skipped: None }
    }

    /// Begins to write what rank 0 writes. A trace that cannot be opened ends a run that has not `begun`.
    pub(super) fn open(&mut self, begun: bool) -> Result<(), TrainError> {
        self.lines.leads = true;
        if let Some(path) = &self.settings.plot {
            // A file that cannot be written is better known now than at the end.
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.map_err(|cause| TrainError::Plot { path: path.clone(), cause })?;
        }
        if self.trace.is_none() {
            match self.settings.trace.as_deref().map(Trace::open).transpose() {
                Err(error) if begun => warn!("{error}; training continues without a trace in this round"),
                opened => self.trace = opened?,
            }
        }
        Ok(())
    }

    /// Ends that, on a rank that is not the first.
    pub(super) fn close(&mut self) {
        (self.lines.leads, self.trace) = (false, None);
    }

    /// Whether the trace ends before `step`.
    pub(super) fn lacks(&self, step: u64) -> bool {
        self.trace.as_ref().is_some_and(|trace| trace.last() < Some(step))
    }

    /// Tells all of an event.
    pub(super) fn tell(&mut self, event: &Event<'_>) {
        let now = Instant::now();
        self.record(event);
        self.account.see(event, now);
        self.lines.see(event, now);
        if let &Event::Step { step, loss, round, world_size, skipped, .. } = event {
            self.skipped = skipped.map(|skipped| self.skipped.unwrap_or_default() + skipped);
            self.keep(Point { step, loss, round, world_size });
        }
        if let Some(own) = &mut self.own {
            own.see(event, now);
        }
    }

    /// Records an event. A trace that takes no more ends no training; the next round tries again.
    pub(super) fn record(&mut self, event: &Event<'_>) {
        if let Some(Err(error)) = self.trace.as_mut().map(|trace| trace.record(event)) {
            warn!("{error}; training continues without a trace in this round");
            self.trace = None;
        }
    }

    /// Tells that a checkpoint is the job's.
    pub(super) fn tell_commit(&mut self, Checkpoint { round, step, path, .. }: &Checkpoint) {
        self.tell(&Event::Committed { round: *round, step: *step, path });
    }

    /// Keeps a step for the plot, if one is wanted.
    fn keep(&mut self, point: Point) {
        if self.settings.plot.is_some() {
            let before = self.seen.partition_point(|seen| seen.step < point.step);
            self.seen.truncate(before);
            self.seen.push(point);
        }
    }

    /// Draws the plot, if one is wanted. A plot that cannot be written is no failure: the work is done and saved, and
    /// to do it again would not help.
    pub(super) fn draw(&self, reachable_loss: Option<f64>) {
        let Some(path) = &self.settings.plot else { return };
        if let Err(cause) = fs::write(path, plot::draw(&self.seen, reachable_loss)) {
            warn!(path = %path.display(), %cause, "cannot write the plot");
        }
    }
}
