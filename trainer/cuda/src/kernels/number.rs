//! What kernels compute with: `f32`, or bf16.

use cudarc::driver::{CudaFunction, DeviceRepr};

use super::loaded::OfNumber;

/// A number in bf16: the upper half of an `f32`'s bits.
pub type Bf16 = u16;

/// `f32` or [`Bf16`].
pub trait Number: DeviceRepr {
    /// The kernel for such numbers.
    #[doc(hidden)]
    fn kernel(kernels: &OfNumber) -> &CudaFunction;
}

impl Number for f32 {
    fn kernel(kernels: &OfNumber) -> &CudaFunction {
        &kernels.in_f32
    }
}

impl Number for Bf16 {
    fn kernel(kernels: &OfNumber) -> &CudaFunction {
        &kernels.in_bf16
    }
}
