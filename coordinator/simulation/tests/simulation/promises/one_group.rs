//! Promise 1: no worker of a round is at work while one of another round is, anywhere. Those that quiesced live on, but
//! not at work.

use crate::process::Process;

pub(super) fn check(processes: &[Process]) -> Result<(), String> {
    let mut first: Option<(usize, u64)> = None;
    for (p, process) in processes.iter().enumerate() {
        match (process.at_work(), first) {
            (Some(round), Some((other, old))) if round != old => {
                return Err(format!(
                    "workers of round {old} on p{other} and of round {round} on p{p} are alive at once"
                ));
            }
            (Some(round), None) => first = Some((p, round)),
            _ => {}
        }
    }
    Ok(())
}

/// A node's workers start when it has none, or continue from where they rest.
pub(super) fn starts(process: &Process) -> Result<(), String> {
    match &process.tree {
        Some(tree) if !tree.at_rest => {
            Err(format!("{} starts workers while its own of round {} are there", process.id(), tree.round))
        }
        _ => Ok(()),
    }
}
