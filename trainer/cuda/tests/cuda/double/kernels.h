// The trainer's kernels as C++, and a way to launch each by its name.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "on_cpu.h"

#include "device.h"

#include "../../../kernels/fours.cu"
#include "../../../kernels/bf16.cu"
#include "../../../kernels/product.cu"
#undef THREADS
#include "../../../kernels/sums.cu"
#undef THREADS
#include "../../../kernels/loss.cu"
#undef THREADS
#include "../../../kernels/adamw.cu"
#undef THREADS
#undef ACROSS
#include "../../../kernels/rows.cu"
#undef THREADS
#undef WARP
#undef EACH
#undef DEPTH
#include "../../../kernels/heads.cu"
#include "../../../kernels/attention.cu"
#undef THREADS
#undef KERNELS
#include "tensor_cores.h"
#include "../../../kernels/attention_tiles.cu"
#include "../../../kernels/attention_bf16.cu"
#undef THREADS
#undef KERNELS

namespace {

using Call = std::function<Work(void **)>;

// Copies the arguments that a launch points to. Returns a call of the kernel with them.
template <class... A, size_t... I> Call caller(void (*kernel)(A...), std::index_sequence<I...>)
{
    return [kernel](void **given) -> Work {
        std::tuple<std::decay_t<A>...> copies(*static_cast<std::decay_t<A> *>(given[I])...);
        return [kernel, copies] { std::apply(kernel, copies); };
    };
}
template <class... A> Call caller(void (*kernel)(A...)) { return caller(kernel, std::index_sequence_for<A...>()); }

#define KERNEL(name) {#name, caller(name)}
const std::map<std::string, Call> kernels = {
    KERNEL(product), KERNEL(product_bf16), KERNEL(product_bf16_to_f32), KERNEL(follow), KERNEL(round_to_bf16),
    KERNEL(add), KERNEL(sum_rows), KERNEL(sum_all), KERNEL(sum_bits), KERNEL(sum_squares), KERNEL(cross_entropy),
    KERNEL(cross_entropy_bf16), KERNEL(adamw), KERNEL(layer_norm), KERNEL(layer_norm_bf16), KERNEL(layer_norm_slope),
    KERNEL(layer_norm_slope_bf16), KERNEL(layer_norm_chunks), KERNEL(layer_norm_chunks_bf16), KERNEL(sum_chunks),
    KERNEL(sum_chunks_bf16), KERNEL(gelu), KERNEL(gelu_slope), KERNEL(follow_bf16), KERNEL(round_parameters),
    KERNEL(embed), KERNEL(embed_slope), KERNEL(attention_64), KERNEL(attention_queries_64), KERNEL(attention_keys_64),
    KERNEL(attention_128), KERNEL(attention_queries_128), KERNEL(attention_keys_128), KERNEL(attention_by_heads),
    KERNEL(attention_means), KERNEL(attention_bf16_64), KERNEL(attention_bf16_queries_64),
    KERNEL(attention_bf16_keys_64), KERNEL(attention_bf16_128), KERNEL(attention_bf16_queries_128),
    KERNEL(attention_bf16_keys_128)};

} // namespace
