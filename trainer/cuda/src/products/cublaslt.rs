//! cuBLASLt: products by NVIDIA's library.
//!
//! It is called without `cudarc`, which would round products of f32 to TF32, and which panics where the library is
//! missing.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use libloading::os::unix::{Library, Symbol};
use tracing::{debug, warn};

use crate::libraries::{self, Driver, PRODUCTS};
use crate::{CudaError, Surroundings};

/// Bytes of the workspace: what NVIDIA advises for the newest GPUs. It is the same on all GPUs, since the library's
/// choice of an algorithm depends on it.
const WORKSPACE: usize = 32 << 20;

/// Constants of cublasLt.h and library_types.h.
mod constant {
    use std::ffi::c_int;

    pub(super) const COMPUTE_32F: c_int = 68;
    pub(super) const R_32F: c_int = 0;
    pub(super) const R_16BF: c_int = 14;
    pub(super) const DESC_TRANSA: c_int = 3;
    pub(super) const DESC_TRANSB: c_int = 4;
    pub(super) const DESC_EPILOGUE: c_int = 7;
    pub(super) const DESC_BIAS_POINTER: c_int = 8;
    pub(super) const DESC_AUX_POINTER: c_int = 11;
    pub(super) const DESC_AUX_LD: c_int = 12;
    pub(super) const EPILOGUE_BIAS: c_int = 4;
    pub(super) const EPILOGUE_GELU_AUX_BIAS: c_int = 164;
    pub(super) const EPILOGUE_DGELU: c_int = 192;
    pub(super) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
    pub(super) const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
    /// Of A, B, C and D.
    pub(super) const PREF_MIN_ALIGNMENT_BYTES: [c_int; 4] = [5, 6, 7, 8];
    pub(super) const REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;
}

/// A pointer to any object of the library's.
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

/// The library's functions that are called.
#[derive(Debug)]
struct Functions {
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
pub(crate) struct CublasLt {
    functions: Functions,
    /// The GPU's number, and the stream that it computes in.
    gpu: usize,
    stream: Arc<CudaStream>,
    /// How each product is computed; none where the library has no way. The plans end before the handle.
    plans: Mutex<HashMap<Shape, Option<MatmulPlan>>>,
    handle: Owned,
    workspace: CudaSlice<u8>,
    version: usize,
    path: PathBuf,
}

/// An object of the library's, which ends with this. Any thread may use it.
#[derive(Debug)]
struct Owned {
    object: Opaque,
    destroy: Destroy,
}

// SAFETY: cuBLASLt's handles and descriptors belong to no thread, and only one thread at a time calls it.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    /// What a call that returned `code` has made.
    fn new(code: c_int, object: Opaque, destroy: &Symbol<Destroy>) -> Result<Owned, c_int> {
        succeeded(code).map(|()| Owned { object, destroy: **destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `destroy` is the counterpart of the function that made the object, and no other code has the object.
        unsafe { (self.destroy)(self.object) };
    }
}

/// A matrix as it lies in memory: `lines`, one after the other, `stride` numbers apart, of `length` numbers each. For
/// the library, which counts by columns, a line is a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lines {
    pub(crate) address: u64,
    pub(crate) lines: usize,
    pub(crate) length: usize,
    pub(crate) stride: usize,
    /// Whether the product takes this matrix's transpose.
    pub(crate) transposed: bool,
}

/// What the library does to a product before it writes it, and the addresses that it needs for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    Nothing,
    Bias { bias: u64 },
    Gelu { bias: u64, inputs: u64 },
    GeluSlope { inputs: u64 },
}

impl Then {
    /// The number of this epilogue; 0 for none. Then the addresses of a bias and of an auxiliary matrix, or 0.
    fn parts(self) -> (c_int, [u64; 2]) {
        match self {
            Then::Nothing => (0, [0; 2]),
            Then::Bias { bias } => (constant::EPILOGUE_BIAS, [bias, 0]),
            Then::Gelu { bias, inputs } => (constant::EPILOGUE_GELU_AUX_BIAS, [bias, inputs]),
            Then::GeluSlope { inputs } => (constant::EPILOGUE_DGELU, [0, inputs]),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Then::Nothing => "",
            Then::Bias { .. } => " with a bias",
            Then::Gelu { .. } => " with a bias and GELU",
            Then::GeluSlope { .. } => " with GELU's derivative",
        }
    }
}

