//! NVIDIA's management library, loaded at run time. It tells which GPUs there are, where they sit, and which
//! processes compute on them. [`crate::workers::slots`] chooses GPUs for workers.
//!
//! Functions, structures and codes are those of the NVML API reference (driver 450 and newer). A machine without the
//! driver has no such library, so nothing here may be linked: all of it is looked up by name. The crate
//! nvml-wrapper (0.13) unloads the library while its threads may run, and fails to list processes when many appear.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

mod health;

pub(crate) use health::GpuHealth;
#[cfg(test)]
pub(crate) use health::GpuMemory;

const LIBRARY: &str = "libnvidia-ml.so.1";

/// The size of a buffer for a UUID: `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID_ROOM: usize = 96;

const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Why the library gives no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NvmlError {
    #[error("cannot load NVIDIA's management library: {0}; is the driver installed, and visible in this container?")]
    Absent(String),
    #[error("NVIDIA's management library has no {0}: the driver is too old, 450 or newer is needed")]
    TooOld(&'static str),
    #[error("{function} of NVIDIA's management library failed with code {code}: {message}")]
    Call { function: &'static str, code: i32, message: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// NVML's index, in order of PCI addresses. It is certainly CUDA's index too only with
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub index: u32,
    /// The UUID, such as `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6`.
    pub uuid: String,
    /// The PCI address as sysfs writes it: `0000:3b:00.0`.
    pub pci: String,
}

/// A process with a compute context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ComputeProcess {
    /// Its id as the driver sees it. In a container this is often the id in the host's namespace.
    pub pid: u32,
    /// Its memory on the GPU in bytes, where the driver knows it.
    pub memory: Option<u64>,
}

type Handle = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlProcessInfo_t`, the same in versions 2 and 3 of the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The initialised library. Dropping this shuts it down. Its functions may be called from any thread.
#[derive(Debug)]
pub(crate) struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    count: unsafe extern "C" fn(*mut c_uint) -> c_int,
    handle: unsafe extern "C" fn(c_uint, *mut Handle) -> c_int,
    uuid: unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_int,
    pci: unsafe extern "C" fn(Handle, *mut PciInfo) -> c_int,
    processes: unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> c_int,
    health: health::Functions,
}

impl Nvml {
    /// Loads the library by its usual name and initialises it, which can take a second while the driver wakes GPUs.
    pub(crate) fn load() -> Result<Nvml, NvmlError> {
        Nvml::load_from(Path::new(LIBRARY))
    }

    /// As [`Nvml::load`], but from this file.
    pub(crate) fn load_from(library: &Path) -> Result<Nvml, NvmlError> {
        let library = Library::open(library)?;
        // SAFETY: the types are those of NVML's API reference for these names.
        let (init, nvml) = unsafe {
            let init: unsafe extern "C" fn() -> c_int = library.function(c"nvmlInit_v2", "nvmlInit_v2")?;
            let nvml = Nvml {
                shutdown: library.function(c"nvmlShutdown", "nvmlShutdown")?,
                error_string: library.function(c"nvmlErrorString", "nvmlErrorString")?,
                count: library.function(c"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount_v2")?,
                handle: library.function(c"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex_v2")?,
                uuid: library.function(c"nvmlDeviceGetUUID", "nvmlDeviceGetUUID")?,
                pci: library.function(c"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v3")?,
                health: health::Functions::of(&library),
                processes: library
                    .function(c"nvmlDeviceGetComputeRunningProcesses_v3", PROCESSES)
                    .or_else(|_| library.function(c"nvmlDeviceGetComputeRunningProcesses_v2", PROCESSES))?,
            };
            (init, nvml)
        };
        // SAFETY: the function takes no arguments.
        match unsafe { init() } {
            SUCCESS => Ok(nvml),
            code => {
                let error = nvml.error("nvmlInit_v2", code);
                // A library that was not initialised must not be shut down.
                std::mem::forget(nvml);
                Err(error)
            }
        }
    }

    /// How many GPUs the driver shows to this process. `CUDA_VISIBLE_DEVICES` has no effect on this.
    pub(crate) fn device_count(&self) -> Result<u32, NvmlError> {
        let mut count = 0;
        // SAFETY: the pointer leads to a place for the number.
        self.check("nvmlDeviceGetCount_v2", unsafe { (self.count)(&raw mut count) })?;
        Ok(count)
    }

    /// All GPUs, by index. If one has fallen off the bus, the whole call fails.
    pub(crate) fn devices(&self) -> Result<Vec<Device>, NvmlError> {
        (0..self.device_count()?).map(|index| self.device(index)).collect()
    }

    pub(crate) fn device(&self, index: u32) -> Result<Device, NvmlError> {
        let handle = self.handle(index)?;
        let mut uuid = [0; UUID_ROOM];
        // SAFETY: the buffer is as long as the call says.
        self.check("nvmlDeviceGetUUID", unsafe { (self.uuid)(handle, uuid.as_mut_ptr(), UUID_ROOM as c_uint) })?;
        // SAFETY: all fields are numbers, and zero is a valid number.
        let mut pci: PciInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is of the type that this version of the call fills.
        self.check("nvmlDeviceGetPciInfo_v3", unsafe { (self.pci)(handle, &raw mut pci) })?;
        let pci = format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device);
        Ok(Device { index, uuid: text(&uuid), pci })
    }

    /// The processes that compute on a GPU, including those of other users and other containers.
    pub(crate) fn compute_processes(&self, index: u32) -> Result<Vec<ComputeProcess>, NvmlError> {
        let handle = self.handle(index)?;
        let mut room = 32;
        loop {
            let mut infos = vec![ProcessInfo::default(); room];
            let mut count = infos.len() as c_uint;
            // SAFETY: the array is as long as the call says.
            let code = unsafe { (self.processes)(handle, &raw mut count, infos.as_mut_ptr()) };
            if code == INSUFFICIENT_SIZE {
                // More processes may start before the next call.
                room = (count as usize).max(room) * 2;
                continue;
            }
            self.check(PROCESSES, code)?;
            infos.truncate(count as usize);
            let told = |memory| (memory != NOT_AVAILABLE).then_some(memory);
            return Ok(infos.iter().map(|info| ComputeProcess { pid: info.pid, memory: told(info.memory) }).collect());
        }
    }

    fn handle(&self, index: u32) -> Result<Handle, NvmlError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer leads to a place for the handle. What the handle points to belongs to the library.
        self.check("nvmlDeviceGetHandleByIndex_v2", unsafe { (self.handle)(index, &raw mut handle) })?;
        Ok(handle)
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), NvmlError> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(function, code)) }
    }

    fn error(&self, function: &'static str, code: c_int) -> NvmlError {
        // SAFETY: the function takes a number and returns a string that lives as long as the library, which is never
        // unloaded.
        let message = unsafe {
            let message = (self.error_string)(code);
            if message.is_null() { String::new() } else { CStr::from_ptr(message).to_string_lossy().into_owned() }
        };
        NvmlError::Call { function, code, message }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the library was initialised.
        unsafe { (self.shutdown)() };
    }
}

const PROCESSES: &str = "nvmlDeviceGetComputeRunningProcesses_v3";

/// A loaded library. It is never unloaded, because the driver's library may leave threads behind that still run in it.
struct Library(*mut c_void);

impl Library {
    fn open(path: &Path) -> Result<Library, NvmlError> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| NvmlError::Absent(format!("{} holds a NUL", path.display())))?;
        // SAFETY: the name is a string that ends in NUL. Loading runs the library's constructors, and the library is
        // the driver's own.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(NvmlError::Absent(last_error())) } else { Ok(Library(handle)) }
    }

    /// # Safety
    /// `F` must be the C type of the function of this name.
    unsafe fn function<F: Copy>(&self, name: &CStr, shown: &'static str) -> Result<F, NvmlError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
        // SAFETY: the handle belongs to a library that is never unloaded.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return Err(NvmlError::TooOld(shown));
        }
        // SAFETY: in POSIX, function pointers and object pointers are alike. The caller vouches for the type.
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

fn last_error() -> String {
    // SAFETY: the string lives until the next call on this thread, which comes after the copy.
    unsafe {
        let error = libc::dlerror();
        if error.is_null() {
            "no reason given".to_owned()
        } else {
            CStr::from_ptr(error).to_string_lossy().into_owned()
        }
    }
}

fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
pub(crate) mod tests;
