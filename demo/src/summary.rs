//! The table at the end.

use crate::checks::Check;
use crate::run::Ended;
use crate::screen::{Screen, Style};

/// Prints the rounds of a run, what each change cost, and the checks.
pub(crate) fn print(screen: &mut Screen, quiet: &Ended, disturbed: &Ended, checks: &[Check]) -> std::io::Result<()> {
    screen.say(Style::Bold, "\nthe disturbed run's rounds")?;
    screen.say(Style::Dim, "  round nodes    when first step repeated time lost  why")?;
    for row in rows(disturbed) {
        screen.say(Style::Plain, &row)?;
    }
    let (quiet, disturbed) = (quiet.took.as_secs_f64(), disturbed.took.as_secs_f64());
    screen.say(Style::Plain, &format!("  the whole run: undisturbed {quiet:.1} s, disturbed {disturbed:.1} s"))?;
    screen.say(Style::Bold, "\nchecks")?;
    for check in checks {
        let (style, word) = if check.holds { (Style::Good, "ok    ") } else { (Style::Bad, "FAILED") };
        screen.say(style, &format!("  {word} {}", check.claim))?;
        for line in wrap(&check.evidence, 68) {
            screen.say(Style::Plain, &format!("         {line}"))?;
        }
    }
    Ok(())
}

fn rows(run: &Ended) -> Vec<String> {
    let mut rows = Vec::new();
    for (number, group_run) in run.history.group_runs.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &run.history.group_runs[before]);
        let first = group_run.steps.first();
        let last = before.and_then(|before| before.steps.last());
        let again = last.map_or("–".to_owned(), |last| last.step.saturating_sub(group_run.from).to_string());
        // The times can be subtracted: all agents run on one machine, with one clock.
        let lost = last.zip(first).map(|(last, first)| format!("{} ms", first.time_ms.saturating_sub(last.time_ms)));
        let seal = run.seals.iter().find(|seal| seal.round == group_run.round);
        let (nodes, when, why) = seal.map_or((0, 0.0, ""), |seal| (seal.nodes, seal.at.as_secs_f64(), &seal.reason));
        let first = first.map_or("–".to_owned(), |first| first.step.to_string());
        let when = format!("+{when:.1}s");
        let lost = lost.unwrap_or("–".to_owned());
        rows.push(format!("  {:>5} {nodes:>5} {when:>7} {first:>10} {again:>8} {lost:>9}  {why}", group_run.round));
    }
    rows
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= width) {
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}
