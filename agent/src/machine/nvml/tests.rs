//! Tests against a stand-in for the library, which they compile: see `tests/fixtures/fake_nvml.c`. These tests cannot
//! tell where a real driver behaves differently.

use std::process::Command;

use super::*;

/// Compiles the stand-in with these GPUs, written in C's own notation, and with these further compiler flags.
pub(crate) fn fake_library(dir: &Path, gpus: &str, flags: &[&str]) -> std::path::PathBuf {
    let library = dir.join(LIBRARY);
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/fake_nvml.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(format!("-DGPUS={gpus}"))
        .args(flags)
        .arg(source)
        .status()
        .expect("run the C compiler");
    assert!(built.success(), "the C compiler could not build the stand-in");
    library
}

const TWO: &str = r#"{"GPU-aaaa-1",0,0x3b,0,{41,42}},{"GPU-bbbb-2",1,0xd8,2,{0}}"#;

#[test]
fn gpus_are_named_as_sysfs_names_them() {
    let dir = tempfile::tempdir().unwrap();
    let nvml = Nvml::load_from(&fake_library(dir.path(), TWO, &[])).unwrap();
    assert_eq!(nvml.device_count(), Ok(2));
    let expected = [
        Device { index: 0, uuid: "GPU-aaaa-1".into(), pci: "0000:3b:00.0".into() },
        Device { index: 1, uuid: "GPU-bbbb-2".into(), pci: "0001:d8:02.0".into() },
    ];
    assert_eq!(nvml.devices().unwrap(), expected);
    let error = nvml.device(2).unwrap_err().to_string();
    assert!(error.contains("nvmlDeviceGetHandleByIndex_v2") && error.contains("code 2"), "{error}");
}

#[test]
fn processes_are_listed_however_many_and_by_older_drivers_too() {
    let many: Vec<String> = (1..=60).map(|pid| pid.to_string()).collect();
    let gpus = format!(r#"{{"GPU-a",0,1,0,{{41,42}}}},{{"GPU-b",0,2,0,{{{}}}}}"#, many.join(","));
    for flags in [&[][..], &["-DDRIVER_450"]] {
        let dir = tempfile::tempdir().unwrap();
        let nvml = Nvml::load_from(&fake_library(dir.path(), &gpus, flags)).unwrap();
        let two = nvml.compute_processes(0).unwrap();
        let expected = [ComputeProcess { pid: 41, memory: Some(1_048_576) }, ComputeProcess { pid: 42, memory: None }];
        assert_eq!(two, expected);
        let pids: Vec<u32> = nvml.compute_processes(1).unwrap().iter().map(|process| process.pid).collect();
        assert_eq!(pids, (1..=60).collect::<Vec<_>>());
    }
}

#[test]
fn a_gpus_health_is_reported_as_far_as_it_is_known() {
    let gpus = r#"{"GPU-a",0,1,0},{"GPU-b",0,2,0,{0},3,1},{"GPU-c",0,3,0,{0},0,0,1}"#;
    let dir = tempfile::tempdir().unwrap();
    let nvml = Nvml::load_from(&fake_library(dir.path(), gpus, &[])).unwrap();
    let well = GpuHealth {
        uncorrected_errors: Some(0),
        retirement_pending: None,
        remap_pending: Some(false),
        remap_failed: Some(false),
        temperature: Some(40),
        throttle_reasons: None,
        utilization: Some(75),
        memory: Some(GpuMemory { total: 80 << 30, free: 60 << 30, used: 20 << 30 }),
        power: Some(350_500),
    };
    assert_eq!(nvml.health(0), Ok(well));
    assert_eq!(nvml.health(1), Ok(GpuHealth { uncorrected_errors: Some(3), remap_pending: Some(true), ..well }));
    assert!(nvml.health(2).unwrap_err().to_string().contains("code 15"));
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let absent = Nvml::load_from(&dir.path().join("none.so")).unwrap_err().to_string();
    assert!(absent.contains("none.so") && absent.contains("is the driver installed"), "{absent}");

    let asleep = Nvml::load_from(&fake_library(dir.path(), TWO, &["-DINIT=9"])).unwrap_err();
    let expected = NvmlError::Call { function: "nvmlInit_v2", code: 9, message: "Driver Not Loaded".into() };
    assert_eq!(asleep, expected);

    let dir = tempfile::tempdir().unwrap();
    let old = Nvml::load_from(&fake_library(dir.path(), TWO, &["-DANCIENT"])).unwrap_err().to_string();
    assert!(old.contains("ComputeRunningProcesses_v3") && old.contains("450 or newer"), "{old}");
}
