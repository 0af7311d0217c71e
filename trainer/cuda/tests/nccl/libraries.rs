//! Libraries that are new, old or incomplete, and ranks whose libraries differ.

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

/// A copy of the stand-in without some functions, like an older NCCL: their names are changed.
pub(crate) fn without(functions: &[&str], folder: &Path) -> PathBuf {
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
fn old_and_poor_libraries_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let whole = open(&fake()).unwrap();
    assert_eq!(whole.version(), 23_007);
    let can = whole.capabilities();
    assert!(can.shrink && can.revoke && can.grow);
    let poor = open(&without(&["ncclCommRevoke", "ncclCommGrow"], folder.path())).unwrap();
    let can = poor.capabilities();
    assert!(can.shrink && !can.revoke && !can.grow);
    let broken = open(&without(&["ncclAllReduce"], folder.path())).unwrap_err().to_string();
    assert!(broken.contains("no function ncclAllReduce"), "{broken}");
    let says = |version: &str| {
        // SAFETY: no other thread of this test's process is at the environment.
        unsafe { std::env::set_var("FAKE_NCCL_VERSION", version) };
        open(&fake())
    };
    // Versions that crash when they shrink
    for (version, well) in [("22803", false), ("22808", false), ("22809", true)] {
        let can = says(version).unwrap().capabilities();
        assert!(can.shrink == well && can.revoke == well && can.grow, "{version}");
    }
    let old = says("21602").unwrap_err().to_string();
    assert!(old.contains("is NCCL 2.16.2, and 2.17 or newer is needed") && old.contains("pip install"), "{old}");
}

#[test]
fn ranks_of_different_versions_are_told_apart_and_make_no_communicator() {
    let new = |version| Process::start_with(&fake(), &[("FAKE_NCCL_VERSION", version)]);
    let (mut a, mut b, mut c) = (new("22809"), new("23007"), new("22809"));
    every(&join(&mut [&mut a, &mut c], 1, LONG), "Renew");
    // No rank calls NCCL, where it might hang or crash: such a call would not return.
    every(&all(&mut [&mut a, &mut b, &mut c], "set FAKE_NCCL_BLOCK ncclCommInitRankConfig,ncclCommGrow"), "set");
    let answers = join(&mut [&mut a, &mut b, &mut c], 2, LONG);
    every(&answers, "error: unlike: 2.28.9 on ranks 0, 2; 2.30.7 on rank 1");
    // The group works again, and so does a later one whose ranks have the same version.
    every(&all(&mut [&mut a, &mut c], "set FAKE_NCCL_BLOCK"), "set");
    every(&join(&mut [&mut a, &mut c], 3, LONG), "Renew");
    every(&all(&mut [&mut a, &mut c], "sum"), "right");
}

#[test]
fn one_rank_that_renews_has_all_make_their_communicator_anew() {
    let never = ("FAKE_NCCL_BLOCK", "ncclCommShrink,ncclCommRevoke,ncclCommGrow");
    let renews = || Process::start_with(&fake(), &[never, ("NCCL_RENEWS", "1")]);
    let other = || Process::start_with(&fake(), &[]);
    let (mut a, mut b, mut c) = (renews(), renews(), other());
    every(&join(&mut [&mut a, &mut b], 1, LONG), "Renew");
    // When a rank comes
    every(&join(&mut [&mut a, &mut b, &mut c], 2, LONG), "Renew");
    every(&all(&mut [&mut a, &mut b, &mut c], "sum"), "right");
    // And when a rank dies in a sum
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclAllReduce"), "set");
    [&mut a, &mut b, &mut c].into_iter().for_each(|process| process.begin("sum"));
    drop(c);
    for survivor in [&mut a, &mut b] {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    every(&join(&mut [&mut a, &mut b], 3, LONG), "Renew");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}
