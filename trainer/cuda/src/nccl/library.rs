//! NCCL's shared library: where it lies, whether it can be used, and its functions.
//!
//! Types and names are those of `nccl.h`. Result codes are plain numbers, since a newer library may return codes that
//! are not known here.
//!
//! It is bound here because no crate does: NVIDIA's bindings are not published, and `cudarc` has no asynchronous errors,
//! no abort from another thread, and enums that are undefined for newer codes. It is loaded at run time, so a machine
//! without NCCL runs everything else.
#![allow(unsafe_code)]

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};

use super::versions::version_text;
use crate::Surroundings;
use crate::libraries::site_packages::site_packages;

/// The oldest version that can be used: since 2.17 NCCL takes the configuration that is passed here.
const OLDEST: c_int = 21_700;

/// The library's file.
const NAME: &str = "libnccl.so.2";

const REMEDY: &str = "install it (pip install nvidia-nccl-cu13 or nvidia-nccl-cu12, or the package libnccl2), or name \
     its file with --nccl-library";

/// `ncclSuccess`
pub(super) const SUCCESS: c_int = 0;
/// `ncclRemoteError`
pub(super) const REMOTE_ERROR: c_int = 6;
/// `ncclInProgress`
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclFloat32`
pub(super) const FLOAT32: c_int = 7;

/// Why there is no NCCL.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// It is not found, or cannot be loaded.
    #[error("cannot load NCCL: {}; {REMEDY}", tried.join("; "))]
    Missing {
        /// Each place, and what was wrong there.
        tried: Vec<String>,
    },
    /// It is too old.
    #[error("{path} is NCCL {}, and 2.17 or newer is needed; {REMEDY}", version_text(*version))]
    TooOld {
        /// The file.
        path: String,
        /// As NCCL counts: 21700 is 2.17.0.
        version: c_int,
    },
    /// It is not NCCL, or it is damaged.
    #[error("{path} has no function {function}: it is not NCCL 2.17 or newer; {REMEDY}")]
    Lacks {
        /// The file.
        path: String,
        /// The function.
        function: &'static str,
    },
}

/// `ncclComm_t`
pub(super) type RawComm = *mut c_void;
/// `cudaStream_t`
pub(super) type RawStream = *mut c_void;

/// `ncclUniqueId`: what the ranks of a new communicator find each other by.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of 2.17. NCCL reads the fields that the caller's version had, and takes defaults for the others.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// The configuration of a communicator whose calls return at once.
    pub(super) fn non_blocking() -> Config {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// NCCL's functions.
pub(super) struct Functions {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) init: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    pub(super) get_async_error: unsafe extern "C" fn(RawComm, *mut c_int) -> c_int,
    pub(super) abort: unsafe extern "C" fn(RawComm) -> c_int,
    pub(super) error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    pub(super) send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    pub(super) recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    pub(super) group_start: unsafe extern "C" fn() -> c_int,
    pub(super) group_end: unsafe extern "C" fn() -> c_int,
}

impl Functions {
    /// Looks the functions up. The error is the name of the first that is missing.
    fn find(library: &libloading::os::unix::Library) -> Result<Functions, &'static str> {
        // SAFETY: the fields' types are those of `nccl.h` for these names.
        unsafe {
            Ok(Functions {
                get_unique_id: need(library, "ncclGetUniqueId")?,
                init: need(library, "ncclCommInitRankConfig")?,
                get_async_error: need(library, "ncclCommGetAsyncError")?,
                abort: need(library, "ncclCommAbort")?,
                error_string: need(library, "ncclGetErrorString")?,
                last_error: need(library, "ncclGetLastError")?,
                send: need(library, "ncclSend")?,
                recv: need(library, "ncclRecv")?,
                group_start: need(library, "ncclGroupStart")?,
                group_end: need(library, "ncclGroupEnd")?,
            })
        }
    }
}

/// # Safety
/// `F` is the C type of the function of this name.
unsafe fn need<F: Copy>(library: &libloading::os::unix::Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: as the caller says.
    unsafe { library.get::<F>(name.as_bytes()) }.map(|symbol| *symbol).map_err(|_| name)
}

/// NCCL, loaded. It is never unloaded, since its threads may outlive every communicator.
pub struct Library {
    pub(super) functions: Functions,
    path: String,
    version: c_int,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Library {
    /// Loads NCCL from `file`. Without one, it takes the first NCCL of these places: the folders of
    /// `ELASTIC_CUDA_LIBRARIES`, the Python packages of the active environment, the package beside those that
    /// `LD_LIBRARY_PATH` names, the loader's own path, and CUDA's own folder.
    ///
    /// # Errors
    /// There is none, or the first that is found cannot be used.
    pub fn open(file: Option<&Path>, surroundings: &Surroundings) -> Result<Arc<Library>, LibraryError> {
        let places = match file {
            Some(file) => vec![file.to_owned()],
            None => {
                let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
                let mut places = files(surroundings, &paths);
                places.retain(|place| place.exists());
                places.extend([NAME.into(), "libnccl.so".into()]);
                places.extend(Some(Path::new("/usr/local/cuda/lib64").join(NAME)).filter(|place| place.exists()));
                places
            }
        };
        let mut tried = Vec::new();
        for place in places {
            // SAFETY: loading runs the library's constructors; the user who named or installed it vouches for it.
            match unsafe { libloading::os::unix::Library::open(Some(&place), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => return Library::bind(&place, library).map(Arc::new),
                Err(error) => {
                    // The error's own text gives no cause.
                    let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    tried.push(format!("{}: {reason}", place.display()));
                }
            }
        }
        Err(LibraryError::Missing { tried })
    }

    fn bind(place: &Path, library: libloading::os::unix::Library) -> Result<Library, LibraryError> {
        // Never unloaded.
        let library = std::mem::ManuallyDrop::new(library);
        let path = place.display().to_string();
        let lacks = |function| LibraryError::Lacks { path: path.clone(), function };
        // SAFETY: the type is that of `nccl.h` for this name.
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int =
            unsafe { need(&library, "ncclGetVersion") }.map_err(lacks)?;
        let mut version = 0;
        // SAFETY: a place for the number.
        if unsafe { get_version(&raw mut version) } != SUCCESS || version < OLDEST {
            return Err(LibraryError::TooOld { path, version });
        }
        let functions = Functions::find(&library).map_err(lacks)?;
        Ok(Library { functions, path, version })
    }

    /// The version as NCCL counts: 22809 is 2.28.9.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// The version, for people.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// Its file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// NCCL's text for a code, and its last error message.
    pub(super) fn explain(&self, code: c_int) -> String {
        // SAFETY: both return strings that live as long as the library, or null; neither needs a communicator.
        let texts = unsafe { [(self.functions.error_string)(code), (self.functions.last_error)(std::ptr::null_mut())] };
        let mut words = Vec::new();
        for text in texts.into_iter().filter(|text| !text.is_null()) {
            // SAFETY: a string of the library's.
            let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned();
            if !text.is_empty() {
                words.push(text);
            }
        }
        words.join(": ")
    }
}

/// Files where NCCL may be: in the folders that the user names, and where the Python packages `nvidia-nccl-cu12` and
/// `nvidia-nccl-cu13` put it.
fn files(surroundings: &Surroundings, library_path: &OsStr) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = surroundings.folders.iter().map(|folder| folder.join(NAME)).collect();
    for prefix in &surroundings.prefixes {
        found.extend(site_packages(prefix).into_iter().map(|packages| packages.join("nvidia/nccl/lib").join(NAME)));
        found.push(prefix.join("lib").join(NAME));
    }
    // …/site-packages/nvidia/cu13/lib has its neighbour at …/site-packages/nvidia/nccl/lib.
    let named = std::env::split_paths(library_path).chain(surroundings.folders.iter().cloned());
    let neighbours = named.filter_map(|path| Some(path.parent()?.parent()?.to_owned()));
    found.extend(neighbours.filter(|path| path.ends_with("nvidia")).map(|path| path.join("nccl/lib").join(NAME)));
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn pythons_packages_are_looked_through() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["python3.9", "python3.11", "pkgconfig"] {
            fs::create_dir_all(folder.path().join("lib").join(name)).unwrap();
        }
        let surroundings = Surroundings::read(|name| match name {
            "VIRTUAL_ENV" => Some(folder.path().display().to_string()),
            "ELASTIC_CUDA_LIBRARIES" => Some("/own:/w/site-packages/nvidia/cuda_nvrtc/lib".to_owned()),
            _ => None,
        });
        let found = files(&surroundings, OsStr::new("/usr/lib:/v/site-packages/nvidia/cu13/lib"));
        let wheel = "site-packages/nvidia/nccl/lib/libnccl.so.2";
        let python = |version: &str| folder.path().join("lib").join(version).join(wheel);
        let expected = [
            "/own/libnccl.so.2".into(),
            "/w/site-packages/nvidia/cuda_nvrtc/lib/libnccl.so.2".into(),
            python("python3.11"),
            python("python3.9"),
            folder.path().join("lib/libnccl.so.2"),
            Path::new("/v").join(wheel),
            Path::new("/w").join(wheel),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_missing_library_and_a_wrong_one_say_what_to_do() {
        let open = |file| Library::open(Some(Path::new(file)), &Surroundings::default());
        let missing = open("/nowhere/libnccl.so.2").unwrap_err().to_string();
        assert!(
            missing.contains("/nowhere/libnccl.so.2")
                && missing.contains("pip install")
                && missing.contains("--nccl-library"),
            "{missing}"
        );
        let wrong = open("libc.so.6").unwrap_err().to_string();
        assert!(wrong.contains("libc.so.6 has no function ncclGetVersion"), "{wrong}");
    }

    #[test]
    fn the_configuration_is_laid_out_as_in_2_17() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }
}
