//! The files of kernels, in the order of compilation: what each includes comes before it.

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

/// All kernels.
pub const SOURCES: [Source; 7] = [
    Source {
        file: "product.cu",
        text: concat!(
            include_str!("../../kernels/fours.cu"),
            include_str!("../../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../../kernels/product.cu")
        ),
        kernels: &["product", "product_bf16", "product_bf16_to_f32", "follow", "round_to_bf16"],
    },
    Source {
        file: "sums.cu",
        text: include_str!("../../kernels/sums.cu"),
        kernels: &["add", "sum_rows", "sum_all", "sum_squares"],
    },
    Source {
        file: "loss.cu",
        text: concat!(
            include_str!("../../kernels/fours.cu"),
            include_str!("../../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../../kernels/loss.cu")
        ),
        kernels: &["cross_entropy", "cross_entropy_bf16"],
    },
    Source {
        file: "adamw.cu",
        text: concat!(include_str!("../../kernels/fours.cu"), "#line 1\n", include_str!("../../kernels/adamw.cu")),
        kernels: &["adamw"],
    },
    Source {
        file: "rows.cu",
        text: concat!(
            include_str!("../../kernels/fours.cu"),
            include_str!("../../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../../kernels/rows.cu")
        ),
        kernels: &[
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
        ],
    },
    Source {
        file: "attention.cu",
        text: concat!(
            include_str!("../../kernels/fours.cu"),
            include_str!("../../kernels/heads.cu"),
            "#line 1\n",
            include_str!("../../kernels/attention.cu")
        ),
        kernels: &[
            "attention_64",
            "attention_queries_64",
            "attention_keys_64",
            "attention_128",
            "attention_queries_128",
            "attention_keys_128",
        ],
    },
    Source {
        file: "attention_bf16.cu",
        text: concat!(
            include_str!("../../kernels/fours.cu"),
            include_str!("../../kernels/heads.cu"),
            include_str!("../../kernels/bf16.cu"),
            include_str!("../../kernels/tensor_cores.cu"),
            include_str!("../../kernels/attention_tiles.cu"),
            "#line 1\n",
            include_str!("../../kernels/attention_bf16.cu")
        ),
        kernels: &[
            "attention_by_heads",
            "attention_means",
            "attention_bf16_64",
            "attention_bf16_queries_64",
            "attention_bf16_keys_64",
            "attention_bf16_128",
            "attention_bf16_queries_128",
            "attention_bf16_keys_128",
        ],
    },
];
