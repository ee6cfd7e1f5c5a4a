// Products of f32 activations with a weight matrix of f32, f16 or bf16, with a bias.
//
// Invariant: one order of operations defines every result: sum = fma(x[i], weight[i], sum) for i from 0 on, starting
// at 0, then the bias is added. The CPU has the same order (larder_kernels::cpu::matmul), so a result has the same
// bits there, and does not depend on the other rows or on the choice of the tile.

#include "element.cuh"

namespace product {

constexpr u32 THREADS = 256;
// Outputs of a block.
constexpr u32 OUTPUTS = 64;
// Inputs that pass through shared memory at a time.
constexpr u32 DEPTH = 32;
// One more than a row, so that the lanes of a warp use different banks.
constexpr u32 X_STRIDE = DEPTH + 1;
constexpr u32 WEIGHT_STRIDE = OUTPUTS + 1;

// A block computes ROWS x OUTPUTS sums. A thread owns OWN_ROWS x OWN_OUTPUTS of them.
template <class W, u32 ROWS, u32 OWN_ROWS, u32 OWN_OUTPUTS> struct Tile {
    static constexpr u32 ACROSS = OUTPUTS / OWN_OUTPUTS;
    static constexpr u32 DOWN = ROWS / OWN_ROWS;
    static constexpr u32 N = Pack<W>::N;
    static constexpr u32 PACKS = DEPTH / N;
    static_assert(ACROSS * DOWN == THREADS, "every thread owns some sums");

    struct Shared {
        float x[ROWS * X_STRIDE];
        // Transposed: the outputs of one input follow each other.
        float weights[DEPTH * WEIGHT_STRIDE];
    };

    // Copies the inputs [start, start + DEPTH) of the block's rows. Rows and inputs that do not exist become zero.
    static __device__ __forceinline__ void load_x(Shared &shared, const float *x, u32 rows, u32 inputs, u32 start,
                                                  bool wide) {
        constexpr u32 X_PACKS = DEPTH / 4;
        for (u32 i = threadIdx.x; i < ROWS * X_PACKS; i += THREADS) {
            const u32 own = i / X_PACKS, at = i % X_PACKS * 4;
            const u32 row = blockIdx.y * ROWS + own;
            const u32 left = row < rows && start + at < inputs ? inputs - start - at : 0;
            float values[4];
            load_pack(x + (u64)row * inputs + start + at, left, wide, values);
            for (u32 j = 0; j < 4; j++) shared.x[own * X_STRIDE + at + j] = values[j];
        }
    }

    static __device__ __forceinline__ void load_weights(Shared &shared, const W *weight, u32 outputs, u32 inputs,
                                                        u32 start, bool wide) {
        for (u32 i = threadIdx.x; i < OUTPUTS * PACKS; i += THREADS) {
            const u32 own = i / PACKS, at = i % PACKS * N;
            const u32 output = blockIdx.x * OUTPUTS + own;
            const u32 left = output < outputs && start + at < inputs ? inputs - start - at : 0;
            float values[N];
            load_pack(weight + (u64)output * inputs + start + at, left, wide, values);
            for (u32 j = 0; j < N; j++) shared.weights[(at + j) * WEIGHT_STRIDE + own] = values[j];
        }
    }

    static __device__ __forceinline__ void add_input(const Shared &shared, u32 input,
                                                     float (&sums)[OWN_ROWS][OWN_OUTPUTS]) {
        const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
        float weights[OWN_OUTPUTS];
        for (u32 o = 0; o < OWN_OUTPUTS; o++) {
            weights[o] = shared.weights[input * WEIGHT_STRIDE + across + o * ACROSS];
        }
        for (u32 r = 0; r < OWN_ROWS; r++) {
            const float x = shared.x[(down + r * DOWN) * X_STRIDE + input];
            for (u32 o = 0; o < OWN_OUTPUTS; o++) sums[r][o] = fmaf(x, weights[o], sums[r][o]);
        }
    }

    static __device__ void run(const float *x, u32 rows, u32 inputs, const W *weight, u32 outputs, const float *bias,
                               float *out) {
        __shared__ Shared shared;
        const bool wide_x = is_aligned(x) && inputs % 4 == 0;
        const bool wide_weight = is_aligned(weight) && inputs % N == 0;
        float sums[OWN_ROWS][OWN_OUTPUTS];
        for (u32 r = 0; r < OWN_ROWS; r++) {
            for (u32 o = 0; o < OWN_OUTPUTS; o++) sums[r][o] = 0.0f;
        }
#pragma unroll 1
        for (u32 start = 0; start < inputs; start += DEPTH) {
            load_x(shared, x, rows, inputs, start, wide_x);
            load_weights(shared, weight, outputs, inputs, start, wide_weight);
            __syncthreads();
            const u32 depth = inputs - start < DEPTH ? inputs - start : DEPTH;
            if (depth == DEPTH) {
#pragma unroll 8
                for (u32 input = 0; input < DEPTH; input++) add_input(shared, input, sums);
            } else {
                // A product of zeros could change the sign of a sum that is zero.
#pragma unroll 1
                for (u32 input = 0; input < depth; input++) add_input(shared, input, sums);
            }
            __syncthreads();
        }
        for (u32 r = 0; r < OWN_ROWS; r++) {
            const u32 row = blockIdx.y * ROWS + threadIdx.x / ACROSS + r * DOWN;
            for (u32 o = 0; o < OWN_OUTPUTS; o++) {
                const u32 output = blockIdx.x * OUTPUTS + threadIdx.x % ACROSS + o * ACROSS;
                if (row >= rows || output >= outputs) continue;
                out[(u64)row * outputs + output] = bias == nullptr ? sums[r][o] : sums[r][o] + bias[output];
            }
        }
    }
};

} // namespace product

// matmul_few_W, matmul_many_W: out[r][o] = sum_i x[r][i] * weight[o][i] + bias[o], for few or many rows. Same bits.
// Shapes: x [rows][inputs], weight [outputs][inputs], bias [outputs] or null, out [rows][outputs].
// gridDim.x * 64 covers the outputs, gridDim.y the rows: 8 per block, or 64. 256 threads per block.
#define MATMUL_KERNELS(NAME, W)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        matmul_few_##NAME(const float *x, u32 rows, u32 inputs, const W *weight, u32 outputs, const float *bias,    \
                          float *out) {                                                                             \
        product::Tile<W, 8, 2, 1>::run(x, rows, inputs, weight, outputs, bias, out);                                \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        matmul_many_##NAME(const float *x, u32 rows, u32 inputs, const W *weight, u32 outputs, const float *bias,   \
                           float *out) {                                                                            \
        product::Tile<W, 64, 4, 4>::run(x, rows, inputs, weight, outputs, bias, out);                               \
    }

MATMUL_KERNELS(f32, float)
MATMUL_KERNELS(f16, f16)
MATMUL_KERNELS(bf16, bf16)
