//! Times the sum over ranks as one rank of several that a benchmark has started: it asks for it in turn with others'.

use std::io::{self, BufRead, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use elastic_collective::{Group, GroupConfig, Patience};
use elastic_trainer::{Environment, Stop};

/// Reads `ordered BYTES TURNS` from standard input, a line at a time, and answers each with milliseconds per
/// turn. Every rank must get the same lines.
pub(crate) fn run() -> anyhow::Result<()> {
    let environment = Environment::read(|name| std::env::var(name).ok())?;
    let Environment { rank, world_size, master_addr, master_port, agent_store, .. } = environment;
    let (job, settings) = ("bench".to_owned(), String::new());
    let config = GroupConfig { job, round: 0, rank, world_size, master_addr, master_port, agent_store, settings };
    let time = Duration::from_secs(60);
    let mut group = Group::form(&config, Patience { form: time, operation: time }, Stop::default())?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let [what, bytes, turns] = line.split(' ').collect::<Vec<_>>()[..] else { bail!("`{line}` is not a task") };
        let (bytes, turns): (usize, u32) = (bytes.parse()?, turns.parse()?);
        let mut data = vec![0.0f32; bytes / size_of::<f32>()];
        let taken = match what {
            "ordered" => {
                // One shard for each rank, so that every rank sends one partial sum.
                time_turns(&mut group, turns, |group| {
                    group.ordered_sum(world_size, &[], &mut data, 0)?;
                    Ok(())
                })?
            }
            other => bail!("`{other}` is not an all-reduce"),
        };
        writeln!(io::stdout(), "{}", taken.as_secs_f64() * 1e3 / f64::from(turns)).context("cannot answer")?;
    }
    group.leave();
    Ok(())
}

/// Turns follow each other as the steps of training do.
fn time_turns(
    group: &mut Group,
    turns: u32,
    mut turn: impl FnMut(&mut Group) -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    // The first touches fresh memory and waits for ranks that are not here yet.
    turn(group)?;
    group.barrier()?;
    let started = Instant::now();
    for _ in 0..turns {
        turn(group)?;
    }
    Ok(started.elapsed())
}
