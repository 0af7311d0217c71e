//! Every kernel, compiled for real GPUs by NVRTC. Not run.

use std::fs;

use elastic_trainer::cuda::{Compiled, Compiler, SOURCES, Source, Surroundings};

use crate::double::prefix;

#[test]
fn every_kernel_compiles_for_real_gpus_and_is_kept() {
    for arch in ["sm_80", "sm_90"] {
        let folder = tempfile::tempdir().unwrap();
        let cache = Some(folder.path().to_owned());
        let surroundings = Surroundings { prefixes: vec![prefix()], cache, ..Surroundings::default() };
        let compiler = Compiler::find(&surroundings).unwrap();
        let compiled = compiler.kernels(arch).unwrap();
        assert_eq!(compiled.len(), SOURCES.len());
        for Compiled { source: Source { file, kernels, .. }, code, warnings } in &compiled {
            assert_eq!(warnings, "", "{file}");
            assert!(code.starts_with(b"\x7fELF"), "{file}");
            for name in *kernels {
                let section = format!(".text.{name}\0");
                let found = code.windows(section.len()).any(|window| window == section.as_bytes());
                assert!(found, "{name} is not in {file} for {arch}");
            }
        }
        // From the cache it is the same; and where that is damaged, too.
        let entries: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(compiler.kernels(arch).unwrap(), compiled);
        fs::write(&entries[0], "damaged").unwrap();
        assert_eq!(compiler.kernels(arch).unwrap(), compiled);
        assert!(entries.len() == SOURCES.len() && fs::metadata(&entries[0]).unwrap().len() > 1000);
    }
}

#[test]
fn what_nvrtc_cannot_do_is_said() {
    let surroundings = Surroundings { prefixes: vec![prefix()], ..Surroundings::default() };
    let error = Compiler::find(&surroundings).unwrap().kernels("sm_12").unwrap_err().to_string();
    assert!(error.contains("cannot compile product.cu for sm_12") && error.contains("architecture"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_written_changes_nothing() {
    let cache = Some("/dev/null/kernels".into());
    let surroundings = Surroundings { prefixes: vec![prefix()], cache, ..Surroundings::default() };
    assert!(Compiler::find(&surroundings).unwrap().kernels("sm_90").is_ok());
}
