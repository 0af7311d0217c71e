use super::*;

fn well() -> GpuHealth {
    GpuHealth {
        uncorrected_errors: Some(0),
        retirement_pending: None,
        remap_pending: Some(false),
        remap_failed: Some(false),
        temperature: Some(40),
        throttle_reasons: Some(1),
        ..GpuHealth::default()
    }
}

fn gpu(index: u32, health: GpuHealth) -> GpuReading {
    GpuReading { index, health: Ok(health), xids: Ok(Vec::new()) }
}

fn fit() -> Readings {
    Readings {
        folders: vec![("/logs".into(), Ok(LEAST_FREE))],
        shared: Ok(USUAL_SHARED),
        files: USUAL_FILES,
        needed_gpus: 1,
        gpus: Ok(vec![gpu(0, well())]),
    }
}

/// Something that could not be read.
fn no<T>() -> Reading<T> {
    Err("permission denied".into())
}

/// The findings that are not [`State::Fit`].
fn wrong(readings: &Readings) -> Vec<(State, String)> {
    let wrong = all(readings).into_iter().filter(|finding| finding.state != State::Fit);
    wrong.map(|finding| (finding.state, finding.to_string())).collect()
}

#[test]
fn each_reading_has_its_threshold() {
    use State::{Unfit, Unknown, Warning};
    assert_eq!(wrong(&fit()), []);
    let low = |free| Readings { folders: vec![("/logs".into(), free)], ..fit() };
    let with = |health| Readings { gpus: Ok(vec![gpu(0, health)]), ..fit() };
    let xids = |xids| Readings { gpus: Ok(vec![GpuReading { xids, ..gpu(0, well()) }]), ..fit() };
    let dead = GpuReading { health: Err("GPU is lost".into()), ..gpu(0, well()) };
    for (readings, state, seen) in [
        (low(Ok(LEAST_FREE - 1)), Unfit, "1023 MiB free in /logs, of 1024 MiB needed: make room"),
        (low(no()), Unknown, "free space in /logs: permission denied"),
        (Readings { shared: Ok(LEAST_SHARED - 1), ..fit() }, Unfit, "63 MiB free in /dev/shm, of 64 MiB needed: "),
        (Readings { shared: Ok(LEAST_SHARED), ..fit() }, Warning, "64 MiB free in /dev/shm"),
        (Readings { shared: no(), ..fit() }, Unknown, "/dev/shm: permission denied"),
        (Readings { files: LEAST_FILES - 1, ..fit() }, Unfit, "1023 open files"),
        (Readings { files: LEAST_FILES, ..fit() }, Warning, "1024 open files"),
        (Readings { needed_gpus: 2, ..fit() }, Unfit, "2 workers need a GPU each, and there are 1: check nvidia-smi"),
        (Readings { gpus: no(), ..fit() }, Unfit, "1 GPUs are needed, and the driver reports none: "),
        (Readings { gpus: no(), needed_gpus: 0, ..fit() }, Unknown, "GPUs: permission denied"),
        (Readings { gpus: Ok(vec![dead]), ..fit() }, Unfit, "GPU 0 does not answer: GPU is lost: reset it"),
        (with(GpuHealth { uncorrected_errors: Some(3), ..well() }), Unfit, "3 uncorrected memory errors"),
        (with(GpuHealth { uncorrected_errors: None, ..well() }), Unknown, "GPU 0 does not report memory errors"),
        (with(GpuHealth { retirement_pending: Some(true), ..well() }), Unfit, "pages of its memory to retire"),
        (with(GpuHealth { remap_pending: Some(true), ..well() }), Unfit, "rows of its memory to remap"),
        (with(GpuHealth { remap_failed: Some(true), ..well() }), Unfit, "could not remap a row"),
        (with(GpuHealth { temperature: Some(HOT), ..well() }), Warning, "is at 85 °C before any work"),
        (with(GpuHealth { throttle_reasons: Some(0x44), ..well() }), Warning, "(reasons 0x40)"),
        (xids(Ok(vec![31, 79])), Unfit, "GPU 0 has had Xid 79 since the host started"),
        (xids(no()), Unknown, "GPU 0 may have had Xids: permission denied"),
    ] {
        let found = wrong(&readings);
        assert_eq!(found.len(), 1, "{seen}: {found:?}");
        assert_eq!(found[0].0, state, "{found:?}");
        assert!(found[0].1.contains(seen), "{seen:?}: {found:?}");
    }
    // Other Xids tell of programs: 13 and 31 are faults of theirs.
    assert_eq!(wrong(&xids(Ok(vec![13, 31]))), []);
    assert_eq!(wrong(&Readings { files: u64::MAX, needed_gpus: 0, gpus: Ok(Vec::new()), ..fit() }), []);
}

#[test]
fn a_command_of_ones_own_says_why() {
    let said = |ended: Ended| {
        let finding = command("check.sh", &ended);
        (finding.state, finding.to_string())
    };
    assert_eq!(said(Ended::Exited(0, vec!["fine".into()])).0, State::Fit);
    for (ended, text) in [
        (
            Ended::Exited(3, vec!["no link".into(), "on ib0".into()]),
            "`check.sh` ended with exit code 3: no link / on ib0",
        ),
        (Ended::Exited(1, Vec::new()), "exit code 1 and said nothing"),
        (Ended::Killed(9), "was ended by signal 9"),
        (Ended::Late(Duration::from_secs(5)), "took longer than --preflight-timeout (5s)"),
        (Ended::NotStarted("no shell".into()), "could not be started: no shell"),
    ] {
        let (state, seen) = said(ended);
        assert!(state == State::Unfit && seen.contains(text), "{seen}");
    }
}

#[test]
fn xids_are_read_from_the_kernels_log() {
    let log = "\
6,1,5;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
6,2,6;NVRM: Xid (PCI:0000:d8:00): 48, pid=1, DBE
6,3,7;NVRM: Xid (PCI:0000:3b:00): 79, again
6,4,8;NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception
6,5,9;usb 1-1: Xid (PCI:0000:3b:00): nothing";
    assert_eq!(xids(log, "0000:3b:00.0"), [13, 79]);
    assert_eq!(xids(log, "0000:d8:00.0"), [48]);
    assert_eq!(xids(log, "0000:00:00.0"), [0; 0]);
}
