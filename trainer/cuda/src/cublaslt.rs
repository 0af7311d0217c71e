//! cuBLASLt: products by NVIDIA's library.
//!
//! It is called without `cudarc`, whose products of f32 would be rounded to TF32, and which panics where it is missing.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{CudaSlice, DevicePtr};
use libloading::os::unix::{Library, Symbol};
use tracing::{debug, warn};

use super::libraries::{self, Driver, PRODUCTS};
use super::{CudaError, Gpu, Surroundings};

/// What NVIDIA advises for the newest GPUs. It is the same everywhere, since the choice of an algorithm depends on it.
const WORKSPACE: usize = 32 << 20;

/// As in cublasLt.h and library_types.h.
mod constant {
    use std::ffi::c_int;

    pub(super) const COMPUTE_32F: c_int = 68;
    pub(super) const R_32F: c_int = 0;
    pub(super) const R_16BF: c_int = 14;
    pub(super) const DESC_TRANSA: c_int = 3;
    pub(super) const DESC_TRANSB: c_int = 4;
    pub(super) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
    pub(super) const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
    /// Of A, B, C and D.
    pub(super) const PREF_MIN_ALIGNMENT_BYTES: [c_int; 4] = [5, 6, 7, 8];
    pub(super) const REDUCTION_SCHEME_NONE: u32 = 0;
}

/// The library's own, of whatever kind.
type Opaque = *mut c_void;
type Create = unsafe extern "C" fn(*mut Opaque) -> c_int;
type Destroy = unsafe extern "C" fn(Opaque) -> c_int;
type Set = unsafe extern "C" fn(Opaque, c_int, *const c_void, usize) -> c_int;
type CreateDesc = unsafe extern "C" fn(*mut Opaque, c_int, c_int) -> c_int;
type CreateLayout = unsafe extern "C" fn(*mut Opaque, c_int, u64, u64, i64) -> c_int;
type Heuristic = unsafe extern "C" fn(
    Opaque,
    Opaque,
    Opaque,
    Opaque,
    Opaque,
    Opaque,
    Opaque,
    c_int,
    *mut Suggestion,
    *mut c_int,
) -> c_int;
type Matmul = unsafe extern "C" fn(
    Opaque,
    Opaque,
    *const f32,
    *const c_void,
    Opaque,
    *const c_void,
    Opaque,
    *const f32,
    *const c_void,
    Opaque,
    *mut c_void,
    Opaque,
    *const [u64; 8],
    *mut c_void,
    usize,
    *mut c_void,
) -> c_int;

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Suggestion {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// What is called of it.
#[derive(Debug)]
struct Functions {
    destroy: Symbol<Destroy>,
    create_desc: Symbol<CreateDesc>,
    destroy_desc: Symbol<Destroy>,
    set_desc: Symbol<Set>,
    create_layout: Symbol<CreateLayout>,
    destroy_layout: Symbol<Destroy>,
    create_preference: Symbol<Create>,
    destroy_preference: Symbol<Destroy>,
    set_preference: Symbol<Set>,
    heuristic: Symbol<Heuristic>,
    matmul: Symbol<Matmul>,
}

/// The library, ready for products on one GPU.
#[derive(Debug)]
pub(super) struct CublasLt {
    functions: Functions,
    handle: Handle,
    workspace: CudaSlice<u8>,
    /// How each product is computed; none where the library has no way.
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
    version: usize,
    path: PathBuf,
}

/// A pointer into the library, which any thread may use.
#[derive(Debug, Clone, Copy)]
struct Handle(Opaque);

// SAFETY: cuBLASLt's handles and descriptors belong to no thread, and it is called by one at a time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// A matrix as it lies in memory: `lines`, one after the other, `stride` numbers apart, of `length` numbers each. For the
/// library, which counts by columns, a line is a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Lines {
    pub(super) address: u64,
    pub(super) lines: usize,
    pub(super) length: usize,
    pub(super) stride: usize,
    /// It is this matrix's transpose that is multiplied.
    pub(super) transposed: bool,
}

/// All that a choice of algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    bf16: bool,
    /// Without addresses. Lines and what they hold, of left, right and out.
    matrices: [Lines; 3],
    /// Bytes that addresses are multiples of. A buffer begins at a multiple of the most that is asked for, and where in
    /// it a matrix lies is fixed by the model: equal products have equal alignments.
    alignments: [u32; 3],
}

/// How a product is computed.
#[derive(Debug)]
struct Plan {
    desc: Handle,
    /// Of right, left and out.
    layouts: [Handle; 3],
    algorithm: [u64; 8],
    workspace: usize,
}

