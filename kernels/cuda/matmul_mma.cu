// Products of f32 activations with a bf16 weight matrix on tensor cores, with a bias. The activations are rounded to
// bf16, the sums are f32.
//
// Invariant: an output is the sum of the products of 16 inputs each, in their order, by one chain of matrix
// instructions. So it does not depend on the other rows or on the choice of the tile, if an instruction gives each
// element the same bits in any row and column. Inputs that do not exist count as zeros.

#include "mma.cuh"

namespace product_mma {

// A block of DOWN x ACROSS warps computes ROWS x OUTPUTS sums. DEPTH inputs pass through shared memory at a time, and
// STAGES of them are on their way or in use. Weights are copied asynchronously. Activations pass through registers,
// where they are rounded.
template <u32 ROWS, u32 OUTPUTS, u32 DOWN, u32 ACROSS, u32 DEPTH, u32 STAGES> struct Tile {
    static constexpr u32 THREADS = DOWN * ACROSS * WARP;
    static constexpr u32 N = Pack<bf16>::N;
    // 16 bytes more than a row, so that eight rows begin in different banks.
    static constexpr u32 STRIDE = DEPTH + N;
    static constexpr u32 PACKS = DEPTH / N;
    // Fragments of a warp.
    static constexpr u32 OWN_ROWS = ROWS / DOWN / mma::M;
    static constexpr u32 OWN_OUTPUTS = OUTPUTS / ACROSS / mma::N;
    // Packs of activations that a thread loads per stage.
    static constexpr u32 OWN_PACKS = ROWS * PACKS / THREADS;
    static_assert(OWN_PACKS * THREADS == ROWS * PACKS && OWN_OUTPUTS % 2 == 0, "threads share the work evenly");

    struct alignas(16) Shared {
        bf16 x[STAGES][ROWS * STRIDE];
        bf16 weights[STAGES][OUTPUTS * STRIDE];
    };

    // Starts the copy of the weights of the inputs [start, start + DEPTH). `inputs` is a multiple of N.
    static __device__ __forceinline__ void load_weights(Shared &shared, u32 stage, const bf16 *weight, u32 outputs,
                                                        u32 inputs, u32 start) {
#pragma unroll
        for (u32 i = threadIdx.x; i < OUTPUTS * PACKS; i += THREADS) {
            const u32 own = i / PACKS, at = i % PACKS * N;
            const u32 output = blockIdx.x * OUTPUTS + own;
            const bool is_present = output < outputs && start + at < inputs;
            const u64 offset = is_present ? (u64)output * inputs + start + at : 0;
            mma::copy_16(&shared.weights[stage][own * STRIDE + at], weight + offset, is_present);
        }
    }

    static __device__ __forceinline__ void load_x(Words4 (&out)[OWN_PACKS], const float *x, u32 rows, u32 inputs,
                                                  u32 start) {
#pragma unroll
        for (u32 i = 0; i < OWN_PACKS; i++) {
            const u32 index = threadIdx.x + i * THREADS, at = start + index % PACKS * N;
            const u32 row = blockIdx.y * ROWS + index / PACKS;
            out[i] = {{0, 0, 0, 0}};
            if (row >= rows || at >= inputs) continue;
            const Words4 *from = (const Words4 *)(x + (u64)row * inputs + at);
            const Words4 low = from[0], high = from[1];
            for (u32 j = 0; j < 2; j++) {
                out[i].w[j] = mma::pack(__uint_as_float(low.w[2 * j]), __uint_as_float(low.w[2 * j + 1]));
                out[i].w[2 + j] = mma::pack(__uint_as_float(high.w[2 * j]), __uint_as_float(high.w[2 * j + 1]));
            }
        }
    }

    static __device__ __forceinline__ void keep_x(Shared &shared, u32 stage, const Words4 (&in)[OWN_PACKS]) {
#pragma unroll
        for (u32 i = 0; i < OWN_PACKS; i++) {
            const u32 index = threadIdx.x + i * THREADS;
            *(Words4 *)&shared.x[stage][index / PACKS * STRIDE + index % PACKS * N] = in[i];
        }
    }

    static __device__ __forceinline__ void add(const Shared &shared, u32 stage,
                                               float (&sums)[OWN_ROWS][OWN_OUTPUTS][4]) {
        const u32 warp = threadIdx.x / WARP;
        const bf16 *x = &shared.x[stage][warp / ACROSS * OWN_ROWS * mma::M * STRIDE];
        const bf16 *weights = &shared.weights[stage][warp % ACROSS * OWN_OUTPUTS * mma::N * STRIDE];
#pragma unroll
        for (u32 at = 0; at < DEPTH; at += mma::K) {
            u32 a[OWN_ROWS][4];
#pragma unroll
            for (u32 r = 0; r < OWN_ROWS; r++) mma::load_a(a[r], x + r * mma::M * STRIDE + at, STRIDE);
#pragma unroll
            for (u32 o = 0; o < OWN_OUTPUTS; o += 2) {
                u32 b[4];
                mma::load_b(b, weights + o * mma::N * STRIDE + at, STRIDE);
#pragma unroll
                for (u32 r = 0; r < OWN_ROWS; r++) {
                    mma::add_product(sums[r][o], a[r], b[0], b[1]);
                    mma::add_product(sums[r][o + 1], a[r], b[2], b[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void write(const float (&sums)[OWN_ROWS][OWN_OUTPUTS][4], u32 rows, u32 outputs,
                                                 const float *bias, float *out) {
        const u32 warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (u32 r = 0; r < OWN_ROWS; r++) {
#pragma unroll
            for (u32 o = 0; o < OWN_OUTPUTS; o++) {
                const u32 own = warp % ACROSS * OWN_OUTPUTS + o;
                const u32 output = blockIdx.x * OUTPUTS + own * mma::N + 2 * t;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 row = blockIdx.y * ROWS + (warp / ACROSS * OWN_ROWS + r) * mma::M + g + i / 2 * 8;
                    const u32 at = output + i % 2;
                    if (row >= rows || at >= outputs) continue;
                    out[(u64)row * outputs + at] = bias == nullptr ? sums[r][o][i] : sums[r][o][i] + bias[at];
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const float *x, u32 rows, u32 inputs, const bf16 *weight, u32 outputs,
                                               const float *bias, float *out) {
        __shared__ Shared shared;
        float sums[OWN_ROWS][OWN_OUTPUTS][4];
#pragma unroll
        for (u32 r = 0; r < OWN_ROWS; r++) {
#pragma unroll
            for (u32 o = 0; o < OWN_OUTPUTS; o++) {
                for (u32 i = 0; i < 4; i++) sums[r][o][i] = 0.0f;
            }
        }
        Words4 next[OWN_PACKS];
#pragma unroll
        for (u32 stage = 0; stage + 1 < STAGES; stage++) {
            load_weights(shared, stage, weight, outputs, inputs, stage * DEPTH);
            mma::end_copies();
            load_x(next, x, rows, inputs, stage * DEPTH);
            keep_x(shared, stage, next);
        }
        u32 stage = 0;
#pragma unroll 1
        for (u32 start = 0; start < inputs; start += DEPTH) {
            mma::wait_copies<STAGES - 2>();
            // All warps have used the stage that the copies below replace.
            __syncthreads();
            const u32 free = stage == 0 ? STAGES - 1 : stage - 1, later = start + (STAGES - 1) * DEPTH;
            load_weights(shared, free, weight, outputs, inputs, later);
            mma::end_copies();
            load_x(next, x, rows, inputs, later);
            add(shared, stage, sums);
            keep_x(shared, free, next);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        write(sums, rows, outputs, bias, out);
    }
};

} // namespace product_mma

// matmul_mma_few, matmul_mma_many: out[r][o] = sum_i x[r][i] * weight[o][i] + bias[o], for few or many rows. Same bits.
// Shapes: x [rows][inputs], weight [outputs][inputs], bias [outputs] or null, out [rows][outputs]. `inputs` is a
// multiple of 8, x and weight begin at multiples of 16 bytes, and sizes are below 2^31 - 4096.
// few: gridDim.x * 32 covers the outputs, gridDim.y * 16 the rows; 64 threads per block.
// many: gridDim.x * 128 covers the outputs, gridDim.y * 128 the rows; 256 threads per block.
extern "C" __global__ void __launch_bounds__(64)
    matmul_mma_few(const float *x, u32 rows, u32 inputs, const bf16 *weight, u32 outputs, const float *bias,
                   float *out) {
    product_mma::Tile<16, 32, 1, 2, 64, 5>::run(x, rows, inputs, weight, outputs, bias, out);
}

extern "C" __global__ void __launch_bounds__(256)
    matmul_mma_many(const float *x, u32 rows, u32 inputs, const bf16 *weight, u32 outputs, const float *bias,
                    float *out) {
    product_mma::Tile<128, 128, 2, 4, 32, 2>::run(x, rows, inputs, weight, outputs, bias, out);
}
