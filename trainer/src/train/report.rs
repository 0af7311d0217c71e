//! The lines for people.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

use tracing::warn;

use super::observer::{Event, Observer};
use crate::data::{Schedule, Unit};

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

/// The lines of a run: its state, how fast a round goes, and each evaluation. Rank 0 prints them.
pub(super) struct Lines<'a> {
    pub(super) printer: Printer<'a>,
    /// Whether this is rank 0.
    pub(super) leads: bool,
    schedule: Schedule,
    unit: Unit,
    reachable: String,
    world_size: u32,
    started: Instant,
    first_step: u64,
    last: Instant,
}

impl<'a> Lines<'a> {
    pub(super) fn new(out: Printer<'a>, schedule: Schedule, unit: Unit, least: Option<f64>, now: Instant) -> Lines<'a> {
        let said = |loss: f64| format!(" ({loss:.4} is reachable)");
        let (reachable, leads) = (least.map_or(String::new(), said), false);
        Lines { printer: out, leads, schedule, unit, reachable, world_size: 1, started: now, first_step: 0, last: now }
    }

    /// After `took` in this round.
    fn line(&self, step: u64, loss: f32, took: Duration) -> String {
        let Lines { schedule, unit, reachable, world_size, .. } = self;
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

impl Observer for Lines<'_> {
    fn see(&mut self, event: &Event<'_>, now: Instant) {
        match event {
            Event::Begin { step, world_size, .. } => {
                (self.first_step, self.world_size) = (*step, *world_size);
                (self.started, self.last) = (now, now);
            }
            Event::Step { step, loss, .. } if self.leads && now - self.last >= REPORT_TIME => {
                self.last = now;
                let line = self.line(*step, *loss, now - self.started);
                self.printer.line(format_args!("{line}"));
            }
            Event::Evaluated { step, samples, loss, metrics, .. } if self.leads => {
                let more: String = metrics.iter().map(|(name, mean)| format!("  {name} {mean:.4}")).collect();
                let line = format_args!("step {step}: held-out loss {loss:.4}{more}  in {samples} samples");
                self.printer.line(line);
            }
            _ => {}
        }
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

    #[test]
    fn a_line_tells_how_far_how_fast_and_how_long() {
        // Given 100 windows of 8 tokens, 10 a step, twice; when 6 steps from the fourth on took 3 seconds
        let schedule = Schedule::of_epochs(100, 10, 2);
        let (mut out, begun) = (Vec::new(), Instant::now());
        let unit = Unit { name: "tokens", of_a_sample: 8 };
        let mut lines = Lines::new(Printer::new(&mut out), schedule, unit, Some(1.408), begun);
        lines.leads = true;
        let (round, pid, collectives, nccl_failures) = (1, 1, "", 0);
        lines.see(&Event::Begin { round, step: 4, world_size: 3, pid, collectives, nccl_failures }, begun);
        let step =
            |step| Event::Step { round, step, epoch: 0, first: 0, end: 1, loss: 1.5, world_size: 3, skipped: None };
        lines.see(&step(5), begun + REPORT_TIME / 2);
        lines.see(&step(10), begun + 3 * REPORT_TIME);
        let wanted =
            "step 10/20  epoch 1/2  loss 1.5000 (1.4080 is reachable)  160 tokens/s  3 workers  about 5 s left";
        assert_eq!(String::from_utf8(out).unwrap().trim_end(), wanted);
    }

    #[test]
    fn times_are_short() {
        for (seconds, words) in [(0.4, "0 s"), (119.4, "119 s"), (120.0, "2 min"), (121.0, "3 min"), (9000.0, "2.5 h")]
        {
            assert_eq!(time(seconds), words);
        }
    }
}
