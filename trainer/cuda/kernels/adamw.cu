// A step of AdamW, as the host does it in `model::adamw`.

#define THREADS 256

// Moves all parameters by scale * gradient, a thread four of them. `rate` is divided by its own correction, `root` is the
// correction of the square root, `keep` is what decay leaves. Parameters that decay and such that do not take turns:
// `ends` has where each of these `pieces` ends, and the first, which may be empty, decays.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(float *__restrict__ parameters, float *__restrict__ mean, float *__restrict__ square,
      const float *__restrict__ gradient, const long long *__restrict__ ends, int pieces, long long count, float scale,
      float beta1, float beta2, float rate, float keep, float root, float epsilon)
{
    const long long first = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
    if (first >= count)
        return;
    // The first piece that ends behind the thread's numbers' begin.
    int piece = 0;
    for (int last = pieces - 1; piece < last;) {
        const int middle = (piece + last) / 2;
        if (ends[middle] > first)
            last = middle;
        else
            piece = middle + 1;
    }
    const bool whole = first + 4 <= count && aligned(parameters, 4) && aligned(mean, 4) && aligned(square, 4) &&
                       aligned(gradient, 4);
    Four p = four(parameters, first, count, whole), m = four(mean, first, count, whole);
    Four v = four(square, first, count, whole);
    const Four slopes = four(gradient, first, count, whole);
    for (int i = 0; i < 4; i++) {
        while (piece < pieces - 1 && first + i >= ends[piece])
            piece++;
        const float slope = slopes.at[i] * scale;
        m.at[i] = beta1 * m.at[i] + (1.0f - beta1) * slope;
        v.at[i] = beta2 * v.at[i] + (1.0f - beta2) * slope * slope;
        p.at[i] = p.at[i] * (piece % 2 == 0 ? keep : 1.0f) - rate * m.at[i] / (sqrtf(v.at[i]) / root + epsilon);
    }
    put(mean, first, count, whole, m);
    put(square, first, count, whole, v);
    put(parameters, first, count, whole, p);
}
