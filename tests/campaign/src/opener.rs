//! A process that opens files, so that tests see whether it can.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A shell that opens a file for each line that it reads, and says whether it could.
pub(super) struct Opener {
    child: Child,
    ask: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Opener {
    pub(super) fn new() -> Opener {
        let mut command = Command::new("sh");
        command.args(["-c", "while read -r line; do true < /dev/null && echo yes || echo no; done"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (ask, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Opener { child, ask, answers: BufReader::new(answers).lines() }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn opens(&mut self) -> bool {
        self.ask.write_all(b"?\n").unwrap();
        self.answers.next().unwrap().unwrap() == "yes"
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
