//! What the person sees: events as lines, and on a terminal a panel below them that is drawn in place.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Shortest time between two drawings of the panel.
const FRAME: Duration = Duration::from_millis(100);
/// Time between two lines of progress where there is no panel.
const PROGRESS: Duration = Duration::from_secs(2);
/// The width, where the terminal does not tell its own.
const COLUMNS: usize = 80;

const HIDE_CURSOR: &str = "\x1b[?25l";
const SHOW_CURSOR: &str = "\x1b[?25h";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// How a line looks, where colours are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Bad,
}

pub(crate) type Line = (Style, String);

#[derive(Debug)]
pub(crate) struct Screen {
    terminal: bool,
    colours: bool,
    /// How many lines of the panel are on the screen.
    drawn: usize,
    last: Option<Instant>,
}

impl Screen {
    pub(crate) fn new() -> Screen {
        let terminal = io::stdout().is_terminal();
        let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Screen { terminal, colours, drawn: 0, last: None }
    }

    /// Prints lines above the panel, to stay. On a terminal the panel is drawn again with the next progress.
    pub(crate) fn say(&mut self, style: Style, text: &str) -> io::Result<()> {
        let mut out = self.erased();
        for line in text.lines() {
            out.push_str(&self.styled(style, line));
            out.push('\n');
        }
        self.last = self.last.filter(|_| !self.terminal);
        write(&out)
    }

    /// Shows how far things are: as a panel of lines on a terminal, else now and then as one line.
    pub(crate) fn progress(
        &mut self,
        panel: impl FnOnce() -> Vec<Line>,
        line: impl FnOnce() -> String,
    ) -> io::Result<()> {
        let period = if self.terminal { FRAME } else { PROGRESS };
        if self.last.is_some_and(|last| last.elapsed() < period) {
            return Ok(());
        }
        self.last = Some(Instant::now());
        if !self.terminal {
            return write(&(line() + "\n"));
        }
        let columns = rustix::termios::tcgetwinsize(io::stdout()).map_or(COLUMNS, |size| usize::from(size.ws_col));
        let lines = panel();
        let mut out = String::from(HIDE_CURSOR);
        if self.drawn > 0 {
            out.push_str(&format!("\x1b[{}F", self.drawn));
        }
        for (style, text) in &lines {
            // A line that wrapped would take two lines, and the count would be wrong.
            let text: String = text.chars().take(columns.saturating_sub(1)).collect();
            out.push_str(&format!("{}{CLEAR_LINE}\n", self.styled(*style, &text)));
        }
        out.push_str(CLEAR_BELOW);
        self.drawn = lines.len();
        write(&out)
    }

    pub(crate) fn clear(&mut self) -> io::Result<()> {
        let mut out = self.erased();
        self.last = None;
        if self.terminal {
            out.push_str(SHOW_CURSOR);
        }
        write(&out)
    }

    fn erased(&mut self) -> String {
        match std::mem::take(&mut self.drawn) {
            0 => String::new(),
            drawn => format!("\x1b[{drawn}F{CLEAR_BELOW}"),
        }
    }

    fn styled(&self, style: Style, text: &str) -> String {
        let code = match style {
            _ if !self.colours => return text.to_owned(),
            Style::Plain => return text.to_owned(),
            Style::Bold => 1,
            Style::Dim => 2,
            Style::Good => 32,
            Style::Bad => 31,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone there is no one to tell.
        let _ = self.clear();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// A bar of `width` columns, filled by `done` of `total`.
pub(crate) fn bar(done: u64, total: u64, width: usize) -> String {
    let filled = (done as usize * width).checked_div(total as usize).unwrap_or(0).min(width);
    format!("[{}{}]", "█".repeat(filled), "░".repeat(width - filled))
}
