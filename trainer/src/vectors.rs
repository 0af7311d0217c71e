//! Loops over flat numbers, on the widest vectors that the processor has.
//!
//! The loops are written so that the compiler turns them into vector code; `pulp` picks the processor's widest at run
//! time. So results are equal, bit for bit, between processors of one kind only.
//!
//! `f32::mul_add` in such a loop is one instruction on x86-64 with AVX2 and FMA, or AVX-512, and on AArch64. On an older
//! x86-64 each is a call of a C function: the result is as exact, but the loop takes many times as long.

use pulp::{Arch, Simd, WithSimd};

/// Runs loops, compiled for the processor's widest vectors. `pulp` runs closures too, but by a shim that is not always
/// inlined, and only what is inlined is compiled so.
#[doc(hidden)]
#[macro_export]
macro_rules! on_vectors {
    ($loops:expr) => {
        $crate::vectors::run(
            #[inline(always)]
            || $loops,
        )
    };
}

struct Loops<F>(F);

impl<R, F: FnOnce() -> R> WithSimd for Loops<F> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> R {
        (self.0)()
    }
}

/// What [`on_vectors`](crate::on_vectors) calls.
#[inline(always)]
pub fn run<R>(loops: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(Loops(loops))
}

/// The place of the first number that is not finite.
pub fn first_not_finite(numbers: &[f32]) -> Option<usize> {
    /// Numbers that are checked together.
    const BLOCK: usize = 4096;
    // All bits of the exponent are set in what is not finite. Without a branch for each number this runs on vectors.
    const EXPONENT: u32 = 0x7f80_0000;
    let flawed = |numbers: &[f32]| numbers.iter().fold(false, |any, n| any | (n.to_bits() & EXPONENT == EXPONENT));
    let block = numbers.chunks(BLOCK).position(flawed)? * BLOCK;
    numbers[block..].iter().position(|number| !number.is_finite()).map(|place| block + place)
}

/// Adds `more` to `sum`, place by place.
pub fn add(sum: &mut [f32], more: &[f32]) {
    on_vectors!(sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more));
}