/// A product that is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Whether both operands are bf16, and whether the result is. Else they are f32.
    pub(crate) bf16: bool,
    pub(crate) out_bf16: bool,
    /// Left, right and out.
    pub(crate) matrices: [Lines; 3],
    /// Whether it is added to what is there.
    pub(crate) adds: bool,
    /// Only with a result in bf16, whose type biases and auxiliary matrices share.
    pub(crate) then: Then,
}

impl Wanted {
    /// A product into f32, with nothing after it.
    pub(crate) fn plain(matrices: [Lines; 3], bf16: bool) -> Wanted {
        Wanted { bf16, out_bf16: false, matrices, adds: false, then: Then::Nothing }
    }

    fn shape(&self) -> Shape {
        let alignment = |address: u64| 1 << address.trailing_zeros().min(8);
        let (epilogue, addresses) = self.then.parts();
        Shape {
            bf16: self.bf16,
            out_bf16: self.out_bf16,
            matrices: self.matrices.map(|lines| Lines { address: 0, ..lines }),
            alignments: self.matrices.map(|lines| alignment(lines.address)),
            epilogue,
            alignments_after: addresses.map(alignment),
        }
    }
}

/// All that a choice of algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    bf16: bool,
    out_bf16: bool,
    /// Left, right and out, without their addresses.
    matrices: [Lines; 3],
    /// The alignment of each address in bytes, up to 256. Every buffer begins at a multiple of 256 bytes, and the model
    /// fixes where in a buffer a matrix lies: so equal products have equal alignments.
    alignments: [u32; 3],
    epilogue: c_int,
    /// Those of the bias and of the auxiliary matrix.
    alignments_after: [u32; 2],
}

/// How a product is computed.
#[derive(Debug)]
struct MatmulPlan {
    desc: Owned,
    /// Of right, left and out.
    layouts: [Owned; 3],
    algorithm: [u64; 8],
    workspace: usize,
}

