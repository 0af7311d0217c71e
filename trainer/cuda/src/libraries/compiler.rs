//! NVRTC, which compiles CUDA C++ for one kind of GPU.
//!
//! It is called without `cudarc`, which would take whatever the loader finds as `libnvrtc.so`. On machines with a CUDA
//! toolkit that is often another version than the one chosen here.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use tracing::warn;

use super::cache::Cache;
use super::error::LoadError;
use super::{self as libraries, Driver};
use crate::Surroundings;
use crate::kernels::sources::{SOURCES, Source};

type Program = *mut c_void;
type Create =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const c_void, *const c_void) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// A file of kernels, compiled.
#[derive(Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The file.
    pub source: Source,
    /// Code for one kind of GPU: a cubin.
    pub code: Vec<u8>,
    /// The compiler's warnings; none if the code comes from the cache.
    pub warnings: String,
}

/// NVRTC, loaded.
#[derive(Debug)]
pub struct Compiler {
    create: Symbol<Create>,
    compile: Symbol<Compile>,
    destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int>,
    log_size: Symbol<Size>,
    log: Symbol<Get>,
    code_size: Symbol<Size>,
    code: Symbol<Get>,
    version: (c_int, c_int),
    path: PathBuf,
    cache: Cache,
}

/// Loads NVRTC's built-ins, which NVRTC itself opens by name when it first compiles. In some of NVIDIA's packages it
/// looks for them only in the loader's folders, and not in its own. A library that is loaded already is found by its
/// name.
fn open_built_ins(nvrtc: &Path, (major, minor): (c_int, c_int)) -> Result<(), LoadError> {
    let path = nvrtc.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    // An NVRTC that the loader found has a bare name. Static builds have no such library.
    if nvrtc.components().count() == 1 || !path.exists() {
        return Ok(());
    }
    // SAFETY: it holds data and functions for NVRTC, and does nothing when it is loaded.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|cause| LoadError::Unloadable { path, cause: cause.to_string() })?;
    // Like NVRTC itself, it is never unloaded.
    std::mem::forget(library);
    Ok(())
}

impl Compiler {
    /// The newest NVRTC on this machine.
    pub fn find(surroundings: &Surroundings) -> Result<Compiler, LoadError> {
        Compiler::load(surroundings, None)
    }

    /// The newest NVRTC whose code the driver can load.
    pub(crate) fn load(surroundings: &Surroundings, driver: Option<&Driver>) -> Result<Compiler, LoadError> {
        let (library, path) = libraries::newest(&libraries::COMPILER, surroundings, driver)?;
        fn get<T>(library: &Library, path: &Path, symbol: &'static str) -> Result<Symbol<T>, LoadError> {
            // SAFETY: callers ask for the types that nvrtc.h has; the library is never unloaded.
            unsafe { libraries::function(library, path, symbol, "update it: pip install --upgrade nvidia-cuda-nvrtc") }
        }
        let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
            get(&library, &path, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers to the two places given.
        unsafe { version(&mut major, &mut minor) };
        open_built_ins(&path, (major, minor))?;
        let compiler = Compiler {
            create: get(&library, &path, "nvrtcCreateProgram")?,
            compile: get(&library, &path, "nvrtcCompileProgram")?,
            destroy: get(&library, &path, "nvrtcDestroyProgram")?,
            log_size: get(&library, &path, "nvrtcGetProgramLogSize")?,
            log: get(&library, &path, "nvrtcGetProgramLog")?,
            code_size: get(&library, &path, "nvrtcGetCUBINSize")?,
            code: get(&library, &path, "nvrtcGetCUBIN")?,
            version: (major, minor),
            path,
            cache: Cache::new(surroundings.cache.clone()),
        };
        // The symbols point into it.
        std::mem::forget(library);
        Ok(compiler)
    }

    /// Its version, such as `13.0`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All kernels for a kind of GPU such as `sm_90`, from the cache if it has them.
    pub fn kernels(&self, arch: &str) -> Result<Vec<Compiled>, LoadError> {
        let compiled = SOURCES.map(|source| {
            let Source { file, text, .. } = source;
            let options = [format!("--gpu-architecture={arch}"), "--std=c++17".to_owned()];
            let key = format!("NVRTC {} {} {file}\n{text}", self.version(), options.join(" "));
            if let Some(code) = self.cache.get(&key) {
                return Ok(Compiled { source, code, warnings: String::new() });
            }
            let (code, warnings) = self.run(file, text, &options).map_err(|log| LoadError::Compile {
                source_file: file,
                arch: arch.to_owned(),
                log,
            })?;
            if let Err(error) = self.cache.put(&key, &code) {
                warn!("{error}; each start compiles the kernels again, which takes some seconds");
            }
            Ok(Compiled { source, code, warnings })
        });
        compiled.into_iter().collect()
    }

    /// The code and the compiler's log; if it cannot be compiled, the log alone.
    fn run(&self, file: &str, source: &str, options: &[String]) -> Result<(Vec<u8>, String), String> {
        let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (file, source) = (text(file)?, text(source)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<CString>, String>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: as nvrtc.h declares it; the texts live to the end of this function, which destroys the program.
        let code = unsafe { (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, none, none) };
        if code != 0 {
            return Err(format!("error {code} of nvrtcCreateProgram"));
        }
        // SAFETY: the program was made above, and the options are as many as are said.
        let code = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let said = self.read(program, &self.log_size, &self.log);
        let said = said.map(|log| String::from_utf8_lossy(&log).trim_matches(['\0', '\n', ' ']).to_owned());
        let result = match (code, said) {
            (0, said) => said.and_then(|said| Ok((self.read(program, &self.code_size, &self.code)?, said))),
            (_, Ok(said) | Err(said)) => Err(said),
        };
        // SAFETY: it is not used after this.
        unsafe { (self.destroy)(&mut program) };
        result
    }

    fn read(&self, program: Program, size: &Symbol<Size>, get: &Symbol<Get>) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program is one that was compiled.
        let code = unsafe { size(program, &mut bytes) };
        let mut all = vec![0; bytes];
        // SAFETY: there is room for as much as the line before has told.
        let code = if code == 0 { unsafe { get(program, all.as_mut_ptr().cast()) } } else { code };
        if code == 0 { Ok(all) } else { Err(format!("error {code} of NVRTC")) }
    }
}
