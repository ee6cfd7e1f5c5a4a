// RMS norm, alone and with the residual addition before it.
//
// Invariant: the result of a row depends on that row only. Thread t sums the packs t, t + 256, ... of the row in
// order, then the block sums its threads in a tree. Alignment changes the loads, not the order.

#include "element.cuh"

namespace rms {

constexpr u32 THREADS = 256;

// Normalises row blockIdx.x. Without ADD it does not write x. With ADD it first adds y to x, rounds the sum to T and stores it in x.
template <class T, bool ADD>
__device__ void row(T *x, const T *y, const float *weight, float eps, u32 width, T *out) {
    constexpr u32 N = Pack<T>::N;
    __shared__ float shared[THREADS / WARP];
    const u64 start = (u64)blockIdx.x * width;
    x += start;
    out += start;
    if (ADD) y += start;
    const bool wide = is_aligned(x) && is_aligned(out) && (!ADD || is_aligned(y));
    float values[N], others[N];
    float sum = 0.0f;
    for (u32 at = threadIdx.x * N; at < width; at += THREADS * N) {
        load_pack(x + at, width - at, wide, values);
        if (ADD) {
            load_pack(y + at, width - at, wide, others);
            for (u32 i = 0; i < N; i++) values[i] = to_float(from_float<T>(values[i] + others[i]));
            store_pack(x + at, width - at, wide, values);
        }
        for (u32 i = 0; i < N; i++) sum = fmaf(values[i], values[i], sum);
    }
    const float mean = block_sum<THREADS / WARP>(sum, shared) / (float)width;
    const float scale = 1.0f / sqrtf(mean + eps);
    // The same thread wrote these packs, so it may read them without a barrier.
    for (u32 at = threadIdx.x * N; at < width; at += THREADS * N) {
        load_pack(x + at, width - at, wide, values);
        for (u32 i = 0; i < N; i++) {
            if (at + i < width) values[i] = values[i] * scale * weight[at + i];
        }
        store_pack(out + at, width - at, wide, values);
    }
}

} // namespace rms

// rms_norm_T: out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight.
// add_rms_norm_T: x[r] += y[r], then the same.
// Shapes: x, y and out [gridDim.x][width]; weight [width], f32. 256 threads per block.
#define NORM_KERNELS(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        rms_norm_##NAME(const T *x, const float *weight, float eps, u32 width, T *out) {                            \
        rms::row<T, false>(const_cast<T *>(x), nullptr, weight, eps, width, out);                                    \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        add_rms_norm_##NAME(T *x, const T *y, const float *weight, float eps, u32 width, T *out) {                  \
        rms::row<T, true>(x, y, weight, eps, width, out);                                                          \
    }

NORM_KERNELS(f32, float)
NORM_KERNELS(f16, f16)
NORM_KERNELS(bf16, bf16)
