//! What kernels compute with: `f32`, or bf16.

use cudarc::driver::{DeviceRepr, ValidAsZeroBits};

/// A number in bf16: the upper half of an `f32`'s bits.
pub type Bf16 = u16;

/// `f32` or [`Bf16`].
pub trait Number: DeviceRepr + ValidAsZeroBits + Sized {
    /// Whether it is a number in bf16, which `f32` is rounded to.
    const ROUNDS: bool;
}

impl Number for f32 {
    const ROUNDS: bool = false;
}

impl Number for Bf16 {
    const ROUNDS: bool = true;
}
