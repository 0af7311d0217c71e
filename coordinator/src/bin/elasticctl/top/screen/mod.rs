//! What `top` shows: a list of all jobs, or one of them. Pure: the same jobs, keys and time give the same lines.

use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{JobId, JobState};
use elastic_rendezvous::time::date::utc;

use crate::show;
use crate::silence::Silent;
use crate::table::{printable, table};

const PLAIN: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const FAINT: &str = "\x1b[2m";
const REVERSED: &str = "\x1b[7m";
const RED: &str = "\x1b[31m";
const YELLOW: &str = "\x1b[33m";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Open,
    Back,
    Quit,
}

impl Key {
    /// The keys of what a terminal has sent (xterm's sequences, in both of its cursor modes). Others are passed over.
    pub(super) fn all(mut bytes: &[u8]) -> Vec<Key> {
        const SENT: [(&[u8], Key); 15] = [
            (b"\x1b[A", Key::Up),
            (b"\x1bOA", Key::Up),
            (b"k", Key::Up),
            (b"\x1b[B", Key::Down),
            (b"\x1bOB", Key::Down),
            (b"j", Key::Down),
            (b"\x1b[5~", Key::PageUp),
            (b"\x1b[6~", Key::PageDown),
            (b"\r", Key::Open),
            (b"\n", Key::Open),
            (b"\x7f", Key::Back),
            (b"q", Key::Quit),
            (b"\x03", Key::Quit),
            (b"\x04", Key::Quit),
            (b" ", Key::PageDown),
        ];
        let mut keys = Vec::new();
        while let Some(first) = bytes.first() {
            if let Some((sent, key)) = SENT.iter().find(|(sent, _)| bytes.starts_with(sent)) {
                keys.push(*key);
                bytes = &bytes[sent.len()..];
            } else if *first != 0x1b {
                bytes = &bytes[1..];
            } else if bytes.len() == 1 {
                keys.push(Key::Back);
                break;
            } else {
                // The rest of a sequence that means nothing here.
                let end = bytes[2..].iter().position(|byte| byte.is_ascii_alphabetic() || *byte == b'~');
                bytes = end.map_or(&[], |end| &bytes[2 + end + 1..]);
            }
        }
        keys
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Show,
    Quit,
}

pub(super) struct Screen {
    /// Where the jobs are, for the first line.
    place: String,
    /// The job that the cursor is on; none: the first.
    chosen: Option<JobId>,
    /// The job that is open, and how many of its lines are above the screen.
    opened: Option<(JobId, usize)>,
    /// Lines of jobs that fitted on the screen last.
    room: usize,
}

impl Screen {
    pub(super) fn new(place: String) -> Screen {
        Screen { place, chosen: None, opened: None, room: 1 }
    }

    pub(super) fn open(&mut self, job: JobId) {
        (self.chosen, self.opened) = (Some(job.clone()), Some((job, 0)));
    }

    /// The job that is open.
    pub(super) fn opened(&self) -> Option<&JobId> {
        self.opened.as_ref().map(|(job, _)| job)
    }

    pub(super) fn press(&mut self, key: Key, overview: &Overview) -> Next {
        let page = self.room.max(1);
        match (key, &mut self.opened) {
            (Key::Quit, _) => return Next::Quit,
            (Key::Back, None) | (Key::Open, Some(_)) => {}
            (Key::Back, Some(_)) => self.opened = None,
            (Key::Up, Some((_, above))) => *above = above.saturating_sub(1),
            (Key::Down, Some((_, above))) => *above += 1,
            (Key::PageUp, Some((_, above))) => *above = above.saturating_sub(page),
            (Key::PageDown, Some((_, above))) => *above += page,
            (_, None) => {
                let jobs = ordered(overview);
                let at = self.cursor(&jobs);
                let at = match key {
                    Key::Up => at.saturating_sub(1),
                    Key::PageUp => at.saturating_sub(page),
                    Key::Down => at + 1,
                    Key::PageDown => at + page,
                    Key::Open | Key::Back | Key::Quit => at,
                };
                let Some((id, _)) = jobs.get(at.min(jobs.len().saturating_sub(1))) else { return Next::Show };
                self.chosen = Some((*id).clone());
                if key == Key::Open {
                    self.opened = Some(((*id).clone(), 0));
                }
            }
        }
        Next::Show
    }

    /// The line of the job that the cursor is on.
    fn cursor(&self, jobs: &[(&JobId, &Job)]) -> usize {
        self.chosen.as_ref().and_then(|chosen| jobs.iter().position(|(id, _)| *id == chosen)).unwrap_or(0)
    }

