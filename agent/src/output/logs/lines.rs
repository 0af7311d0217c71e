//! Cuts a byte stream into lines for the console and for failure reports, without any IO. Log files get the bytes as
//! they come.

use std::collections::VecDeque;

/// A longer line is shown in pieces of this many bytes, so that a stream without line ends needs bounded memory.
pub(super) const LONGEST: usize = 256 * 1024;

/// Cuts a stream into lines. A carriage return ends a line too, because progress bars use nothing else.
#[derive(Debug, Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
    after_return: bool,
}

impl Lines {
    /// Takes bytes, and hands out each line that they complete, without the line's end.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_return) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let room = &bytes[..bytes.len().min(LONGEST - self.partial.len())];
            let end = memchr::memchr2(b'\n', b'\r', room);
            let line = &room[..end.unwrap_or(room.len())];
            bytes = &bytes[line.len()..];
            if let Some(end) = bytes.first().filter(|_| end.is_some()) {
                self.after_return = *end == b'\r';
                bytes = &bytes[1..];
                if self.partial.is_empty() {
                    each(line);
                    continue;
                }
            }
            self.partial.extend_from_slice(line);
            if end.is_some() || self.partial.len() == LONGEST {
                each(&self.partial);
                self.partial.clear();
            }
        }
    }

    /// Hands out the rest of the stream when it has ended.
    pub(super) fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            each(&self.partial);
            self.partial.clear();
        }
    }

    /// The beginning of the line that is not complete yet.
    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }
}

/// The last lines of a stream.
#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<Vec<u8>>,
    /// A line that may not be complete.
    partial: Vec<u8>,
}

impl Tail {
    /// How many lines are kept.
    pub(super) const LINES: usize = 40;
    /// How many bytes of each line are kept.
    const WIDTH: usize = 1024;

    pub(super) fn push(&mut self, line: &[u8]) {
        // A stream of a hundred megabytes a second may pass here, so the memory of the oldest line is used again for
        // the newest.
        let mut kept = if self.lines.len() < Tail::LINES { None } else { self.lines.pop_front() }.unwrap_or_default();
        kept.clear();
        kept.extend_from_slice(&line[..line.len().min(Tail::WIDTH)]);
        self.lines.push_back(kept);
        self.partial.clear();
    }

    /// Sets the beginning of the line after the last complete one.
    pub(super) fn set_partial(&mut self, partial: &[u8]) {
        self.partial.clear();
        self.partial.extend_from_slice(&partial[..partial.len().min(Tail::WIDTH)]);
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let partial = (!self.partial.is_empty()).then_some(&self.partial);
        self.lines.iter().chain(partial).map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        for chunk in chunks {
            lines.feed(chunk, |line| found.push(line.to_vec()));
        }
        lines.finish(|line| found.push(line.to_vec()));
        found
    }

    #[test]
    fn lines_end_with_newline_return_or_both() {
        assert_eq!(cut(&[b"a\nb\r", b"\nc\rd\n\ne"]), [&b"a"[..], b"b", b"c", b"d", b"", b"e"]);
    }

    #[test]
    fn an_endless_line_comes_in_pieces_and_complete() {
        let line = vec![b'x'; LONGEST * 2 + 7];
        let pieces = cut(&[&line, b"\nnext\n"]);
        assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), [LONGEST, LONGEST, 7, 4]);
    }

    #[test]
    fn a_tail_keeps_the_last_lines() {
        let mut tail = Tail::default();
        (0..50).for_each(|n| tail.push(format!("{n}").as_bytes()));
        assert_eq!(tail.lines().first().unwrap(), "10");
        assert_eq!(tail.lines().len(), Tail::LINES);
        tail.set_partial(b"half a l");
        assert_eq!(tail.lines().last().unwrap(), "half a l");
        tail.push(b"half a line");
        assert_eq!(tail.lines().last().unwrap(), "half a line");
    }

    proptest! {
        #[test]
        fn the_lines_do_not_depend_on_how_the_stream_was_chopped(
            text in "[ab\r\n]{0,60}", cuts in proptest::collection::vec(0..61usize, 0..6),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(cut(&chunks), cut(&[bytes]));
        }
    }
}
