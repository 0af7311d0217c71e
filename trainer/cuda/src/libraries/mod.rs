//! Finds and loads the NVIDIA driver, NVRTC and cuBLASLt. The driver is checked before anything calls `cudarc`, which
//! panics if the library or a function is missing.
#![allow(unsafe_code)]

mod cache;
pub(crate) mod compiler;
pub(crate) mod error;
pub(crate) mod site_packages;
pub(crate) mod surroundings;

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libloading::os::unix::{Library, Symbol};

use crate::Surroundings;
use error::LoadError;

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
/// The oldest driver that will do, as CUDA counts: 12000 is 12.0. It has all functions that `cudarc` calls.
const OLDEST: c_int = 12_000;

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
pub(crate) fn driver(surroundings: &Surroundings) -> Result<Driver, LoadError> {
    static FOUND: Mutex<Option<Driver>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(driver) = &*found {
        return Ok(driver.clone());
    }
    let Some((library, path)) = surroundings.find(DRIVER)? else {
        return Err(LoadError::Missing { name: DRIVER, remedy: DRIVER_REMEDY });
    };
    let driver = look_at(&library, path)?;
    // It stays loaded: the driver does not support being unloaded.
    std::mem::forget(library);
    Ok(found.insert(driver).clone())
}

fn look_at(library: &Library, path: PathBuf) -> Result<Driver, LoadError> {
    fn get<T>(library: &Library, path: &Path, symbol: &'static str) -> Result<Symbol<T>, LoadError> {
        // SAFETY: below are the types that cuda.h has; a code is no Rust enum here, since drivers know codes that no
        // header has yet. The caller keeps the library.
        unsafe { function(library, path, symbol, "update the NVIDIA driver") }
    }
    type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
    let init: Symbol<unsafe extern "C" fn(u32) -> c_int> = get(library, &path, "cuInit")?;
    // `cudarc` asks the loader for libcuda.so, and must get the same library.
    // SAFETY: symbols are looked up, not called; a library is there, or this would panic.
    let same = unsafe {
        cudarc::driver::sys::is_culib_present()
            && cudarc::driver::sys::culib()
                .get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit")
                .is_ok_and(|it| *it as usize == *init as usize)
    };
    if !same {
        return Err(LoadError::Shadowed { path });
    }
    let (mut version, mut gpus) = (0, 0);
    let version_of: Symbol<Number> = get(library, &path, "cuDriverGetVersion")?;
    let count: Symbol<Number> = get(library, &path, "cuDeviceGetCount")?;
    // SAFETY: both write one number to the place given.
    if unsafe { version_of(&mut version) } != 0 || version < OLDEST {
        return Err(LoadError::OldDriver { version });
    }
    // SAFETY: with the only flags there are; the count is asked for after that.
    let code = unsafe { init(0) };
    // SAFETY: as above.
    let code = if code == 0 { unsafe { count(&mut gpus) } } else { code };
    if code != 0 || gpus < 1 {
        return Err(LoadError::NoGpu { cause: if code == 0 { "none".to_owned() } else { words(library, code) } });
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

/// A function of the library at `path`.
///
/// # Safety
/// `T` is its type. It is not called once the library is unloaded.
pub(crate) unsafe fn function<T>(
    library: &Library,
    path: &Path,
    symbol: &'static str,
    remedy: &'static str,
) -> Result<Symbol<T>, LoadError> {
    // SAFETY: as the caller says.
    unsafe { library.get(symbol.as_bytes()) }.map_err(|_| LoadError::Lacks { path: path.to_owned(), symbol, remedy })
}

/// The newest library of a family on this machine. With a driver, it is the newest that is not newer than the driver's
/// CUDA: the driver loads code of its own CUDA and of earlier ones.
pub(crate) fn newest(
    family: &Family,
    surroundings: &Surroundings,
    driver: Option<&Driver>,
) -> Result<(Library, PathBuf), LoadError> {
    let &Family { names, remedy, package } = family;
    let newest = driver.map_or(c_int::MAX, |driver| driver.version / 1000);
    let mut too_new = None;
    for (name, major) in names {
        match surroundings.find(name)? {
            Some((library, path)) if major <= newest => return Ok((library, path)),
            Some((_, path)) => too_new = Some(LoadError::NewLibrary { path, driver: newest, package }),
            None => {}
        }
    }
    Err(too_new.unwrap_or(LoadError::Missing { name: names[0].0, remedy }))
}

#[cfg(test)]
mod tests {
    use std::fs;

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
