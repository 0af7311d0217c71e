//! Tokens in a file: as nanoGPT and llm.c write them, or the bytes of a text.
//!
//! A batch's windows are read where they lie, by one call of the system each. The file is not mapped: where a mapped
//! file is cut short, the process dies of SIGBUS, and a read says what is wrong. Both take the bytes from the kernel's
//! one copy, and a call takes two microseconds of a step's milliseconds.

#![allow(clippy::disallowed_types)] // It reads one file.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elastic_trainer::{Data, SampleError, Step, Unit};

use crate::gpt::Tokens;

/// Bytes of llm.c's header. It begins with three numbers of 32 bits: magic, version and tokens.
const HEADER: u64 = 1024;
/// Magic and version of llm.c's files, and the bytes of a token in them: GPT-2's and Llama 3's.
const HEADERS: [([u32; 2], u64); 2] = [([20_240_520, 1], 2), ([20_240_801, 7], 4)];

/// What a file is known by: its length, and so many pieces of so many bytes, evenly from its start to its end.
const PIECES: u64 = 256;
const PIECE: u64 = 4096;

/// How tokens lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A text: each byte is a token.
    Text,
    /// Little-endian numbers of so many bytes, 2 or 4, without a header; or, where it begins with one, as llm.c's
    /// header says.
    Numbers(u8),
}

/// Why a file's tokens cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenFileError {
    /// It cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It holds something else.
    #[error("{} does not hold tokens: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// It is another model's.
    #[error(
        "token {token} at position {position} of {} is outside the vocabulary of {vocabulary}; take a larger \
        one (--vocabulary, or another --init-from; GPT-2's is 50257), another --token-bytes, or --text for a text",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Tokens before it.
        position: u64,
        /// The token.
        token: u32,
        /// The vocabulary's size.
        vocabulary: usize,
    },
    /// There are too few.
    #[error(
        "{} holds {tokens} tokens: too few for {windows} windows of {time} tokens and the next one; lower --context or \
        --held-out, or take a larger file",
        path.display()
    )]
    TooFew {
        /// The file.
        path: PathBuf,
        /// Its tokens.
        tokens: u64,
        /// What is wanted.
        windows: u64,
        /// Tokens of a window.
        time: usize,
    },
    /// Somebody writes to it.
    #[error("{} has changed since training began with it; restore it, or start over with it", .0.display())]
    Changed(PathBuf),
}

/// A file of tokens.
#[derive(Debug)]
pub(crate) struct TokenFile {
    path: PathBuf,
    file: File,
    /// Where the first token lies.
    start: u64,
    /// Bytes of a token.
    width: u64,
    tokens: u64,
    vocabulary: usize,
    checksum: u32,
    stamp: Stamp,
}

/// Changes when somebody writes to a file: its length, and when it was last written to.
type Stamp = (u64, i64, i64);

fn stamp(file: &File) -> io::Result<Stamp> {
    file.metadata().map(|about| (about.len(), about.mtime(), about.mtime_nsec()))
}

impl TokenFile {
    /// Opens a file. Some of its tokens are compared with the vocabulary here, the others when they are read.
    pub(crate) fn open(path: &Path, form: Form, vocabulary: usize) -> Result<TokenFile, TokenFileError> {
        let unread = |cause| TokenFileError::Read { path: path.to_owned(), cause };
        let refused = |cause| TokenFileError::Format { path: path.to_owned(), cause };
        // To open a pipe would wait for its writer.
        if !fs::metadata(path).map_err(unread)?.is_file() {
            return Err(refused("it is not a regular file".to_owned()));
        }
        let file = File::open(path).map_err(unread)?;
        let stamp = stamp(&file).map_err(unread)?;
        let (start, width) = match form {
            Form::Text => (0, 1),
            Form::Numbers(width) => match header(&file).map_err(unread)? {
                None => (0, u64::from(width)),
                Some((width, count)) if stamp.0 == HEADER + count * width => (HEADER, width),
                Some((width, count)) => {
                    let cause = format!("its header promises {count} tokens of {width} bytes in {} bytes", stamp.0);
                    return Err(refused(cause));
                }
            },
        };
        let bytes = stamp.0 - start;
        if !bytes.is_multiple_of(width) {
            return Err(refused(format!("its {bytes} bytes are not whole tokens of {width} bytes")));
        }
        let tokens = bytes / width;
        let mut opened =
            TokenFile { path: path.to_owned(), file, start, width, tokens, vocabulary, checksum: 0, stamp };
        opened.checksum = opened.sample()?;
        Ok(opened)
    }

