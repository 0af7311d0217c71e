//! Every mode on trees of sysfs. A fixture describes one file on each line: `PATH: CONTENT`. A path with a list of CPUs
//! in braces means one file for each CPU. One tree is recorded. The others are written by hand after machines of
//! their kind.

use super::*;
use crate::machine::devices::Gpu;
use crate::machine::nvml::NvmlError;

const DGX: &str = include_str!("../../../tests/fixtures/sysfs/two-sockets-eight-gpus.sysfs");
const EPYC: &str = include_str!("../../../tests/fixtures/sysfs/one-socket-two-nodes-eight-caches.sysfs");
const DESKTOP: &str = include_str!("../../../tests/fixtures/sysfs/one-socket-without-numa.sysfs");
const POWER: &str = include_str!("../../../tests/fixtures/sysfs/numbers-with-holes.sysfs");
const SMALL: &str = include_str!("../../../tests/fixtures/sysfs/virtual-machine.sysfs");

struct Machine {
    sys: tempfile::TempDir,
    gpus: Gpus,
}

/// The machine of a fixture, with all its PCI devices taken for GPUs.
fn machine(fixture: &str) -> Machine {
    let sys = tempfile::tempdir().unwrap();
    let mut gpus = Gpus { all: Vec::new(), unknown: None };
    for line in fixture.lines().filter(|line| !line.starts_with('#')) {
        let (path, content) = line.split_once(": ").unwrap();
        for path in expanded(path) {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{content}\n")).unwrap();
        }
        if let Some(device) = path.strip_prefix("bus/pci/devices/") {
            let pci = device.split('/').next().map(str::to_owned);
            gpus.all.push(Gpu { uuid: None, pci });
        }
    }
    Machine { sys, gpus }
}

fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let (list, after) = rest.split_once('}').unwrap();
    list.parse::<CpuSet>().unwrap().0.iter().map(|cpu| format!("{before}{cpu}{after}")).collect()
}

impl Machine {
    /// The CPUs of the first `workers` workers of a process that may use `allowed` and sees the GPUs `visible`.
    fn bind(
        &self,
        affinity: Affinity,
        workers: u32,
        allowed: &str,
        visible: &[usize],
    ) -> Result<Vec<String>, NumaError> {
        let visible: Vec<Visible> = visible.iter().map(|index| Visible::Gpu(*index)).collect();
        let bound = bind(affinity, workers, &self.gpus, &visible, &allowed.parse().unwrap(), self.sys.path())?;
        Ok(bound.iter().map(ToString::to_string).collect())
    }
}

const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

#[test]
fn a_node_or_a_socket_is_shared_by_the_workers_whose_gpus_are_on_it() {
    let dgx = machine(DGX);
    let near = ["0-55,112-167", "56-111,168-223"];
    let expected = [near[0], near[0], near[0], near[0], near[1], near[1], near[1], near[1]];
    assert_eq!(dgx.bind(Affinity::Node, 8, "0-223", &ALL).unwrap(), expected);
    assert_eq!(dgx.bind(Affinity::Socket, 8, "0-223", &ALL).unwrap(), expected);
    // Four workers, and the first of the visible GPUs is on the other socket.
    let expected = [near[1], near[0], near[1], near[0]];
    assert_eq!(dgx.bind(Affinity::Node, 4, "0-223", &[7, 0, 6, 1]).unwrap(), expected);

    let epyc = machine(EPYC);
    assert_eq!(epyc.bind(Affinity::Node, 5, "0-31", &ALL[..5]).unwrap()[3..], ["0-15", "16-31"]);
    assert_eq!(epyc.bind(Affinity::Socket, 5, "0-31", &ALL[..5]).unwrap()[3..], ["0-31", "0-31"]);
}

#[test]
fn exclusive_shares_are_whole_cores_and_never_overlap() {
    let dgx = machine(DGX);
    let bound = dgx.bind(Affinity::Exclusive, 8, "0-223", &ALL).unwrap();
    assert_eq!(bound[..2], ["0-13,112-125", "14-27,126-139"]);
    assert_eq!(bound[7], "98-111,210-223");
    // Cores that are left over go to the first GPUs: 14 cores of node 0 for four GPUs.
    let bound = dgx.bind(Affinity::Exclusive, 4, "0-13,112-125", &ALL[..4]).unwrap();
    assert_eq!(bound, ["0-3,112-115", "4-7,116-119", "8-10,120-122", "11-13,123-125"]);
    // Every visible GPU has a share, even if fewer workers run.
    assert_eq!(dgx.bind(Affinity::Exclusive, 1, "0-223", &ALL).unwrap(), ["0-13,112-125"]);

    let few = dgx.bind(Affinity::Exclusive, 4, "0-2,112-114", &ALL[..4]).unwrap_err();
    assert_eq!(few, NumaError::TooFewCores { node: 0, cores: 3, gpus: 4 });
}

