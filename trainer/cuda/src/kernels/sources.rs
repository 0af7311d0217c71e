//! The files of kernels.

/// A file of kernels.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name.
    pub file: &'static str,
    /// CUDA C++, which includes nothing.
    pub text: &'static str,
    /// The kernels in it.
    pub kernels: &'static [&'static str],
}

/// A file, the files that it needs before it, and its kernels.
macro_rules! source {
    ($file:literal, [$($before:literal),*], $kernels:expr) => {
        Source {
            file: $file,
            text: concat!(
                $(include_str!(concat!("../../kernels/", $before)),)*
                "#line 1\n",
                include_str!(concat!("../../kernels/", $file))
            ),
            kernels: &$kernels,
        }
    };
}

/// All kernels.
pub const SOURCES: [Source; 7] = [
    source!(
        "product.cu",
        ["fours.cu", "bf16.cu"],
        ["product", "product_bf16", "product_bf16_to_f32", "follow", "round_to_bf16"]
    ),
    source!("sums.cu", [], ["add", "sum_rows", "sum_all", "sum_bits", "sum_squares"]),
    source!("loss.cu", ["fours.cu", "bf16.cu"], ["cross_entropy", "cross_entropy_bf16"]),
    source!("adamw.cu", ["fours.cu"], ["adamw"]),
    source!(
        "rows.cu",
        ["fours.cu", "bf16.cu"],
        [
            "layer_norm",
            "layer_norm_bf16",
            "layer_norm_slope",
            "layer_norm_slope_bf16",
            "layer_norm_chunks",
            "layer_norm_chunks_bf16",
            "sum_chunks",
            "sum_chunks_bf16",
            "gelu",
            "gelu_slope",
            "follow_bf16",
            "round_parameters",
            "embed",
            "embed_slope",
        ]
    ),
    source!(
        "attention.cu",
        ["fours.cu", "heads.cu"],
        [
            "attention_64",
            "attention_queries_64",
            "attention_keys_64",
            "attention_128",
            "attention_queries_128",
            "attention_keys_128",
        ]
    ),
    source!(
        "attention_bf16.cu",
        ["fours.cu", "heads.cu", "bf16.cu", "tensor_cores.cu", "attention_tiles.cu"],
        [
            "attention_by_heads",
            "attention_means",
            "attention_bf16_64",
            "attention_bf16_queries_64",
            "attention_bf16_keys_64",
            "attention_bf16_128",
            "attention_bf16_queries_128",
            "attention_bf16_keys_128",
        ]
    ),
];
