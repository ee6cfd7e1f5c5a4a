// Quantisation of the keys and values of pages to 8 bits with one scale per head, and a lossless split of bf16 into
// byte planes.
//
// Invariant: the result of a head of a page depends on this head and page only.

#include "element.cuh"

namespace quantise {

constexpr u32 THREADS = 256;

// 8-bit floats with 4 exponent and 3 mantissa bits, without infinities (E4M3, https://arxiv.org/abs/2209.05433).
struct E4m3 {
    static constexpr float MAX = 448.0f;

    // Rounds to the nearest, ties to even. Larger numbers become the largest one.
    static __device__ u8 encode(float x) {
        const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
        if (magnitude > 0x7F800000u) return (u8)(sign | 0x7Fu);
        // Below 2^-6 the numbers are multiples of 2^-9. The sum with 2^14, whose last bit is 2^-9, rounds.
        if (magnitude < 0x3C800000u) {
            return (u8)(sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u));
        }
        const u32 code = (magnitude - 0x3C000000u + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
        return (u8)(sign | (code < 0x7Eu ? code : 0x7Eu));
    }

    static __device__ float decode(u8 code) {
        const u32 sign = (u32)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
        if (magnitude == 0x7Fu) return __uint_as_float(sign | 0x7FC00000u);
        if (magnitude < 8) return __uint_as_float(sign | __float_as_uint((float)magnitude * 0.001953125f));
        return __uint_as_float(sign | ((magnitude << 20) + 0x3C000000u));
    }
};

// Two's complement from -127 to 127. NaN becomes 0.
struct Int8 {
    static constexpr float MAX = 127.0f;

    static __device__ u8 encode(float x) {
        if (is_nan(x)) return 0;
        const float limited = x > MAX ? MAX : (x < -MAX ? -MAX : x);
        return (u8)(int)rintf(limited);
    }

    static __device__ float decode(u8 code) { return (float)(code < 128 ? (int)code : (int)code - 256); }
};

// Codes of a pack, which move together.
template <u32 N> struct alignas(N) Codes {
    u8 bytes[N];
};

// Head blockIdx.y of page blockIdx.x.
struct Head {
    u64 start;
    u32 stride;
    u32 tokens;
    u32 head_dim;

    // A head outside its page must not access other memory.
    __device__ bool is_inside(u64 page_elements) const {
        return start % page_elements + (u64)(tokens - 1) * stride + head_dim <= page_elements;
    }

