// Rates of arithmetic from registers: ceilings for products and attention. No kernel touches memory inside its loop.
//
// Invariant: the order of all operations is fixed, and fused ones are written as fmaf. So the host can compare every
// result bit by bit.

#include "element.cuh"

namespace rates {

// Independent sums of a thread. A sum waits for its last step, so several keep the units busy.
constexpr u32 CHAINS = 8;

} // namespace rates

// rate_fma_f32: out[thread] = the total of CHAINS sums after `steps` steps sum = fma(sum, factor, addend). Sum `i`
// starts at threadIdx.x + i. One dimension. A step of a thread has 2 * CHAINS operations.
extern "C" __global__ void __launch_bounds__(256) rate_fma_f32(u32 steps, float factor, float addend, float *out) {
    float sums[rates::CHAINS];
    for (u32 i = 0; i < rates::CHAINS; i++) sums[i] = (float)(threadIdx.x + i);
    for (u32 step = 0; step < steps; step++)
        for (u32 i = 0; i < rates::CHAINS; i++) sums[i] = fmaf(sums[i], factor, addend);
    float total = 0.0f;
    for (u32 i = 0; i < rates::CHAINS; i++) total += sums[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// rate_mma_bf16: out[thread] = the total of the thread's 4 * CHAINS elements of CHAINS matrices of 16 x 8, after `steps`
// products of 16 x 16 ones with 16 x 8 sixteenths. Every product adds 1 to each element. One dimension, whole warps. A
// step of a warp has 4096 * CHAINS operations.
//
// The instruction is in section "Multiply-and-Accumulate Instruction: mma" of
// https://docs.nvidia.com/cuda/parallel-thread-execution/
extern "C" __global__ void __launch_bounds__(256) rate_mma_bf16(u32 steps, float *out) {
    float sums[rates::CHAINS][4];
    for (u32 i = 0; i < rates::CHAINS; i++)
        for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
    for (u32 step = 0; step < steps; step++) {
        for (u32 i = 0; i < rates::CHAINS; i++) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
            const u32 ones = 0x3F803F80u, sixteenths = 0x3D803D80u;
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
                         : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
                         : "r"(ones), "r"(sixteenths));
#else
            for (u32 j = 0; j < 4; j++) sums[i][j] += 1.0f;
#endif
        }
    }
    float total = 0.0f;
    for (u32 i = 0; i < rates::CHAINS; i++)
        for (u32 j = 0; j < 4; j++) total += sums[i][j];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
