//! The accelerators of this machine, and which of them a process sees. [`crate::workers::slots`] derives the number of
//! workers from them, and [`crate::machine::nvml`] speaks to NVIDIA's library.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::machine::field;
use crate::machine::nvml::{Device, Nvml, NvmlError};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Gpu {
    pub uuid: Option<String>,
    /// Its PCI address as sysfs writes it: `0000:3b:00.0`.
    pub pci: Option<String>,
}

impl From<Device> for Gpu {
    fn from(device: Device) -> Gpu {
        Gpu { uuid: Some(device.uuid), pci: Some(device.pci) }
    }
}

/// The NVIDIA GPUs of this machine, in the order of their PCI addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpus {
    pub all: Vec<Gpu>,
    /// Why the driver's library gave no answer. The GPUs were then found by the driver's files, and their ids may be
    /// unknown.
    pub unknown: Option<NvmlError>,
}

impl Gpus {
    /// Asks the driver's library. If it does not answer, this looks for device files. May take a second.
    pub(crate) fn detect() -> Gpus {
        match Nvml::load().and_then(|nvml| nvml.devices()) {
            Ok(devices) => Gpus { all: devices.into_iter().map(Gpu::from).collect(), unknown: None },
            Err(error) => Gpus { all: by_files(Path::new("/")), unknown: Some(error) },
        }
    }
}

/// The GPUs that have device files below the root directory `root`. The driver's files below /proc give their PCI
/// addresses and ids (driver's README, "proc interface"), in names and lines such as `0000:3b:00.0`, `GPU UUID: GPU-…`,
/// `Device Minor: 0`. Where those files are hidden, only the number of device files is known.
fn by_files(root: &Path) -> Vec<Gpu> {
    let described = fs::read_dir(root.join("proc/driver/nvidia/gpus")).into_iter().flatten().flatten();
    let mut gpus: Vec<Gpu> = described
        .filter_map(|entry| {
            let pci = entry.file_name().into_string().ok()?;
            let about = fs::read_to_string(entry.path().join("information")).ok()?;
            let minor = field(&about, "Device Minor")?;
            let uuid = field(&about, "GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?'));
            let shown = root.join(format!("dev/nvidia{minor}")).exists();
            shown.then(|| Gpu { uuid: uuid.map(str::to_owned), pci: Some(pci) })
        })
        .collect();
    gpus.sort_by(|one, other| one.pci.cmp(&other.pci));
    let files = device_files(&root.join("dev"));
    if gpus.len() == files { gpus } else { vec![Gpu::default(); files] }
}

fn device_files(dev: &Path) -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let names = fs::read_dir(dev).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.to_str().is_some_and(is_gpu)).count()
}

/// A device that CUDA shows to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Visible {
    /// A GPU, by its place in [`Gpus::all`].
    Gpu(usize),
    /// A GPU named by its id. It is not known which GPU has this id.
    Named(String),
    /// A part of a GPU, by its id.
    Mig(String),
}

/// The devices that CUDA shows to a process with this `CUDA_VISIBLE_DEVICES`, in CUDA's order.
///
/// The list is read as CUDA reads it (programming guide, environment variables):
///
/// - An entry is an index or an id. The beginning of an id is enough if it is unique.
/// - The first entry that names no device ends the list.
/// - If a device is repeated, the process sees none.
/// - Of several MIG instances the process sees one.
pub(crate) fn visible(list: Option<&str>, gpus: &Gpus) -> Vec<Visible> {
    let Some(list) = list else { return (0..gpus.all.len()).map(Visible::Gpu).collect() };
    let entries: Vec<&str> = list.split(',').map(str::trim).collect();
    if let Some(mig) = entries.first().filter(|entry| entry.starts_with("MIG-")) {
        return if gpus.all.is_empty() { Vec::new() } else { vec![Visible::Mig((*mig).to_owned())] };
    }
    let devices: Vec<Visible> = entries.iter().map_while(|entry| named(entry, gpus)).collect();
    let distinct: BTreeSet<String> = devices.iter().map(|device| format!("{device:?}")).collect();
    if distinct.len() == devices.len() { devices } else { Vec::new() }
}