impl CublasLt {
    /// The newest library that suits the driver.
    pub(crate) fn load(
        surroundings: &Surroundings,
        driver: &Driver,
        gpu: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<CublasLt, CudaError> {
        let (library, path) = libraries::newest(&PRODUCTS, surroundings, Some(driver))?;
        fn get<T>(library: &Library, path: &Path, symbol: &'static str) -> Result<Symbol<T>, CudaError> {
            // SAFETY: callers ask for the types that cublasLt.h has; the library is never unloaded.
            Ok(unsafe { libraries::function(library, path, symbol, "update it: pip install --upgrade nvidia-cublas") }?)
        }
        let create: Symbol<Create> = get(&library, &path, "cublasLtCreate")?;
        let destroy: Symbol<Destroy> = get(&library, &path, "cublasLtDestroy")?;
        let version: Symbol<unsafe extern "C" fn() -> usize> = get(&library, &path, "cublasLtGetVersion")?;
        let functions = Functions {
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
        let workspace = stream.alloc_zeros(WORKSPACE);
        let workspace = workspace.map_err(|error| CudaError::no_memory(gpu, WORKSPACE, error))?;
        let bound = stream.context().bind_to_thread();
        bound.map_err(|error| CudaError::failed(gpu, "start cuBLASLt", error))?;
        let mut handle = null_mut();
        // SAFETY: it writes a handle to the place given.
        let handle = Owned::new(unsafe { create(&mut handle) }, handle, &destroy);
        let handle = handle.map_err(|code| failed(code, gpu, "start cuBLASLt"))?;
        // SAFETY: it takes nothing and returns a number.
        let version = unsafe { version() };
        let (stream, plans) = (Arc::clone(stream), Mutex::default());
        Ok(CublasLt { functions, gpu, stream, plans, handle, workspace, version, path })
    }

    /// As in `13.1.0`.
    pub(crate) fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// Where it lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Has the GPU compute the product, whose lines are its rows. Returns false, and does nothing, where the library
    /// has no algorithm that gives the same bits each time.
    ///
    /// # Safety
    /// The matrices are on this GPU, whose context is current, and their shapes fit.
    pub(crate) unsafe fn product(&self, wanted: &Wanted) -> Result<bool, CudaError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let (shape, matrices) = (wanted.shape(), wanted.matrices);
        let plan = match plans.get(&shape) {
            Some(plan) => plan,
            None => {
                let none_before = plans.iter().all(|(other, plan)| plan.is_some() || other.epilogue != shape.epilogue);
                let plan = self.plan(&shape, wanted.then).map_err(|code| failed(code, self.gpu, "plan a product"))?;
                if plan.is_none() {
                    let [left, _, out] = shape.matrices;
                    let inner = if left.transposed { left.lines } else { left.length };
                    let size = format!("{}×{}×{inner}{}", out.lines, out.length, wanted.then.words());
                    match none_before {
                        true => {
                            warn!("cuBLASLt has no algorithm for a product of {size}; the trainer's kernels compute it")
                        }
                        false => debug!("cuBLASLt has no algorithm for a product of {size} either"),
                    }
                }
                &*plans.entry(shape).or_insert(plan)
            }
        };
        let Some(MatmulPlan { desc, layouts: [a, b, d], algorithm, workspace }) = plan else { return Ok(false) };
        self.name_addresses(desc, wanted.then).map_err(|code| failed(code, self.gpu, "multiply"))?;
        let [left, right, out] = matrices.map(|lines| lines.address as *mut c_void);
        let beta: f32 = if wanted.adds { 1.0 } else { 0.0 };
        let room = self.workspace.device_ptr(&self.stream).0;
        let stream = self.stream.cu_stream().cast();
        // SAFETY: as cublasLt.h declares it; the plan was made for these shapes and alignments, the workspace is as
        // large as was said then, and the two factors are read before this returns. By columns, the transpose of `out`
        // is the transpose of `right` times that of `left`.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle.object,
                desc.object,
                &1.0,
                right,
                a.object,
                left,
                b.object,
                &beta,
                out,
                d.object,
                out,
                d.object,
                algorithm,
                room as *mut c_void,
                *workspace,
                stream,
            )
        };
        succeeded(code).map_err(|code| self.why(code))?;
        Ok(true)
    }

    /// Why a product was not launched. Of a GPU that has failed the library only says that it could not launch: the
    /// driver knows what happened.
    fn why(&self, code: c_int) -> CudaError {
        // What it says of a stream that is being captured is not the cause.
        const OF_CAPTURES: std::ops::RangeInclusive<u32> = 900..=909;
        match self.stream.synchronize() {
            Err(error) if !OF_CAPTURES.contains(&(error.0 as u32)) => CudaError::failed(self.gpu, "multiply", error),
            _ => failed(code, self.gpu, "multiply"),
        }
    }

    /// Tells the library where the bias and the auxiliary matrix lie.
    fn name_addresses(&self, desc: &Owned, then: Then) -> Result<(), c_int> {
        let attributes = [constant::DESC_BIAS_POINTER, constant::DESC_AUX_POINTER];
        for (attribute, address) in attributes.into_iter().zip(then.parts().1).filter(|(_, address)| *address != 0) {
            // SAFETY: as cublasLt.h declares it; the attribute is a pointer.
            succeeded(unsafe {
                (self.functions.set_desc)(desc.object, attribute, (&raw const address).cast(), size_of::<u64>())
            })?;
        }
        Ok(())
    }

    /// Asks for an epilogue. An auxiliary matrix has the result's strides. The addresses are named already here, since
    /// the library takes their alignment from them.
    fn ask_for(&self, desc: &Owned, shape: &Shape, then: Then) -> Result<(), c_int> {
        let (epilogue, [_, auxiliary]) = then.parts();
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: as cublasLt.h declares it; the value lives as long as the call, and has the attribute's size.
            succeeded(unsafe { (self.functions.set_desc)(desc.object, attribute, value, size) })
        };
        set(constant::DESC_EPILOGUE, (&raw const epilogue).cast(), size_of::<c_int>())?;
        if auxiliary != 0 {
            let stride = shape.matrices[2].stride as i64;
            set(constant::DESC_AUX_LD, (&raw const stride).cast(), size_of::<i64>())?;
        }
        self.name_addresses(desc, then)
    }

    /// The library's first suggestion among the algorithms that sum each number in one sequence, or in parts that are
    /// kept in f32 and summed in a second step. It depends only on the shape, the GPU's kind and the library's version:
    /// the library measures no times for it.
    fn plan(&self, shape: &Shape, then: Then) -> Result<Option<MatmulPlan>, c_int> {
        let Functions { create_desc, set_desc, create_layout, create_preference, set_preference, .. } = &self.functions;
        let Functions { destroy_desc, destroy_layout, destroy_preference, .. } = &self.functions;
        let [left, right, out] = shape.matrices;
        let kind = |bf16: bool| if bf16 { constant::R_16BF } else { constant::R_32F };
        let operands = kind(shape.bf16);
        let mut object = null_mut();

        // SAFETY: all calls below are as cublasLt.h declares them, and attributes have the sizes that it names.
        let code = unsafe { create_desc(&mut object, constant::COMPUTE_32F, constant::R_32F) };
        let desc = Owned::new(code, object, destroy_desc)?;
        for (attribute, lines) in [(constant::DESC_TRANSA, right), (constant::DESC_TRANSB, left)] {
            let transposed = c_int::from(lines.transposed);
            // SAFETY: as above.
            succeeded(unsafe { set_desc(desc.object, attribute, (&raw const transposed).cast(), size_of::<c_int>()) })?;
        }
        // A matrix whose rows are no multiple of 16 bytes cannot be one of GELU's, and the library may say so already
        // here.
        if then != Then::Nothing && self.ask_for(&desc, shape, then).is_err() {
            return Ok(None);
        }
        let layout = |kind, lines: Lines| {
            let (rows, columns, stride) = (lines.length as u64, lines.lines as u64, lines.stride as i64);
            let mut object = null_mut();
            // SAFETY: as above.
            let code = unsafe { create_layout(&mut object, kind, rows, columns, stride) };
            Owned::new(code, object, destroy_layout)
        };
        let layouts = [layout(operands, right)?, layout(operands, left)?, layout(kind(shape.out_bf16), out)?];
        // SAFETY: as above.
        let code = unsafe { create_preference(&mut object) };
        let preference = Owned::new(code, object, destroy_preference)?;
        let (most, scheme) = (WORKSPACE, constant::REDUCTION_SCHEME_COMPUTE_TYPE);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: as above; the value lives as long as the call.
            succeeded(unsafe { set_preference(preference.object, attribute, value, size) })
        };
        set(constant::PREF_MAX_WORKSPACE_BYTES, (&raw const most).cast(), size_of::<usize>())?;
        set(constant::PREF_REDUCTION_SCHEME_MASK, (&raw const scheme).cast(), size_of::<u32>())?;
        let [left, right, out] = shape.alignments;
        for (attribute, alignment) in constant::PREF_MIN_ALIGNMENT_BYTES.into_iter().zip([right, left, out, out]) {
            set(attribute, (&raw const alignment).cast(), size_of::<u32>())?;
        }
        let (mut suggestion, mut count) = (Suggestion::default(), 0);
        let [a, b, d] = layouts.each_ref().map(|layout| layout.object);
        // SAFETY: as above; there is room for the one suggestion that is asked for.
        let code = unsafe {
            let (handle, desc, preference) = (self.handle.object, desc.object, preference.object);
            (self.functions.heuristic)(handle, desc, a, b, d, d, preference, 1, &mut suggestion, &mut count)
        };
        // Whatever the reason why it has no algorithm: the trainer's own kernel computes the product.
        if code != 0 || count < 1 || suggestion.state != 0 || suggestion.workspace > WORKSPACE {
            return Ok(None);
        }
        Ok(Some(MatmulPlan { desc, layouts, algorithm: suggestion.algorithm, workspace: suggestion.workspace }))
    }
}

fn succeeded(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// The names are those of `cublasStatus_t`.
fn failed(code: c_int, gpu: usize, doing: &'static str) -> CudaError {
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
    CudaError::Failed { gpu, doing, cause: format!("cuBLASLt's error {code}, {name}") }
}
