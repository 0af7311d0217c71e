//! How long a node waits before it starts workers again that fail soon after each start. Without a pause a program that
//! cannot start spends thousands of restarts, log folders and lines in a minute.
//!
//! All nodes of a job count alike: their workers start together, and the job counts its restarts.

use std::time::Duration;

use tokio::time::Instant;

/// Workers that ran for this long had begun their work, and so had those that reported a step.
const LONG: Duration = Duration::from_secs(10);

/// As many restarts come without a pause.
const AT_ONCE: u32 = 2;

/// The first pause. Each later one is twice as long.
const FIRST: Duration = Duration::from_millis(500);

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(20);

/// The restarts of workers that failed soon after their start.
#[derive(Debug, Default)]
pub(super) struct Storm {
    /// When the workers were last started, and the job's restarts at that time.
    last: Option<(Instant, u32)>,
    /// Failures in a row that came soon after the start.
    soon: u32,
    /// The reason for the first of these restarts.
    first: String,
}

impl Storm {
    /// The pause before a start at `now`, in a round with so many `restarts` that was formed for this `reason`. `worked`:
    /// the workers before reported a step. The pause is no longer than `most`.
    pub(super) fn pause(
        &mut self,
        restarts: u32,
        reason: &str,
        worked: bool,
        most: Duration,
        now: Instant,
    ) -> Duration {
        let (started, before) = self.last.unwrap_or((now, restarts));
        let failed = restarts > before;
        if worked || now.saturating_duration_since(started) >= LONG {
            self.soon = 0;
        } else if failed {
            self.soon += 1;
        }
        if failed && self.soon == 1 {
            self.first = reason.to_owned();
        }
        let doublings = self.soon.checked_sub(AT_ONCE + 1).filter(|_| failed);
        let pause = doublings.map_or(Duration::ZERO, |doublings| FIRST * 2_u32.saturating_pow(doublings.min(16)));
        let pause = pause.min(LONGEST).min(most);
        self.last = Some((now + pause, restarts));
        pause
    }

    /// What to say before a pause.
    pub(super) fn story(&self, pause: Duration) -> String {
        format!(
            "workers failed {} times in a row soon after their start: starting them again in {pause:?}; the first \
             time: {}",
            self.soon, self.first
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_secs(3600);

    #[test]
    fn pauses_grow_up_to_a_bound_and_end_with_workers_that_run_for_long() {
        let (mut storm, mut now) = (Storm::default(), Instant::now());
        let pauses: Vec<u64> = (0..13)
            .map(|restarts| {
                let pause = storm.pause(restarts, &format!("reason {restarts}"), false, MOST, now);
                now += pause + Duration::from_millis(10);
                pause.as_millis() as u64
            })
            .collect();
        assert_eq!(pauses, [0, 0, 0, 500, 1000, 2000, 4000, 8000, 16_000, 20_000, 20_000, 20_000, 20_000]);
        let story = storm.story(LONGEST);
        assert!(story.contains("12 times") && story.ends_with("the first time: reason 1"), "{story}");

        assert_eq!(storm.pause(13, "later", true, MOST, now), Duration::ZERO, "they worked");
        for restarts in 14..17 {
            now += storm.pause(restarts, "", false, MOST, now);
        }
        now += LONG;
        assert_eq!(storm.pause(17, "later", false, MOST, now), Duration::ZERO, "they ran for long");
        assert_eq!(storm.soon, 0);
    }

    #[test]
    fn a_change_of_nodes_is_no_failure_and_a_start_must_not_be_overdue() {
        let (mut storm, now) = (Storm::default(), Instant::now());
        for restarts in 0..6 {
            storm.pause(restarts, "", false, Duration::ZERO, now);
        }
        assert_eq!(storm.pause(5, "b joins", false, MOST, now), Duration::ZERO);
        assert_eq!(storm.pause(6, "", false, Duration::from_secs(1), now), Duration::from_secs(1), "bounded");
    }
}
