//! The phases of the group's workers. The phase decides how the workers' ends are judged.
//!
//! ```text
//!   start ──────────▶ Running ───────── the end is reported, or they are to rest ─▶ Reported
//!                      ▲   ▲                                                     │
//!   start_ahead ─▶ Ahead   └──────────────── start, in the same processes ───────┘
//!
//!   any of these ── stop ──▶ Stopping ── nothing of them is left ──▶ unchanged, without workers
//! ```

/// What the workers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Life {
    /// They have places in a round, and an end must be reported.
    #[default]
    Running,
    /// Their end was reported, or they are about to quiesce or stop: further ends are not reported.
    Reported,
    /// They were started before their places are known: an end is not a failure.
    Ahead,
}

/// What the workers do, and whether the agent is stopping them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupPhase {
    /// The agent is not stopping them.
    Up(Life),
    /// The agent is stopping them, and this is not yet reported as done. Holds what they did before.
    Stopping(Life),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// They are started in places of a round, or continue in new places.
    Start,
    /// They are started before their places are known.
    StartAhead,
    /// Their end is reported, or further ends need no report.
    Report,
    Stop,
    /// No process of theirs is left.
    Gone,
}

/// The consequence of a worker's exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitMeans {
    /// The exit is judged, and reported if it ends the group's part in the round.
    News,
    /// The exit of a worker with a place was expected: only torchrun's events record it.
    Expected,
    /// The exit of a worker that never had a place was expected: nothing follows.
    Nothing,
}

impl Default for GroupPhase {
    fn default() -> GroupPhase {
        GroupPhase::Up(Life::default())
    }
}

impl GroupPhase {
    #[must_use]
    pub(super) fn step(self, input: Input) -> GroupPhase {
        let become_ = |life| match self {
            GroupPhase::Up(_) => GroupPhase::Up(life),
            GroupPhase::Stopping(_) => GroupPhase::Stopping(life),
        };
        match input {
            Input::Start => become_(Life::Running),
            Input::StartAhead => become_(Life::Ahead),
            Input::Report => become_(if self.life() == Life::Ahead { Life::Ahead } else { Life::Reported }),
            Input::Stop => GroupPhase::Stopping(self.life()),
            Input::Gone => GroupPhase::Up(self.life()),
        }
    }

    fn life(self) -> Life {
        match self {
            GroupPhase::Up(life) | GroupPhase::Stopping(life) => life,
        }
    }

    /// Whether an end must still be reported, even if the agent is stopping the workers.
    pub(super) fn is_unreported(self) -> bool {
        self.life() == Life::Running
    }

    /// Whether the workers run in places of a round, and no end is expected.
    pub(super) fn is_running(self) -> bool {
        self == GroupPhase::Up(Life::Running)
    }

    /// Whether the agent is stopping them.
    pub(super) fn is_stopping(self) -> bool {
        matches!(self, GroupPhase::Stopping(_))
    }

    /// Whether they were started in places of a round.
    pub(super) fn has_places(self) -> bool {
        self.life() != Life::Ahead
    }

    /// What a worker's exit means now.
    pub(super) fn exit(self) -> ExitMeans {
        match self {
            GroupPhase::Up(Life::Running) => ExitMeans::News,
            _ if self.has_places() => ExitMeans::Expected,
            _ => ExitMeans::Nothing,
        }
    }

    /// Whether to report that a worker could not be started. For workers started ahead it is reported, because they are
    /// then started in their round.
    pub(super) fn reports_unstarted(self) -> bool {
        matches!(self, GroupPhase::Up(Life::Running | Life::Ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ExitMeans::{Expected, News, Nothing};
    use GroupPhase::{Stopping, Up};
    use Input::{Gone, Report, Start, StartAhead, Stop};
    use Life::{Ahead, Reported, Running};

    #[test]
    fn what_happens_decides_what_follows() {
        for (before, input, after) in [
            (Up(Running), Report, Up(Reported)),
            (Up(Running), Stop, Stopping(Running)),
            (Up(Running), Start, Up(Running)),
            (Up(Running), StartAhead, Up(Ahead)),
            (Up(Reported), Start, Up(Running)),
            (Up(Reported), Report, Up(Reported)),
            (Up(Reported), Stop, Stopping(Reported)),
            (Up(Ahead), Start, Up(Running)),
            (Up(Ahead), Report, Up(Ahead)),
            (Up(Ahead), Stop, Stopping(Ahead)),
            (Stopping(Running), Report, Stopping(Reported)),
            (Stopping(Running), Gone, Up(Running)),
            (Stopping(Reported), Gone, Up(Reported)),
            (Stopping(Reported), Stop, Stopping(Reported)),
        ] {
            assert_eq!(before.step(input), after, "{before:?} {input:?}");
        }
    }

    #[test]
    fn only_a_running_groups_end_is_news() {
        for (phase, exit, unstarted) in [
            (Up(Running), News, true),
            (Up(Reported), Expected, false),
            (Up(Ahead), Nothing, true),
            (Stopping(Running), Expected, false),
            (Stopping(Reported), Expected, false),
            (Stopping(Ahead), Nothing, false),
        ] {
            assert_eq!((phase.exit(), phase.reports_unstarted()), (exit, unstarted), "{phase:?}");
        }
    }
}