    /// A checksum of its tokens. Those that it looks at must be of the vocabulary.
    fn sample(&self) -> Result<u32, TokenFileError> {
        sampled(self.tokens * self.width, self.width, |start, raw| self.read(start / self.width, raw, |_| ()))
    }

    /// Passes on the tokens from `first` on, as many as `raw` has room for.
    fn read(
        &self,
        first: u64,
        raw: &mut [u8],
        mut take: impl FnMut(&mut dyn Iterator<Item = u32>),
    ) -> Result<(), TokenFileError> {
        let read = self.file.read_exact_at(raw, self.start + first * self.width);
        read.map_err(|cause| match cause.kind() {
            ErrorKind::UnexpectedEof => TokenFileError::Changed(self.path.clone()),
            _ => TokenFileError::Read { path: self.path.clone(), cause },
        })?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
        let numbers = || raw.chunks_exact(self.width as usize).map(number);
        if let Some((place, token)) = numbers().enumerate().find(|(_, token)| *token as usize >= self.vocabulary) {
            let (position, vocabulary) = (first + place as u64, self.vocabulary);
            let path = self.path.clone();
            return Err(TokenFileError::Unknown { path, position, token, vocabulary });
        }
        take(&mut numbers());
        Ok(())
    }

    fn check_unchanged(&self) -> Result<(), TokenFileError> {
        match stamp(&self.file) {
            Ok(stamp) if stamp == self.stamp => Ok(()),
            Ok(_) => Err(TokenFileError::Changed(self.path.clone())),
            Err(cause) => Err(TokenFileError::Read { path: self.path.clone(), cause }),
        }
    }
}

