//! The UCI digits: 8×8 images, cut into a training and a test part.
//!
//! Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
//! doi 10.24432/C50P49, CC BY 4.0. See `data/README.md`.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use elastic_trainer::{Data, SampleError, Step};

use crate::mlp::Rows;

/// Pixels on an image's side.
pub(crate) const SIDE: usize = 8;
/// Pixels of an image, which are the model's inputs.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// Classes, which are the model's outputs.
pub(crate) const CLASSES: usize = 10;

/// The copy compiled into the program.
static BUILT_IN: &[u8] = include_bytes!("../../data/digits.csv.gz");

/// Every fifth image is kept for the test. Neighbours come from the same writer, so both parts hold images of every
/// writer.
const TEST_EVERY: usize = 5;

/// Where a pixel comes from in each copy: the image itself, and moved by one pixel in eight directions.
const SHIFTS: [(isize, isize); 9] = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)];

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file cannot be read.
    #[error("cannot read training data {}: {cause}; name a readable file with --data, or leave it out", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A line is not an image.
    #[error("training data {name}, line {line}: {cause}; each line holds 64 pixels from 0 to 16 and the digit")]
    Format {
        /// The file, or "built in".
        name: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        cause: String,
    },
    /// Too little to train and test on.
    #[error("training data {name} holds {images} images; at least {TEST_EVERY} are needed")]
    TooFew {
        /// The file, or "built in".
        name: String,
        /// Images found.
        images: usize,
    },
}

/// Labelled images, each perhaps in shifted copies.
#[derive(Debug, Clone)]
pub struct Images {
    pixels: Vec<f32>,
    labels: Vec<u8>,
    copies: usize,
    /// The checksum of the file's bytes.
    checksum: u32,
}

/// The data set, split.
#[derive(Debug, Clone)]
pub struct Digits {
    /// What the model is trained on: four images of five.
    pub train: Images,
    /// What it is judged by: every fifth image, never shifted.
    pub test: Images,
}

impl Digits {
    /// Reads `path` (CSV, or CSV under gzip), or the built-in copy. With `shifts` each training image counts nine
    /// times: itself, and moved by one pixel in eight directions.
    pub fn load(path: Option<&Path>, shifts: bool) -> Result<Digits, DataError> {
        let (name, bytes) = match path {
            None => ("built in".to_owned(), BUILT_IN.to_vec()),
            Some(path) => {
                let bytes = fs::read(path).map_err(|cause| DataError::Read { path: path.to_owned(), cause })?;
                (path.display().to_string(), bytes)
            }
        };
        let text = decode(&bytes).map_err(|cause| DataError::Format {
            name: name.clone(),
            line: 1,
            cause: format!("not text: {cause}"),
        })?;
        let checksum = crc32c::crc32c(&bytes);
        let empty = |copies| Images { pixels: Vec::new(), labels: Vec::new(), copies, checksum };
        let (mut train, mut test) = (empty(if shifts { SHIFTS.len() } else { 1 }), empty(1));
        for (number, line) in text.lines().enumerate() {
            let part = if number % TEST_EVERY == 0 { &mut test } else { &mut train };
            part.push(line).map_err(|cause| DataError::Format { name: name.clone(), line: number + 1, cause })?;
        }
        let images = train.labels.len() + test.labels.len();
        if images < TEST_EVERY {
            return Err(DataError::TooFew { name, images });
        }
        Ok(Digits { train, test })
    }
}

impl Images {
    /// Writes `sample`'s pixels, each in `[0, 1]`, into `row` and returns its digit.
    ///
    /// # Panics
    /// When there is no such sample, or `row` does not hold 64 numbers.
    pub fn image(&self, sample: u64, row: &mut [f32]) -> u8 {
        let (image, copy) = (sample as usize / self.copies, sample as usize % self.copies);
        let pixels = &self.pixels[image * PIXELS..(image + 1) * PIXELS];
        let (down, right) = SHIFTS[copy];
        if (down, right) == (0, 0) {
            row.copy_from_slice(pixels);
        } else {
            for (place, value) in row.iter_mut().enumerate() {
                let from = |at: usize, shift: isize| at.checked_add_signed(-shift).filter(|&from| from < SIDE);
                *value = match (from(place / SIDE, down), from(place % SIDE, right)) {
                    (Some(y), Some(x)) => pixels[y * SIDE + x],
                    _ => 0.0,
                };
            }
        }
        self.labels[image]
    }

