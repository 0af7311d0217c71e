//! `elastic-trainer check-gpus`: has each GPU multiply two matrices, and compares the product with the right one.
//!
//! The matrices hold whole numbers below 8. So all sums are whole numbers that f32 holds exactly, and every product has
//! one right result, in whatever order a kernel or cuBLASLt adds. The product has 256 tiles, more than a GPU has
//! multiprocessors, so that each gets some of them.

use std::io::{self, Write};
use std::time::Instant;

use elastic_cuda::{After, Buffer, CudaError, Gpu, Matrix, Surroundings};

/// Rows and columns of the product, and what is summed for each of its numbers.
const SIZE: usize = 1024;
const INNER: usize = 64;

/// Why the check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is none, or a library is missing.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Some GPUs failed the check. The reason for each was printed.
    #[error(
        "{unfit} of {all} GPUs failed the check (the lines above say why); search for memory errors and Xids \
         (nvidia-smi -q, dmesg), then reset or replace the GPU"
    )]
    Unfit {
        /// GPUs that failed.
        unfit: usize,
        /// GPUs that the driver shows.
        all: usize,
    },
    /// The result cannot be printed.
    #[error("cannot print: {0}")]
    Print(#[from] io::Error),
}

/// Checks all GPUs that the driver shows, and prints a line for each.
///
/// # Errors
/// A GPU failed, there is none, a library is missing or does not match, or the result cannot be printed.
pub fn run(out: &mut impl Write) -> Result<(), CheckError> {
    let surroundings = &Surroundings::read(|name| std::env::var(name).ok());
    let all = Gpu::count(surroundings)?;
    let mut unfit = 0;
    for number in 0..all {
        match check(surroundings, number) {
            Ok(fit) => writeln!(out, "GPU {number}: {fit}")?,
            Err(Unfit::Cuda(error)) if error.is_of_software() => return Err(error.into()),
            Err(why) => {
                unfit += 1;
                writeln!(out, "GPU {number}: failed: {why}")?;
            }
        }
    }
    out.flush()?;
    if unfit == 0 { Ok(()) } else { Err(CheckError::Unfit { unfit, all }) }
}

/// Why a GPU failed the check.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("{name} computed a wrong product: {wrong}")]
    Wrong { name: String, wrong: String },
}

/// The line about a working GPU, or what is wrong with a faulty one.
fn check(surroundings: &Surroundings, number: usize) -> Result<String, Unfit> {
    let mut gpu = Gpu::open(surroundings, number)?;
    let name = gpu.name().to_owned();
    let begun = Instant::now();
    // By cuBLASLt where it is there, and by the trainer's own kernel.
    for own in [false, true] {
        if own {
            gpu = gpu.without_library();
        }
        if let Some(wrong) = judge(&product(&gpu)?) {
            return Err(Unfit::Wrong { name, wrong });
        }
    }
    Ok(format!("{name} computed correct products in {} ms", begun.elapsed().as_millis()))
}

fn product(gpu: &Gpu) -> Result<Vec<f32>, CudaError> {
    let matrix = |rows: usize, columns: usize, number: fn(usize, usize) -> usize| -> Result<Buffer<f32>, CudaError> {
        let numbers: Vec<f32> =
            (0..rows * columns).map(|place| number(place / columns, place % columns) as f32).collect();
        let mut room = Buffer::default();
        gpu.upload(&numbers, &mut room.fit(gpu, numbers.len())?)?;
        Ok(room)
    };
    let (left, right) = (matrix(SIZE, INNER, left)?, matrix(INNER, SIZE, right)?);
    let (left, right) = (Matrix::new(left.view(), SIZE, INNER), Matrix::new(right.view(), INNER, SIZE));
    let mut out = Buffer::default();
    gpu.product(&mut out.fit(gpu, SIZE * SIZE)?, &left, &right, &After::Plain)?;
    let mut found = vec![f32::NAN; SIZE * SIZE];
    gpu.download(&out.view(), &mut found)?;
    Ok(found)
}

fn left(row: usize, inner: usize) -> usize {
    (row + inner) % 8
}

fn right(inner: usize, column: usize) -> usize {
    (3 * inner + column) % 8
}

/// What is wrong with a product, if anything is.
fn judge(found: &[f32]) -> Option<String> {
    // Both matrices repeat themselves after eight rows, columns and summands.
    let right_one = |row: usize, column: usize| -> f32 {
        let of_eight: usize = (0..8).map(|inner| left(row, inner) * right(inner, column)).sum();
        (INNER / 8 * of_eight) as f32
    };
    let table: Vec<f32> = (0..64).map(|place| right_one(place / 8, place % 8)).collect();
    let expected = |place: usize| table[place / SIZE % 8 * 8 + place % SIZE % 8];
    let mut wrong = found.iter().enumerate().filter(|(place, found)| **found != expected(*place));
    let (place, number) = wrong.next()?;
    Some(format!(
        "{} of {} numbers differ, the first in row {} and column {}: {number} instead of {}",
        1 + wrong.count(),
        found.len(),
        place / SIZE,
        place % SIZE,
        expected(place)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_wrong_bit_is_found_and_nothing_else() {
        let mut product: Vec<f32> = (0..SIZE * SIZE)
            .map(|place| {
                let (row, column) = (place / SIZE, place % SIZE);
                (0..INNER).map(|inner| left(row, inner) * right(inner, column)).sum::<usize>() as f32
            })
            .collect();
        assert_eq!(judge(&product), None);
        let place = 517 * SIZE + 1003;
        product[place] = f32::from_bits(product[place].to_bits() ^ 1);
        let told = judge(&product).unwrap();
        assert!(told.starts_with("1 of 1048576 numbers differ, the first in row 517 and column 1003: "), "{told}");
        product[3] = f32::NAN;
        let told = judge(&product).unwrap();
        let expected = "2 of 1048576 numbers differ, the first in row 0 and column 3: NaN instead of ";
        assert!(told.starts_with(expected), "{told}");
    }
}
