//! How a GPU is, as the driver tells. What to make of it is judged elsewhere.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_uint};

use super::{Handle, Library, Nvml, NvmlError, SUCCESS};

/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED`.
const UNCORRECTED: c_uint = 1;
/// `NVML_VOLATILE_ECC`: since the driver was loaded.
const VOLATILE: c_uint = 0;
/// `NVML_TEMPERATURE_GPU`.
const CORE: c_uint = 0;

/// A GPU's health and load. What the driver or the GPU does not tell is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GpuHealth {
    /// Memory errors that were not corrected since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// Whether pages of memory are to be retired at the next reset; GPUs before Ampere.
    pub retirement_pending: Option<bool>,
    /// Whether rows of memory are to be remapped at the next reset; Ampere and later.
    pub remap_pending: Option<bool>,
    /// Whether a row could not be remapped.
    pub remap_failed: Option<bool>,
    /// In degrees Celsius.
    pub temperature: Option<u32>,
    /// `nvmlClocksThrottleReasons`, a set of bits.
    pub throttle_reasons: Option<u64>,
    /// The share of the driver's last sample period in which a kernel ran, in percent.
    pub utilization: Option<u32>,
    pub memory: Option<GpuMemory>,
    /// What it draws, in milliwatts.
    pub power: Option<u32>,
}

/// A GPU's memory in bytes: `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GpuMemory {
    pub total: u64,
    /// What can still be had.
    pub free: u64,
    /// What processes and the driver have.
    pub used: u64,
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

type Retirement = unsafe extern "C" fn(Handle, *mut c_uint) -> c_int;
type Remapped = unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint) -> c_int;

/// Functions that some drivers do not have.
#[derive(Debug)]
pub(super) struct Functions {
    errors: Option<unsafe extern "C" fn(Handle, c_uint, c_uint, *mut u64) -> c_int>,
    retirement: Option<Retirement>,
    remapped: Option<Remapped>,
    temperature: Option<unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int>,
    throttle: Option<unsafe extern "C" fn(Handle, *mut u64) -> c_int>,
    utilization: Option<unsafe extern "C" fn(Handle, *mut Utilization) -> c_int>,
    memory: Option<unsafe extern "C" fn(Handle, *mut GpuMemory) -> c_int>,
    power: Option<unsafe extern "C" fn(Handle, *mut c_uint) -> c_int>,
}

impl Functions {
    pub(super) fn of(library: &Library) -> Functions {
        /// # Safety
        /// `F` must be the C type of the function of this name.
        unsafe fn optional<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
            // SAFETY: the caller vouches for the type.
            unsafe { library.function(name, "") }.ok()
        }
        // SAFETY: the types are those of NVML's API reference for these names.
        unsafe {
            Functions {
                errors: optional(library, c"nvmlDeviceGetTotalEccErrors"),
                retirement: optional(library, c"nvmlDeviceGetRetiredPagesPendingStatus"),
                remapped: optional(library, c"nvmlDeviceGetRemappedRows"),
                temperature: optional(library, c"nvmlDeviceGetTemperature"),
                throttle: optional(library, c"nvmlDeviceGetCurrentClocksThrottleReasons"),
                utilization: optional(library, c"nvmlDeviceGetUtilizationRates"),
                memory: optional(library, c"nvmlDeviceGetMemoryInfo"),
                power: optional(library, c"nvmlDeviceGetPowerUsage"),
            }
        }
    }
}

impl Nvml {
    pub(crate) fn health(&self, index: u32) -> Result<GpuHealth, NvmlError> {
        let handle = self.handle(index)?;
        // A GPU that is lost answers nothing: its name shows that better than what it may not support anyway.
        self.device(index)?;
        let Functions { errors, retirement, remapped, temperature, throttle, utilization, memory, power } =
            &self.health;
        let (mut uncorrected, mut reasons) = (0u64, 0u64);
        let (mut pages, mut degrees, mut milliwatts) = (0, 0, 0);
        let (mut rates, mut bytes) = (Utilization::default(), GpuMemory::default());
        let [mut corrected, mut uncorrectable, mut pending, mut failed] = [0; 4];
        // SAFETY: each pointer leads to a place for what the function of that type writes.
        let told = unsafe {
            [
                errors.map(|ask| ask(handle, UNCORRECTED, VOLATILE, &raw mut uncorrected)),
                retirement.map(|ask| ask(handle, &raw mut pages)),
                remapped.map(|ask| {
                    ask(handle, &raw mut corrected, &raw mut uncorrectable, &raw mut pending, &raw mut failed)
                }),
                temperature.map(|ask| ask(handle, CORE, &raw mut degrees)),
                throttle.map(|ask| ask(handle, &raw mut reasons)),
                utilization.map(|ask| ask(handle, &raw mut rates)),
                memory.map(|ask| ask(handle, &raw mut bytes)),
                power.map(|ask| ask(handle, &raw mut milliwatts)),
            ]
        };
        let told = told.map(|code| code == Some(SUCCESS));
        Ok(GpuHealth {
            uncorrected_errors: told[0].then_some(uncorrected),
            retirement_pending: told[1].then_some(pages != 0),
            remap_pending: told[2].then_some(pending != 0),
            remap_failed: told[2].then_some(failed != 0),
            temperature: told[3].then_some(degrees),
            throttle_reasons: told[4].then_some(reasons),
            utilization: told[5].then_some(rates.gpu),
            memory: told[6].then_some(bytes),
            power: told[7].then_some(milliwatts),
        })
    }
}
