//! Compiles every kernel for real GPUs by NVRTC. The kernels do not run.

use std::fs;
use std::path::PathBuf;

use elastic_cuda::{Compiled, Compiler, SOURCES, Source, Surroundings};

use crate::cubin::usage;
use crate::double::{nvrtc, prefix};

/// The compiled code contains all kernels, and the compiler printed nothing. Those of attention in bf16 use tensor cores,
/// and no local memory, which is slow.
fn assert_whole(compiled: &[Compiled], arch: &str) {
    assert_eq!(compiled.len(), SOURCES.len());
    for Compiled { source: Source { file, kernels, .. }, code, warnings } in compiled {
        assert_eq!(warnings, "", "{file}");
        assert!(code.starts_with(b"\x7fELF"), "{file}");
        let usage = usage(code);
        for name in *kernels {
            let used = usage.get(*name).unwrap_or_else(|| panic!("{name} is not in {file} for {arch}"));
            let multiplies = name.starts_with("attention_bf16");
            assert!(!multiplies || used.local == 0, "{name} for {arch}: {used:?}");
            assert_eq!(used.tensor_cores > 0, multiplies, "{name} for {arch}: {used:?}");
        }
    }
}

#[test]
fn every_kernel_compiles_for_a_real_gpu_and_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Some(folder.path().to_owned());
    let surroundings = Surroundings { prefixes: vec![prefix()], cache, ..Surroundings::default() };
    let compiler = Compiler::find(&surroundings).unwrap();
    let compiled = compiler.kernels("sm_90").unwrap();
    assert_whole(&compiled, "sm_90");
    // The cache gives the same code, also after one of its files was damaged. That is the smallest file, which is
    // compiled again quickest.
    let size = |path: &PathBuf| fs::metadata(path).unwrap().len();
    let entries: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), SOURCES.len());
    assert_eq!(compiler.kernels("sm_90").unwrap(), compiled);
    let smallest = entries.iter().min_by_key(|path| size(path)).unwrap();
    fs::write(smallest, "damaged").unwrap();
    assert_eq!(compiler.kernels("sm_90").unwrap(), compiled);
    assert!(size(smallest) > 1000);
}

#[test]
fn a_cache_that_cannot_be_written_changes_nothing_for_another_gpu() {
    let cache = Some("/dev/null/kernels".into());
    let surroundings = Surroundings { prefixes: vec![prefix()], cache, ..Surroundings::default() };
    let compiled = Compiler::find(&surroundings).unwrap().kernels("sm_80").unwrap();
    assert_whole(&compiled, "sm_80");
}

#[test]
fn every_kernel_compiles_for_the_gpus_after_hopper() {
    let surroundings = Surroundings { prefixes: vec![prefix()], ..Surroundings::default() };
    assert_whole(&Compiler::find(&surroundings).unwrap().kernels("sm_100").unwrap(), "sm_100");
}

#[test]
fn what_nvrtc_cannot_do_is_said() {
    let surroundings = Surroundings { prefixes: vec![prefix()], ..Surroundings::default() };
    let error = Compiler::find(&surroundings).unwrap().kernels("sm_12").unwrap_err().to_string();
    assert!(error.contains("cannot compile product.cu for sm_12") && error.contains("architecture"), "{error}");
}

/// Compiles all kernels by the NVRTC of this version from its Python package. Without the package the test is skipped.
fn assert_compiles_by(version: &str) {
    let Some(folder) = nvrtc(version) else { return };
    let surroundings = Surroundings { folders: vec![folder.clone()], ..Surroundings::default() };
    let compiler = Compiler::find(&surroundings).unwrap();
    assert!(compiler.path().starts_with(&folder), "{}", compiler.path().display());
    assert!(version.starts_with(&compiler.version()), "{}", compiler.version());
    assert_whole(&compiler.kernels("sm_90").unwrap(), "sm_90");
}

#[test]
fn every_kernel_compiles_by_the_nvrtc_that_pytorch_brings() {
    assert_compiles_by("13.0.88");
}

#[test]
fn every_kernel_compiles_by_an_nvrtc_of_cuda_12() {
    assert_compiles_by("12.8.93");
}
