//! The order of events: an undisturbed run, then the same with an agent killed and started again.

use std::time::{Duration, Instant};

use crate::agents::{is_guard, marked};
use crate::checks;
use crate::run::{Ended, Interrupted, Kill, RUNS, Run, Stage};
use crate::screen::Style;
use crate::summary;

const VICTIM: &str = "b";
/// The longest that nodes may take to agree on a round, or to notice a kill.
const CHANGE: Duration = Duration::from_secs(60);
const TRAINING: Duration = Duration::from_secs(600);

/// Runs both trainings and prints the checks. Returns whether every check held.
pub(crate) async fn play(stage: &mut Stage) -> anyhow::Result<bool> {
    stage.screen.say(Style::Plain, &format!("store     {}", stage.store.name))?;
    stage.screen.say(Style::Plain, &format!("training  {}", stage.training.describe()))?;
    stage.screen.say(Style::Plain, &format!("logs      {}", stage.folder.display()))?;
    stage.screen.say(Style::Bold, "\n1 of 2: three agents, undisturbed, to compare with")?;
    let quiet = undisturbed(stage).await?;
    stage.screen.say(Style::Bold, &format!("\n2 of 2: the same, and agent {VICTIM} is killed and comes back"))?;
    let (disturbed, kill) = disturbed(stage).await?;
    let (schedule, order) = (&stage.training.schedule, &stage.training.order);
    let checks = checks::all(schedule, order, &quiet, &disturbed, &kill);
    summary::print(&mut stage.screen, &quiet, &disturbed, &checks)?;
    let failed = checks.iter().filter(|check| !check.holds).count();
    let (style, verdict) = match failed {
        0 => (Style::Good, "all checks hold".to_owned()),
        failed => (Style::Bad, format!("{failed} of {} checks FAILED", checks.len())),
    };
    stage.screen.say(style, &format!("\n{verdict}; logs and traces are in {}", stage.folder.display()))?;
    Ok(failed == 0)
}

async fn undisturbed(stage: &mut Stage) -> anyhow::Result<Ended> {
    let run = Run::start(stage, RUNS[0], "1 of 2, undisturbed").await?;
    finish(run, async |run| run.ended(TRAINING).await).await
}

async fn disturbed(stage: &mut Stage) -> anyhow::Result<(Ended, Kill)> {
    let run = Run::start(stage, RUNS[1], "2 of 2, disturbed").await?;
    finish(run, async |run| {
        let third = run.total() / 3;
        let first = run
            .until("a third of the steps is committed", TRAINING, |run| {
                run.job_view.running_with(3).filter(|_| run.history().committed >= third)
            })
            .await?;

        let mut kill = kill(run).await?;
        let alone = run
            .until("the other two train on", CHANGE, |run| {
                run.job_view.running_with(2).filter(|&round| round > first && run.steps_in(round) > 0)
            })
            .await?;

        let pause = run.total() / 12;
        run.until("the two have done some steps", CHANGE, |run| (run.steps_in(alone) >= pause).then_some(())).await?;
        run.agents.start(VICTIM)?;
        run.say(Style::Good, &format!("started agent {VICTIM} again"))?;
        run.until("three train again", CHANGE, |run| {
            run.job_view.running_with(3).filter(|&round| round > alone && run.steps_in(round) > 0)
        })
        .await?;

        kill.others_later = others(run);
        let ended = run.ended(TRAINING).await?;
        kill.left = marked(&kill.mark);
        Ok((ended, kill))
    })
    .await
}

/// Kills the agent with SIGKILL, and watches its processes end.
async fn kill(run: &mut Run<'_>) -> anyhow::Result<Kill> {
    let mark = run.agents.by_node[VICTIM].mark.clone();
    let processes = marked(&mark);
    let guard = processes.iter().copied().find(|&pid| is_guard(pid));
    let others = others(run);
    let rounds = run.job_view.seals.len();
    run.agents.kill(VICTIM)?;
    let killed = Instant::now();
    run.say(Style::Bad, &format!("killed agent {VICTIM} (SIGKILL): its processes were {processes:?}"))?;
    let mut round_waited = true;
    let look = |run: &mut Run<'_>| {
        // A round that is known by now must not have begun while a worker lives, or what a worker started. The guard
        // may still be ending: it lets the others continue once all of these are gone.
        let sealed = run.job_view.seals.len() > rounds;
        let left = marked(&mark);
        round_waited &= !sealed || left.iter().all(|pid| guard == Some(*pid));
        left.is_empty().then(|| killed.elapsed())
    };
    let gone_after = run.until("the killed agent's processes are gone", CHANGE, look).await?;
    run.say(Style::Plain, &format!("nothing of it is left after {} ms", gone_after.as_millis()))?;
    let (node, left, others_later) = (VICTIM.to_owned(), Vec::new(), Vec::new());
    Ok(Kill { node, mark, processes, gone_after, round_waited, left, others, others_later })
}

/// The processes of the agents that are not killed.
fn others(run: &Run<'_>) -> Vec<u32> {
    let others = run.agents.by_node.iter().filter(|(node, _)| **node != *VICTIM);
    let mut processes: Vec<u32> = others.flat_map(|(_, agent)| marked(&agent.mark)).collect();
    processes.sort_unstable();
    processes
}

/// Runs `part`, then ends what is left of the run, also when `part` failed.
async fn finish<'a, T>(
    mut run: Run<'a>,
    part: impl AsyncFnOnce(&mut Run<'a>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let result = part(&mut run).await;
    if result.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
        run.say(Style::Bold, "ending the agents; once more ends them at once")?;
    }
    let left = run.close().await;
    anyhow::ensure!(left.is_empty(), "processes {left:?} of the demo do not end; end them by hand");
    result
}
