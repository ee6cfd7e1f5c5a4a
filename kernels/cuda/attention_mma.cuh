// Causal attention over paged keys and values of bf16, on tensor cores.
//
// Invariants:
// - The result of a query depends on its position and on its sequence's keys and values only, as in attention.cuh.
//   This assumes that a matrix instruction gives each element the same bits in any row, and that values are finite:
//   a key that a query does not see counts with the weight 0.
// - Keys are taken in spans of attention::SPAN absolute positions, and there in blocks of KEYS. Prefill and split
//   kernels run the same code per span and merge the spans in order, so they give the same bits.
// - Bits differ from those of attention.cuh: queries and weights are rounded to bf16.
//
// A warp owns 16 queries. Scores, weights and weighted values stay in its registers; the fragment of the scores is
// the left operand of the product with the values (FlashAttention-2, https://arxiv.org/abs/2307.08691). Keys and values
// pass through shared memory, where the next block arrives while the present one is used.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace attention_mma {

using attention::Cache;
using attention::Shape;
using attention::SPAN;
using attention::Tables;
using attention::Tile;

constexpr u32 KEYS = 32;
constexpr u32 STAGES = 2;
constexpr u32 PREFILL_WARPS = 4;
static_assert(KEYS == WARP && SPAN % KEYS == 0, "a lane finds the place of a key, and spans have whole blocks");

// Base 2 instead of e saves a multiplication per weight.
constexpr float LOG2_E = 1.44269504f;

// Sums of a warp's queries over some keys. A lane has rows g and g + 8, see mma.cuh. `largest` is in units of log 2.
// Until `finish`, `weight` has the lane's own keys.
template <u32 COLUMNS> struct Sums {
    float largest[2];
    float weight[2];
    float values[COLUMNS][4];

    __device__ __forceinline__ void clear() {
        for (u32 row = 0; row < 2; row++) {
            largest[row] = -infinite();
            weight[row] = 0.0f;
        }
        for (u32 c = 0; c < COLUMNS; c++) {
            for (u32 i = 0; i < 4; i++) values[c][i] = 0.0f;
        }
    }

    __device__ __forceinline__ void finish() {
        for (u32 row = 0; row < 2; row++) {
            weight[row] += __shfl_xor_sync(ALL_LANES, weight[row], 1);
            weight[row] += __shfl_xor_sync(ALL_LANES, weight[row], 2);
        }
    }

    // Adds a row of the next span, which has at least one key.
    __device__ __forceinline__ void merge(const Sums &span, u32 row) {
        const float both = larger(largest[row], span.largest[row]);
        const float own = exp2f(largest[row] - both), other = exp2f(span.largest[row] - both);
        largest[row] = both;
        weight[row] = fmaf(weight[row], own, span.weight[row] * other);
        for (u32 c = 0; c < COLUMNS; c++) {
            for (u32 i = 2 * row; i < 2 * row + 2; i++) {
                values[c][i] = fmaf(values[c][i], own, span.values[c][i] * other);
            }
        }
    }
};

