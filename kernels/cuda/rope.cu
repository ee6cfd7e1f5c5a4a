// Per-head norm, rotary position embedding, and the store of keys and values into their pages.
//
// Invariant: a warp computes one head of one row, and reads nothing else. Lane l sums the pairs l, l + 32, ... in
// order, then the warp sums its lanes in a tree.

#include "element.cuh"

namespace rope {

constexpr u32 WARPS = 4;

// Pages of keys and values. Token s of head h in page p begins at element
// p * page_elements + starts[h] + s * token_stride of the pool.
template <class E> struct Pages {
    E *pool;
    u64 page_elements;
    u32 page_count;
    u32 page_tokens;
    const u32 *starts;
    u32 token_stride;
};

template <class T, class E>
__device__ void head(T *qkv, u32 row_stride, u32 heads, u32 kv_heads, u32 head_dim, const float *table,
                     const float *query_norm, const float *key_norm, float eps, const u32 *slots, Pages<E> pages) {
    const u32 lane = threadIdx.x % WARP;
    const u32 index = blockIdx.y * WARPS + threadIdx.x / WARP;
    if (index >= heads + 2 * kv_heads) return;
    const u32 row = blockIdx.x, pairs = head_dim / 2;
    const bool is_query = index < heads, is_value = index >= heads + kv_heads;
    T *values = qkv + (u64)row * row_stride + (u64)index * head_dim;
    E *target = nullptr;
    if (!is_query && pages.pool != nullptr) {
        const u32 page = slots[row] / pages.page_tokens, slot = slots[row] % pages.page_tokens;
        const u64 end = pages.starts[index - heads] + (u64)(pages.page_tokens - 1) * pages.token_stride + head_dim;
        // A slot outside the pool, or a head outside its page, must not write elsewhere.
        if (page >= pages.page_count || end > pages.page_elements) return;
        target = pages.pool + page * pages.page_elements + pages.starts[index - heads] +
                 (u64)slot * pages.token_stride;
    }
    if (is_value) {
        if (target == nullptr) return;
        for (u32 i = lane; i < head_dim; i += WARP) target[i] = from_float<E>(to_float(values[i]));
        return;
    }
    const float *weight = is_query ? query_norm : key_norm;
    float scale = 1.0f;
    if (weight != nullptr) {
        float sum = 0.0f;
        for (u32 i = lane; i < pairs; i += WARP) {
            const float a = to_float(values[i]), b = to_float(values[i + pairs]);
            sum = fmaf(b, b, fmaf(a, a, sum));
        }
        scale = 1.0f / sqrtf(warp_sum(sum) / (float)head_dim + eps);
    }
    const float *cosines = table + (u64)row * head_dim, *sines = cosines + pairs;
    for (u32 i = lane; i < pairs; i += WARP) {
        float a = to_float(values[i]), b = to_float(values[i + pairs]);
        if (weight != nullptr) {
            a = a * scale * weight[i];
            b = b * scale * weight[i + pairs];
        }
        const float first = fmaf(a, cosines[i], -(b * sines[i]));
        const float second = fmaf(b, cosines[i], a * sines[i]);
        if (target != nullptr) {
            target[i] = from_float<E>(first);
            target[i + pairs] = from_float<E>(second);
        } else {
            values[i] = from_float<T>(first);
            values[i + pairs] = from_float<T>(second);
        }
    }
}

} // namespace rope

// rope_T_E: for each row, normalises and rotates the queries in place, and writes the rotated keys and the values
// to the pages. If pool is null it rotates the keys in place and leaves the values.
// Shapes: qkv [gridDim.x][row_stride], each row begins with heads query heads, kv_heads key heads and kv_heads
// value heads of head_dim elements (even); table [gridDim.x][head_dim], the cosines of all pairs, then the sines;
// query_norm and key_norm [head_dim], f32, or null for no norm; slots [gridDim.x], page * page_tokens + token in
// the page; starts [2 * kv_heads], the key heads, then the value heads.
// Element i of a head rotates with element i + head_dim / 2. The host computes the table, with any scaling.
// gridDim.y * 4 covers heads + 2 * kv_heads. 128 threads per block.
#define ROPE_KERNEL(NAME, T, E)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                               \
        rope_##NAME(T *qkv, u32 row_stride, u32 heads, u32 kv_heads, u32 head_dim, const float *table,              \
                    const float *query_norm, const float *key_norm, float eps, const u32 *slots, E *pool,           \
                    u64 page_elements, u32 page_count, u32 page_tokens, const u32 *starts, u32 token_stride) {      \
        const rope::Pages<E> pages = {pool, page_elements, page_count, page_tokens, starts, token_stride};          \
        rope::head<T, E>(qkv, row_stride, heads, kv_heads, head_dim, table, query_norm, key_norm, eps, slots,       \
                         pages);                                                                                    \
    }

ROPE_KERNEL(f32_f32, float, float)
ROPE_KERNEL(f32_f16, float, f16)
ROPE_KERNEL(f32_bf16, float, bf16)
ROPE_KERNEL(f16_f16, f16, f16)
ROPE_KERNEL(bf16_bf16, bf16, bf16)