impl CublasLt {
    /// The newest library that suits the driver.
    pub(super) fn load(surroundings: &Surroundings, driver: &Driver, gpu: &Gpu) -> Result<CublasLt, CudaError> {
        let (library, path) = libraries::newest(&PRODUCTS, surroundings, Some(driver))?;
        fn get<T>(library: &Library, path: &Path, symbol: &'static str) -> Result<Symbol<T>, CudaError> {
            // SAFETY: callers ask for the types that cublasLt.h has; the library is never unloaded.
            unsafe { library.get(symbol.as_bytes()) }.map_err(|_| CudaError::Lacks {
                path: path.to_owned(),
                symbol,
                remedy: "update it: pip install --upgrade nvidia-cublas",
            })
        }
        let create: Symbol<Create> = get(&library, &path, "cublasLtCreate")?;
        let version: Symbol<unsafe extern "C" fn() -> usize> = get(&library, &path, "cublasLtGetVersion")?;
        let functions = Functions {
            destroy: get(&library, &path, "cublasLtDestroy")?,
            create_desc: get(&library, &path, "cublasLtMatmulDescCreate")?,
            destroy_desc: get(&library, &path, "cublasLtMatmulDescDestroy")?,
            set_desc: get(&library, &path, "cublasLtMatmulDescSetAttribute")?,
            create_layout: get(&library, &path, "cublasLtMatrixLayoutCreate")?,
            destroy_layout: get(&library, &path, "cublasLtMatrixLayoutDestroy")?,
            create_preference: get(&library, &path, "cublasLtMatmulPreferenceCreate")?,
            destroy_preference: get(&library, &path, "cublasLtMatmulPreferenceDestroy")?,
            set_preference: get(&library, &path, "cublasLtMatmulPreferenceSetAttribute")?,
            heuristic: get(&library, &path, "cublasLtMatmulAlgoGetHeuristic")?,
            matmul: get(&library, &path, "cublasLtMatmul")?,
        };
        // The symbols point into it.
        std::mem::forget(library);
        let workspace = gpu.zeros(WORKSPACE)?;
        gpu.stream().context().bind_to_thread().map_err(gpu.failed("start cuBLASLt"))?;
        let mut handle = null_mut();
        // SAFETY: it writes a handle to where it is told.
        checked(unsafe { create(&mut handle) }, gpu, "start cuBLASLt")?;
        // SAFETY: it takes nothing and returns a number.
        let version = unsafe { version() };
        let (handle, plans) = (Handle(handle), Mutex::default());
        Ok(CublasLt { functions, handle, workspace, plans, version, path })
    }