    __device__ u64 at(u32 index) const { return start + (u64)(index / head_dim) * stride + index % head_dim; }
};

template <class T, class Q>
__device__ void encode(const T *pages, u64 page_elements, const u32 *starts, u32 stride, u32 tokens, u32 head_dim,
                       float *scales, u8 *out) {
    constexpr u32 N = Pack<T>::N;
    __shared__ float shared[THREADS / WARP];
    const Head head = {blockIdx.x * page_elements + starts[blockIdx.y], stride, tokens, head_dim};
    if (starts[blockIdx.y] >= page_elements || !head.is_inside(page_elements)) return;
    const u32 count = tokens * head_dim;
    // A pack of a head stays inside a token.
    const bool wide = head_dim % N == 0 && stride % N == 0 && is_aligned(pages + head.start);
    const u32 step = wide ? N : 1;
    float values[N];
    float most = 0.0f;
    for (u32 i = threadIdx.x * step; i < count; i += THREADS * step) {
        load_pack(pages + head.at(i), step, wide, values);
        // A load of fewer elements fills the pack with zeros.
        for (u32 k = 0; k < N; k++) {
            if (is_finite(values[k])) most = larger(most, fabsf(values[k]));
        }
    }
    const float scale = block_max<THREADS / WARP>(most, shared) / Q::MAX;
    if (threadIdx.x == 0) scales[(u64)blockIdx.x * gridDim.y + blockIdx.y] = scale;
    for (u32 i = threadIdx.x * step; i < count; i += THREADS * step) {
        load_pack(pages + head.at(i), step, wide, values);
        Codes<N> codes;
        for (u32 k = 0; k < N; k++) {
            const float scaled = scale > 0.0f ? values[k] / scale : (is_finite(values[k]) ? 0.0f : values[k]);
            codes.bytes[k] = Q::encode(scaled);
        }
        u8 *target = out + head.at(i);
        if (wide && (u64)target % N == 0) {
            *(Codes<N> *)target = codes;
        } else {
            for (u32 k = 0; k < N; k++) {
                if (k < step) target[k] = codes.bytes[k];
            }
        }
    }
}

template <class T, class Q>
__device__ void decode(const u8 *codes, const float *scales, u64 page_elements, const u32 *starts, u32 stride,
                       u32 tokens, u32 head_dim, T *pages) {
    constexpr u32 N = Pack<T>::N;
    const Head head = {blockIdx.x * page_elements + starts[blockIdx.y], stride, tokens, head_dim};
    if (starts[blockIdx.y] >= page_elements || !head.is_inside(page_elements)) return;
    const float scale = scales[(u64)blockIdx.x * gridDim.y + blockIdx.y];
    const bool wide = head_dim % N == 0 && stride % N == 0 && is_aligned(pages + head.start) &&
                      (u64)(codes + head.start) % N == 0;
    const u32 step = wide ? N : 1;
    for (u32 i = threadIdx.x * step; i < tokens * head_dim; i += THREADS * step) {
        const u64 at = head.at(i);
        Codes<N> own = {};
        if (wide) {
            own = *(const Codes<N> *)(codes + at);
        } else {
            own.bytes[0] = codes[at];
        }
        float values[N];
        for (u32 k = 0; k < N; k++) values[k] = Q::decode(own.bytes[k]) * scale;
        store_pack(pages + at, step, wide, values);
    }
}

// A bf16 has its sign, 8 exponent bits and 7 mantissa bits. Exponents of neighbours are alike, so their plane
// compresses well; the other plane holds the sign and the mantissa.
__device__ __forceinline__ u8 exponent_of(u32 bits) { return (u8)(bits >> 7); }
__device__ __forceinline__ u8 rest_of(u32 bits) { return (u8)((bits >> 8 & 0x80u) | (bits & 0x7Fu)); }

constexpr u32 GROUP = 16;

// Elements from (blockIdx.x * 256 + threadIdx.x) * 16 on, of the piece blockIdx.y.
__device__ void split(const u16 *elements, u64 count, u8 *planes) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * GROUP;
    if (at >= count) return;
    const u16 *from = elements + blockIdx.y * count;
    u8 *exponents = planes + blockIdx.y * 2 * count, *rests = exponents + count;
    if (count - at >= GROUP && is_aligned(from) && is_aligned(exponents) && is_aligned(rests)) {
        Words4 exponent, rest;
        for (u32 half = 0; half < 2; half++) {
            const Words4 words = *(const Words4 *)(from + at + half * 8);
            for (u32 i = 0; i < 2; i++) {
                const u32 a = words.w[2 * i], b = words.w[2 * i + 1];
                exponent.w[2 * half + i] = (u32)exponent_of(a) | (u32)exponent_of(a >> 16) << 8 |
                                           (u32)exponent_of(b) << 16 | (u32)exponent_of(b >> 16) << 24;
                rest.w[2 * half + i] = (u32)rest_of(a) | (u32)rest_of(a >> 16) << 8 | (u32)rest_of(b) << 16 |
                                       (u32)rest_of(b >> 16) << 24;
            }
        }
        *(Words4 *)(exponents + at) = exponent;
        *(Words4 *)(rests + at) = rest;
        return;
    }
    for (u64 i = at; i < at + GROUP && i < count; i++) {
        exponents[i] = exponent_of(from[i]);
        rests[i] = rest_of(from[i]);
    }
}

