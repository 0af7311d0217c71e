//! Numbers that look random and depend only on their key. There is no generator with a state, so no history of ranks
//! and restarts can change a number.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

/// Mixes 64 bits so that each input bit reaches each output bit.
/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in `[0, 1)` for this key, with 24 random bits: exact in `f32`.
pub fn unit(key: u64) -> f32 {
    (mix(key) >> 40) as f32 / (1u64 << 24) as f32
}
