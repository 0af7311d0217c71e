//! The kernel of `adamw.cu` as a function: one launch moves all parameters.
#![allow(unsafe_code)]

use std::ops::Range;

use cudarc::driver::{CudaSlice, PushKernelArg};

use super::launch::{THREADS, grid, whole};
use crate::CudaError;
use crate::gpu::Gpu;

/// Which of all parameters decay.
#[derive(Debug)]
pub struct Decays {
    /// Where pieces of them end that decay and that do not, in turn.
    ends: CudaSlice<i64>,
    pieces: usize,
    parameters: usize,
}

impl Decays {
    /// By tensors, one after the other, from the first parameter on: each one's place, and whether it decays.
    pub fn new(gpu: &Gpu, tensors: impl IntoIterator<Item = (Range<usize>, bool)>) -> Result<Decays, CudaError> {
        let mut ends = vec![0];
        for (place, decays) in tensors {
            let last = ends.len() - 1;
            assert_eq!(ends[last], place.start as i64, "tensors that follow one another");
            if decays == last.is_multiple_of(2) {
                ends[last] = place.end as i64;
            } else {
                ends.push(place.end as i64);
            }
        }
        let (pieces, parameters) = (ends.len(), ends[ends.len() - 1] as usize);
        let mut room = gpu.zeros(pieces)?;
        gpu.upload(&ends, &mut room.as_view_mut())?;
        Ok(Decays { ends: room, pieces, parameters })
    }
}

/// The numbers of one step of AdamW.
#[derive(Debug, Clone, Copy)]
pub struct AdamwStep {
    /// How slowly the mean of the gradient forgets.
    pub beta1: f32,
    /// How slowly the mean of its square forgets.
    pub beta2: f32,
    /// Keeps the division finite.
    pub epsilon: f32,
    /// What the mean is multiplied by: the rate, corrected for a mean that began at zero.
    pub rate: f32,
    /// What the square's root is divided by, for the same reason.
    pub root: f32,
    /// What decay leaves of a parameter that decays.
    pub keep: f32,
}

impl Gpu {
    /// Moves parameters by AdamW, along `scale * gradient`. The three slices of `state` are parameters, means and
    /// squares; the gradient may be longer than they are.
    pub fn adamw(
        &self,
        step: &AdamwStep,
        decays: &Decays,
        state: &mut [CudaSlice<f32>; 3],
        gradient: &CudaSlice<f32>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let [parameters, mean, square] = state;
        let AdamwStep { beta1, beta2, epsilon, rate, root, keep } = step;
        let (count, pieces) = (decays.parameters, whole(decays.pieces));
        if count == 0 {
            return Ok(());
        }
        let shortest = [&*parameters, mean, square, gradient].map(CudaSlice::len).into_iter().min();
        assert!(shortest >= Some(count), "{count} parameters, and buffers of {shortest:?}");
        let (blocks, count) = (whole(count.div_ceil(4 * THREADS)) as u32, count as i64);
        let mut launch = self.launch("adamw");
        launch.arg(parameters).arg(mean).arg(square).arg(gradient).arg(&decays.ends).arg(&pieces).arg(&count);
        launch.arg(&scale).arg(beta1).arg(beta2).arg(rate).arg(keep).arg(root).arg(epsilon);
        // SAFETY: the arguments are the kernel's; there are so many pieces, and the four buffers have `count` numbers.
        unsafe { self.run(launch, grid((blocks, 1, 1), THREADS), "step") }
    }
}
