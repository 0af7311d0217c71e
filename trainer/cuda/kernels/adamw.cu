// A step of AdamW, as the host does it in `model::adamw`.

#define THREADS 256

// Moves a tensor's parameters by scale * gradient. `rate` is divided by its own correction, `root` is the correction of
// the square root, `keep` is what decay leaves.
extern "C" __global__ void adamw(float *parameters, float *mean, float *square, const float *gradient, long long count,
                                 float scale, float beta1, float beta2, float rate, float keep, float root,
                                 float epsilon)
{
    const long long place = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (place >= count)
        return;
    const float slope = gradient[place] * scale;
    const float m = beta1 * mean[place] + (1.0f - beta1) * slope;
    const float v = beta2 * square[place] + (1.0f - beta2) * slope * slope;
    mean[place] = m;
    square[place] = v;
    parameters[place] = parameters[place] * keep - rate * m / (sqrtf(v) / root + epsilon);
}
