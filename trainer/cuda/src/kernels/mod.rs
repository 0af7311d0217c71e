//! The kernels of `trainer/cuda/kernels` as functions that check shapes.

pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod attention_bf16;
pub(crate) mod launch;
pub(crate) mod loaded;
pub(crate) mod number;
pub(crate) mod rows;
pub(crate) mod sources;
