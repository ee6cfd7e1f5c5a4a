// Attention with f32 queries. The kernels and their shapes are in attention.cuh.

#include "attention.cuh"

ATTENTION_KERNELS(f32_f32, float, float, 64)
ATTENTION_KERNELS(f32_f32, float, float, 128)
ATTENTION_KERNELS(f32_f16, float, f16, 64)
ATTENTION_KERNELS(f32_f16, float, f16, 128)
ATTENTION_KERNELS(f32_bf16, float, bf16, 64)
ATTENTION_KERNELS(f32_bf16, float, bf16, 128)
COMBINE_KERNEL(f32, float)
