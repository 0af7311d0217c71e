//! Products when cuBLASLt cannot be used. These tests need the doubles, and so the source tree: they are no part of
//! `make gpu` and of the GPU kit.

use elastic_cuda::Gpu;

#[test]
#[should_panic(expected = "the trainer's own kernel computes the products, which is slower")]
fn products_without_the_library_are_warned_of() {
    crate::warnings::are_failures();
    // Another library under its name
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(crate::double::driver().join("libcuda.so.1"), folder.path().join("libcublasLt.so.13"))
        .unwrap();
    let mut surroundings = crate::double::on_the_double();
    surroundings.folders[1] = folder.path().to_owned();
    Gpu::open(&surroundings, 0).unwrap();
}
