// A double of cuBLASLt for tests on machines without a GPU: the functions that the trainer calls, as plain loops over
// the memory of the driver's double. It shows that shapes, strides, types and attributes are right, and nothing of the
// real library's choices, results or speed. It is strict: it knows only the attributes that the trainer sets, finds no
// algorithm unless those that sum in parts are ruled out, and takes an algorithm only for the shapes, alignments and
// workspace that it was suggested for.
//
// It sums from the end of the inner dimension, so that its bits differ from those of the trainer's own kernel.
// FAKE_CUDA changes it: `cublaslt=0` (it cannot start), `ways=0` (it has no algorithm for any product).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <string>

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { COMPUTE_32F = 68, R_32F = 0, R_16BF = 14 };

struct Desc {
    int compute, scale, transposed[2] = {0, 0};
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
    float *out;
};

float number(const Layout &layout, const void *from, bool transposed, uint64_t row, uint64_t column)
{
    const uint64_t place = transposed ? row * layout.stride + column : column * layout.stride + row;
    if (layout.type == R_32F)
        return static_cast<const float *>(from)[place];
    const uint32_t bits = (uint32_t) static_cast<const uint16_t *>(from)[place] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
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
            of.out[column * of.d.stride + row] = sum;
        }
}

bool fit(const Desc &desc, const Layout &a, const Layout &b, const Layout &c, const Layout &d)
{
    const auto rows = [](const Layout &layout, int transposed) { return transposed ? layout.columns : layout.rows; };
    const auto columns = [](const Layout &layout, int transposed) { return transposed ? layout.rows : layout.columns; };
    const bool types = a.type == b.type && (a.type == R_32F || a.type == R_16BF) && d.type == R_32F && c.type == R_32F;
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
    add(desc.transposed[0]), add(desc.transposed[1]);
    return hash;
}

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
LT cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const int *value, size_t bytes)
{
    if ((attribute != 3 && attribute != 4) || bytes != sizeof *value || *value < 0 || *value > 1)
        return INVALID_VALUE;
    return desc->transposed[attribute - 3] = *value, SUCCESS;
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
    if (preference->schemes != 0 || preference->workspace < 1 << 20 || !setting("ways", 1))
        return NOT_SUPPORTED;
    *suggestion = {};
    suggestion->algorithm.is = shape_of(*desc, *a, *b, *d);
    suggestion->algorithm.of[0] = suggestion->workspace = 1 << 20;
    for (int matrix = 0; matrix < 4; matrix++)
        suggestion->algorithm.of[1 + matrix] = preference->alignments[matrix];
    return *count = 1, SUCCESS;
}
LT cublasLtMatmul(void *handle, const Desc *desc, const float *alpha, const void *left, const Layout *a,
                  const void *right, const Layout *b, const float *beta, const void *, const Layout *c, void *out,
                  const Layout *d, const Algorithm *algorithm, void *workspace, size_t bytes, void *stream)
{
    const void *addresses[4] = {left, right, out, out};
    if (!handle || !stream || *alpha != 1 || *beta != 0 || !fit(*desc, *a, *b, *c, *d))
        return INVALID_VALUE;
    if (algorithm->is != shape_of(*desc, *a, *b, *d) || bytes < algorithm->of[0])
        return INVALID_VALUE;
    for (int matrix = 0; matrix < 4; matrix++)
        if ((uint64_t)addresses[matrix] % algorithm->of[1 + matrix] != 0)
            return INVALID_VALUE;
    const auto in_memory = [](const void *address, size_t bytes) { return within((unsigned long long)address, bytes); };
    if (!in_memory(workspace, bytes) || !in_memory(left, bytes_of(*a)) || !in_memory(right, bytes_of(*b)) ||
        !in_memory(out, bytes_of(*d)))
        return INVALID_VALUE;
    auto *product = new Product{*desc, *a, *b, *d, left, right, static_cast<float *>(out)};
    return enqueue(stream, multiply, product, [](void *given) { delete static_cast<Product *>(given); });
}
