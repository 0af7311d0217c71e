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
        match &epilogue {
            Epilogue::Bias(bias) | Epilogue::Gelu { bias, .. } => assert_eq!(bias.len(), columns, "a bias each"),
            Epilogue::Plain | Epilogue::GeluSlope(_) => {}
        }
        match &epilogue {
            Epilogue::Gelu { inputs, .. } => assert_eq!(inputs.len(), rows * columns, "room for GELU's inputs"),
            Epilogue::GeluSlope(inputs) => assert_eq!(inputs.len(), rows * columns, "GELU's inputs"),
            Epilogue::Plain | Epilogue::Bias(_) => {}
        }
        if self.multiplied(&wanted)? {
            return Ok(());
        }
        let alone = wanted.then == Then::Nothing || !self.multiplied(&Wanted { then: Then::Nothing, ..wanted })?;
        if alone {
            let mut launch = self.launch("product_bf16");
            let (size, adds) = ([rows, columns, left.columns].map(whole), 0i32);
            launch.arg(&mut *out).arg(&left.data).arg(&left.strides.0).arg(&left.strides.1);
            launch.arg(&right.data).arg(&right.strides.0).arg(&right.strides.1);
            launch.arg(&size[0]).arg(&size[1]).arg(&size[2]).arg(&adds);
            let grid_dim = (columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1);
            // SAFETY: the arguments are the kernel's, and the strides reach only what `Matrix::new` has found.
            unsafe { self.run(launch, grid(grid_dim, THREADS), "multiply") }?;
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
        let (rows, columns) = checked(out.len(), left, right);
        let address = out.device_ptr_mut(self.stream()).0;
        if self.multiplied(&self.wanted(address, left, right, adds))? {
            return Ok(());
        }
        let mut launch = self.launch("product_bf16_to_f32");
        let (size, adds) = ([rows, columns, left.columns].map(whole), i32::from(adds));
        launch.arg(out).arg(&left.data).arg(&left.strides.0).arg(&left.strides.1);
        launch.arg(&right.data).arg(&right.strides.0).arg(&right.strides.1);
        launch.arg(&size[0]).arg(&size[1]).arg(&size[2]).arg(&adds);
        let grid_dim = (columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1);
        // SAFETY: as above.
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

    /// Has cuBLASLt multiply, if it is there and can. Returns whether it did.
    fn multiplied(&self, wanted: &Wanted) -> Result<bool, CudaError> {
        let Some(library) = &self.cublaslt else { return Ok(false) };
        self.stream().context().bind_to_thread().map_err(self.failed("multiply"))?;
        // SAFETY: the context is current from the line before on, the matrices are this GPU's, and the callers have found
        // that their shapes fit.
        unsafe { library.product(wanted) }
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
