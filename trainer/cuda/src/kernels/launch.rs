//! The kernels of `sums.cu` and `loss.cu` as functions. They check shapes, since a kernel checks nothing.
//!
//! A launch returns before its work is done. If a kernel fails, a later call returns the error.
#![allow(unsafe_code)]

use std::ops::Range;

use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DeviceRepr, LaunchArgs, LaunchConfig, PushKernelArg, ValidAsZeroBits,
};

use crate::gpu::{Buffer, Gpu};
use crate::{CudaError, Number};

/// Threads of a block, as in the kernels of these files and of `product.cu`.
pub(crate) const THREADS: usize = 256;
/// Threads for a row of scores in bf16, as in `loss.cu`.
const THREADS_OF_A_ROW: usize = 1024;
/// The most blocks that sum squares, or bits. The order of a sum of squares depends on it, so it is the same on all GPUs.
const SUM_BLOCKS: usize = 256;

impl Gpu {
    /// Launches a kernel. An error names what it was `doing`.
    ///
    /// # Safety
    /// The arguments are the kernel's, and it stays within their memory.
    pub(crate) unsafe fn run(
        &self,
        mut launch: LaunchArgs<'_>,
        size: LaunchConfig,
        doing: &'static str,
    ) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        unsafe { launch.launch(size) }.map(drop).map_err(self.failed(doing))
    }

    /// Adds `more` to `sum`, place by place.
    pub fn add(&self, sum: &mut CudaSlice<f32>, more: &CudaSlice<f32>) -> Result<(), CudaError> {
        self.add_part(&mut sum.as_view_mut(), &more.as_view())
    }

    /// The same for parts of buffers.
    pub fn add_part(&self, sum: &mut CudaViewMut<'_, f32>, more: &CudaView<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(sum.len(), more.len(), "numbers to add");
        let count = sum.len() as i64;
        let mut launch = self.launch("add");
        launch.arg(sum).arg(more).arg(&count);
        // SAFETY: the arguments are the kernel's, and both buffers have as many numbers.
        unsafe { self.run(launch, for_each(count as usize), "add") }
    }

    /// Writes the sum of all rows, as long as `sum`, of `numbers`.
    pub fn sum_rows(&self, sum: &mut CudaViewMut<'_, f32>, numbers: &CudaView<'_, f32>) -> Result<(), CudaError> {
        assert!(!sum.is_empty() && numbers.len().is_multiple_of(sum.len()), "whole rows of {}", sum.len());
        let (rows, columns) = (whole(numbers.len() / sum.len()), whole(sum.len()));
        let mut launch = self.launch("sum_rows");
        launch.arg(sum).arg(numbers).arg(&rows).arg(&columns);
        // SAFETY: the arguments are the kernel's, and so many rows and columns are there.
        unsafe { self.run(launch, for_each(columns as usize), "sum rows") }
    }

    /// Writes the sum of all `numbers` into the one number of `sum`.
    pub fn sum_all(&self, sum: &mut CudaViewMut<'_, f32>, numbers: &CudaView<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(sum.len(), 1, "room for one sum");
        let count = whole(numbers.len());
        let mut launch = self.launch("sum_all");
        launch.arg(sum).arg(numbers).arg(&count);
        // SAFETY: the arguments are the kernel's, and so many numbers are there.
        unsafe { self.run(launch, for_each(1), "sum") }
    }

    /// The Euclidean norm, once all work is done. `room` is kept from call to call.
    pub fn norm(&self, numbers: &CudaView<'_, f32>, room: &mut Buffer<f64>) -> Result<f64, CudaError> {
        Ok(self.sums("sum_squares", numbers, room)?.iter().sum::<f64>().sqrt())
    }

    /// A checksum, once all work is done: the same for the same bits in the same places. `room` is kept from call to
    /// call.
    pub fn checksum(&self, numbers: &CudaView<'_, f32>, room: &mut Buffer<u64>) -> Result<u64, CudaError> {
        Ok(self.sums("sum_bits", numbers, room)?.into_iter().fold(0, u64::wrapping_add))
    }

    /// What each block of a kernel makes of its part of the numbers.
    fn sums<T: DeviceRepr + ValidAsZeroBits + Clone + Default>(
        &self,
        kernel: &str,
        numbers: &CudaView<'_, f32>,
        room: &mut Buffer<T>,
    ) -> Result<Vec<T>, CudaError> {
        let blocks = numbers.len().div_ceil(THREADS).clamp(1, SUM_BLOCKS);
        let mut room = room.fit(self, blocks)?;
        let count = numbers.len() as i64;
        let mut launch = self.launch(kernel);
        launch.arg(&mut room).arg(numbers).arg(&count);
        // SAFETY: the arguments are the kernel's; there is a number of its kind for each block.
        unsafe { self.run(launch, for_each(blocks * THREADS), "take a norm or a checksum") }?;
        let mut sums = vec![T::default(); blocks];
        self.download(&room.as_view(), &mut sums)?;
        Ok(sums)
    }

    /// Turns rows of `scores` into the derivatives of their losses, and writes these. A row for each of `labels`, which
    /// the caller has made sure are columns. In bf16, rows are a multiple of four numbers, and may be longer than there
    /// are classes: what is behind these counts for nothing, and becomes zero.
    pub fn cross_entropy<T: Number>(
        &self,
        scores: &mut CudaViewMut<'_, T>,
        labels: &Labelled<'_>,
        losses: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let (rows, classes) = (labels.numbers.len(), labels.classes);
        let width = scores.len() / rows;
        assert_eq!((losses.len(), scores.len()), (rows, rows * width), "a row and a loss for each label");
        let fits = if T::ROUNDS { width >= classes && width.is_multiple_of(4) } else { width == classes };
        assert!(fits, "rows of {width} for {classes}");
        let (classes, padded) = (whole(classes), whole(width));
        let mut launch = self.launch_of::<T>("cross_entropy");
        launch.arg(scores).arg(&labels.numbers).arg(losses).arg(&classes);
        if T::ROUNDS {
            launch.arg(&padded);
        }
        let size = grid((whole(rows) as u32, 1, 1), if T::ROUNDS { THREADS_OF_A_ROW } else { THREADS });
        // SAFETY: the arguments are the kernel's, the shapes fit, and `Labels` are below the number of classes.
        unsafe { self.run(launch, size, "take losses") }
    }
}

