//! Products of matrices.
#![allow(unsafe_code)]

pub(crate) mod bf16;
pub(crate) mod cublaslt;

use std::sync::PoisonError;

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut, PushKernelArg};

use crate::gpu::{Buffer, Gpu, Precision};
use crate::kernels::launch::{THREADS, grid, whole};
use crate::{Bf16, CudaError};
use cublaslt::{Lines, Wanted};

/// Rows and columns of a product that a block computes, as in `product.cu`.
pub(crate) const TILE: usize = 64;
/// The most that a grid may have in its second dimension.
pub(crate) const MOST_ROWS: usize = 65_535 * TILE;
/// Rows of bf16 begin at multiples of so many numbers: 16 bytes, which tensor cores load at once.
const BF16_STRIDE: usize = 8;

/// A matrix on the GPU, as it lies there or transposed.
#[derive(Debug)]
pub struct Matrix<'a, T = f32> {
    pub(crate) data: CudaView<'a, T>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) strides: (i64, i64),
}

impl<'a, T> Matrix<'a, T> {
    /// The matrix whose rows follow each other in `data`.
    pub fn new(data: CudaView<'a, T>, rows: usize, columns: usize) -> Matrix<'a, T> {
        assert_eq!(data.len(), rows * columns, "a {rows}×{columns} matrix");
        Matrix { data, rows, columns, strides: (columns as i64, 1) }
    }

    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns it has.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Its transpose. No numbers are moved.
    pub fn transposed(self) -> Matrix<'a, T> {
        let (row, column) = self.strides;
        Matrix { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }

    pub(crate) fn lines(&self, gpu: &Gpu) -> Lines {
        let (address, transposed) = (self.data.device_ptr(gpu.stream()).0, self.strides.1 != 1);
        let (lines, length, stride) = match transposed {
            false => (self.rows, self.columns, self.strides.0),
            true => (self.columns, self.rows, self.strides.1),
        };
        // A matrix with a single line, or with lines of one number, lies in memory as its transpose does.
        Lines { address, lines, length, stride: (stride as usize).max(length), transposed }
    }
}

/// What follows a product.
#[derive(Debug)]
pub enum After<'a> {
    /// Nothing.
    Plain,
    /// A bias for each column is added.
    Bias(CudaView<'a, f32>),
    /// A bias for each column is added, and negative numbers become zero.
    BiasRelu(CudaView<'a, f32>),
    /// The product becomes zero where this matrix, of the product's shape, is not above zero.
    WherePositive(CudaView<'a, f32>),
}

impl Gpu {
    /// Replaces `out` by `left · right`, and applies what follows the product. With [`Precision::Bf16`] the operands
    /// are rounded to bf16; sums and what follows them are computed in f32. Equal shapes and contents give equal bits.
    pub fn product(
        &self,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_>,
        right: &Matrix<'_>,
        after: &After<'_>,
    ) -> Result<(), CudaError> {
        let (rows, columns, inner) = (left.rows, right.columns, left.columns);
        assert_eq!(inner, right.rows, "inner dimensions");
        assert_eq!(out.len(), rows * columns, "size of the product");
        assert!(rows <= MOST_ROWS, "a product of {rows} rows");
        let (number, more) = match after {
            After::Plain => (0i32, &left.data),
            After::Bias(bias) | After::BiasRelu(bias) => {
                assert_eq!(bias.len(), columns, "a bias for each column");
                (if matches!(after, After::Bias(_)) { 1 } else { 2 }, bias)
            }
            After::WherePositive(mask) => {
                assert_eq!(mask.len(), rows * columns, "a mask of the product's shape");
                (3, mask)
            }
        };
        if out.is_empty() {
            return Ok(());
        }
        if inner > 0 && self.by_library(out, left, right)? {
            return if number == 0 { Ok(()) } else { self.follow(out, more, columns, number) };
        }
        let rounds = i32::from(self.precision() == Precision::Bf16);
        let size = (whole(rows), whole(columns), whole(inner));
        let mut launch = self.launch("product");
        launch.arg(out).arg(&left.data).arg(&left.strides.0).arg(&left.strides.1);
        launch.arg(&right.data).arg(&right.strides.0).arg(&right.strides.1);
        launch.arg(more).arg(&size.0).arg(&size.1).arg(&size.2).arg(&number).arg(&rounds);
        let grid_dim = (columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1);
        // SAFETY: the arguments are the kernel's, and the strides reach only what `Matrix::new` has found in the
        // slices.
        unsafe { self.run(launch, grid(grid_dim, THREADS), "multiply") }
    }

    /// Replaces `out` by `left · right`, if cuBLASLt is there and can. Returns whether it did.
    fn by_library(
        &self,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_>,
        right: &Matrix<'_>,
    ) -> Result<bool, CudaError> {
        if self.cublaslt.is_none() {
            return Ok(false);
        }
        let (lines, length) = (left.rows, right.columns);
        let address = out.device_ptr_mut(self.stream()).0;
        let out = Lines { address, lines, length, stride: length, transposed: false };
        let [mut left_lines, mut right_lines] = [left, right].map(|matrix| matrix.lines(self));
        let bf16 = self.precision() == Precision::Bf16;
        if bf16 {
            let mut rooms = self.rounded.lock().unwrap_or_else(PoisonError::into_inner);
            let [left_room, right_room] = &mut *rooms;
            left_lines = self.round(left, left_lines, left_room)?;
            right_lines = self.round(right, right_lines, right_room)?;
        }
        self.multiplied(&Wanted::plain([left_lines, right_lines, out], bf16))
    }

    /// Has cuBLASLt multiply, if it is there and can. Returns whether it did.
    fn multiplied(&self, wanted: &Wanted) -> Result<bool, CudaError> {
        let Some(library) = &self.cublaslt else { return Ok(false) };
        self.stream().context().bind_to_thread().map_err(self.failed("multiply"))?;
        // SAFETY: the context is current from the line before on, the matrices are this GPU's, and the callers have found
        // that their shapes fit.
        unsafe { library.product(wanted) }
    }

    /// Rounds a matrix, which lies in memory as `lines` says, to bf16.
    fn round(&self, matrix: &Matrix<'_>, lines: Lines, room: &mut Buffer<Bf16>) -> Result<Lines, CudaError> {
        let stride = lines.length.next_multiple_of(BF16_STRIDE);
        let mut rounded = room.fit(self, lines.lines * stride)?;
        let (columns, from_stride, to_stride) = (whole(lines.length), lines.stride as i64, stride as i64);
        let grid_dim = (whole(lines.lines) as u32, 1, 1);
        let mut launch = self.launch("round_to_bf16");
        launch.arg(&mut rounded).arg(&matrix.data).arg(&columns).arg(&from_stride).arg(&to_stride);
        // SAFETY: the arguments are the kernel's; the matrix has these lines, and there is room for them.
        unsafe { self.run(launch, grid(grid_dim, THREADS), "round to bf16") }?;
        Ok(Lines { address: rounded.device_ptr_mut(self.stream()).0, stride, ..lines })
    }

    /// Applies what follows a product to its numbers.
    fn follow(
        &self,
        out: &mut CudaViewMut<'_, f32>,
        more: &CudaView<'_, f32>,
        columns: usize,
        number: i32,
    ) -> Result<(), CudaError> {
        let (grid_dim, columns) = ((whole(out.len() / columns) as u32, 1, 1), whole(columns));
        let mut launch = self.launch("follow");
        launch.arg(out).arg(more).arg(&columns).arg(&number);
        // SAFETY: the arguments are the kernel's, and `product` has found that there is a number for each column or
        // place.
        unsafe { self.run(launch, grid(grid_dim, THREADS), "follow a product") }
    }
}
