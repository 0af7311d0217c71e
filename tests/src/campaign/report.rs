//! The table of what came of each fault in each moment.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::scene::Phase;
use super::{Outcome, fault};

/// Markdown: a line for each fault, in their own order, a column for each moment.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut rows: BTreeMap<&str, BTreeMap<&str, Vec<&Outcome>>> = BTreeMap::new();
    for outcome in outcomes {
        rows.entry(&outcome.fault).or_default().entry(&outcome.phase).or_default().push(outcome);
    }
    let mut text = String::from("| fault |");
    text.extend(Phase::ALL.map(|phase| format!(" {} |", phase.name())));
    text.push_str("\n|---|");
    text.extend(Phase::ALL.map(|_| "---|"));
    for fault in fault::all().iter().map(|fault| fault.name) {
        let Some(row) = rows.get(fault) else { continue };
        let _ = write!(text, "\n| {fault} |");
        for phase in Phase::ALL {
            let cell = row.get(phase.name());
            text.push_str(&cell.map_or_else(|| " – |".to_owned(), |all| format!(" {} |", summary(all))));
        }
    }
    text.push('\n');
    text
}

/// The longest pause, and what was broken.
fn summary(outcomes: &[&Outcome]) -> String {
    let wrong = outcomes.iter().filter(|outcome| !outcome.broken.is_empty()).count();
    let pause = outcomes.iter().map(|outcome| outcome.pause_s).fold(0.0, f64::max);
    let ended = outcomes.iter().find(|outcome| outcome.result != "succeeded").map(|outcome| outcome.result.as_str());
    let mut cell = format!("{pause:.1}");
    if let Some(ended) = ended {
        let _ = write!(cell, " {ended}");
    }
    if wrong > 0 {
        let _ = write!(cell, " **broken {wrong} of {}**", outcomes.len());
    }
    cell
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::setting::Setting;

    #[test]
    fn a_broken_promise_stands_out() {
        let outcome = |phase: &str, broken: &[&str]| Outcome {
            setting: Setting::Plain,
            fault: "a worker is killed".into(),
            phase: phase.into(),
            seed: 1,
            broken: broken.iter().map(ToString::to_string).collect(),
            pause_s: 0.25,
            after_s: 1.0,
            restarts: 1,
            rounds: 2,
            result: "succeeded".into(),
        };
        let text = table(&[outcome("running", &[]), outcome("sealing", &["a number falls"])]);
        let row = text.lines().last().unwrap();
        assert_eq!(row, "| a worker is killed | – | 0.2 **broken 1 of 1** | – | 0.2 | – | – | – | – |");
    }
}