#[test]
fn with_some_threads_not_allowed_a_share_is_what_is_left_of_its_cores() {
    let bound = machine(DGX).bind(Affinity::Exclusive, 2, "0-1,113,200", &ALL[..2]).unwrap();
    assert_eq!(bound, ["0", "1,113"]);
}

#[test]
fn core_complexes_are_taken_in_turn_the_largest_first() {
    let epyc = machine(EPYC);
    let bound = epyc.bind(Affinity::CoreComplex, 5, "0-31", &ALL[..5]).unwrap();
    assert_eq!(bound, ["0-3", "4-7", "8-11", "12-15", "16-19"]);
    // A cpuset leaves the first cache one core, so this cache comes last. There are two caches, so they are used in
    // turn.
    let bound = epyc.bind(Affinity::CoreComplex, 4, "3-7", &ALL[..4]).unwrap();
    assert_eq!(bound, ["4-7", "3", "4-7", "3"]);
}

#[test]
fn numbers_may_have_holes() {
    let power = machine(POWER);
    let node_0 = "0-3,8-11,16-19,24-27";
    let bound = power.bind(Affinity::Node, 3, "0-127", &[0, 1, 2]).unwrap();
    assert_eq!(bound, [node_0, node_0, "80-83,88-91,96-99,104-107"]);
    let bound = power.bind(Affinity::Exclusive, 2, "0-127", &[0, 1]).unwrap();
    assert_eq!(bound, ["0-3,8-11", "16-19,24-27"]);
    let bound = power.bind(Affinity::CoreComplex, 2, "0-127", &[0, 1]).unwrap();
    assert_eq!(bound, ["0-3,8-11", "16-19,24-27"]);
    // The firmware does not say where one GPU is. A guess would crowd another node.
    let silent = power.bind(Affinity::Node, 4, "0-127", &[0, 1, 2, 3]).unwrap_err();
    assert_eq!(silent, NumaError::Homeless { pci: "0035:04:00.0".into(), nodes: 2 });
}

#[test]
fn where_there_is_one_node_every_gpu_is_on_it() {
    let desktop = machine(DESKTOP);
    assert_eq!(desktop.bind(Affinity::Node, 2, "0-11", &[0, 1]).unwrap(), ["0-11", "0-11"]);
    assert_eq!(desktop.bind(Affinity::Exclusive, 2, "0-11", &[0, 1]).unwrap(), ["0-5", "6-11"]);
    let small = machine(SMALL);
    assert_eq!(small.bind(Affinity::Exclusive, 2, "0-1", &[0, 1]).unwrap(), ["0", "1"]);
    assert_eq!(small.bind(Affinity::Socket, 2, "0-1", &[0, 1]).unwrap(), ["0-1", "0-1"]);
}

#[test]
fn what_cannot_be_bound_says_why() {
    let dgx = machine(DGX);
    let refused = |result: Result<Vec<String>, NumaError>| result.unwrap_err().to_string();
    let text = refused(dgx.bind(Affinity::Node, 3, "0-223", &[0, 1]));
    assert!(text.contains("worker 2 has no GPU: 2 are visible"), "{text}");
    let text = refused(dgx.bind(Affinity::Node, 5, "0-55", &ALL));
    assert!(text.contains("none of the CPUs of NUMA node 1"), "{text}");
    fs::remove_dir_all(dgx.sys.path().join("devices/system/cpu/cpu0/cache")).unwrap();
    let text = refused(dgx.bind(Affinity::CoreComplex, 1, "0-223", &ALL));
    assert!(text.contains("cannot read ") && text.contains("cpu0/cache: no cache is described there"), "{text}");

    let counted = Gpus { all: vec![Gpu::default()], unknown: Some(NvmlError::TooOld("nvmlInit_v2")) };
    let allowed = "0".parse().unwrap();
    for (visible, expected) in [
        (Visible::Gpu(0), "the driver is too old"),
        (Visible::Named("GPU-x".into()), "which GPU GPU-x is"),
        (Visible::Mig("MIG-x".into()), "MIG-x is a part of a GPU"),
    ] {
        let text = bind(Affinity::Node, 1, &counted, &[visible], &allowed, dgx.sys.path()).unwrap_err().to_string();
        assert!(text.contains("the place of worker 0's GPU is unknown") && text.contains(expected), "{text}");
    }
}
