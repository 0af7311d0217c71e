//! What a run leaves besides its result: the trace, the account of its time, and the plot.

use std::fs::{self, OpenOptions};

use elastic_proto::worker::Checkpoint;
use tracing::warn;

use super::TrainError;
use super::account::Account;
use super::plot::{self, Point};
use super::trace::{Event, Trace};
use crate::settings::Settings;

/// One worker's history, over all rounds of its process.
pub(super) struct History<'a> {
    settings: &'a Settings,
    /// On rank 0.
    trace: Option<Trace>,
    pub(super) account: Account,
    /// Each step once, with its last result. They are kept only if a plot is wanted.
    seen: Vec<Point>,
}

impl<'a> History<'a> {
    pub(super) fn new(settings: &'a Settings, account: Account) -> History<'a> {
        History { settings, trace: None, account, seen: Vec::new() }
    }

    /// Opens the files, on rank 0. A trace that cannot be opened ends a run that has not `begun`.
    pub(super) fn open(&mut self, begun: bool) -> Result<(), TrainError> {
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

    /// Closes the trace, on a rank that does not write it.
    pub(super) fn close(&mut self) {
        self.trace = None;
    }

    /// Whether the trace ends before `step`.
    pub(super) fn lacks(&self, step: u64) -> bool {
        self.trace.as_ref().is_some_and(|trace| trace.last() < Some(step))
    }

    /// Records an event. A trace that takes no more ends no training; the next round tries again.
    pub(super) fn record(&mut self, event: &Event<'_>) {
        if let Some(Err(error)) = self.trace.as_mut().map(|trace| trace.record(event)) {
            warn!("{error}; training continues without a trace in this round");
            self.trace = None;
        }
    }

    /// Records that a checkpoint is the job's.
    pub(super) fn record_commit(&mut self, Checkpoint { round, step, path, .. }: &Checkpoint) {
        self.record(&Event::Committed { round: *round, step: *step, path });
    }

    /// Keeps a step for the plot, if one is wanted.
    pub(super) fn see(&mut self, point: Point) {
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
