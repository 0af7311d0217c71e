//! Pages of memory for copies of the state: this process's own, or of a file that outlives it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::disk::ALIGNMENT;

/// Mapped memory.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory like any other; who may touch which part of it is `Pages`'s to know.
#[allow(unsafe_code)]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of this process alone.
    pub(super) fn own(len: usize) -> io::Result<Mapping> {
        Mapping::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// A file's, which has `len` bytes and keeps them.
    pub(super) fn of(file: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Mapping::map(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(len: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<Mapping> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses where, so nothing that is there is touched.
        #[allow(unsafe_code)]
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file, 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Mapping { start, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A part of it. No other part may overlap.
    pub(super) fn part(self: &Arc<Mapping>, start: usize, len: usize) -> Pages {
        assert!(start.is_multiple_of(ALIGNMENT) && start + len <= self.len, "a part that is not there");
        Pages { mapping: Arc::clone(self), start, len }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and every part of it is gone.
        #[allow(unsafe_code)]
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.len);
        }
    }
}

/// Bytes that start at a multiple of 4 KiB.
#[derive(Debug)]
pub(super) struct Pages {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Of this process alone.
    pub(super) fn own(len: usize) -> io::Result<Pages> {
        Ok(Arc::new(Mapping::own(len)?).part(0, len))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the part lies within the mapping, and no other code in this process has it. Of others only the agent
        // knows the file, and does not write to it.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts(self.mapping.start.as_ptr().add(self.start), self.len)
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.start.as_ptr().add(self.start), self.len)
        }
    }

    /// Makes the kernel provide all of its pages now, with their contents: the first touch of a fresh page costs many
    /// times what copying it does. The kernel is asked for large pages, since copying to many small ones takes longer,
    /// above all in a virtual machine.
    pub(super) fn populate(&mut self) {
        let bytes = self.bytes_mut();
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the range is this part's, and how it is backed changes nothing in it. The kernel may refuse large
        // pages, which is as good as before.
        #[allow(unsafe_code)]
        let populated = unsafe {
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
            libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE)
        };
        if populated != 0 {
            // Before Linux 5.14.
            for place in (0..len).step_by(ALIGNMENT) {
                // SAFETY: within the part. Volatile, or the compiler would leave the write out.
                #[allow(unsafe_code)]
                unsafe {
                    start.add(place).write_volatile(start.add(place).read_volatile());
                }
            }
        }
    }
}

/// Lets the kernel give fresh memory in large pages, where it has them: the first touch of each small one costs more
/// than reading what goes there.
pub(super) fn in_large_pages(bytes: &mut [u8]) {
    let skip = bytes.as_ptr().align_offset(ALIGNMENT);
    let Some(rest) = bytes.get_mut(skip..) else { return };
    let len = rest.len() / ALIGNMENT * ALIGNMENT;
    // SAFETY: whole pages within the slice, and how they are backed changes nothing in them. The kernel may refuse,
    // which is as good as before.
    #[allow(unsafe_code)]
    unsafe {
        libc::madvise(rest.as_mut_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
}
