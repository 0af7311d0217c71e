//! `elastic-trainer check-gpus`, on the double of the driver.

use crate::training::{refused, run};

#[test]
fn each_gpu_is_told_of_and_one_that_fails_fails_the_check() {
    let (well, printed, logged) = run("check-gpus", "devices=2");
    assert!(well, "{logged}");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 2, "{printed}");
    for (number, line) in lines.iter().enumerate() {
        let fit = line.starts_with(&format!("GPU {number}: ")) && line.contains(" multiplies right, within ");
        assert!(fit, "{printed}");
    }
    let (well, printed, logged) = run("check-gpus", "devices=2,fail=1");
    assert!(!well && logged.contains("of 2 GPUs are not fit: look for memory errors and Xids"), "{logged}");
    assert!(printed.starts_with("GPU 0: not fit: GPU 0 failed to "), "{printed}");
    let why = refused("check-gpus", "devices=0");
    assert!(why.contains("the NVIDIA driver shows no GPU"), "{why}");
}
