//! Products of matrices. Not for what a model multiplies.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::CudaError;
use super::gpu::Gpu;
use super::launch::{THREADS, whole};
use crate::device::Precision;

/// Rows and columns of a product that a block computes: as in `product.cu`.
const TILE: usize = 64;
/// The most that a grid may have in its second dimension.
const MOST_ROWS: usize = 65_535 * TILE;

/// A matrix on the GPU, as it lies there or transposed.
#[derive(Debug)]
pub struct Matrix<'a> {
    data: CudaView<'a, f32>,
    rows: usize,
    columns: usize,
    strides: (i64, i64),
}

impl<'a> Matrix<'a> {
    /// The matrix whose rows follow each other in `data`.
    ///
    /// # Panics
    /// When `data` does not hold `rows * columns` numbers.
    pub fn new(data: CudaView<'a, f32>, rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(data.len(), rows * columns, "a {rows}×{columns} matrix");
        Matrix { data, rows, columns, strides: (columns as i64, 1) }
    }

    /// Its transpose; nothing is moved.
    pub fn transposed(self) -> Matrix<'a> {
        let (row, column) = self.strides;
        Matrix { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }
}

/// What becomes of a product's numbers.
#[derive(Debug)]
pub enum After<'a> {
    /// Nothing.
    Plain,
    /// Each column's bias is added.
    Bias(CudaView<'a, f32>),
    /// The same, and what is then below zero is zero.
    BiasRelu(CudaView<'a, f32>),
    /// It is zero where this matrix, of the product's shape, is not above zero.
    WherePositive(CudaView<'a, f32>),
}

impl Gpu {
    /// Replaces `out` by `left · right`, and by what is to become of that. With [`Precision::Bf16`] the numbers of both are
    /// rounded to bf16 for it; sums are f32, and what becomes of them is computed in that. Equal shapes and contents give
    /// equal bits.
    ///
    /// # Panics
    /// When the shapes do not fit.
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
        let rounds = i32::from(self.precision() == Precision::Bf16);
        let size = (whole(rows), whole(columns), whole(inner));
        let mut launch = self.stream().launch_builder(&self.functions.product);
        launch.arg(out).arg(&left.data).arg(&left.strides.0).arg(&left.strides.1);
        launch.arg(&right.data).arg(&right.strides.0).arg(&right.strides.1);
        launch.arg(more).arg(&size.0).arg(&size.1).arg(&size.2).arg(&number).arg(&rounds);
        let grid_dim = (columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1);
        // SAFETY: the arguments are the kernel's, and the strides reach only what `Matrix::new` has found in the slices.
        unsafe { launch.launch(LaunchConfig { grid_dim, block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 }) }
            .map_err(self.failed("multiply"))?;
        Ok(())
    }
}
