//! A GPU for a test, its double or a real one, and numbers on it.

use elastic_cuda::{Buffer, Gpu};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::double::surroundings;
use crate::warnings;

/// The GPU, with all libraries. A warning fails the test.
pub(crate) fn gpu() -> Gpu {
    warnings::are_failures();
    let gpu = Gpu::open(&surroundings(), 0).unwrap();
    eprintln!("on {}: {}", gpu.name(), gpu.versions());
    assert!(gpu.versions().contains("cuBLASLt"), "products are not the library's: {}", gpu.versions());
    gpu
}

/// Numbers in [-0.5, 0.5) that look random. Another salt gives others.
pub(crate) fn numbers(count: usize, salt: u64) -> Vec<f32> {
    let mut random = SmallRng::seed_from_u64(salt);
    (0..count).map(|_| random.random::<f32>() - 0.5).collect()
}

pub(crate) fn on(gpu: &Gpu, numbers: &[f32]) -> Buffer<f32> {
    let mut room = Buffer::default();
    gpu.upload(numbers, &mut room.fit(gpu, numbers.len()).unwrap()).unwrap();
    room
}

pub(crate) fn back(gpu: &Gpu, room: &Buffer<f32>) -> Vec<f32> {
    let view = room.view();
    let mut numbers = vec![f32::NAN; view.len()];
    gpu.download(&view, &mut numbers).unwrap();
    numbers
}

pub(crate) fn assert_near(found: &[f32], wanted: &[f64], error: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (place, (&found, &wanted)) in found.iter().zip(wanted).enumerate() {
        let off = (f64::from(found) - wanted).abs();
        assert!(off <= error * (1.0 + wanted.abs()), "{what} at {place}: {found}, not {wanted}");
    }
}
