//! Libraries that are old or damaged, and ranks whose libraries differ.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use elastic_cuda::Surroundings;
use elastic_cuda::nccl::{Library, LibraryError};

use crate::process::{LONG, Process, all, every, join};

/// The stand-in, built beside this test.
pub(crate) fn fake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libfake_nccl.so")
}

pub(crate) fn open(file: &Path) -> Result<Arc<Library>, LibraryError> {
    Library::open(Some(file), &Surroundings::default())
}

/// A copy of the stand-in without some functions: their names are changed.
fn without(functions: &[&str], folder: &Path) -> PathBuf {
    let mut bytes = std::fs::read(fake()).unwrap();
    for function in functions {
        let name = [b"\0", function.as_bytes(), b"\0"].concat();
        let places: Vec<usize> =
            bytes.windows(name.len()).enumerate().filter(|(_, window)| *window == name).map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "{function} is there");
        places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    }
    // A file that may be loaded must not be overwritten.
    let path = folder.join(format!("{}.so", functions.join("-")));
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn old_and_damaged_libraries_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let whole = open(&fake()).unwrap();
    assert_eq!(whole.version(), 23_007);
    let broken = open(&without(&["ncclGroupEnd"], folder.path())).unwrap_err().to_string();
    assert!(broken.contains("no function ncclGroupEnd"), "{broken}");
    // SAFETY: no other thread of this test's process is at the environment.
    unsafe { std::env::set_var("FAKE_NCCL_VERSION", "21602") };
    let old = open(&fake()).unwrap_err().to_string();
    assert!(old.contains("is NCCL 2.16.2, and 2.17 or newer is needed") && old.contains("pip install"), "{old}");
}

#[test]
fn ranks_of_different_versions_are_found_and_make_no_communicator() {
    let new = |version| Process::start_with(&fake(), &[("FAKE_NCCL_VERSION", version)]);
    let (mut a, mut b, mut c) = (new("22809"), new("23007"), new("22809"));
    every(&join(&mut [&mut a, &mut c], 1, LONG), "joined");
    // No rank calls NCCL, where it might hang or crash: such a call would not return.
    every(&all(&mut [&mut a, &mut b, &mut c], "set FAKE_NCCL_BLOCK ncclCommInitRankConfig"), "set");
    let answers = join(&mut [&mut a, &mut b, &mut c], 2, LONG);
    every(&answers, "error: unlike: 2.28.9 on ranks 0, 2; 2.30.7 on rank 1");
    // The group works again, and so does a later one whose ranks have the same version.
    every(&all(&mut [&mut a, &mut c], "set FAKE_NCCL_BLOCK"), "set");
    every(&join(&mut [&mut a, &mut c], 3, LONG), "joined");
    every(&all(&mut [&mut a, &mut c], "sum"), "right");
}
