//! Products by cuBLASLt, here its double: when it is used, and what is logged when it is not. Its results are checked
//! in `kernels` and `precision`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::double::{driver, folders, prefix};
use crate::training::{SHORT, checksum, command, ended, printed, refused_by_rank_0};

fn flags() -> String {
    format!("{SHORT} --device cuda:0")
}

/// A run with libraries in these folders: its checksum, and what it logs about products.
fn run(folders: &str, how: &str) -> (String, String) {
    let output: Output = command(&flags(), how).env("ELASTIC_CUDA_LIBRARIES", folders).output().unwrap();
    let (well, printed, logged) = ended(output);
    assert!(well, "{logged}");
    let warnings: Vec<&str> = logged.lines().filter(|line| line.contains("WARN")).collect();
    assert!(warnings.len() <= 1, "{logged}");
    (checksum(&printed).to_owned(), warnings.concat())
}

#[test]
fn it_multiplies_where_it_will_do_and_else_the_own_kernel_does() {
    let (by_library, said) = run(&folders(), "");
    assert_eq!(said, "");
    let own = "the trainer's own kernel computes the products, which is slower: ";
    // Another library under its name, as an old cuBLASLt lacks functions
    let folder = tempfile::tempdir().unwrap();
    symlink(driver().join("libcuda.so.1"), folder.path().join("libcublasLt.so.13")).unwrap();
    let (by_kernel, said) = run(&format!("{}:{}", driver().display(), folder.path().display()), "");
    assert!(said.contains(own) && said.contains("libcublasLt.so.13 has no cublasLtCreate: it is too old"), "{said}");
    assert!(said.contains("pip install --upgrade nvidia-cublas"), "{said}");
    // The double sums in another order.
    assert_ne!(by_library, by_kernel);
    let (sum, said) = run(&folders(), "cublaslt=0");
    assert!(sum == by_kernel && said.contains(own), "{said}");
    assert!(
        said.contains("GPU 0 failed to start cuBLASLt: cuBLASLt's error 1, CUBLAS_STATUS_NOT_INITIALIZED"),
        "{said}"
    );
    // The library starts, and has no algorithm for any product.
    let (sum, said) = run(&folders(), "ways=0");
    assert!(sum == by_kernel && said.contains("cuBLASLt has no algorithm for a product of"), "{said}");
    // There is no cuBLASLt.
    let (sum, said) = run(&driver().display().to_string(), "");
    let names = ["libcublasLt.so.13", "libcublasLt.so.12"];
    if is_installed(&names, Some(&prefix()), None) {
        // An installed library may work, or refuse the double of the driver.
        assert!(!said.contains("cannot find") && (said.is_empty() || said.contains(own)), "{said}");
    } else {
        assert_eq!(sum, by_kernel);
        assert!(said.contains(own) && said.contains("cannot find libcublasLt.so.13; pip install"), "{said}");
    }
}

/// Names of libraries that a child process tries to load, one a line.
const TO_LOAD: &str = "LIBRARIES_OF_TEST";

/// Whether this machine has one of these libraries where the trainer looks, apart from `ELASTIC_CUDA_LIBRARIES`: in a
/// Python environment, where the loader looks (by an `LD_LIBRARY_PATH` of one's own), and in CUDA's folder. Another
/// process loads them, since the doubles may be loaded in this one.
pub(crate) fn is_installed(names: &[&str], prefix: Option<&Path>, library_path: Option<&str>) -> bool {
    let mut folders: Vec<PathBuf> = vec!["".into(), "/usr/local/cuda/lib64".into()];
    if let Some(lib) = prefix.map(|prefix| prefix.join("lib")) {
        let pythons = fs::read_dir(&lib).into_iter().flatten().flatten().map(|python| python.path());
        let wheels = ["cu13/lib", "cuda_nvrtc/lib", "cublas/lib"];
        folders.extend(pythons.flat_map(|python| wheels.map(|wheel| python.join("site-packages/nvidia").join(wheel))));
        folders.push(lib);
    }
    let files = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name).display().to_string()));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "library::load", "--nocapture"]);
    child.env(TO_LOAD, files.collect::<Vec<_>>().join("\n"));
    if let Some(path) = library_path {
        child.env("LD_LIBRARY_PATH", path);
    }
    let output = child.output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && printed.contains("\n> "), "{printed}");
    printed.contains("\n> true")
}

#[test]
#[ignore = "a part of the other tests"]
#[allow(unsafe_code)]
fn load() {
    let files = std::env::var(TO_LOAD).unwrap();
    // SAFETY: NVIDIA's libraries do nothing but set themselves up when they are loaded.
    let is_there = |file: &str| unsafe { libloading::os::unix::Library::new(file) }.is_ok();
    println!("\n> {}", files.lines().any(is_there));
}

#[test]
fn it_gives_the_same_bits_with_and_without_graphs() {
    assert_eq!(checksum(&printed(&flags(), "")), checksum(&printed(&flags(), "graphs=0")));
}

#[test]
fn workers_without_it_are_refused_by_those_with_it() {
    let logged = refused_by_rank_0("--device cuda:0", "--device cuda:0", "cublaslt=0");
    assert!(logged.contains("cuBLASLt 13.1.0 on 132 processors") && logged.contains("own products"), "{logged}");
}
