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

/// What the node has of a nursery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nursery {
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
        if modules.is_empty() { Nursery::Off } else { Nursery::Wanted }
    }

    /// All workers of the node run.
    #[must_use]
    pub(super) fn workers_run(self, now: Instant) -> Nursery {
        if self == Nursery::Wanted { Nursery::Due(now + SETTLED) } else { self }
    }

    /// It is gone. `of_itself`: not because everything was killed. Then another one would end too.
    #[must_use]
    fn gone(of_itself: bool) -> Nursery {
        if of_itself { Nursery::Off } else { Nursery::Wanted }
    }
}

/// Waits until a nursery is to begin. Waits for ever if none is. The wait may be cancelled.
pub(super) async fn due(nursery: Nursery) {
    match nursery {
        Nursery::Due(at) => tokio::time::sleep_until(at).await,
        _ => std::future::pending().await,
    }
}

impl LocalGroup {
    pub(super) fn begin_nursery(&mut self, socket: &WorkerSocket) {
        self.nursery = Nursery::Begun;
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
        self.nursery = Nursery::Ready;
        let modules = self.setup.options.preload.join(",");
        tracing::info!("{modules} is imported, and workers are forked from process {pid} from now on");
    }

    pub(super) fn without_nursery(&mut self, why: Option<String>) {
        let modules = self.setup.options.preload.join(",");
        let advice = match self.nursery {
            Nursery::Ready => "start the agent again to have it back",
            _ => "correct it or leave it out; the workers' Python needs these modules and the package elastic-agent",
        };
        self.nursery = Nursery::gone(why.is_some());
        if let Some(why) = why {
            tracing::warn!("--preload={modules}: {why}. Workers start without it from now on; {advice}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nursery_begins_once_workers_have_run_for_a_while_and_again_only_if_it_was_killed_with_them() {
        let now = Instant::now();
        assert_eq!(Nursery::of(&[]).workers_run(now), Nursery::Off);
        let due = Nursery::of(&["torch".to_owned()]).workers_run(now);
        assert_eq!(due, Nursery::Due(now + SETTLED));
        assert_eq!(due.workers_run(now + SETTLED / 2), due, "workers that start again do not put it off");
        assert_eq!(Nursery::Ready.workers_run(now), Nursery::Ready);
        assert_eq!(Nursery::gone(false).workers_run(now), Nursery::Due(now + SETTLED));
        assert_eq!(Nursery::gone(true).workers_run(now), Nursery::Off);
    }
}
