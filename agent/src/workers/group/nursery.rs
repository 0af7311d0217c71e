//! `--preload`: when this node gets a nursery, and what the agent says of it. The guard forks workers from it once it is
//! ready.

use std::time::Duration;

use tokio::time::Instant;

use super::LocalGroup;
use crate::output::logs::Stdio;
use crate::workers::environment::without_worker;
use crate::workers::guard_client::command_line;
use crate::workers::socket::WorkerSocket;

/// How long workers run before the nursery imports: it does not compete with the imports of the first ones.
const SETTLED: Duration = Duration::from_secs(5);

/// The longest pause before a nursery that was lost is started again.
const LONGEST: Duration = Duration::from_secs(300);

/// What the node has of a nursery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nursery {
    state: State,
    /// How often one was lost that workers were forked from.
    losses: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// None is wanted, or none would be of use.
    Off,
    /// It is to begin once workers have run for a while.
    Wanted,
    /// It is to begin at this time.
    Due(Instant),
    /// It was asked for, and imports.
    Begun,
    /// Workers are forked from it.
    Ready,
}

impl Nursery {
    pub(super) fn of(modules: &[String]) -> Nursery {
        Nursery { state: if modules.is_empty() { State::Off } else { State::Wanted }, losses: 0 }
    }

    fn becomes(self, state: State) -> Nursery {
        Nursery { state, ..self }
    }

    /// All workers of the node run.
    #[must_use]
    pub(super) fn workers_run(self, now: Instant) -> Nursery {
        if self.state == State::Wanted { self.becomes(State::Due(now + self.pause())) } else { self }
    }

    /// It is gone. `of_itself`: not because everything was killed. One whose imports have succeeded comes back: perhaps
    /// the machine was too busy. Of another, the next one would end too.
    #[must_use]
    fn gone(self, of_itself: bool, now: Instant) -> Nursery {
        if !of_itself {
            return self.becomes(State::Wanted);
        }
        if self.state != State::Ready && self.losses == 0 {
            return self.becomes(State::Off);
        }
        let lost = Nursery { losses: self.losses.saturating_add(1), ..self };
        lost.becomes(State::Due(now + lost.pause()))
    }

    /// It doubles with each loss.
    fn pause(self) -> Duration {
        SETTLED.saturating_mul(1 << self.losses.saturating_sub(1).min(16)).min(LONGEST)
    }
}

/// Waits until a nursery is to begin. Waits for ever if none is. The wait may be cancelled.
pub(super) async fn due(nursery: Nursery) {
    match nursery.state {
        State::Due(at) => tokio::time::sleep_until(at).await,
        _ => std::future::pending().await,
    }
}

impl LocalGroup {
    pub(super) fn begin_nursery(&mut self, socket: &WorkerSocket) {
        self.nursery = self.nursery.becomes(State::Begun);
        let planned = self.without_place(0);
        let begun = self.spec(&planned, None, Stdio::default(), socket).and_then(|mut spec| {
            without_worker(&mut spec.env);
            let python = self.setup.command.program.clone().into_os_string();
            spec.argv = command_line(python, &self.setup.options.preload, spec.argv);
            self.guard.begin_nursery(spec).map_err(|error| error.to_string())
        });
        if let Err(why) = begun {
            self.without_nursery(Some(why));
        }
    }

    pub(super) fn preloaded(&mut self, pid: i32) {
        self.nursery = self.nursery.becomes(State::Ready);
        let modules = self.setup.options.preload.join(",");
        match self.nursery.losses {
            0 | 1 => tracing::info!("{modules} is imported, and workers are forked from process {pid} from now on"),
            losses => tracing::debug!("{modules} is imported again in process {pid}, after {losses} losses"),
        }
    }

    pub(super) fn without_nursery(&mut self, why: Option<String>) {
        let modules = self.setup.options.preload.join(",");
        self.nursery = self.nursery.gone(why.is_some(), Instant::now());
        let Some(why) = why else { return };
        match self.nursery {
            Nursery { state: State::Off, .. } => tracing::warn!(
                "--preload={modules}: {why}. Workers start without it from now on; correct it or leave it out; the \
                 workers' Python needs these modules and the package elastic-agent"
            ),
            Nursery { losses: 1, .. } => tracing::warn!(
                "--preload={modules}: {why}. Workers start without it until it has imported them again, in {:?}; the \
                 pause doubles with each loss, and no later one is logged",
                self.nursery.pause()
            ),
            Nursery { losses, .. } => tracing::debug!("--preload={modules}: {why}. It was lost {losses} times"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loses(mut nursery: Nursery, times: u32, now: Instant) -> Nursery {
        for _ in 0..times {
            nursery = nursery.becomes(State::Ready).gone(true, now);
        }
        nursery
    }

    #[test]
    fn a_nursery_begins_once_workers_have_run_for_a_while() {
        let now = Instant::now();
        assert_eq!(Nursery::of(&[]).workers_run(now).state, State::Off);
        let due = Nursery::of(&["torch".to_owned()]).workers_run(now);
        assert_eq!(due.state, State::Due(now + SETTLED));
        assert_eq!(due.workers_run(now + SETTLED / 2), due, "workers that start again do not put it off");
        let ready = due.becomes(State::Ready);
        assert_eq!(ready.workers_run(now), ready);
        assert_eq!(ready.gone(false, now).workers_run(now), due, "it was killed with the workers");
    }

    #[test]
    fn a_nursery_that_is_lost_comes_back_after_growing_pauses_if_its_imports_have_ever_succeeded() {
        let (now, wanted) = (Instant::now(), Nursery::of(&["torch".to_owned()]));
        assert_eq!(wanted.becomes(State::Begun).gone(true, now).state, State::Off);
        for (times, seconds) in [(1, 5), (2, 10), (3, 20), (7, 300), (u32::from(u16::MAX), 300)] {
            assert_eq!(loses(wanted, times, now).state, State::Due(now + Duration::from_secs(seconds)), "{times}");
        }
        let third = loses(wanted, 2, now).becomes(State::Begun).gone(true, now);
        assert_eq!(third, loses(wanted, 3, now), "the imports of a later one may fail for once");
        let killed = third.becomes(State::Begun).gone(false, now);
        assert_eq!(killed.workers_run(now), third, "a kill of everything does not shorten the pause");
    }
}
