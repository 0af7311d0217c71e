//! What the group's workers are doing, which decides what their ends mean.
//!
//! ```text
//!   start ──────────▶ Running ── the end is reported, or they are to rest ──▶ Reported
//!                      ▲   ▲                                                     │
//!   start_ahead ─▶ Ahead   └──────────────── start, in the same processes ───────┘
//!
//!   any of these ── stop ──▶ Stopping ── nothing of them is left ──▶ as it was, without workers
//! ```

/// What they do while nobody has told them to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Life {
    /// They have places in a round, and an end of theirs is news.
    #[default]
    Running,
    /// Their end was reported, or they are to come to rest: another end of theirs is no news.
    Reported,
    /// They were started before their places are known: how they end is no failure.
    Ahead,
}

/// What they are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nobody has told them to stop.
    Up(Life),
    /// They were told to stop, and that they have is not yet reported; inside is what they did before.
    Stopping(Life),
}

/// What happens to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// They are started, or go on, in places of a round.
    Start,
    /// They are started before their places are known.
    StartAhead,
    /// Their end is reported.
    Report,
    /// They are to stop.
    Stop,
    /// Nothing of them is left.
    Gone,
}

/// What follows a worker's exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitMeans {
    /// It is judged, and reported if it ends the group's part.
    News,
    /// It was expected of a worker with a place: torchrun's events tell of it.
    Expected,
    /// It was expected of a worker that never had a place: nothing follows.
    Nothing,
}

impl Default for Phase {
    fn default() -> Phase {
        Phase::Up(Life::default())
    }
}

impl Phase {
    /// What they do after this.
    #[must_use]
    pub(super) fn step(self, input: Input) -> Phase {
        let become_ = |life| match self {
            Phase::Up(_) => Phase::Up(life),
            Phase::Stopping(_) => Phase::Stopping(life),
        };
        match input {
            Input::Start => become_(Life::Running),
            Input::StartAhead => become_(Life::Ahead),
            Input::Report => become_(if self.life() == Life::Ahead { Life::Ahead } else { Life::Reported }),
            Input::Stop => Phase::Stopping(self.life()),
            Input::Gone => Phase::Up(self.life()),
        }
    }

    fn life(self) -> Life {
        match self {
            Phase::Up(life) | Phase::Stopping(life) => life,
        }
    }

    /// Whether an end of theirs is still to be reported, though they may have been told to stop.
    pub(super) fn is_unreported(self) -> bool {
        self.life() == Life::Running
    }

    /// Whether they run in places of a round, and nobody expects their end.
    pub(super) fn is_running(self) -> bool {
        self == Phase::Up(Life::Running)
    }

    /// Whether they were told to stop.
    pub(super) fn is_stopping(self) -> bool {
        matches!(self, Phase::Stopping(_))
    }

    /// Whether they were started in places of a round.
    pub(super) fn has_places(self) -> bool {
        self.life() != Life::Ahead
    }

    /// What a worker's exit means now.
    pub(super) fn exit(self) -> ExitMeans {
        match self {
            Phase::Up(Life::Running) => ExitMeans::News,
            _ if self.has_places() => ExitMeans::Expected,
            _ => ExitMeans::Nothing,
        }
    }

    /// Whether that a worker could not be started is to be reported: of those started ahead it is, since they are then
    /// started in their round.
    pub(super) fn reports_unstarted(self) -> bool {
        matches!(self, Phase::Up(Life::Running | Life::Ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ExitMeans::{Expected, News, Nothing};
    use Input::{Gone, Report, Start, StartAhead, Stop};
    use Life::{Ahead, Reported, Running};
    use Phase::{Stopping, Up};

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
