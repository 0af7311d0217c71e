//! A terminal that is drawn on as a whole, and whose keys come one at a time.

use std::io::{self, Read, Write};

use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

use super::screen::Key;

/// The other screen, without a cursor: what was there before is there again afterwards.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// The terminal. Dropping it restores it.
pub(super) struct Terminal {
    before: Termios,
    keys: mpsc::UnboundedReceiver<Key>,
}

impl Terminal {
    /// Takes the terminal of standard input and output. Keys are not shown, and Ctrl-C is one of them.
    pub(super) fn open() -> io::Result<Terminal> {
        if !isatty(stdin()) || !isatty(stdout()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "standard input and output are no terminal"));
        }
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Flush, &raw)?;
        let (sender, keys) = mpsc::unbounded_channel();
        // A read of a terminal cannot be cancelled: this thread ends with the process.
        std::thread::spawn(move || {
            let mut bytes = [0; 64];
            while let Ok(count @ 1..) = io::stdin().lock().read(&mut bytes) {
                for key in Key::all(&bytes[..count]) {
                    let _ = sender.send(key);
                }
            }
            let _ = sender.send(Key::Quit);
        });
        let terminal = Terminal { before, keys };
        io::stdout().lock().write_all(ENTER)?;
        Ok(terminal)
    }

    pub(super) fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        size.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
    }

    pub(super) fn draw(&mut self, lines: &[String]) -> io::Result<()> {
        let picture = format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n"));
        let mut out = io::stdout().lock();
        out.write_all(picture.as_bytes())?;
        out.flush()
    }

    /// The next key. May be cancelled.
    pub(super) async fn key(&mut self) -> Key {
        self.keys.recv().await.unwrap_or(Key::Quit)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(LEAVE).and_then(|()| out.flush());
        let _ = tcsetattr(stdin(), OptionalActions::Flush, &self.before);
    }
}
