//! Where a worker's time goes: into steps that count, or not. Callers pass the time.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::time::{Duration, Instant};

use super::observer::{Event, Observer};

/// What a worker's time went into since it began. All that happens between two steps of a round is the later one's.
#[derive(Debug, Clone)]
pub(super) struct Account {
    begun: Instant,
    /// Up to here it is known what the time went into.
    mark: Instant,
    steps: Duration,
    evaluating: Duration,
    saving: Duration,
    changes: Duration,
    rounds: u32,
    /// The last step that was done. What is done again counts once.
    furthest: u64,
}

impl Account {
    pub(super) fn new(now: Instant) -> Account {
        let none = Duration::ZERO;
        Account {
            begun: now,
            mark: now,
            steps: none,
            evaluating: none,
            saving: none,
            changes: none,
            rounds: 0,
            furthest: 0,
        }
    }

    /// A round's steps begin.
    fn begin(&mut self, now: Instant) {
        let since = self.since(now);
        // Before the first round it is the start, which no change has caused.
        if self.rounds > 0 {
            self.changes += since;
        }
        self.rounds += 1;
    }

    /// A step is done.
    fn stepped(&mut self, step: u64, now: Instant) {
        let since = self.since(now);
        match step > self.furthest {
            true => self.steps += since,
            false => self.changes += since,
        }
        self.furthest = self.furthest.max(step);
    }

    /// Something is saved, or saving has failed.
    pub(super) fn saved(&mut self, now: Instant) {
        let since = self.since(now);
        self.saving += since;
    }

    fn since(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(std::mem::replace(&mut self.mark, now))
    }

    /// The share of steps that count in all time, and what took the rest, for people.
    pub(super) fn summary(&self, now: Instant) -> String {
        let all = now.saturating_duration_since(self.begun).as_secs_f64();
        let parts = [self.steps, self.evaluating, self.saving, self.changes];
        let [steps, evaluating, saving, changes] = parts.map(|time| time.as_secs_f64());
        let share = if all > 0.0 { 100.0 * steps / all } else { 0.0 };
        let lost = match self.rounds.saturating_sub(1) {
            0 => "the group did not change".to_owned(),
            1 => format!("{changes:.1} s lost to a change of the group"),
            count => format!("{changes:.1} s lost to {count} changes of the group"),
        };
        let evaluating = if evaluating > 0.0 { format!("{evaluating:.1} s evaluating, ") } else { String::new() };
        format!("goodput {share:.1} %: {steps:.1} of {all:.1} s in steps, {evaluating}{saving:.1} s saving, {lost}")
    }
}

impl Observer for Account {
    fn see(&mut self, event: &Event<'_>, now: Instant) {
        match event {
            Event::Begin { .. } => self.begin(now),
            Event::Step { step, .. } => self.stepped(*step, now),
            Event::Evaluated { .. } => {
                let since = self.since(now);
                self.evaluating += since;
            }
            Event::Committed { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods)] // A moment to count from.
    fn time_goes_into_steps_saving_or_changes() {
        let begun = Instant::now();
        let at = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        let mut account = Account::new(begun);
        account.begin(at(1.0));
        account.stepped(1, at(3.0));
        account.stepped(2, at(5.0));
        assert_eq!(
            account.summary(at(5.0)),
            "goodput 80.0 %: 4.0 of 5.0 s in steps, 0.0 s saving, the group did not change"
        );
        account.saved(at(5.5));
        // A step was given up at some time, and the next round began at 8.5.
        account.begin(at(8.5));
        account.stepped(3, at(10.0));
        assert_eq!(
            account.summary(at(10.0)),
            "goodput 55.0 %: 5.5 of 10.0 s in steps, 0.5 s saving, 3.0 s lost to a change of the group"
        );
        // Step 3 is lost after all and done again: that is the change's cost.
        account.begin(at(11.0));
        account.stepped(3, at(12.0));
        account.stepped(4, at(16.5));
        assert_eq!(
            account.summary(at(20.0)),
            "goodput 50.0 %: 10.0 of 20.0 s in steps, 0.5 s saving, 5.0 s lost to 2 changes of the group"
        );
    }
}
