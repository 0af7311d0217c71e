//! Pinned memory of the host, which a GPU copies to and from by itself.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{DriverError, PinnedHostSlice};
use tracing::warn;

use super::Gpu;

/// Numbers in pinned memory. The operating system does not move its pages, so a GPU can copy them without the driver's
/// help while the process's threads do other things. If there is no pinned memory, it is ordinary memory, and a copy
/// blocks the thread that asks for it.
#[derive(Debug)]
pub struct HostMemory {
    start: NonNull<f32>,
    len: usize,
    /// Owns the numbers, which are reached through `start` alone.
    _owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Pinned { _memory: PinnedHostSlice<f32> },
    Pageable { _memory: Vec<f32> },
}

// SAFETY: it owns its numbers, and lends them as a slice does.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl Gpu {
    /// Memory of zeros for so many numbers. To allocate it takes long, so it should be kept.
    pub fn host_memory(&self, len: usize) -> HostMemory {
        match self.pinned(len) {
            Ok(memory) => memory,
            Err(error) => {
                if !self.warned_of_pageable.swap(true, Relaxed) {
                    warn!(
                        "{}; copies between GPU and host take longer, and training waits for each snapshot's copy",
                        self.failed("allocate pinned host memory")(error)
                    );
                }
                let mut memory = vec![0.0; len];
                let start = NonNull::new(memory.as_mut_ptr()).unwrap_or(NonNull::dangling());
                HostMemory { start, len, _owner: Owner::Pageable { _memory: memory } }
            }
        }
    }

    fn pinned(&self, len: usize) -> Result<HostMemory, DriverError> {
        // SAFETY: it is zeroed below, before anybody reads it. It is not write-combined, since the host reads it.
        let mut memory = unsafe { self.stream().context().alloc_pinned_with_flags::<f32>(len.max(1), 0) }?;
        let start = NonNull::new(memory.as_mut_ptr()?).ok_or(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        // SAFETY: it has room for as many, and zero bytes are the number 0.
        unsafe { start.write_bytes(0, len) };
        Ok(HostMemory { start, len, _owner: Owner::Pinned { _memory: memory } })
    }
}

impl Deref for HostMemory {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the owner has as many numbers there for as long as this lives, and they are reached through this
        // alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for HostMemory {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
