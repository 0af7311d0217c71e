//! The schedule of what went wrong, and the last things that happened, in words.

use std::collections::VecDeque;

use crate::dice::SECOND;

/// Lines kept.
const LINES: usize = 60;

#[derive(Default)]
pub(crate) struct Story {
    /// Words cost time, so only a replay tells them.
    pub(crate) told: bool,
    /// Print every line at once.
    pub(crate) aloud: bool,
    lines: VecDeque<String>,
    /// What went wrong, all of it.
    pub(crate) schedule: Vec<String>,
}

impl Story {
    pub(crate) fn tell(&mut self, now: u64, line: impl FnOnce() -> String) {
        if !self.told {
            return;
        }
        let line = format!("{:>10.4}  {}", now as f64 / SECOND as f64, readable(&line()));
        if self.aloud {
            println!("{line}");
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// Tells a line that belongs to the schedule.
    pub(crate) fn schedule(&mut self, now: u64, line: impl FnOnce() -> String) {
        if self.told {
            self.tell(now, line);
            self.schedule.extend(self.lines.back().cloned());
        }
    }

    pub(crate) fn end(&self) -> String {
        self.lines.iter().cloned().collect::<Vec<_>>().join("\n")
    }
}

/// A debug output with keys shortened and values as text.
fn readable(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("value: [") {
        let (before, after) = rest.split_at(at + "value: ".len());
        out.push_str(before);
        let end = after.find(']').map_or(after.len(), |end| end + 1);
        let bytes: Option<Vec<u8>> = after[1..end - 1].split(", ").map(|byte| byte.parse().ok()).collect();
        match bytes {
            Some(bytes) => out.push_str(&String::from_utf8_lossy(&bytes)),
            None => out.push_str(&after[..end]),
        }
        rest = &after[end..];
    }
    out.push_str(rest);
    out.replace("/elastic/v1/jobs/J/", "").replace("create_revision", "created").replace("mod_revision", "modified")
}
