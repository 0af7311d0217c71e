//! The lines for people.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::data::{Data, Schedule, Unit};

/// Time between two lines.
const REPORT_TIME: Duration = Duration::from_secs(1);

/// Prints lines until that fails. Then training continues without them.
pub(super) struct Printer<'a>(Option<&'a mut dyn Write>);

impl<'a> Printer<'a> {
    pub(super) fn new(out: &'a mut dyn Write) -> Printer<'a> {
        Printer(Some(out))
    }

    pub(super) fn line(&mut self, line: fmt::Arguments<'_>) {
        let Some(out) = &mut self.0 else { return };
        if let Err(error) = writeln!(out, "{line}") {
            warn!(%error, "cannot print; training continues without output");
            self.0 = None;
        }
    }
}

/// How a run stands and how fast a round goes.
pub(super) struct ProgressLine {
    schedule: Schedule,
    unit: Unit,
    reachable: String,
    world_size: u32,
    started: Instant,
    first_step: u64,
    last: Instant,
}

impl ProgressLine {
    /// Of a round with so many workers, which begins after `step` steps.
    pub(super) fn new<B>(step: u64, schedule: Schedule, data: &dyn Data<Batch = B>, world_size: u32) -> ProgressLine {
        let now = Instant::now();
        let reachable = data.reachable_loss().map_or(String::new(), |loss| format!(" ({loss:.4} is reachable)"));
        ProgressLine { schedule, unit: data.unit(), reachable, world_size, started: now, first_step: step, last: now }
    }

    pub(super) fn is_due(&self) -> bool {
        self.last.elapsed() >= REPORT_TIME
    }

    pub(super) fn print(&mut self, out: &mut Printer<'_>, step: u64, loss: f32) {
        self.last = Instant::now();
        out.line(format_args!("{}", self.line(step, loss, self.last - self.started)));
    }

    /// After `took` in this round.
    fn line(&self, step: u64, loss: f32, took: Duration) -> String {
        let ProgressLine { schedule, unit, reachable, world_size, .. } = self;
        let (total, per_epoch) = (schedule.total_steps(), schedule.steps_per_epoch());
        let rate = (step - self.first_step) as f64 / took.as_secs_f64();
        let units = rate * (schedule.samples * unit.of_a_sample) as f64 / per_epoch as f64;
        let workers = if *world_size == 1 { "worker" } else { "workers" };
        format!(
            "step {step}/{total}  epoch {}/{}  loss {loss:.4}{reachable}  {units:.0} {}/s  {world_size} {workers}  about \
             {} left",
            step.div_ceil(per_epoch),
            schedule.epochs(),
            unit.name,
            time((total - step) as f64 / rate),
        )
    }
}

/// Seconds, as people say them.
fn time(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..120 => format!("{whole} s"),
        120..7200 => format!("{} min", whole.div_ceil(60)),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Markov;

    #[test]
    fn a_line_tells_how_far_how_fast_and_how_long() {
        // Given 100 windows of 8 tokens, 10 a step, twice; when 6 steps from the fourth on took 3 seconds
        let data = Markov::new(16, 8, 100, 0);
        let schedule = Schedule::of_epochs(100, 10, 2);
        let progress = ProgressLine::new(4, schedule, &data, 3);
        let line = progress.line(10, 1.5, Duration::from_secs(3));
        // (4 + 7 · 1.75) / 8 bits are reachable.
        let wanted =
            "step 10/20  epoch 1/2  loss 1.5000 (1.4080 is reachable)  160 tokens/s  3 workers  about 5 s left";
        assert_eq!(line, wanted);
    }

    #[test]
    fn times_are_short() {
        for (seconds, words) in [(0.4, "0 s"), (119.4, "119 s"), (120.0, "2 min"), (121.0, "3 min"), (9000.0, "2.5 h")]
        {
            assert_eq!(time(seconds), words);
        }
    }
}
