//! Work on the flat numbers of any model, on the widest vectors that the processor has.

use pulp::Arch;

/// The place of the first number that is not finite.
pub(crate) fn first_not_finite(numbers: &[f32]) -> Option<usize> {
    /// Numbers that are checked together.
    const BLOCK: usize = 4096;
    // All bits of the exponent are set in what is not finite. Without a branch for each number this runs on vectors.
    const EXPONENT: u32 = 0x7f80_0000;
    let flawed = |numbers: &[f32]| numbers.iter().fold(false, |any, n| any | (n.to_bits() & EXPONENT == EXPONENT));
    let block = numbers.chunks(BLOCK).position(flawed)? * BLOCK;
    numbers[block..].iter().position(|number| !number.is_finite()).map(|place| block + place)
}

/// Adds `more` to `sum`, place by place.
pub(crate) fn add(sum: &mut [f32], more: &[f32]) {
    Arch::new().dispatch(|| sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more));
}
