// A double of cuBLASLt for tests on machines without a GPU: the functions that the trainer calls, as plain loops over
// the memory of the driver's double. It shows that shapes, strides, types and attributes are right, and nothing of the
// real library's choices, results or speed. It is strict: it knows only the attributes that the trainer sets, finds no
// algorithm unless those that sum in parts keep them in f32 and add them in a second step, and takes an algorithm only for the shapes, epilogue, alignments
// and workspace that it was suggested for. Of epilogues it takes what NVIDIA documents: a bias of the result's type, for
// each row of the result as the library counts, and GELU's inputs of that type, whose columns begin at multiples of 8
// numbers; all in the GPU's memory.
//
// It sums from the end of the inner dimension, so that its bits differ from those of the trainer's own kernel.
// FAKE_CUDA changes it: `cublaslt=0` (it cannot start), `ways=0` (it has no algorithm for any product),
// `epilogues=0` (it has none for products with something after them).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <string>

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { COMPUTE_32F = 68, R_32F = 0, R_16BF = 14 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4, EPILOGUE_GELU_AUX_BIAS = 164, EPILOGUE_DGELU = 192 };

struct Desc {
    int compute, scale, transposed[2] = {0, 0}, epilogue = EPILOGUE_DEFAULT;
    uint16_t *bias = nullptr, *aux = nullptr;
    int64_t aux_stride = 0;

