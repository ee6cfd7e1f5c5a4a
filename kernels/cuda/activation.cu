// The gated activation of the MLP, and the residual addition.
//
// Invariant: every element of a result depends on two elements of the input only.

#include "element.cuh"

namespace activation {

constexpr u32 THREADS = 256;

// Row blockIdx.x, packs from blockIdx.y * 256 on.
template <class T> __device__ void silu_mul(const T *gate_up, u32 width, T *out) {
    constexpr u32 N = Pack<T>::N;
    const u32 at = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (at >= width) return;
    const T *gates = gate_up + (u64)blockIdx.x * 2 * width;
    const T *ups = gates + width;
    out += (u64)blockIdx.x * width;
    const bool wide = is_aligned(gates) && is_aligned(ups) && is_aligned(out);
    float gate[N], up[N];
    load_pack(gates + at, width - at, wide, gate);
    load_pack(ups + at, width - at, wide, up);
    for (u32 i = 0; i < N; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    store_pack(out + at, width - at, wide, gate);
}

template <class T> __device__ void add(T *x, const T *y, u64 count) {
    constexpr u32 N = Pack<T>::N;
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (at >= count) return;
    const u32 left = count - at < N ? (u32)(count - at) : N;
    const bool wide = is_aligned(x) && is_aligned(y);
    float a[N], b[N];
    load_pack(x + at, left, wide, a);
    load_pack(y + at, left, wide, b);
    for (u32 i = 0; i < N; i++) a[i] += b[i];
    store_pack(x + at, left, wide, a);
}

__device__ __forceinline__ void narrow(const float *x, u64 count, bf16 *out) {
    constexpr u32 N = Pack<bf16>::N, HALF = Pack<float>::N;
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (at >= count) return;
    const u32 left = count - at < N ? (u32)(count - at) : N;
    const bool wide = is_aligned(x) && is_aligned(out);
    float values[N];
    for (u32 part = 0; part < N; part += HALF) {
        float few[HALF];
        load_pack(x + at + part, left > part ? left - part : 0, wide, few);
        for (u32 i = 0; i < HALF; i++) values[part + i] = few[i];
    }
    store_pack(out + at, left, wide, values);
}

} // namespace activation

// silu_mul_T: out = silu(gate) * up, with silu(x) = x / (1 + e^-x).
// Shapes: gate_up [gridDim.x][2 * width], each row its gates, then its ups; out [gridDim.x][width].
// The blocks of 256 threads of a row cover 256 packs of 16 bytes each.
//
// add_T: x += y over count elements. Blocks of 256 threads cover 256 packs.
//
// narrow_bf16: out = x over count elements, rounded to the nearest bf16. Blocks as for add_bf16.
#define ACTIVATION_KERNELS(NAME, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) silu_mul_##NAME(const T *gate_up, u32 width, T *out) {        \
        activation::silu_mul<T>(gate_up, width, out);                                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) add_##NAME(T *x, const T *y, u64 count) {                     \
        activation::add<T>(x, y, count);                                                                            \
    }

ACTIVATION_KERNELS(f32, float)
ACTIVATION_KERNELS(f16, f16)
ACTIVATION_KERNELS(bf16, bf16)

extern "C" __global__ void __launch_bounds__(256) narrow_bf16(const float *x, u64 count, bf16 *out) {
    activation::narrow(x, count, out);
}
