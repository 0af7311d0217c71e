//! Builds the doubles of the CUDA driver and of cuBLASLt with g++, the driver's from the kernels' own sources; and
//! finds the real NVRTC.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use elastic_cuda::{Compiler, Surroundings};

/// If this variable is 1, the tests of kernels run on a real GPU. If it is `small`, they leave out GPT-2's shapes, for
/// tools that slow the tests down.
const REAL: &str = "ELASTIC_TEST_GPU";
const SMALL: &str = "small";

/// The repository. Tests of other crates, `trainer` and `tests`, include this file too, so it goes by the folder's name.
fn repository() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().find(|folder| folder.join("trainer/cuda").exists()).unwrap()
}

fn root() -> PathBuf {
    repository().join("trainer/cuda")
}

/// The virtual environment that has NVRTC.
pub(crate) fn prefix() -> PathBuf {
    let prefix = repository().join(".venv");
    let found = fs::read_dir(prefix.join("lib"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|python| python.path().join("site-packages/nvidia/cu13/lib/libnvrtc.so.13").exists());
    assert!(found, "there is no NVRTC in {}: run scripts/setup.sh test", prefix.display());
    prefix
}

/// The folder of an earlier NVRTC that `scripts/nvrtc.sh` has put into `target/`. If it is missing, a line says so; if
/// `ELASTIC_REQUIRE_NVRTC`, a list of versions, has this version, the test fails.
pub(crate) fn nvrtc(version: &str) -> Option<PathBuf> {
    let packages = repository().join("target/nvrtc").join(version).join("nvidia");
    let folders = ["cu13/lib", "cuda_nvrtc/lib"].map(|folder| packages.join(folder));
    let found = folders.into_iter().find(|folder| folder.exists());
    if found.is_none() {
        let missing = format!("there is no NVRTC {version} in {}: run scripts/nvrtc.sh {version}", packages.display());
        let required = std::env::var("ELASTIC_REQUIRE_NVRTC").unwrap_or_default();
        assert!(!required.split_whitespace().any(|required| required == version), "{missing}");
        eprintln!("skipped: {missing}");
    }
    found
}

/// A folder with the driver's double. When the double is built, all kernels are compiled, too.
pub(crate) fn driver() -> PathBuf {
    // `cudarc` asks for this name first.
    built("cuda-double", "driver.cpp", "libcuda.so.1", "libcuda.so")
}

/// A folder with cuBLASLt's double.
pub(crate) fn cublaslt() -> PathBuf {
    built("cublaslt-double", "cublaslt.cpp", "libcublasLt.so.13", "libcublasLt.so.13")
}

/// Both folders, as a value for `ELASTIC_CUDA_LIBRARIES`.
pub(crate) fn folders() -> String {
    format!("{}:{}", driver().display(), cublaslt().display())
}

/// A folder with a double, which is built if its sources have changed.
fn built(folder: &str, source: &str, name: &str, soname: &str) -> PathBuf {
    let sources: Vec<PathBuf> = [root().join("tests/cuda/double"), root().join("kernels")]
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    let newest = sources.iter().map(|path| fs::metadata(path).unwrap().modified().unwrap()).max().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    let library = folder.join(name);
    fs::create_dir_all(&folder).unwrap();
    // Tests run at the same time, and each may be the first.
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    if fs::metadata(&library).and_then(|built| built.modified()).is_ok_and(|built| built > newest) {
        return folder;
    }
    // Compiling takes seconds, so it is done once for all tests.
    let kept = Surroundings { prefixes: vec![prefix()], cache: Some(cache()), ..Surroundings::default() };
    Compiler::find(&kept).unwrap().kernels("sm_90").unwrap();
    let fresh = folder.join("fresh");
    let mut command = Command::new("g++");
    // Fibers jump between different stacks. The hardened `longjmp` refuses that.
    command.args(["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE"]);
    // `#pragma unroll` is for a GPU's compiler.
    command.arg("-Wno-unknown-pragmas");
    command.arg(format!("-Wl,-soname,{soname}")).arg("-o").arg(&fresh);
    command.arg(root().join("tests/cuda/double").join(source)).arg("-ldl");
    let output =
        command.output().unwrap_or_else(|error| panic!("g++ cannot be run ({error}): run scripts/setup.sh test"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&fresh, &library).unwrap();
    folder
}

/// Whether tests of kernels run on a real GPU.
pub(crate) fn is_real() -> bool {
    std::env::var(REAL).is_ok_and(|value| value == "1" || value == SMALL)
}

/// Whether the tests run there at GPT-2's sizes, too.
pub(crate) fn is_whole() -> bool {
    is_real() && std::env::var(REAL).is_ok_and(|value| value != SMALL)
}

/// Where a test of kernels finds its libraries: on the double, or on a real GPU if that is asked for.
pub(crate) fn surroundings() -> Surroundings {
    if is_real() {
        return Surroundings::read(|name| std::env::var(name).ok());
    }
    on_the_double()
}

/// The driver's double, cuBLASLt's, and where they find the real NVRTC.
pub(crate) fn on_the_double() -> Surroundings {
    Surroundings { folders: vec![driver(), cublaslt()], prefixes: vec![prefix()], cache: Some(cache()) }
}

/// Shapes of a test; on a real GPU also those of GPT-2, which would take minutes on the double.
pub(crate) fn and_on_a_gpu<T>(shapes: impl IntoIterator<Item = T>, of_gpt2: impl IntoIterator<Item = T>) -> Vec<T> {
    let of_gpt2 = of_gpt2.into_iter().filter(|_| is_whole());
    shapes.into_iter().chain(of_gpt2).collect()
}

/// Where the tests keep compiled kernels.
pub(crate) fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-cache")
}
