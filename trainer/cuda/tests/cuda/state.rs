//! Copies of the state on a GPU while steps change it. On the double of the driver, or, by `make gpu`, on a real GPU.

use std::time::Duration;

use elastic_cuda::{CudaError, Gpu, GpuState};

use crate::buffers::{gpu, numbers};

/// So many numbers that a GPU copies them in milliseconds.
const COUNT: usize = 1 << 20;

fn filled(gpu: &Gpu, salt: u64) -> (GpuState, Vec<f32>) {
    let (mut state, given) = (GpuState::new(gpu, COUNT).unwrap(), numbers(3 * COUNT, salt));
    state.upload(gpu, &given).unwrap();
    (state, given)
}

/// Doubles all numbers, instead of a step.
fn change(gpu: &Gpu, state: &mut GpuState) {
    for part in state.parts_mut(gpu).unwrap() {
        let mut as_it_was = gpu.zeros::<f32>(COUNT).unwrap();
        gpu.copy(&part.as_view(), &mut as_it_was.as_view_mut()).unwrap();
        gpu.add(part, &as_it_was).unwrap();
    }
}

fn doubled(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|number| 2.0 * number).collect()
}

fn downloaded(gpu: &Gpu, state: &GpuState) -> Vec<f32> {
    let mut found = vec![f32::NAN; 3 * COUNT];
    state.download(gpu, &mut found).unwrap();
    found
}

#[test]
fn a_copy_is_of_the_state_as_it_was_when_it_was_asked_for() {
    let gpu = gpu();
    let (mut state, mut given) = filled(&gpu, 1);
    for turn in 0..4 {
        let copy = state.snapshot(&gpu).unwrap().unwrap();
        assert!(downloaded(&gpu, &state) == given, "it is what the copy is of, in turn {turn}");
        change(&gpu, &mut state);
        assert!(copy.numbers().unwrap() == given, "turn {turn}");
        given = doubled(&given);
        assert!(downloaded(&gpu, &state) == given, "the state changes, in turn {turn}");
    }
    let copy = state.snapshot(&gpu).unwrap().unwrap();
    state.upload(&gpu, &vec![0.0; 3 * COUNT]).unwrap();
    assert!(copy.numbers().unwrap() == given, "another state takes its place");
}

#[test]
fn no_other_copy_is_made_while_one_is_kept() {
    let gpu = gpu();
    let (mut state, given) = filled(&gpu, 2);
    let copy = state.snapshot(&gpu).unwrap().unwrap();
    change(&gpu, &mut state);
    assert!(state.snapshot(&gpu).unwrap().is_none());
    assert!(copy.numbers().unwrap() == given);
    drop(copy);
    let copy = state.snapshot(&gpu).unwrap().unwrap();
    assert!(copy.numbers().unwrap() == doubled(&given));
}

#[test]
fn a_copy_outlives_the_state_and_may_be_read_anywhere() {
    let gpu = gpu();
    let (mut state, given) = filled(&gpu, 3);
    let copy = state.snapshot(&gpu).unwrap().unwrap();
    drop(state);
    let read = std::thread::spawn(move || copy.numbers().unwrap() == given);
    // The freed memory may be used again without an effect on the copy.
    filled(&gpu, 4);
    assert!(read.join().unwrap());
}

#[test]
fn a_copy_is_waited_for_no_longer_than_other_work() {
    let gpu = gpu().patient_for(Duration::ZERO);
    let (mut state, _) = filled(&gpu, 5);
    let copy = state.snapshot(&gpu).unwrap().unwrap();
    assert!(matches!(copy.numbers(), Err(CudaError::Hangs { gpu: 0, .. })));
}