/// The GPUs that workers with this `CUDA_VISIBLE_DEVICES` see, by NVML's index: none where the list names MIG instances.
pub(crate) fn shown(nvml: &Nvml, list: Option<&str>) -> Result<Vec<u32>, NvmlError> {
    let count = nvml.device_count()?;
    // One of them does not answer, and it is not known which of the list that is.
    let Ok(devices) = nvml.devices() else { return Ok((0..count).collect()) };
    let gpus = Gpus { all: devices.into_iter().map(Gpu::from).collect(), unknown: None };
    let index = |device| if let Visible::Gpu(index) = device { u32::try_from(index).ok() } else { None };
    Ok(visible(list, &gpus).into_iter().filter_map(index).collect())
}

fn named(entry: &str, gpus: &Gpus) -> Option<Visible> {
    if let Ok(index) = entry.parse::<usize>() {
        return (index < gpus.all.len()).then_some(Visible::Gpu(index));
    }
    if !entry.starts_with("GPU-") || gpus.all.is_empty() {
        return None;
    }
    if gpus.all.iter().any(|gpu| gpu.uuid.is_none()) {
        return Some(Visible::Named(entry.to_owned()));
    }
    let begins = |gpu: &Gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(entry));
    let mut fitting = (0..gpus.all.len()).filter(|&index| begins(&gpus.all[index]));
    match (fitting.next(), fitting.next()) {
        (Some(index), None) => Some(Visible::Gpu(index)),
        _ => None,
    }
}

/// How many Intel GPUs a process sees. With `ZE_AFFINITY_MASK` these are the GPUs that the mask names. Otherwise there
/// is one for each of Intel's render nodes below `root`.
///
/// A mask names devices, or parts of devices such as `0.1` (Level Zero specification). With
/// `ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE` the parts of one device count as one. The render nodes do not tell how many
/// parts a device has. So without a mask, a device of several tiles counts once.
pub(crate) fn xpus(root: &Path, mask: Option<&str>, hierarchy: Option<&str>) -> u32 {
    let Some(mask) = mask.filter(|mask| !mask.is_empty()) else { return render_nodes(root) };
    let composite = hierarchy.is_some_and(|hierarchy| hierarchy.eq_ignore_ascii_case("COMPOSITE"));
    let entry = |entry: &str| {
        let whole = entry.trim().split('.').next().unwrap_or_default();
        whole.parse::<u32>().ok()?;
        Some(if composite { whole.to_owned() } else { entry.trim().to_owned() })
    };
    mask.split(',').filter_map(entry).collect::<BTreeSet<String>>().len() as u32
}

/// Intel's PCI vendor id.
const INTEL: &str = "0x8086";