// T: queries and results. DIM: largest head_dim, 64 or 128.
template <class T, u32 DIM, u32 WARPS> struct Block {
    static constexpr u32 QUERIES = WARPS * mma::M;
    static constexpr u32 THREADS = WARPS * WARP;
    static constexpr u32 STEPS = DIM / mma::K;
    static constexpr u32 COLUMNS = DIM / mma::N;
    static constexpr u32 N = Pack<bf16>::N;
    static constexpr u32 PACKS = DIM / N;
    // 16 bytes more than a row, so that eight rows begin in different banks.
    static constexpr u32 STRIDE = DIM + N;
    typedef Sums<COLUMNS> Own;

    struct alignas(16) Shared {
        bf16 keys[STAGES][KEYS * STRIDE];
        bf16 values[STAGES][KEYS * STRIDE];
    };

    // This lane's query of row 0 or 1, in the tile.
    static __device__ __forceinline__ u32 query_of(u32 row) {
        return threadIdx.x / WARP * mma::M + threadIdx.x % WARP / 4 + row * 8;
    }

    // Fragments of the warp's queries. Queries and elements that do not exist become zero.
    static __device__ __forceinline__ void load_queries(u32 (&out)[STEPS][4], const Tile &tile, const Shape &shape,
                                                        u32 kv_head, const T *queries, u32 query_stride) {
        const u32 group = shape.heads / shape.kv_heads, t = threadIdx.x % 4;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const u32 query = query_of(row);
            const u32 head = kv_head * group + (tile.first + query) % group;
            const T *from = queries + (u64)tile.row(query, group) * query_stride + head * shape.head_dim;
#pragma unroll
            for (u32 pair = 0; pair < 2 * STEPS; pair++) {
                const u32 at = pair * 8 + 2 * t;
                float low = 0.0f, high = 0.0f;
                if (query < tile.count && at < shape.head_dim) {
                    low = to_float(from[at]);
                    high = to_float(from[at + 1]);
                }
                out[pair / 2][pair % 2 * 2 + row] = mma::pack(low, high);
            }
        }
    }

    // Starts the copy of the keys and values at positions [start, end), at most KEYS. Others become zero.
    static __device__ __forceinline__ void load_block(Shared &shared, u32 stage, const Tile &tile, const Shape &shape,
                                                      u32 kv_head, const Cache<bf16> &cache, u32 start, u32 end) {
        const u32 position = start + threadIdx.x % WARP;
        u32 page = ~0u, slot = 0;
        if (position < end) {
            page = cache.page_table[tile.first_page + position / cache.page_tokens];
            slot = position % cache.page_tokens;
            // A page outside the pool must not be read.
            if (page >= cache.page_count) page = ~0u;
        }
        const bf16 *keys = cache.pool + cache.starts[kv_head];
        const bf16 *values = cache.pool + cache.starts[shape.kv_heads + kv_head];
#pragma unroll 2
        for (u32 i = threadIdx.x; i < KEYS * PACKS; i += THREADS) {
            const u32 key = i / PACKS, at = i % PACKS * N;
            const u32 key_page = __shfl_sync(ALL_LANES, page, key);
            const u32 key_slot = __shfl_sync(ALL_LANES, slot, key);
            const bool is_present = key_page != ~0u && at < shape.head_dim;
            const u64 offset =
                is_present ? key_page * cache.page_elements + (u64)key_slot * cache.token_stride + at : 0;
            mma::copy_16(&shared.keys[stage][key * STRIDE + at], keys + offset, is_present);
            mma::copy_16(&shared.values[stage][key * STRIDE + at], values + offset, is_present);
        }
    }

    static __device__ __forceinline__ void scores(const bf16 *keys, const u32 (&queries)[STEPS][4],
                                                  float (&out)[KEYS / mma::N][4]) {
#pragma unroll
        for (u32 j = 0; j < KEYS / mma::N; j++) {
            for (u32 i = 0; i < 4; i++) out[j][i] = 0.0f;
        }
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
#pragma unroll
            for (u32 j = 0; j < KEYS / mma::N; j += 2) {
                u32 b[4];
                mma::load_b(b, keys + j * mma::N * STRIDE + step * mma::K, STRIDE);
                mma::add_product(out[j], queries[step], b[0], b[1]);
                mma::add_product(out[j + 1], queries[step], b[2], b[3]);
            }
        }
    }

    // Turns the scores of one row into weights, and scales the row's sums to the new largest score. The row sees the
    // first `limit` keys of the block. If it sees none, its sums keep their bits.
    static __device__ __forceinline__ void weigh(float (&scores)[KEYS / mma::N][4], u32 row, u32 limit, float scale,
                                                 Own &sums) {
        float largest = -infinite();
#pragma unroll
        for (u32 j = 0; j < KEYS / mma::N; j++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 key = j * mma::N + threadIdx.x % 4 * 2 + i;
                float &score = scores[j][2 * row + i];
                score = key < limit ? score * scale : -infinite();
                largest = larger(largest, score);
            }
        }
        largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        largest = larger(sums.largest[row], largest);
        // Without any key so far, all weights are 0 whatever they are relative to.
        const float base = largest == -infinite() ? 0.0f : largest;
        const float correction = exp2f(sums.largest[row] - base);
        float weight = 0.0f;