    bool has_bias() const { return epilogue == EPILOGUE_BIAS || epilogue == EPILOGUE_GELU_AUX_BIAS; }
    bool has_aux() const { return epilogue == EPILOGUE_GELU_AUX_BIAS || epilogue == EPILOGUE_DGELU; }
};
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t schemes = 7, alignments[4] = {256, 256, 256, 256};
};
struct Algorithm {
    uint64_t is;
    // The workspace, and the alignments of A, B, C, D, bias and aux.
    uint64_t of[7];
};
struct Suggestion {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// Functions of the driver's double.
int (*enqueue)(void *, void (*)(void *), void *, void (*)(void *));
bool (*within)(unsigned long long, size_t);

long setting(const char *name, long otherwise)
{
    const char *all = getenv("FAKE_CUDA");
    const std::string wanted = std::string(name) + "=";
    const char *found = all ? strstr(all, wanted.c_str()) : nullptr;
    return found ? atol(found + wanted.size()) : otherwise;
}

size_t size_of(const Layout &layout) { return layout.type == R_32F ? 4 : 2; }
size_t bytes_of(const Layout &layout) { return ((layout.columns - 1) * layout.stride + layout.rows) * size_of(layout); }

struct Product {
    const Desc desc;
    const Layout a, b, d;
    const void *left, *right;
    void *out;
    const float beta;
};

float widened(uint16_t number)
{
    const uint32_t bits = (uint32_t)number << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to the nearest, ties to even. (No test's product is NaN.)
uint16_t rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float number(const Layout &layout, const void *from, bool transposed, uint64_t row, uint64_t column)
{
    const uint64_t place = transposed ? row * layout.stride + column : column * layout.stride + row;
    if (layout.type == R_32F)
        return static_cast<const float *>(from)[place];
    return widened(static_cast<const uint16_t *>(from)[place]);
}

double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

// What follows the sum of one number of the product.
float after(const Desc &desc, float sum, uint64_t row, uint64_t column)
{
    if (desc.has_bias())
        sum += widened(desc.bias[row]);
    if (!desc.has_aux())
        return sum;
    uint16_t &aux = desc.aux[column * desc.aux_stride + row];
    if (desc.epilogue == EPILOGUE_GELU_AUX_BIAS) {
        aux = rounded(sum);
        return gelu(sum);
    }
    const double x = widened(aux), step = 1e-4;
    return sum * (gelu(x + step) - gelu(x - step)) / (2 * step);
}

void multiply(void *given)
{
    const Product &of = *static_cast<Product *>(given);
    const uint64_t inner = of.desc.transposed[0] ? of.a.rows : of.a.columns;
    for (uint64_t column = 0; column < of.d.columns; column++)
        for (uint64_t row = 0; row < of.d.rows; row++) {
            float sum = 0;
            for (uint64_t i = inner; i-- > 0;)
                sum += number(of.a, of.left, of.desc.transposed[0], row, i) *
                       number(of.b, of.right, of.desc.transposed[1], i, column);
            const uint64_t place = column * of.d.stride + row;
            if (of.d.type == R_32F) {
                float &out = static_cast<float *>(of.out)[place];
                out = of.beta ? sum + out : sum;
            } else {
                static_cast<uint16_t *>(of.out)[place] = rounded(after(of.desc, sum, row, column));
            }
        }
}

bool fit(const Desc &desc, const Layout &a, const Layout &b, const Layout &c, const Layout &d)
{
    const auto rows = [](const Layout &layout, int transposed) { return transposed ? layout.columns : layout.rows; };
    const auto columns = [](const Layout &layout, int transposed) { return transposed ? layout.rows : layout.columns; };
    const bool types = a.type == b.type && (a.type == R_32F || a.type == R_16BF) && c.type == d.type &&
                       (d.type == R_32F || (d.type == R_16BF && a.type == R_16BF));
    if (desc.epilogue != EPILOGUE_DEFAULT && d.type != R_16BF)
        return false;
    if (desc.has_aux() && (desc.aux_stride % 8 || desc.aux_stride < (int64_t)d.rows || (uint64_t)desc.aux % 16))
        return false;
    return types && desc.compute == COMPUTE_32F && desc.scale == R_32F && &c == &d &&
           rows(a, desc.transposed[0]) == d.rows && columns(b, desc.transposed[1]) == d.columns &&
           columns(a, desc.transposed[0]) == rows(b, desc.transposed[1]);
}

// A hash of everything that an algorithm was suggested for.
uint64_t shape_of(const Desc &desc, const Layout &a, const Layout &b, const Layout &d)
{
    uint64_t hash = 14695981039346656037u;
    const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
    for (const Layout *layout : {&a, &b, &d})
        add(layout->type), add(layout->rows), add(layout->columns), add(layout->stride);
    add(desc.transposed[0]), add(desc.transposed[1]), add(desc.epilogue), add(desc.aux_stride);
    return hash;
}

uint64_t alignment(const void *address) { return address ? std::min<uint64_t>((uint64_t)address & -(uint64_t)address, 256) : 1; }

} // namespace

#define LT extern "C" __attribute__((visibility("default"))) int

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130100; }
LT cublasLtCreate(void **handle)
{
    enqueue = (decltype(enqueue))dlsym(RTLD_DEFAULT, "fakeEnqueue");
    within = (decltype(within))dlsym(RTLD_DEFAULT, "fakeWithin");
    if (!enqueue || !within || !setting("cublaslt", 1))
        return NOT_INITIALIZED;
    return *handle = new int, SUCCESS;
}
LT cublasLtDestroy(int *handle) { return delete handle, SUCCESS; }
LT cublasLtMatmulDescCreate(Desc **desc, int compute, int scale) { return *desc = new Desc{compute, scale}, SUCCESS; }
LT cublasLtMatmulDescDestroy(Desc *desc) { return delete desc, SUCCESS; }
LT cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t bytes)
{
    const bool is_int = attribute == 3 || attribute == 4 || attribute == 7;
    if (bytes != (is_int ? sizeof(int) : sizeof(int64_t)))
        return INVALID_VALUE;
    const int given = is_int ? *static_cast<const int *>(value) : 0;
    switch (attribute) {
    case 3:
    case 4:
        return given < 0 || given > 1 ? INVALID_VALUE : (desc->transposed[attribute - 3] = given, SUCCESS);
    case 7:
        if (given != EPILOGUE_BIAS && given != EPILOGUE_GELU_AUX_BIAS && given != EPILOGUE_DGELU)
            return INVALID_VALUE;
        return desc->epilogue = given, SUCCESS;
    case 8: return memcpy(&desc->bias, value, bytes), SUCCESS;
    case 11: return memcpy(&desc->aux, value, bytes), SUCCESS;
    case 12: return memcpy(&desc->aux_stride, value, bytes), SUCCESS;
    default: return INVALID_VALUE;
    }
}
LT cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t stride)
{
    if (rows == 0 || columns == 0 || stride < (int64_t)rows)
        return INVALID_VALUE;
    return *layout = new Layout{type, rows, columns, stride}, SUCCESS;
}
LT cublasLtMatrixLayoutDestroy(Layout *layout) { return delete layout, SUCCESS; }
LT cublasLtMatmulPreferenceCreate(Preference **preference) { return *preference = new Preference, SUCCESS; }
LT cublasLtMatmulPreferenceDestroy(Preference *preference) { return delete preference, SUCCESS; }
LT cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t bytes)
{
    if (bytes != (attribute == 1 ? sizeof(uint64_t) : sizeof(uint32_t)))
        return INVALID_VALUE;
    if (attribute == 1)
        memcpy(&preference->workspace, value, bytes);
    else if (attribute == 3)
        memcpy(&preference->schemes, value, bytes);
    else if (attribute >= 5 && attribute <= 8)
        memcpy(&preference->alignments[attribute - 5], value, bytes);
    else
        return INVALID_VALUE;
    return SUCCESS;
}
LT cublasLtMatmulAlgoGetHeuristic(void *, const Desc *desc, const Layout *a, const Layout *b, const Layout *c,
                                  const Layout *d, const Preference *preference, int wanted, Suggestion *suggestion,
                                  int *count)
{
    *count = 0;
    if (wanted < 1 || !fit(*desc, *a, *b, *c, *d))
        return INVALID_VALUE;
    if (preference->schemes != 2 || preference->workspace < 1 << 20 || !setting("ways", 1))
        return NOT_SUPPORTED;
    if (desc->epilogue != EPILOGUE_DEFAULT && !setting("epilogues", 1))
        return NOT_SUPPORTED;
    *suggestion = {};
    suggestion->algorithm.is = shape_of(*desc, *a, *b, *d);
    suggestion->algorithm.of[0] = suggestion->workspace = 1 << 20;
    for (int matrix = 0; matrix < 4; matrix++)
        suggestion->algorithm.of[1 + matrix] = preference->alignments[matrix];
    suggestion->algorithm.of[5] = alignment(desc->bias), suggestion->algorithm.of[6] = alignment(desc->aux);
    return *count = 1, SUCCESS;
}
LT cublasLtMatmul(void *handle, const Desc *desc, const float *alpha, const void *left, const Layout *a,
                  const void *right, const Layout *b, const float *beta, const void *, const Layout *c, void *out,
                  const Layout *d, const Algorithm *algorithm, void *workspace, size_t bytes, void *stream)
{
    const void *addresses[6] = {left, right, out, out, desc->bias, desc->aux};
    if (!handle || !stream || *alpha != 1 || (*beta != 0 && *beta != 1) || !fit(*desc, *a, *b, *c, *d))
        return INVALID_VALUE;
    if (*beta == 1 && d->type != R_32F)
        return INVALID_VALUE;
    if (algorithm->is != shape_of(*desc, *a, *b, *d) || bytes < algorithm->of[0])
        return INVALID_VALUE;
    for (int matrix = 0; matrix < 6; matrix++)
        if ((uint64_t)addresses[matrix] % algorithm->of[1 + matrix] != 0)
            return INVALID_VALUE;
    const auto in_memory = [](const void *address, size_t bytes) { return within((unsigned long long)address, bytes); };
    if (!in_memory(workspace, bytes) || !in_memory(left, bytes_of(*a)) || !in_memory(right, bytes_of(*b)) ||
        !in_memory(out, bytes_of(*d)))
        return INVALID_VALUE;
    if ((desc->has_bias() && !in_memory(desc->bias, 2 * d->rows)) ||
        (desc->has_aux() && !in_memory(desc->aux, 2 * ((d->columns - 1) * desc->aux_stride + d->rows))))
        return INVALID_VALUE;
    auto *product = new Product{*desc, *a, *b, *d, left, right, out, *beta};
    const int launched = enqueue(stream, multiply, product, [](void *given) { delete static_cast<Product *>(given); });
    return launched ? EXECUTION_FAILED : SUCCESS;
}