fn render_nodes(root: &Path) -> u32 {
    let drm = root.join("sys/class/drm");
    let is_intels = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let render = name.to_str().is_some_and(|name| name.starts_with("renderD"));
        let vendor = || fs::read_to_string(entry.path().join("device/vendor")).is_ok_and(|v| v.trim() == INTEL);
        // A container sees all of sysfs, but has only its own devices in /dev.
        render && vendor() && root.join("dev/dri").join(name).exists()
    };
    fs::read_dir(drm).into_iter().flatten().flatten().filter(is_intels).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(uuids: &[&str]) -> Gpus {
        let gpu = |uuid: &&str| Gpu { uuid: Some((*uuid).to_owned()), pci: None };
        Gpus { all: uuids.iter().map(gpu).collect(), unknown: None }
    }

    fn counted(count: usize) -> Gpus {
        Gpus { all: vec![Gpu::default(); count], unknown: Some(NvmlError::Absent("none".into())) }
    }

    #[test]
    fn the_list_is_read_as_cuda_reads_it() {
        let four = known(&["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]);
        let table: [(Option<&str>, &[usize]); 12] = [
            (None, &[0, 1, 2, 3]),
            (Some(""), &[]),
            (Some("-1"), &[]),
            (Some("2"), &[2]),
            (Some("3, 0"), &[3, 0]),
            (Some("1,-1,2"), &[1]),
            (Some("1,7,2"), &[1]),
            (Some("1,1"), &[]),
            (Some("GPU-bb33,GPU-aa1"), &[2, 0]),
            (Some("GPU-aa"), &[]),
            (Some("GPU-cc,none"), &[3]),
            (Some("NoDevFiles"), &[]),
        ];
        for (list, expected) in table {
            let expected: Vec<Visible> = expected.iter().map(|&index| Visible::Gpu(index)).collect();
            assert_eq!(visible(list, &four), expected, "{list:?}");
        }
        // A GPU that is named in two ways counts as repeated.
        assert_eq!(visible(Some("0,GPU-aa11"), &four), []);
    }

    #[test]
    fn ids_count_also_where_their_gpus_are_unknown() {
        assert_eq!(visible(Some("GPU-xx,GPU-yy"), &counted(4)).len(), 2);
        assert_eq!(visible(Some("GPU-xx"), &counted(0)), []);
    }

    #[test]
    fn of_mig_instances_a_process_sees_one() {
        let list = Some("MIG-7b1c,MIG-8d2e");
        assert_eq!(visible(list, &known(&["GPU-aa"])), [Visible::Mig("MIG-7b1c".into())]);
        assert_eq!(visible(list, &counted(0)), []);
    }

    #[test]
    fn device_files_of_gpus_are_distinguished_from_the_drivers_others() {
        let dev = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "null"] {
            fs::write(dev.path().join(name), "").unwrap();
        }
        assert_eq!(device_files(dev.path()), 3);
        assert_eq!(device_files(&dev.path().join("absent")), 0);
    }

    #[test]
    fn without_the_drivers_library_its_files_tell_where_gpus_sit() {
        let root = tempfile::tempdir().unwrap();
        let describe = |pci: &str, minor: u32, uuid: &str| {
            let directory = root.path().join("proc/driver/nvidia/gpus").join(pci);
            fs::create_dir_all(&directory).unwrap();
            let about = format!(
                "Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nBus Location: \t {pci}\n\
                 Device Minor: \t {minor}\nGPU Excluded:\t No\n"
            );
            fs::write(directory.join("information"), about).unwrap();
            fs::create_dir_all(root.path().join("dev")).unwrap();
            fs::write(root.path().join(format!("dev/nvidia{minor}")), "").unwrap();
        };
        describe("0000:43:00.0", 0, "GPU-bb");
        describe("0000:1b:00.0", 1, "GPU-aa");
        let known = |pci: &str, uuid: &str| Gpu { uuid: Some(uuid.into()), pci: Some(pci.into()) };
        let both = vec![known("0000:1b:00.0", "GPU-aa"), known("0000:43:00.0", "GPU-bb")];
        assert_eq!(by_files(root.path()), both);
        // A container that sees one of them.
        fs::remove_file(root.path().join("dev/nvidia1")).unwrap();
        assert_eq!(by_files(root.path()), both[1..]);
        // A container that sees no description.
        fs::remove_dir_all(root.path().join("proc")).unwrap();
        assert_eq!(by_files(root.path()), [Gpu::default()]);
    }

    #[test]
    fn intels_render_nodes_are_counted_if_they_are_shown_to_us() {
        let root = tempfile::tempdir().unwrap();
        let nodes = [("renderD128", "0x8086"), ("renderD129", "0x10de"), ("renderD130", "0x8086"), ("card0", "0x8086")];
        for (name, vendor) in nodes {
            let device = root.path().join("sys/class/drm").join(name).join("device");
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
        }
        fs::create_dir_all(root.path().join("dev/dri")).unwrap();
        assert_eq!(xpus(root.path(), None, None), 0, "none is in /dev/dri");
        for (name, _) in nodes {
            fs::write(root.path().join("dev/dri").join(name), "").unwrap();
        }
        assert_eq!(xpus(root.path(), None, None), 2);
        let table =
            [("0", "", 1), ("0,1,2", "", 3), ("0.0,0.1", "FLAT", 2), ("0.0,0.1,1.0", "composite", 2), ("x", "", 0)];
        for (mask, hierarchy, expected) in table {
            assert_eq!(xpus(root.path(), Some(mask), Some(hierarchy)), expected, "{mask} {hierarchy}");
        }
    }
}
