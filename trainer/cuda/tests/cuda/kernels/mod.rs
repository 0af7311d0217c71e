//! Each kernel, compared with its definition. On the double of the driver, or, by `make gpu`, on a real GPU.

mod attention;
pub(crate) mod rows;
mod sizes;

use elastic_cuda::{After, Buffer, Gpu, Labels, Matrix};

use crate::buffers::{assert_near, back, gpu, numbers, on};
use crate::double::{and_on_a_gpu, surroundings};
use crate::products::assert_products_match;

#[test]
fn products_match_the_definition() {
    for gpu in [gpu(), gpu().without_library()] {
        let shapes = [(1, 1, 1), (8, 128, 64), (64, 64, 16), (65, 10, 17), (3, 130, 100), (130, 70, 1)];
        assert_products_match(&gpu, shapes, |operand| operand);
    }
}

#[test]
fn a_row_of_a_product_by_the_own_kernel_has_the_same_bits_among_any_number_of_rows() {
    let gpu = gpu().without_library();
    let (all, weight) = (numbers(70 * 33, 1), on(&gpu, &numbers(33 * 20, 2)));
    let product = |rows: usize| {
        let (left, mut out) = (on(&gpu, &all[..rows * 33]), Buffer::default());
        let (left, right) = (Matrix::new(left.view(), rows, 33), Matrix::new(weight.view(), 33, 20));
        gpu.product(&mut out.fit(&gpu, rows * 20).unwrap(), &left, &right, &After::Plain).unwrap();
        back(&gpu, &out)
    };
    let whole = product(70);
    for rows in [1, 5, 64] {
        assert_eq!(product(rows), whole[..rows * 20], "{rows} rows");
    }
}

#[test]
fn sums_and_norms_match_the_definition() {
    let gpu = gpu();
    for (rows, columns) in [(1, 1), (7, 10), (64, 300), (1000, 3)] {
        let given = numbers(rows * columns, 5);
        let room = on(&gpu, &given);
        let sum_of = |from: &dyn Fn(usize) -> bool| -> f64 {
            given.iter().enumerate().filter(|(place, _)| from(*place)).map(|(_, &value)| f64::from(value)).sum()
        };
        let mut sum = Buffer::default();
        gpu.sum_rows(&mut sum.fit(&gpu, columns).unwrap(), &room.view()).unwrap();
        let wanted: Vec<f64> = (0..columns).map(|column| sum_of(&|place| place % columns == column)).collect();
        assert_near(&back(&gpu, &sum), &wanted, 1e-4, "rows");
        gpu.sum_all(&mut sum.fit(&gpu, 1).unwrap(), &room.view()).unwrap();
        assert_near(&back(&gpu, &sum), &[sum_of(&|_| true)], 1e-4, "all");

        let norm = gpu.norm(&room.view(), &mut Buffer::default()).unwrap();
        let wanted = given.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
        assert!((norm - wanted).abs() < 1e-12 * wanted, "{norm}, not {wanted}");
    }
    // An addition of two numbers has one result, on any device.
    let (left, right) = (numbers(1000, 6), numbers(1000, 7));
    let place = |numbers: &[f32]| {
        let mut buffer = gpu.zeros::<f32>(numbers.len()).unwrap();
        gpu.upload(numbers, &mut buffer.as_view_mut()).unwrap();
        buffer
    };
    let mut sum = place(&left);
    gpu.add(&mut sum, &place(&right)).unwrap();
    let mut found = vec![0.0; 1000];
    gpu.download(&sum.as_view(), &mut found).unwrap();
    let wanted: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
    assert_eq!(found, wanted);
}

#[test]
fn a_checksum_is_that_of_all_bits_in_their_places() {
    let gpu = gpu();
    // The finalizer of SplitMix64
    let mix = |bits: u64| {
        let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    let golden: u64 = 0x9e37_79b9_7f4a_7c15;
    // One block, some, and fewer than would have a number each
    for count in [1, 1000, 70_000] {
        let given = numbers(count, 9);
        let sum = |given: &[f32]| gpu.checksum(&on(&gpu, given).view(), &mut Buffer::default()).unwrap();
        let places = (0..).zip(&given);
        let mixed = places.map(|(place, number)| mix(golden.wrapping_mul(place).wrapping_add(number.to_bits().into())));
        assert_eq!(sum(&given), mixed.fold(0, u64::wrapping_add), "{count} numbers");
        let mut changed = given.clone();
        changed[count / 2] = f32::from_bits(given[count / 2].to_bits() ^ 1);
        assert_ne!(sum(&changed), sum(&given), "a bit of {count} numbers");
        changed.clone_from(&given);
        changed.swap(0, count - 1);
        assert_eq!(sum(&changed) == sum(&given), count == 1, "two of {count} numbers");
    }
}

#[test]
fn losses_and_their_slopes_match_the_definition() {
    let gpu = gpu();
    for (rows, classes) in and_on_a_gpu([(1, 2), (8, 10), (3, 256), (2, 3001)], [(256, 50_257)]) {
        // Some scores are so far apart that a plain exponential would overflow.
        let scores: Vec<f32> = numbers(rows * classes, 8).iter().map(|score| score * 200.0).collect();
        let labels: Vec<u32> = (0..rows).map(|row| (row * 7 % classes) as u32).collect();
        let (mut slopes, mut uploaded, mut losses) = (on(&gpu, &scores), Labels::new(classes), Buffer::default());
        uploaded.upload(&gpu, &labels).unwrap();
        gpu.cross_entropy(&mut slopes.view_mut(), &uploaded.all(), &mut losses.fit(&gpu, rows).unwrap()).unwrap();
        let (mut wanted_slopes, mut wanted_losses) = (Vec::new(), Vec::new());
        for (row, &label) in scores.chunks_exact(classes).zip(&labels) {
            let top = row.iter().copied().fold(f32::MIN, f32::max);
            let powers: Vec<f64> = row.iter().map(|&score| f64::from(score - top).exp()).collect();
            let sum: f64 = powers.iter().sum();
            wanted_losses.push(sum.ln() - f64::from(row[label as usize] - top));
            let is_label = |class| if class == label as usize { 1.0 } else { 0.0 };
            wanted_slopes.extend(powers.iter().enumerate().map(|(class, power)| power / sum - is_label(class)));
        }
        assert_near(&back(&gpu, &losses), &wanted_losses, 1e-5, "losses");
        assert_near(&back(&gpu, &slopes), &wanted_slopes, 1e-5, "slopes");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    let surroundings = surroundings();
    let count = Gpu::count(&surroundings).unwrap();
    let error = Gpu::open(&surroundings, count).unwrap_err().to_string();
    assert!(error.contains(&format!("there is no GPU {count}: this node has {count}")), "{error}");
}
