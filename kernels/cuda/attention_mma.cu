// Attention on tensor cores. The kernels and their shapes are in attention_mma.cuh.

#include "attention_mma.cuh"

ATTENTION_MMA_KERNELS(f32, float, 64)
ATTENTION_MMA_KERNELS(f32, float, 128)
ATTENTION_MMA_KERNELS(bf16, bf16, 64)
ATTENTION_MMA_KERNELS(bf16, bf16, 128)
COMBINE_MMA_KERNEL(f32, float)
COMBINE_MMA_KERNEL(bf16, bf16)