    /// As in `13.1.0`.
    pub(super) fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// Where it lies.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Has the GPU write `left · right` into `out`, whose lines are its rows; false where the library has no way that is
    /// the same each time, and nothing is done. `left` and `right` are bf16, or all are f32.
    ///
    /// # Safety
    /// The matrices are on this GPU, whose context is current, and their shapes fit.
    pub(super) unsafe fn product(&self, gpu: &Gpu, bf16: bool, matrices: [Lines; 3]) -> Result<bool, CudaError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = Shape {
            bf16,
            matrices: matrices.map(|lines| Lines { address: 0, ..lines }),
            alignments: matrices.map(|lines| 1 << lines.address.trailing_zeros().min(8)),
        };
        let plan = match plans.get(&shape) {
            Some(plan) => plan,
            None => {
                let none_before = plans.values().all(Option::is_some);
                let plan = self.plan(&shape).map_err(|code| failed(code, gpu, "plan a product"))?;
                if plan.is_none() {
                    let [left, _, out] = shape.matrices;
                    let inner = if left.transposed { left.lines } else { left.length };
                    let size = format!("{}×{}×{inner}", out.lines, out.length);
                    match none_before {
                        true => {
                            warn!("cuBLASLt has no way to a product of {size}; the trainer's own kernel computes it")
                        }
                        false => debug!("cuBLASLt has no way to a product of {size} either"),
                    }
                }
                &*plans.entry(shape).or_insert(plan)
            }
        };
        let Some(Plan { desc, layouts: [a, b, d], algorithm, workspace }) = plan else { return Ok(false) };
        let [left, right, out] = matrices.map(|lines| lines.address as *mut c_void);
        let room = self.workspace.device_ptr(gpu.stream()).0;
        let stream = gpu.stream().cu_stream().cast();
        // SAFETY: as cublasLt.h declares it; the plan was made for these shapes and alignments, the workspace is as large
        // as was said then, and the two factors are read before this returns. By columns, the transpose of `out` is the
        // transpose of `right` times that of `left`.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle.0,
                desc.0,
                &1.0,
                right,
                a.0,
                left,
                b.0,
                &0.0,
                out,
                d.0,
                out,
                d.0,
                algorithm,
                room as *mut c_void,
                *workspace,
                stream,
            )
        };
        checked(code, gpu, "multiply")?;
        Ok(true)
    }

    /// The library's first suggestion of those that sum each number in one sequence: a function of the shape, of the
    /// GPU's kind and of the library's version. It times nothing.
    fn plan(&self, shape: &Shape) -> Result<Option<Plan>, c_int> {
        let Functions { create_desc, set_desc, create_layout, create_preference, set_preference, .. } = &self.functions;
        let [left, right, out] = shape.matrices;
        let operands = if shape.bf16 { constant::R_16BF } else { constant::R_32F };
        let mut made =
            Made { functions: &self.functions, descs: Vec::new(), layouts: Vec::new(), preferences: Vec::new() };
        let mut opaque = null_mut();

        // SAFETY: all calls below are as cublasLt.h declares them. What is made is destroyed once, by `Made` or by the
        // plan's owner, and attributes have the sizes that it names.
        let code = unsafe { create_desc(&mut opaque, constant::COMPUTE_32F, constant::R_32F) };
        let desc = made.keep(code, opaque, |made| &mut made.descs)?;
        for (attribute, lines) in [(constant::DESC_TRANSA, right), (constant::DESC_TRANSB, left)] {
            let transposed = c_int::from(lines.transposed);
            // SAFETY: as above.
            succeeded(unsafe { set_desc(desc.0, attribute, (&raw const transposed).cast(), size_of::<c_int>()) })?;
        }
        let mut layouts = [Handle(null_mut()); 3];
        for (place, (kind, lines)) in
            [(operands, right), (operands, left), (constant::R_32F, out)].into_iter().enumerate()
        {
            let (rows, columns, stride) = (lines.length as u64, lines.lines as u64, lines.stride as i64);
            // SAFETY: as above.
            let code = unsafe { create_layout(&mut opaque, kind, rows, columns, stride) };
            layouts[place] = made.keep(code, opaque, |made| &mut made.layouts)?;
        }
        // SAFETY: as above.
        let code = unsafe { create_preference(&mut opaque) };
        let preference = made.keep(code, opaque, |made| &mut made.preferences)?;
        let (most, scheme) = (WORKSPACE, constant::REDUCTION_SCHEME_NONE);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: as above; the value lives as long as the call.
            succeeded(unsafe { set_preference(preference.0, attribute, value, size) })
        };
        set(constant::PREF_MAX_WORKSPACE_BYTES, (&raw const most).cast(), size_of::<usize>())?;
        set(constant::PREF_REDUCTION_SCHEME_MASK, (&raw const scheme).cast(), size_of::<u32>())?;
        let [left, right, out] = shape.alignments;
        for (attribute, alignment) in constant::PREF_MIN_ALIGNMENT_BYTES.into_iter().zip([right, left, out, out]) {
            set(attribute, (&raw const alignment).cast(), size_of::<u32>())?;
        }
        let (mut suggestion, mut count) = (Suggestion::default(), 0);
        let [a, b, d] = layouts.map(|layout| layout.0);
        // SAFETY: as above; there is room for the one suggestion that is asked for.
        let code = unsafe {
            (self.functions.heuristic)(self.handle.0, desc.0, a, b, d, d, preference.0, 1, &mut suggestion, &mut count)
        };
        // Whatever it says of a product that it has no way to: there is another.
        if code != 0 || count < 1 || suggestion.state != 0 || suggestion.workspace > WORKSPACE {
            return Ok(None);
        }
        made.descs.clear();
        made.layouts.clear();
        Ok(Some(Plan { desc, layouts, algorithm: suggestion.algorithm, workspace: suggestion.workspace }))
    }
}

/// What has been made for a plan, and is destroyed if none comes of it.
struct Made<'a> {
    functions: &'a Functions,
    descs: Vec<Handle>,
    layouts: Vec<Handle>,
    preferences: Vec<Handle>,
}

impl Made<'_> {
    fn keep(
        &mut self,
        code: c_int,
        made: Opaque,
        kind: impl FnOnce(&mut Self) -> &mut Vec<Handle>,
    ) -> Result<Handle, c_int> {
        succeeded(code)?;
        kind(self).push(Handle(made));
        Ok(Handle(made))
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let Functions { destroy_desc, destroy_layout, destroy_preference, .. } = self.functions;
        for (destroy, all) in
            [(destroy_desc, &self.descs), (destroy_layout, &self.layouts), (destroy_preference, &self.preferences)]
        {
            for made in all {
                // SAFETY: it was made by the function's counterpart, and nobody has it any longer.
                unsafe { destroy(made.0) };
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let plans = std::mem::take(self.plans.get_mut().unwrap_or_else(PoisonError::into_inner));
        for Plan { desc, layouts, .. } in plans.into_values().flatten() {
            drop(Made {
                functions: &self.functions,
                descs: vec![desc],
                layouts: layouts.to_vec(),
                preferences: Vec::new(),
            });
        }
        // SAFETY: it is not used after this.
        unsafe { (self.functions.destroy)(self.handle.0) };
    }
}

fn succeeded(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn checked(code: c_int, gpu: &Gpu, doing: &'static str) -> Result<(), CudaError> {
    succeeded(code).map_err(|code| failed(code, gpu, doing))
}

/// The names are those of `cublasStatus_t`.
fn failed(code: c_int, gpu: &Gpu, doing: &'static str) -> CudaError {
    let name = match code {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        _ => "an unknown status",
    };
    CudaError::Failed { gpu: gpu.number(), doing, cause: format!("cuBLASLt's error {code}, {name}") }
}