/// Classes on the GPU, each below their number.
#[derive(Debug)]
pub struct Labels {
    numbers: Buffer<u32>,
    classes: usize,
}

impl Labels {
    /// None yet, of so many classes.
    pub fn new(classes: usize) -> Labels {
        Labels { numbers: Buffer::default(), classes }
    }

    /// Copies labels there, over the earlier ones.
    pub fn upload(&mut self, gpu: &Gpu, labels: &[u32]) -> Result<(), CudaError> {
        let classes = self.classes;
        assert!(labels.iter().all(|&label| (label as usize) < classes), "labels below {classes}");
        gpu.upload(labels, &mut self.numbers.fit(gpu, labels.len())?)
    }

    /// All of them.
    pub fn all(&self) -> Labelled<'_> {
        Labelled { numbers: self.numbers.view(), classes: self.classes }
    }
}

/// Some of the [`Labels`].
#[derive(Debug)]
pub struct Labelled<'a> {
    pub(crate) numbers: CudaView<'a, u32>,
    pub(crate) classes: usize,
}

impl Labelled<'_> {
    /// Those in a range.
    pub fn part(&self, range: Range<usize>) -> Labelled<'_> {
        Labelled { numbers: self.numbers.slice(range), classes: self.classes }
    }
}

/// As a kernel counts rows and columns.
pub(crate) fn whole(count: usize) -> i32 {
    assert!(count <= i32::MAX as usize, "{count} is more than a kernel counts");
    count as i32
}

/// A grid of blocks of so many threads.
pub(crate) fn grid(grid_dim: (u32, u32, u32), threads: usize) -> LaunchConfig {
    LaunchConfig { grid_dim, block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 }
}

/// A thread for each of `count`.
pub(crate) fn for_each(count: usize) -> LaunchConfig {
    let blocks = count.div_ceil(THREADS).max(1) as u32;
    grid((blocks, 1, 1), THREADS)
}
