//! Lines that are copied to a file of their own because they hold certain words: torchrun's
//! `--duplicate-stdout-filters` and `--duplicate-stderr-filters`.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memmem;

use super::file::append_to;

/// The words to look for. A line with any of them is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needles(Vec<String>);

impl FromStr for Needles {
    type Err = String;

    /// Reads words between commas. As with torchrun, two commas mean one comma within a word.
    fn from_str(text: &str) -> Result<Needles, String> {
        // No argument can hold a NUL.
        let words: Vec<String> = text.replace(",,", "\0").split(',').map(|word| word.replace('\0', ",")).collect();
        match words.iter().any(String::is_empty) {
            true => Err("an empty word is in every line".into()),
            false => Ok(Needles(words)),
        }
    }
}

/// The file that gets the matching lines of all workers of an attempt.
#[derive(Debug, Clone)]
pub(super) struct Duplicates {
    finders: Arc<[memmem::Finder<'static>]>,
    file: Arc<Mutex<File>>,
}

impl Duplicates {
    pub(super) fn open(needles: &Needles, path: &Path) -> io::Result<Duplicates> {
        let file = append_to(path)?;
        let finders = needles.0.iter().map(|word| memmem::Finder::new(word).into_owned()).collect();
        Ok(Duplicates { finders, file: Arc::new(Mutex::new(file)) })
    }

    pub(super) fn wants(&self, line: &[u8]) -> bool {
        self.finders.iter().any(|finder| finder.find(line).is_some())
    }

    /// Writes whole lines.
    pub(super) fn write(&self, lines: &[u8]) {
        if !lines.is_empty() {
            // This is a copy. What a full disk does not take is in the worker's own file, or noted there as a gap.
            let _ = self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(lines);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_commas_are_one_within_a_word() {
        let words = |text: &str| text.parse::<Needles>().map(|needles| needles.0);
        assert_eq!(words("apple,orange").unwrap(), ["apple", "orange"]);
        assert_eq!(words("a,,b,c").unwrap(), ["a,b", "c"]);
        assert!(words("a,").is_err() && words("").is_err());
    }
}
