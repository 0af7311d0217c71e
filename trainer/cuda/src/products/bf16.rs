//! Products of matrices in bf16, with what cuBLASLt can do to them before it writes them (its epilogues).
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut, PushKernelArg};

use super::cublaslt::{Lines, Then, Wanted};
use super::{MOST_ROWS, Matrix, TILE};
use crate::gpu::Gpu;
use crate::kernels::launch::{THREADS, grid, whole};
use crate::kernels::rows::{each, fours};
use crate::{Bf16, CudaError};

/// The numbers by which the kernel `follow_bf16` knows a bias, GELU and GELU's slope, as in `rows.cu`.
const FOLLOWS: [i32; 3] = [1, 2, 3];

/// What is done to a product before it is rounded and written.
#[derive(Debug)]
pub enum Epilogue<'a, T = Bf16> {
    /// Nothing.
    Plain,
    /// A bias for each column is added.
    Bias(CudaView<'a, T>),
    /// A bias for each column is added. The sums are kept as `inputs`, and their GELU is the result.
    Gelu {
        /// The bias.
        bias: CudaView<'a, T>,
        /// Room for the sums, of the product's shape.
        inputs: CudaViewMut<'a, T>,
    },
    /// The product is the derivative by GELU's outputs, and the result that by its inputs, which are these.
    GeluSlope(CudaView<'a, T>),
}

impl Gpu {
    /// Replaces `out` by `left · right`, with what follows. Sums are `f32`. Equal shapes and contents give equal bits.
    /// Where cuBLASLt has no way to an epilogue, one warning says so, and a kernel does the same to the rounded product.
    pub fn product_bf16(
        &self,
        out: &mut CudaViewMut<'_, Bf16>,
        left: &Matrix<'_, Bf16>,
        right: &Matrix<'_, Bf16>,
        mut epilogue: Epilogue<'_>,
    ) -> Result<(), CudaError> {
        let (rows, columns) = checked(out.len(), left, right);
        let address = out.device_ptr_mut(self.stream()).0;
        let mut wanted = Wanted { out_bf16: true, ..self.wanted(address, left, right, false) };
        let address = |view: &CudaView<'_, Bf16>| view.device_ptr(self.stream()).0;
        wanted.then = match &epilogue {
            Epilogue::Plain => Then::Nothing,
            Epilogue::Bias(bias) => Then::Bias { bias: address(bias) },
            Epilogue::Gelu { bias, inputs } => Then::Gelu { bias: address(bias), inputs: address(&inputs.as_view()) },
            Epilogue::GeluSlope(inputs) => Then::GeluSlope { inputs: address(inputs) },
        };
        let (biases, inputs) = match &epilogue {
            Epilogue::Plain => (columns, rows * columns),
            Epilogue::Bias(bias) => (bias.len(), rows * columns),
            Epilogue::Gelu { bias, inputs } => (bias.len(), inputs.len()),
            Epilogue::GeluSlope(inputs) => (columns, inputs.len()),
        };
        assert_eq!((biases, inputs), (columns, rows * columns), "a bias for each column, and all of GELU's inputs");
        if self.multiplied(&wanted)? {
            return Ok(());
        }
        let alone = wanted.then == Then::Nothing || !self.multiplied(&Wanted { then: Then::Nothing, ..wanted })?;
        if alone {
            self.by_kernel("product_bf16", out, left, right, false)?;
        }
        let mut launch = self.launch("follow_bf16");
        let (columns, [bias_alone, gelu, gelu_slope]) = (whole(columns), FOLLOWS);
        launch.arg(out);
        // An argument that the kernel does not read is any other of its kind.
        match &mut epilogue {
            Epilogue::Plain => return Ok(()),
            Epilogue::Bias(bias) => launch.arg(&*bias).arg(&*bias).arg(&columns).arg(&bias_alone),
            Epilogue::Gelu { bias, inputs } => launch.arg(inputs).arg(&*bias).arg(&columns).arg(&gelu),
            Epilogue::GeluSlope(inputs) => launch.arg(&*inputs).arg(&*inputs).arg(&columns).arg(&gelu_slope),
        };
        // SAFETY: the arguments are the kernel's, and the lengths were compared with the shape.
        unsafe { self.run(launch, each(rows), "follow a product") }
    }

    /// Replaces `out` by `left · right`, or if it `adds`, adds that to it. Sums and `out` are `f32`.
    pub fn product_bf16_to_f32(
        &self,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_, Bf16>,
        right: &Matrix<'_, Bf16>,
        adds: bool,
    ) -> Result<(), CudaError> {
        checked(out.len(), left, right);
        let address = out.device_ptr_mut(self.stream()).0;
        if self.multiplied(&self.wanted(address, left, right, adds))? {
            return Ok(());
        }
        self.by_kernel("product_bf16_to_f32", out, left, right, adds)
    }

    /// Has the trainer's own kernel multiply. The caller has found that the shapes fit.
    fn by_kernel<T>(
        &self,
        kernel: &str,
        out: &mut CudaViewMut<'_, T>,
        left: &Matrix<'_, Bf16>,
        right: &Matrix<'_, Bf16>,
        adds: bool,
    ) -> Result<(), CudaError> {
        let mut launch = self.launch(kernel);
        let (size, adds) = ([left.rows, right.columns, left.columns].map(whole), i32::from(adds));
        launch.arg(out).arg(&left.data).arg(&left.strides.0).arg(&left.strides.1);
        launch.arg(&right.data).arg(&right.strides.0).arg(&right.strides.1);
        launch.arg(&size[0]).arg(&size[1]).arg(&size[2]).arg(&adds);
        let grid_dim = (right.columns.div_ceil(TILE) as u32, left.rows.div_ceil(TILE) as u32, 1);
        // SAFETY: the arguments are the kernel's, and the strides reach only what `Matrix::new` has found.
        unsafe { self.run(launch, grid(grid_dim, THREADS), "multiply") }
    }

    /// Writes `parameters` in bf16, with so many zeros, `gap`, behind the first `before` of them.
    pub fn round_parameters(
        &self,
        parameters: &CudaView<'_, f32>,
        (before, gap): (usize, usize),
        to: &mut CudaViewMut<'_, Bf16>,
    ) -> Result<(), CudaError> {
        assert!(before <= parameters.len() && to.len() == parameters.len() + gap, "room for all parameters");
        let (count, before, gap) = (to.len() as i64, before as i64, gap as i64);
        let mut launch = self.launch("round_parameters");
        launch.arg(to).arg(parameters).arg(&count).arg(&before).arg(&gap);
        // SAFETY: the arguments are the kernel's, and the lengths were compared.
        unsafe { self.run(launch, fours(count as usize), "round to bf16") }
    }

    /// A product into the rows at `address`, without anything after it.
    fn wanted(&self, address: u64, left: &Matrix<'_, Bf16>, right: &Matrix<'_, Bf16>, adds: bool) -> Wanted {
        let (lines, length) = (left.rows, right.columns);
        let out = Lines { address, lines, length, stride: length, transposed: false };
        Wanted { adds, ..Wanted::plain([left.lines(self), right.lines(self), out], true) }
    }
}

/// Rows and columns of the product, which has so many numbers.
fn checked(out: usize, left: &Matrix<'_, Bf16>, right: &Matrix<'_, Bf16>) -> (usize, usize) {
    assert_eq!(left.columns, right.rows, "inner dimensions");
    assert!(out > 0 && left.columns > 0, "a product of something");
    assert_eq!(out, left.rows * right.columns, "size of the product");
    assert!(left.rows <= MOST_ROWS, "a product of {} rows", left.rows);
    (left.rows, right.columns)
}