    /// The lines of the screen: not wider, and not more.
    pub(super) fn draw(
        &mut self,
        (overview, silent): (&Overview, &Silent),
        trouble: Option<&str>,
        columns: usize,
        rows: usize,
        now_ms: u64,
    ) -> Vec<String> {
        let jobs = ordered(overview);
        let mut lines = vec![head(&self.place, &jobs, columns, now_ms)];
        lines.push(trouble.map_or_else(String::new, |trouble| {
            style(RED, &format!("this may be old: {}", printable(trouble)), columns)
        }));
        self.room = rows.saturating_sub(4);
        let keys = match &self.opened {
            None => {
                let at = self.cursor(&jobs);
                lines.extend(list(&jobs, at, columns, self.room));
                "up, down: choose   Enter: open   q: quit"
            }
            Some((id, above)) => {
                let job = overview.jobs.get(id);
                let all = job.map_or_else(|| vec![format!("job {id} was deleted")], |job| whole(id, job, silent));
                let above = (*above).min(all.len().saturating_sub(self.room));
                self.opened = Some((id.clone(), above));
                lines.extend(all.iter().skip(above).take(self.room + 1).map(|line| style("", line, columns)));
                "up, down: scroll   Esc: all jobs   q: quit"
            }
        };
        lines.truncate(rows.saturating_sub(1));
        lines.resize(rows.saturating_sub(1), String::new());
        lines.push(style(FAINT, keys, columns));
        lines
    }
}

/// The jobs that have begun: those that continue come first, then those that ended last.
fn ordered(overview: &Overview) -> Vec<(&JobId, &Job)> {
    let mut jobs: Vec<_> = overview.jobs.iter().filter(|(_, job)| job.round.is_some()).collect();
    jobs.sort_by_key(|(id, job)| (job.ended_ms().map(std::cmp::Reverse), *id));
    jobs
}

fn head(place: &str, jobs: &[(&JobId, &Job)], columns: usize, now_ms: u64) -> String {
    let mut counts = if jobs.len() == 1 { "1 job".to_owned() } else { format!("{} jobs", jobs.len()) };
    for state in JobState::ALL {
        let count = jobs.iter().filter(|(_, job)| job.state() == Some(state)).count();
        if count > 0 {
            counts.push_str(&format!(", {count} {state}"));
        }
    }
    style(BOLD, &format!("{} UTC   {place}   {counts}", &utc(now_ms)[..19]), columns)
}

/// The list under its heading, as far as it fits around the cursor.
fn list(jobs: &[(&JobId, &Job)], at: usize, columns: usize, room: usize) -> Vec<String> {
    if jobs.is_empty() {
        return vec![style("", "no jobs yet: one appears once its first agent has joined", columns)];
    }
    let rows: Vec<_> = jobs.iter().map(|(id, job)| line(id, job)).collect();
    let text = table(
        &["JOB", "STATE", "ROUND", "NODES", "STEP", "LOSS", "STEPS/S", "GOODPUT", "RESTARTS", "REASON OF THE ROUND"],
        &rows,
    );
    let mut text = text.lines();
    let mut lines = vec![style(FAINT, text.next().unwrap_or_default(), columns)];
    let above = at.saturating_sub(room.saturating_sub(1));
    for ((number, line), (_, job)) in text.enumerate().zip(jobs).skip(above).take(room) {
        let colour = match job.state() {
            _ if number == at => REVERSED,
            Some(JobState::Forming | JobState::Paused) => YELLOW,
            Some(JobState::Failed) => RED,
            Some(JobState::Succeeded | JobState::Closed) => FAINT,
            Some(JobState::Running) | None => "",
        };
        lines.push(style(colour, line, columns));
    }
    lines
}

fn line(id: &JobId, job: &Job) -> Vec<String> {
    let round = job.round.as_ref().map(|round| &round.value);
    let progress = job.progress.as_ref();
    // A rate of a while ago says nothing.
    let running = job.state() == Some(JobState::Running);
    vec![
        id.to_string(),
        show::or_dash(job.state()),
        show::or_dash(round.map(|round| round.number)),
        show::nodes_here(job),
        show::step(job),
        show::or_dash(progress.and_then(|progress| progress.loss).map(|loss| format!("{loss:.4}"))),
        show::or_dash(progress.and_then(|progress| progress.steps_per_second).filter(|_| running).map(show::rate)),
        show::or_dash(progress.and_then(|progress| progress.goodput()).map(show::percent)),
        show::restarts(job),
        round.map(|round| round.reason.clone()).unwrap_or_default(),
    ]
}

/// All that is known of a job, its newest history first.
fn whole(id: &JobId, job: &Job, silent: &Silent) -> Vec<String> {
    let mut lines: Vec<String> = show::describe(id, job, silent).lines().map(str::to_owned).collect();
    let cause = job.round.as_ref().and_then(|round| round.value.cause.as_ref());
    let failure = cause.or_else(|| job.nodes.values().find_map(|node| node.value.failure.as_ref()));
    if let Some(failure) = failure.filter(|failure| failure.traceback.is_some() || !failure.stderr.is_empty()) {
        lines.extend([String::new(), "last lines of what failed".to_owned()]);
        let said: Vec<&str> = match &failure.traceback {
            Some(traceback) => traceback.lines().collect(),
            None => failure.stderr.iter().map(String::as_str).collect(),
        };
        lines.extend(said.into_iter().map(|line| format!("  {}", printable(line))));
    }
    lines.extend([String::new(), show::events_header()]);
    lines.extend(job.events.values().rev().map(show::event_line));
    lines
}

/// A line in a style, cut where the screen ends.
fn style(style: &str, text: &str, columns: usize) -> String {
    let text: String = text.chars().take(columns).collect();
    if style.is_empty() { text } else { format!("{style}{text}{PLAIN}") }
}

#[cfg(test)]
mod tests;
