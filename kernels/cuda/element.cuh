// Elements, 16-byte packs and reductions that the model kernels share.
//
// Conversions are integer arithmetic, so that device and emulator give the same bits without a toolkit header.
//
// Invariant: each function has a fixed order of operations. Sums that must not depend on the compiler's choice
// of fused operations use fmaf.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "sizes of the integers");

// 16 and 8 bytes that move with one instruction.
struct alignas(16) Words4 {
    u32 w[4];
};
struct alignas(8) Words2 {
    u32 w[2];
};

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u; }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

__device__ __forceinline__ float infinite() { return __uint_as_float(0x7F800000u); }

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// The product with 2^112, the difference of the exponents' biases, also normalises subnormal numbers exactly.
__device__ __forceinline__ float to_float(f16 x) {
    const u32 sign = (u32)(x.bits & 0x8000u) << 16;
    const u32 magnitude = (u32)(x.bits & 0x7FFFu) << 13;
    if ((x.bits & 0x7C00u) == 0x7C00u) return __uint_as_float(sign | magnitude | 0x7F800000u);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude) * __uint_as_float(239u << 23)));
}

// Rounds to the nearest element, ties to even. A value beyond the largest element becomes infinite.
template <class T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    const u32 bits = __float_as_uint(x);
    bf16 out;
    // Rounding could turn a NaN into an infinity.
    out.bits = is_nan(x) ? (u16)(bits >> 16 | 0x40u) : (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    return out;
}

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    u32 half;
    if (magnitude > 0x7F800000u) {
        half = 0x7E00u | (magnitude >> 13 & 0x3FFu);
    } else if (magnitude >= 0x477FF000u) {
        // From 65,520 on, half way between the largest element and the next power of two.
        half = 0x7C00u;
    } else if (magnitude < 0x38800000u) {
        // Below 2^-14 the elements are multiples of 2^-24. The sum with 1/2, whose last bit is 2^-24, rounds.
        half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    }
    f16 out;
    out.bits = (u16)(sign | half);
    return out;
}

// Elements of 16 bytes.
template <class T> struct Pack {
    static constexpr u32 N = 16 / sizeof(T);
};

__device__ __forceinline__ void unpack(const Words4 &words, float (&out)[4], float) {
    for (u32 i = 0; i < 4; i++) out[i] = __uint_as_float(words.w[i]);
}

template <class T> __device__ __forceinline__ void unpack(const Words4 &words, float (&out)[8], T) {
    for (u32 i = 0; i < 4; i++) {
        T low, high;
        low.bits = (u16)words.w[i];
        high.bits = (u16)(words.w[i] >> 16);
        out[2 * i] = to_float(low);
        out[2 * i + 1] = to_float(high);
    }
}

__device__ __forceinline__ bool is_aligned(const void *pointer) { return ((u64)pointer & 15) == 0; }

// Reads the first `count` elements of a pack, at most all. Others become 0. `wide` permits a load of 16 bytes
// where the pack is whole. The values do not depend on it.
template <class T>
__device__ __forceinline__ void load_pack(const T *from, u32 count, bool wide, float (&out)[Pack<T>::N]) {
    if (wide && count >= Pack<T>::N) {
        unpack(*(const Words4 *)from, out, T());
    } else {
        for (u32 i = 0; i < Pack<T>::N; i++) out[i] = i < count ? to_float(from[i]) : 0.0f;
    }
}

__device__ __forceinline__ void pack(const float (&in)[4], Words4 &words, float) {
    for (u32 i = 0; i < 4; i++) words.w[i] = __float_as_uint(in[i]);
}

template <class T> __device__ __forceinline__ void pack(const float (&in)[8], Words4 &words, T) {
    for (u32 i = 0; i < 4; i++) {
        words.w[i] = (u32)from_float<T>(in[2 * i]).bits | (u32)from_float<T>(in[2 * i + 1]).bits << 16;
    }
}

// Writes the first `count` elements of a pack, at most all.
template <class T>
__device__ __forceinline__ void store_pack(T *to, u32 count, bool wide, const float (&in)[Pack<T>::N]) {
    if (wide && count >= Pack<T>::N) {
        Words4 words;
        pack(in, words, T());
        *(Words4 *)to = words;
    } else {
        for (u32 i = 0; i < Pack<T>::N; i++) {
            if (i < count) to[i] = from_float<T>(in[i]);
        }
    }
}

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// Sum over the lanes of a warp, in every lane. Addition commutes, so all lanes have the same bits.
__device__ __forceinline__ float warp_sum(float x) {
    for (u32 step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// NaN never wins.
__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float warp_max(float x) {
    for (u32 step = WARP / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        const u32 low = __shfl_xor_sync(ALL_LANES, (u32)x, step);
        const u32 high = __shfl_xor_sync(ALL_LANES, (u32)(x >> 32), step);
        x += (u64)high << 32 | low;
    }
    return x;
}

// Sum over a block of WARPS warps, in every thread. `shared` is free for other uses after the next barrier.
template <u32 WARPS> __device__ __forceinline__ float block_sum(float x, float *shared) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % WARP < WARPS ? shared[threadIdx.x % WARP] : 0.0f);
}

template <u32 WARPS> __device__ __forceinline__ float block_max(float x, float *shared) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(shared[threadIdx.x % WARPS]);
}