#pragma unroll
        for (u32 j = 0; j < KEYS / mma::N; j++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float &score = scores[j][2 * row + i];
                score = exp2f(score - base);
                weight += score;
            }
        }
        sums.largest[row] = largest;
        sums.weight[row] = fmaf(sums.weight[row], correction, weight);
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            sums.values[c][2 * row] *= correction;
            sums.values[c][2 * row + 1] *= correction;
        }
    }

    static __device__ __forceinline__ void add_values(const bf16 *values, const float (&weights)[KEYS / mma::N][4],
                                                      Own &sums) {
#pragma unroll
        for (u32 j = 0; j < KEYS / mma::N; j += 2) {
            const u32 a[4] = {mma::pack(weights[j][0], weights[j][1]), mma::pack(weights[j][2], weights[j][3]),
                              mma::pack(weights[j + 1][0], weights[j + 1][1]),
                              mma::pack(weights[j + 1][2], weights[j + 1][3])};
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c += 2) {
                u32 b[4];
                mma::load_b_rows(b, values + j * mma::N * STRIDE + c * mma::N, STRIDE);
                mma::add_product(sums.values[c], a, b[0], b[1]);
                mma::add_product(sums.values[c + 1], a, b[2], b[3]);
            }
        }
    }

    // Computes the sums over the keys [first, end), span by span, and calls `done` with each span. `first` begins a
    // span. While a block is used, the next one is on its way, also across the end of a span.
    template <class Done>
    static __device__ __forceinline__ void walk(Shared &shared, const Tile &tile, const Shape &shape, u32 kv_head,
                                                const Cache<bf16> &cache, u32 first, u32 end,
                                                const u32 (&queries)[STEPS][4], Own &sums, Done done) {
        const u32 group = shape.heads / shape.kv_heads;
        const float scale = shape.scale * LOG2_E;
        u32 stage = 0;
        load_block(shared, stage, tile, shape, kv_head, cache, first, end);
        mma::end_copies();
#pragma unroll 1
        for (u32 start = first; start < end; start += KEYS) {
            if (start + KEYS < end) load_block(shared, stage ^ 1, tile, shape, kv_head, cache, start + KEYS, end);
            // An empty group at the end keeps the count.
            mma::end_copies();
            mma::wait_copies<1>();
            __syncthreads();
            if (start % SPAN == 0) sums.clear();
            float weights[KEYS / mma::N][4];
            scores(shared.keys[stage], queries, weights);
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const u32 query = query_of(row);
                const u32 visible = query < tile.count ? tile.visible(query, group) : 0;
                const u32 limit = visible <= start ? 0 : (visible - start < KEYS ? visible - start : KEYS);
                weigh(weights, row, limit, scale, sums);
            }
            add_values(shared.values[stage], weights, sums);
            if ((start + KEYS) % SPAN == 0 || start + KEYS >= end) {
                sums.finish();
                done(start / SPAN);
            }
            // The next turn writes over this block.
            __syncthreads();
            stage ^= 1;
        }
    }

    static __device__ bool has_heads(const Shape &shape, u32 kv_head, const Cache<bf16> &cache) {
        return cache.has(kv_head, shape.head_dim) && cache.has(shape.kv_heads + kv_head, shape.head_dim);
    }
};

// Tile blockIdx.x, key head blockIdx.y: all spans, one after the other.
template <class T, u32 DIM>
__device__ __forceinline__ void prefill(const T *queries, u32 query_stride, Tables tables, Shape shape,
                                        Cache<bf16> cache, T *out) {
    typedef Block<T, DIM, PREFILL_WARPS> B;
    __shared__ typename B::Shared shared;
    const u32 group = shape.heads / shape.kv_heads, kv_head = blockIdx.y;
    const Tile tile = attention::tile_at(tables, group, B::QUERIES, cache.page_tokens, cache.page_entries);
    if (tile.count == 0 || !B::has_heads(shape, kv_head, cache)) return;
    u32 fragments[B::STEPS][4];
    B::load_queries(fragments, tile, shape, kv_head, queries, query_stride);
    typename B::Own totals, sums;
    totals.clear();
    const auto done = [&](u32 span) {
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const u32 query = B::query_of(row);
            if (query < tile.count && tile.visible(query, group) > span * SPAN) totals.merge(sums, row);
        }
    };
    B::walk(shared, tile, shape, kv_head, cache, 0, tile.visible(tile.count - 1, group), fragments, sums, done);
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        const u32 query = B::query_of(row);
        if (query >= tile.count) continue;
        const u32 head = kv_head * group + (tile.first + query) % group;
        T *to = out + ((u64)tile.row(query, group) * shape.heads + head) * shape.head_dim;
        const float scale = 1.0f / totals.weight[row];
#pragma unroll
        for (u32 c = 0; c < B::COLUMNS; c++) {
            const u32 at = c * mma::N + threadIdx.x % 4 * 2;
            if (at >= shape.head_dim) continue;
            for (u32 i = 0; i < 2; i++) to[at + i] = from_float<T>(totals.values[c][2 * row + i] * scale);
        }
    }
}

