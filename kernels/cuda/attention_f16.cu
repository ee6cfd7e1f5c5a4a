// Attention with f16 queries. The kernels and their shapes are in attention.cuh.

#include "attention.cuh"

ATTENTION_KERNELS(f16_f16, f16, f16, 64)
ATTENTION_KERNELS(f16_f16, f16, f16, 128)
COMBINE_KERNEL(f16, f16)
