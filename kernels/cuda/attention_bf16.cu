// Attention with bf16 queries. The kernels and their shapes are in attention.cuh.

#include "attention.cuh"

ATTENTION_KERNELS(bf16_bf16, bf16, bf16, 64)
ATTENTION_KERNELS(bf16_bf16, bf16, bf16, 128)
COMBINE_KERNEL(bf16, bf16)