    fn push(&mut self, line: &str) -> Result<(), String> {
        let numbers: Vec<u8> = line
            .split(',')
            .map(|field| field.trim().parse().map_err(|_| format!("\"{field}\" is not a small number")))
            .collect::<Result<_, _>>()?;
        let [pixels @ .., label] = numbers.as_slice() else { return Err("the line is empty".to_owned()) };
        if pixels.len() != PIXELS {
            return Err(format!("{} fields instead of {}", numbers.len(), PIXELS + 1));
        }
        if let Some(pixel) = pixels.iter().find(|&&pixel| pixel > 16) {
            return Err(format!("pixel {pixel} is above 16"));
        }
        if usize::from(*label) >= CLASSES {
            return Err(format!("{label} is not a digit"));
        }
        self.pixels.extend(pixels.iter().map(|&pixel| f32::from(pixel) / 16.0));
        self.labels.push(*label);
        Ok(())
    }

    /// Replaces the contents of `batch` with these images.
    pub(crate) fn fill(&self, images: &[u64], batch: &mut Rows) {
        batch.labels.clear();
        batch.inputs.resize(images.len() * PIXELS, 0.0);
        for (&image, row) in images.iter().zip(batch.inputs.chunks_exact_mut(PIXELS)) {
            batch.labels.push(self.image(image, row));
        }
    }
}

impl Data for Images {
    type Batch = Rows;

    /// Shifted copies included.
    fn samples(&self) -> u64 {
        (self.labels.len() * self.copies) as u64
    }

    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Rows) -> Result<(), SampleError> {
        self.fill(samples, batch);
        Ok(())
    }

    /// With the checksum of the file's bytes.
    fn identity(&self) -> String {
        format!("{}(data {:08x})", if self.copies > 1 { "--shifts " } else { "" }, self.checksum)
    }
}

/// What is trained on.
impl Data for Digits {
    type Batch = Rows;

    fn samples(&self) -> u64 {
        self.train.samples()
    }

    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Rows) -> Result<(), SampleError> {
        self.train.read(samples, step, batch)
    }

    fn identity(&self) -> String {
        self.train.identity()
    }

    fn held_out(&self) -> Option<&dyn Data<Batch = Rows>> {
        Some(&self.test)
    }
}

fn decode(bytes: &[u8]) -> io::Result<String> {
    let mut text = String::new();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        GzDecoder::new(bytes).read_to_string(&mut text)?;
    } else {
        { bytes }.read_to_string(&mut text)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_data_is_whole() {
        let digits = Digits::load(None, false).unwrap();
        assert_eq!((digits.train.samples(), digits.test.samples()), (1437, 360));
        let mut row = [0.0; PIXELS];
        assert_eq!(digits.test.image(0, &mut row), 0, "the file's first image is a zero");
        assert_eq!(row[2], 5.0 / 16.0);
        let seen: std::collections::BTreeSet<u8> =
            (0..digits.train.samples()).map(|sample| digits.train.image(sample, &mut row)).collect();
        assert_eq!(seen.len(), CLASSES);
    }

    #[test]
    fn shifted_copies_move_every_pixel_by_one() {
        let plain = Digits::load(None, false).unwrap().train;
        let shifted = Digits::load(None, true).unwrap().train;
        assert_eq!(shifted.samples(), 9 * plain.samples());
        let (mut image, mut copy) = ([0.0; PIXELS], [0.0; PIXELS]);
        let label = plain.image(5, &mut image);
        for (number, (down, right)) in SHIFTS.into_iter().enumerate() {
            assert_eq!(shifted.image(5 * 9 + number as u64, &mut copy), label);
            for y in 1..7isize {
                for x in 1..7isize {
                    let at = |y: isize, x: isize| (y * SIDE as isize + x) as usize;
                    assert_eq!(copy[at(y + down, x + right)], image[at(y, x)]);
                }
            }
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.csv");
        fs::write(&path, "1,2,3\n").unwrap();
        let error = Digits::load(Some(&path), false).unwrap_err().to_string();
        assert!(error.contains("bad.csv, line 1: 3 fields instead of 65"), "{error}");
        let error = Digits::load(Some(Path::new("/nowhere/x.csv")), false).unwrap_err().to_string();
        assert!(error.contains("/nowhere/x.csv") && error.contains("--data"), "{error}");
    }
}