/// CRC-32C of what `read` reads at places of a file of so many bytes, in units of so many: of all up to 1 MiB, and of
/// 256 evenly spread pieces of 4 KiB in a larger one. A disk gives those within seconds, however large the file is.
pub(crate) fn sampled<E>(
    bytes: u64,
    unit: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<u32, E> {
    let large = bytes > PIECES * PIECE;
    let pieces = if large { PIECES } else { bytes.div_ceil(PIECE) };
    // The last piece ends where the file does.
    let spread = |piece: u64| (bytes - PIECE) / unit * piece / (PIECES - 1) * unit;
    let (mut sum, mut raw) = (0, Vec::new());
    for piece in 0..pieces {
        let start = if large { spread(piece) } else { piece * PIECE };
        raw.resize(PIECE.min(bytes - start) as usize, 0);
        read(start, &mut raw)?;
        sum = crc32c::crc32c_append(sum, &raw);
    }
    Ok(sum)
}

/// Bytes of a token, and tokens, if a file begins with llm.c's header.
fn header(file: &File) -> io::Result<Option<(u64, u64)>> {
    let mut bytes = [0; 12];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let known = HEADERS.into_iter().find(|(words, _)| *words == [word(0), word(4)]);
    Ok(known.map(|(_, width)| (width, word(8).into())))
}

/// Some of a file's windows: each the tokens that follow the one before it, and, as the last target, one more.
#[derive(Debug, Clone)]
pub(crate) struct Windows {
    file: Arc<TokenFile>,
    time: usize,
    first: u64,
    count: u64,
}

impl Windows {
    /// All windows of `time` tokens.
    pub(crate) fn all(file: TokenFile, time: usize) -> Windows {
        let count = file.tokens.saturating_sub(1) / time as u64;
        Windows { file: Arc::new(file), time, first: 0, count }
    }

    /// The first `count` of them, and the others.
    pub(crate) fn split(self, count: u64) -> (Windows, Windows) {
        let count = count.min(self.count);
        let rest = Windows { first: self.first + count, count: self.count - count, ..self.clone() };
        (Windows { count, ..self }, rest)
    }

    /// An error if there are fewer.
    pub(crate) fn at_least(&self, windows: u64) -> Result<(), TokenFileError> {
        let TokenFile { path, tokens, .. } = &*self.file;
        let too_few = || TokenFileError::TooFew { path: path.clone(), tokens: *tokens, windows, time: self.time };
        (self.first + self.count >= windows).then_some(()).ok_or_else(too_few)
    }

    fn fill(&self, samples: &[u64], batch: &mut Tokens) -> Result<(), (u64, TokenFileError)> {
        let mut raw = vec![0; (self.time + 1) * self.file.width as usize];
        batch.time = self.time;
        batch.inputs.clear();
        batch.targets.clear();
        for &sample in samples {
            let first = (self.first + sample) * self.time as u64;
            let read = self.file.read(first, &mut raw, |tokens| batch.targets.extend(tokens));
            read.and_then(|()| self.file.check_unchanged()).map_err(|error| (sample, error))?;
            let begin = batch.targets.len() - self.time - 1;
            batch.inputs.extend(&batch.targets[begin..begin + self.time]);
            batch.targets.remove(begin);
        }
        Ok(())
    }
}

impl Data for Windows {
    type Batch = Tokens;

    fn samples(&self) -> u64 {
        self.count
    }

    /// What is wrong with the file may pass: a start of the worker compares it with what the job was trained on.
    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Tokens) -> Result<(), SampleError> {
        self.fill(samples, batch).map_err(|(sample, error)| match error {
            TokenFileError::Unknown { .. } => SampleError::damaged(sample, error),
            error => SampleError::unavailable(sample, error),
        })
    }

    fn identity(&self) -> String {
        let TokenFile { tokens, checksum, width, .. } = *self.file;
        let flag = if width == 1 { "--text" } else { "--tokens" };
        let whole = if tokens * width > PIECES * PIECE { "sampled " } else { "" };
        let Windows { first, count, time, .. } = self;
        format!("{flag} ({tokens} tokens, {whole}crc32c {checksum:08x}; {count} windows of {time} from {first})")
    }

    fn unit(&self) -> Unit {
        Unit { name: "tokens", of_a_sample: self.time as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Folder {
            Folder(tempfile::tempdir().unwrap())
        }

        fn write(&self, bytes: &[u8]) -> PathBuf {
            let path = self.0.path().join("tokens.bin");
            fs::write(&path, bytes).unwrap();
            path
        }

        fn open(&self, bytes: &[u8], form: Form, vocabulary: usize) -> Result<TokenFile, String> {
            TokenFile::open(&self.write(bytes), form, vocabulary).map_err(|error| error.to_string())
        }
    }

    /// nanoGPT's file: numpy's `uint16` array as it lies in memory.
    fn halves(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
        tokens.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    /// llm.c's header.
    fn llm_c(magic: u32, version: u32, count: u32) -> Vec<u8> {
        [magic, version, count].into_iter().chain([0; 253]).flat_map(u32::to_le_bytes).collect()
    }

    fn batch(windows: &Windows, samples: &[u64]) -> Result<Tokens, SampleError> {
        let mut batch = Tokens::default();
        windows.read(samples, &Step::new(0, 1, 0, samples), &mut batch).map(|()| batch)
    }

    #[test]
    fn each_form_gives_the_same_windows() {
        let folder = Folder::new();
        let long: Vec<u8> = (0..12u32).flat_map(u32::to_le_bytes).collect();
        let numbered = [llm_c(20_240_520, 1, 12), halves(0..12)].concat();
        let numbered_long = [llm_c(20_240_801, 7, 12), long.clone()].concat();
        for (bytes, form) in [
            (halves(0..12), Form::Numbers(2)),
            (long, Form::Numbers(4)),
            (numbered, Form::Numbers(2)),
            (numbered_long, Form::Numbers(2)),
            ((0..12).collect(), Form::Text),
        ] {
            let all = Windows::all(folder.open(&bytes, form, 12).unwrap(), 3);
            assert_eq!(all.samples(), 3, "a fourth would have no last target");
            let read = batch(&all, &[2, 0]).unwrap();
            assert_eq!(
                (read.time, &read.inputs[..], &read.targets[..]),
                (3, &[6, 7, 8, 0, 1, 2][..], &[7, 8, 9, 1, 2, 3][..])
            );
            let (train, held_out) = all.split(2);
            assert_eq!((train.samples(), held_out.samples()), (2, 1));
            assert_eq!(batch(&held_out, &[0]).unwrap().inputs, [6, 7, 8]);
            assert!(held_out.at_least(3).is_ok() && held_out.at_least(4).is_err());
        }
    }

    #[test]
    fn what_holds_no_tokens_is_refused() {
        let folder = Folder::new();
        let refused = |bytes: &[u8], form| folder.open(bytes, form, 60_000).unwrap_err();
        assert!(
            refused(&[1; 7], Form::Numbers(2)).contains("tokens.bin does not hold tokens: its 7 bytes are not whole")
        );
        let cut = [llm_c(20_240_520, 1, 12), halves(0..11)].concat();
        assert!(refused(&cut, Form::Numbers(2)).contains("promises 12 tokens of 2 bytes in 1046 bytes"));
        let none = TokenFile::open(Path::new("/nowhere/train.bin"), Form::Text, 256).unwrap_err().to_string();
        assert!(none.contains("cannot read /nowhere/train.bin: No such file"), "{none}");
        let folder = TokenFile::open(folder.0.path(), Form::Text, 256).unwrap_err().to_string();
        assert!(folder.contains("not a regular file"), "{folder}");
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named_with_its_place() {
        // Given a long file whose only wrong token lies where opening does not look
        let folder = Folder::new();
        let mut tokens = vec![7u16; 3 << 20];
        tokens[5000] = 300;
        let file = folder.open(&halves(tokens), Form::Numbers(2), 256).unwrap();
        let all = Windows::all(file, 64);
        assert!(batch(&all, &[77]).is_ok());
        let error = batch(&all, &[78]).unwrap_err().to_string();
        for part in ["sample 78", "token 300 at position 5000 of /", "tokens.bin", "the vocabulary of 256"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        // And where it does look, all is known at once.
        let error = folder.open(&halves([1, 2, 256]), Form::Numbers(2), 256).unwrap_err();
        assert!(error.contains("token 256 at position 2 of "), "{error}");
    }

    #[test]
    fn a_file_that_is_cut_short_or_written_to_is_an_error() {
        let folder = Folder::new();
        let all = Windows::all(folder.open(&halves(0..100), Form::Numbers(2), 100).unwrap(), 9);
        assert!(batch(&all, &[10]).is_ok());
        let path = folder.0.path().join("tokens.bin");
        fs::File::options().write(true).open(&path).unwrap().set_len(150).unwrap();
        for sample in [0, 10] {
            let error = batch(&all, &[sample]).unwrap_err();
            assert!(error.to_string().contains("tokens.bin has changed since") && error.may_pass(), "{error}");
        }
    }

    proptest! {
        /// A token that differs where the sample looks, or a length that differs, makes another identity.
        #[test]
        fn files_are_distinguished(length in 1usize..3000, place: prop::sample::Index) {
            let folder = Folder::new();
            let mut tokens = vec![3u16; length];
            let identity = |tokens: &[u16]| {
                let file = folder.open(&halves(tokens.iter().copied()), Form::Numbers(2), 9).unwrap();
                Windows::all(file, 1).identity()
            };
            let first = identity(&tokens);
            prop_assert_eq!(&identity(&tokens), &first);
            prop_assert_ne!(&identity(&vec![3; length + 1]), &first);
            tokens[place.index(length)] = 4;
            prop_assert_ne!(&identity(&tokens), &first);
        }
    }

    #[test]
    fn a_large_file_is_sampled_from_its_start_to_its_end() {
        let folder = Folder::new();
        let mut bytes = vec![5; 5_000_001];
        let identity = |bytes: &[u8]| Windows::all(folder.open(bytes, Form::Text, 256).unwrap(), 1).identity();
        let first = identity(&bytes);
        assert!(first.contains("sampled crc32c"), "{first}");
        for place in [0, 5_000_000] {
            bytes[place] = 6;
            assert_ne!(identity(&bytes), first, "byte {place}");
            bytes[place] = 5;
        }
    }
}
