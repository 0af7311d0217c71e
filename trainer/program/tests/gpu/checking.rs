//! `elastic-trainer check-gpus`, on the double of the driver.

use crate::training::{command, ended, refused, run};

#[test]
fn each_gpu_is_listed_and_one_that_fails_fails_the_check() {
    let (well, printed, logged) = run("check-gpus", "devices=2");
    assert!(well, "{logged}");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 2, "{printed}");
    for (number, line) in lines.iter().enumerate() {
        let fit = line.starts_with(&format!("GPU {number}: ")) && line.contains(" computed correct products in ");
        assert!(fit, "{printed}");
    }
    let (well, printed, logged) = run("check-gpus", "devices=2,fail=1");
    let told = "of 2 GPUs failed the check (the lines above say why); search for memory errors and Xids";
    assert!(!well && logged.contains(told), "{logged}");
    assert!(printed.starts_with("GPU 0: failed: GPU 0 failed to "), "{printed}");
    let why = refused("check-gpus", "devices=0");
    assert!(why.contains("the NVIDIA driver shows no GPU"), "{why}");
}

#[test]
fn a_missing_library_is_not_taken_for_a_broken_gpu() {
    if crate::library::is_installed(&["libnvrtc.so.13", "libnvrtc.so.12"], None, Some("/nowhere")) {
        eprintln!("skipped: NVRTC is installed in a folder of the system");
        return;
    }
    let mut without = command("check-gpus", "devices=2");
    without.env("VIRTUAL_ENV", "/nowhere").env("LD_LIBRARY_PATH", "/nowhere");
    let (well, printed, logged) = ended(without.output().unwrap());
    assert!(!well && logged.contains("cannot find libnvrtc.so.13; pip install nvidia-cuda-nvrtc"), "{logged}");
    assert!(!logged.contains("replace") && !printed.contains("failed"), "{printed}{logged}");
}
