// Matrix instructions of a warp on bf16 elements, and asynchronous copies into shared memory.
//
// Each function has a plain twin for the emulator, which has neither. The twin gives the same elements to the same
// lanes. Its sums have one rounding per product. A GPU rounds them in an order of its own, so their last bits differ.
//
// Fragments are those of mma.m16n8k16, with g = lane / 4 and t = lane % 4. A register holds two elements, the first in
// its low half:
// - A [16][16]: registers 0 to 3 are rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8.
// - B [16][8]: registers 0 and 1 are rows 2t and 2t + 8 at column g.
// - C [16][8]: elements 0 to 3 are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
//
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/, sections on mma, ldmatrix and cp.async.
#pragma once

#include "element.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define LARDER_HAS_MMA 1
#endif

namespace mma {

// Rows of A and C.
constexpr u32 M = 16;
// Columns of B and C.
constexpr u32 N = 8;
// Columns of A, rows of B.
constexpr u32 K = 16;

// Two elements in a register, rounded to the nearest.
__device__ __forceinline__ u32 pack(float low, float high) {
#if defined(LARDER_HAS_MMA)
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
#else
    return (u32)from_float<bf16>(low).bits | (u32)from_float<bf16>(high).bits << 16;
#endif
}

// Adds A * B to C. All lanes of the warp take part. Blocks have at most 8 warps.
__device__ __forceinline__ void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if defined(LARDER_HAS_MMA)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __shared__ u32 lanes[8][WARP][6];
    u32(&warp)[WARP][6] = lanes[threadIdx.x / WARP];
    const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; i++) warp[lane][i] = a[i];
    warp[lane][4] = b0;
    warp[lane][5] = b1;
    __syncwarp();
    for (u32 i = 0; i < 4; i++) {
        const u32 row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (u32 k = 0; k < K; k++) {
            const u32 shift = k % 2 * 16, of_pair = k % 8 / 2;
            const u32 x = warp[row % 8 * 4 + of_pair][row / 8 + k / 8 * 2] >> shift & 0xFFFFu;
            const u32 y = warp[column * 4 + of_pair][4 + k / 8] >> shift & 0xFFFFu;
            c[i] = fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), c[i]);
        }
    }
    __syncwarp();
#endif
}

#if defined(LARDER_HAS_MMA)
__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }
#else
__device__ __forceinline__ u32 two(const bf16 *low, const bf16 *high) {
    return (u32)low->bits | (u32)high->bits << 16;
}
#endif

// A fragment of A: rows [0, 16) and elements [0, 16) at `from` in shared memory. Rows begin at multiples of 16 bytes.
__device__ __forceinline__ void load_a(u32 (&out)[4], const bf16 *from, u32 stride) {
    const u32 lane = threadIdx.x % WARP;
#if defined(LARDER_HAS_MMA)
    const bf16 *row = from + lane % 16 * stride + lane / 16 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    const bf16 *at = from + lane / 4 * stride + lane % 4 * 2;
    for (u32 i = 0; i < 4; i++) {
        const bf16 *pair = at + i % 2 * 8 * stride + i / 2 * 8;
        out[i] = two(pair, pair + 1);
    }
#endif
}

// Two fragments of B whose columns follow each other: column n is row n at `from`, so B is stored transposed.
__device__ __forceinline__ void load_b(u32 (&out)[4], const bf16 *from, u32 stride) {
    const u32 lane = threadIdx.x % WARP;
#if defined(LARDER_HAS_MMA)
    const bf16 *row = from + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    const bf16 *at = from + lane / 4 * stride + lane % 4 * 2;
    for (u32 i = 0; i < 4; i++) {
        const bf16 *pair = at + i / 2 * 8 * stride + i % 2 * 8;
        out[i] = two(pair, pair + 1);
    }
#endif
}

// Two fragments of B whose columns follow each other: row k is row k at `from`.
__device__ __forceinline__ void load_b_rows(u32 (&out)[4], const bf16 *from, u32 stride) {
    const u32 lane = threadIdx.x % WARP;
#if defined(LARDER_HAS_MMA)
    const bf16 *row = from + lane % 16 * stride + lane / 16 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    const bf16 *at = from + lane % 4 * 2 * stride + lane / 4;
    for (u32 i = 0; i < 4; i++) {
        const bf16 *element = at + i % 2 * 8 * stride + i / 2 * 8;
        out[i] = two(element, element + stride);
    }
#endif
}

// Starts a copy of 16 bytes to shared memory, or a fill with zeros. The bytes are there after `wait_copies` by this
// thread, for other threads after a barrier behind it. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16(void *to, const void *from, bool is_present) {
#if defined(LARDER_HAS_MMA)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(is_present ? 16u : 0u)
                 : "memory");
#else
    larder_copy_async(to, is_present ? from : nullptr, 16);
#endif
}

// Ends a group of copies. A group may be empty.
__device__ __forceinline__ void end_copies() {
#if defined(LARDER_HAS_MMA)
    asm volatile("cp.async.commit_group;" : : : "memory");
#else
    larder_commit_async();
#endif
}

// Waits for all groups but the last `LATER`.
template <u32 LATER> __device__ __forceinline__ void wait_copies() {
#if defined(LARDER_HAS_MMA)
    asm volatile("cp.async.wait_group %0;" : : "n"(LATER) : "memory");
#else
    larder_wait_async(LATER);
#endif
}

} // namespace mma