__device__ __forceinline__ u32 merged(u32 exponent, u32 rest) {
    return (rest & 0x80u) << 8 | (exponent & 0xFFu) << 7 | (rest & 0x7Fu);
}

__device__ void merge(const u8 *planes, u64 count, u16 *elements) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * GROUP;
    if (at >= count) return;
    u16 *to = elements + blockIdx.y * count;
    const u8 *exponents = planes + blockIdx.y * 2 * count, *rests = exponents + count;
    if (count - at >= GROUP && is_aligned(to) && is_aligned(exponents) && is_aligned(rests)) {
        const Words4 exponent = *(const Words4 *)(exponents + at), rest = *(const Words4 *)(rests + at);
        for (u32 half = 0; half < 2; half++) {
            Words4 words;
            for (u32 i = 0; i < 2; i++) {
                const u32 a = exponent.w[2 * half + i], b = rest.w[2 * half + i];
                words.w[2 * i] = merged(a, b) | merged(a >> 8, b >> 8) << 16;
                words.w[2 * i + 1] = merged(a >> 16, b >> 16) | merged(a >> 24, b >> 24) << 16;
            }
            *(Words4 *)(to + at + half * 8) = words;
        }
        return;
    }
    for (u64 i = at; i < at + GROUP && i < count; i++) to[i] = (u16)merged(exponents[i], rests[i]);
}

} // namespace quantise

// quantise_FORMAT_T: for head h of page p, scales[p][h] = largest finite magnitude / largest number of the format,
// and each element becomes element / scale, rounded to the nearest. Infinities become the largest number. NaN
// stays NaN in e4m3, and becomes 0 in int8.
// dequantise_FORMAT_T: the elements times their scale.
// Shapes: pages [gridDim.x][page_elements]; starts [gridDim.y], the first element of each head in a page; element d
// of token t is at start + t * stride + d; scales [gridDim.x][gridDim.y]; codes [gridDim.x][page_elements], one
// byte per element, in the places of the elements. 256 threads per block.
#define QUANTISE_KERNELS(FORMAT, Q, NAME, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        quantise_##FORMAT##_##NAME(const T *pages, u64 page_elements, const u32 *starts, u32 stride, u32 tokens,    \
                                   u32 head_dim, float *scales, u8 *codes) {                                        \
        quantise::encode<T, quantise::Q>(pages, page_elements, starts, stride, tokens, head_dim, scales, codes);    \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        dequantise_##FORMAT##_##NAME(const u8 *codes, const float *scales, u64 page_elements, const u32 *starts,    \
                                     u32 stride, u32 tokens, u32 head_dim, T *pages) {                              \
        quantise::decode<T, quantise::Q>(codes, scales, page_elements, starts, stride, tokens, head_dim, pages);    \
    }

QUANTISE_KERNELS(e4m3, E4m3, f32, float)
QUANTISE_KERNELS(e4m3, E4m3, f16, f16)
QUANTISE_KERNELS(e4m3, E4m3, bf16, bf16)
QUANTISE_KERNELS(int8, Int8, f32, float)
QUANTISE_KERNELS(int8, Int8, f16, f16)
QUANTISE_KERNELS(int8, Int8, bf16, bf16)

// planes_split: each piece of count bf16 becomes count exponent bytes, then count bytes of sign and mantissa.
// planes_merge: the inverse.
// Shapes: elements [gridDim.y][count], planes [gridDim.y][2][count]. Blocks of 256 threads cover 4096 elements.
extern "C" __global__ void __launch_bounds__(256) planes_split(const u16 *elements, u64 count, u8 *planes) {
    quantise::split(elements, count, planes);
}

extern "C" __global__ void __launch_bounds__(256) planes_merge(const u8 *planes, u64 count, u16 *elements) {
    quantise::merge(planes, count, elements);
}
