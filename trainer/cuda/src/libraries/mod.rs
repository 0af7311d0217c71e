//! Finds and loads the NVIDIA driver, NVRTC and cuBLASLt. The driver is checked before anything calls `cudarc`, which
//! panics if the library or a function is missing.
#![allow(unsafe_code)]

mod cache;
pub(crate) mod compiler;
pub(crate) mod site_packages;
pub(crate) mod surroundings;

use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::sync::Mutex;

use libloading::os::unix::Library;

use crate::{CudaError, Surroundings};

/// The driver's library.
pub(crate) const DRIVER: &str = "libcuda.so.1";
const DRIVER_REMEDY: &str = "install the NVIDIA driver";

/// A library that each version of CUDA ships in its own build.
#[derive(Debug)]
pub(crate) struct Family {
    /// The names of its files and the first numbers of their CUDA, newest first.
    names: [(&'static str, c_int); 2],
    remedy: &'static str,
    /// The Python package of an earlier CUDA, without the number at its end.
    package: &'static str,
}

/// NVRTC.
pub(crate) const COMPILER: Family = Family {
    names: [("libnvrtc.so.13", 13), ("libnvrtc.so.12", 12)],
    remedy: "pip install nvidia-cuda-nvrtc",
    package: "nvidia-cuda-nvrtc-cu",
};
/// cuBLASLt.
pub(crate) const PRODUCTS: Family = Family {
    names: [("libcublasLt.so.13", 13), ("libcublasLt.so.12", 12)],
    remedy: "pip install nvidia-cublas",
    package: "nvidia-cublas-cu",
};
/// The oldest driver that will do, as CUDA counts: 12000 is 12.0.
const OLDEST: c_int = 12_000;

/// All functions of the driver that are called, here or by `cudarc`.
const CALLED: [&str; 42] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuGetErrorString",
    "cuGetErrorName",
];

/// A driver that was checked: `cudarc` may be called.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    /// The newest CUDA that it knows, as 1000 times its first number and 10 times its second.
    pub(crate) version: c_int,
    /// How many GPUs it shows.
    pub(crate) gpus: usize,
    pub(crate) path: PathBuf,
}

/// Finds the driver, once in a process, since `cudarc` keeps the first that it loads.
pub(crate) fn driver(surroundings: &Surroundings) -> Result<Driver, CudaError> {
    static FOUND: Mutex<Option<Driver>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(driver) = &*found {
        return Ok(driver.clone());
    }
    let Some((library, path)) = surroundings.find(DRIVER)? else {
        return Err(CudaError::Missing { name: DRIVER, remedy: DRIVER_REMEDY });
    };
    let driver = look_at(&library, path)?;
    // It stays loaded: the driver does not support being unloaded.
    std::mem::forget(library);
    Ok(found.insert(driver).clone())
}

fn look_at(library: &Library, path: PathBuf) -> Result<Driver, CudaError> {
    let lacks = |symbol| CudaError::Lacks { path: path.clone(), symbol, remedy: "update the NVIDIA driver" };
    for symbol in CALLED {
        // SAFETY: the symbol is looked up, not called.
        unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.map_err(|_| lacks(symbol))?;
    }
    // SAFETY: this is the signature of both functions below; a code is no Rust enum here, since drivers know codes that
    // no header has yet.
    let number =
        |symbol: &'static str| unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol.as_bytes()) };
    // SAFETY: as cuda.h declares it.
    let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit") }.map_err(|_| lacks("cuInit"))?;
    // `cudarc` asks the loader for libcuda.so, and must get the same library.
    // SAFETY: symbols are looked up, not called; a library is there, or this would panic.
    let same = unsafe {
        cudarc::driver::sys::is_culib_present()
            && cudarc::driver::sys::culib()
                .get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit")
                .is_ok_and(|it| *it as usize == *init as usize)
    };
    if !same {
        return Err(CudaError::Shadowed { path });
    }
    let (mut version, mut gpus) = (0, 0);
    let version_of = number("cuDriverGetVersion").map_err(|_| lacks("cuDriverGetVersion"))?;
    let count = number("cuDeviceGetCount").map_err(|_| lacks("cuDeviceGetCount"))?;
    // SAFETY: both write one number to the place given.
    if unsafe { version_of(&mut version) } != 0 || version < OLDEST {
        return Err(CudaError::OldDriver { version });
    }
    // SAFETY: with the only flags there are; the count is asked for after that.
    let code = unsafe { init(0) };
    // SAFETY: as above.
    let code = if code == 0 { unsafe { count(&mut gpus) } } else { code };
    if code != 0 || gpus < 1 {
        return Err(CudaError::NoGpu { cause: if code == 0 { "none".to_owned() } else { words(library, code) } });
    }
    Ok(Driver { version, gpus: gpus as usize, path })
}

/// The driver's text for an error.
fn words(library: &Library, code: c_int) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: as cuda.h declares it; the text that it names is a constant of the library.
    let told = unsafe {
        library
            .get::<unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int>(b"cuGetErrorString")
            .is_ok_and(|ask| ask(code, &mut text) == 0 && !text.is_null())
    };
    if !told {
        return format!("error {code}");
    }
    // SAFETY: the driver has just set it to a constant text.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The newest library of a family on this machine. With a driver, it is the newest that is not newer than the driver's
/// CUDA: the driver loads code of its own CUDA and of earlier ones.
pub(crate) fn newest(
    family: &Family,
    surroundings: &Surroundings,
    driver: Option<&Driver>,
) -> Result<(Library, PathBuf), CudaError> {
    let &Family { names, remedy, package } = family;
    let newest = driver.map_or(c_int::MAX, |driver| driver.version / 1000);
    let mut too_new = None;
    for (name, major) in names {
        match surroundings.find(name)? {
            Some((library, path)) if major <= newest => return Ok((library, path)),
            Some((_, path)) => too_new = Some(CudaError::NewLibrary { path, driver: newest, package }),
            None => {}
        }
    }
    Err(too_new.unwrap_or(CudaError::Missing { name: names[0].0, remedy }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use std::path::Path;

    use libloading::os::unix::RTLD_NOW;

    use super::*;

    #[test]
    fn what_is_missing_broken_or_something_else_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("libnvrtc.so.13");
        fs::write(&broken, "no library").unwrap();
        let surroundings = Surroundings { folders: vec![folder.path().into()], ..Surroundings::default() };
        let error = newest(&COMPILER, &surroundings, None).unwrap_err().to_string();
        assert!(error.contains("cannot load ") && error.contains("libnvrtc.so.13: "), "{error}");
        // Some other library than the driver.
        let other = [Path::new("libc.so.6"), Path::new("libm.so.6")].into_iter().find_map(|name| {
            // SAFETY: the C library is loaded already.
            unsafe { Library::open(Some(name), RTLD_NOW) }.ok()
        });
        let error = look_at(&other.unwrap(), "/somewhere/libcuda.so.1".into()).unwrap_err().to_string();
        assert!(error.contains("/somewhere/libcuda.so.1 has no cuInit") && error.contains("update"), "{error}");
    }
}