// Tile blockIdx.x, key head blockIdx.y, span blockIdx.z. A block is one warp: many of them on a multiprocessor keep
// enough copies on their way. Writes the sums for `combine`.
template <class T, u32 DIM>
__device__ __forceinline__ void split(const T *queries, u32 query_stride, Tables tables, Shape shape,
                                      Cache<bf16> cache, float *partials) {
    typedef Block<T, DIM, 1> B;
    __shared__ typename B::Shared shared;
    const u32 group = shape.heads / shape.kv_heads, kv_head = blockIdx.y, span = blockIdx.z;
    const Tile tile = attention::tile_at(tables, group, B::QUERIES, cache.page_tokens, cache.page_entries);
    if (tile.count == 0 || !B::has_heads(shape, kv_head, cache)) return;
    const u32 all = tile.visible(tile.count - 1, group), first = span * SPAN;
    if (first >= all) return;
    u32 fragments[B::STEPS][4];
    B::load_queries(fragments, tile, shape, kv_head, queries, query_stride);
    typename B::Own sums;
    const u32 end = first + SPAN < all ? first + SPAN : all;
    B::walk(shared, tile, shape, kv_head, cache, first, end, fragments, sums, [](u32) {});
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        const u32 query = B::query_of(row);
        if (query >= tile.count || first >= tile.visible(query, group)) continue;
        const u32 head = kv_head * group + (tile.first + query) % group;
        const u64 index = ((u64)tile.row(query, group) * shape.heads + head) * gridDim.z + span;
        float *partial = partials + index * (shape.head_dim + 2);
        if (threadIdx.x % 4 == 0) {
            partial[shape.head_dim] = sums.largest[row];
            partial[shape.head_dim + 1] = sums.weight[row];
        }
#pragma unroll
        for (u32 c = 0; c < B::COLUMNS; c++) {
            const u32 at = c * mma::N + threadIdx.x % 4 * 2;
            if (at >= shape.head_dim) continue;
            for (u32 i = 0; i < 2; i++) partial[at + i] = sums.values[c][2 * row + i];
        }
    }
}

// Tile blockIdx.x of 16 queries, key head blockIdx.y. A warp merges the spans of its queries in order, with the
// operations of Sums::merge.
template <class T>
__device__ __forceinline__ void combine(const float *partials, u32 spans, Tables tables, Shape shape, u32 page_tokens,
                                        u32 page_entries, T *out) {
    constexpr u32 PER_LANE = 4;
    const u32 group = shape.heads / shape.kv_heads, at = threadIdx.x % WARP * PER_LANE;
    const Tile tile = attention::tile_at(tables, group, mma::M, page_tokens, page_entries);
#pragma unroll 1
    for (u32 query = threadIdx.x / WARP; query < tile.count; query += attention::WARPS) {
        const u32 head = blockIdx.y * group + (tile.first + query) % group;
        const u64 index = (u64)tile.row(query, group) * shape.heads + head;
        const float *partial = partials + index * spans * (shape.head_dim + 2);
        float largest = -infinite(), weight = 0.0f, values[PER_LANE] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 span = 0; span < spans && span * SPAN < tile.visible(query, group); span++) {
            const float span_largest = partial[shape.head_dim];
            const float both = larger(largest, span_largest);
            const float own = exp2f(largest - both), other = exp2f(span_largest - both);
            largest = both;
            weight = fmaf(weight, own, partial[shape.head_dim + 1] * other);
            for (u32 i = 0; i < PER_LANE; i++) {
                const float value = at < shape.head_dim ? partial[at + i] : 0.0f;
                values[i] = fmaf(values[i], own, value * other);
            }
            partial += shape.head_dim + 2;
        }
        if (at >= shape.head_dim) continue;
        const float scale = 1.0f / weight;
        T *to = out + index * shape.head_dim;
        for (u32 i = 0; i < PER_LANE; i++) to[at + i] = from_float<T>(values[i] * scale);
    }
}

} // namespace attention_mma

// attention_mma_prefill_T_dD: tiles of 64 queries, 128 threads, grid (tiles, kv_heads).
// attention_mma_split_T_dD: tiles of 16 queries, 32 threads, grid (tiles, kv_heads, spans); then
// attention_mma_combine_T with the same tiles, 128 threads, grid (tiles, kv_heads).
// Pages are bf16. Other parameters and shapes are those of attention.cuh.
#define ATTENTION_MMA_KERNELS(NAME, T, D)                                                                           \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                            \
        attention_mma_prefill_##NAME##_d##D(ATTENTION_PARAMETERS(T, bf16), T *out) {                                \
        attention_mma::prefill<T, D>(ATTENTION_ARGUMENTS(bf16), out);                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(32)                                                                \
        attention_mma_split_##NAME##_d##D(ATTENTION_PARAMETERS(T, bf16), float *partials) {                         \
        attention_mma::split<T, D>(ATTENTION_ARGUMENTS(bf16), partials);                                            \
    }

#define COMBINE_MMA_KERNEL(NAME, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                                               \
        attention_mma_combine_##NAME(const float *partials, u32 spans, const u32 *sequences, u32 sequence_count,    \
                                     const u32 *tiles, u32 rows, u32 heads, u32 kv_heads, u32 head_dim,             \
                                     u32 page_tokens, u32 page_entries, T *out) {                                   \
        const attention::Shape shape = {heads, kv_heads, head_dim, 0.0f};                                           \
        attention_mma::combine<T>(partials, spans, attention::Tables{sequences, sequence_count, tiles, rows},       \
                                  shape, page_tokens, page_entries, out);                                           \
    }
