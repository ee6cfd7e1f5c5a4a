// Causal attention over paged keys and values, with grouped query heads.
//
// Invariants:
// - The result of a query depends on its position and on its sequence's keys and values only, not on the chunk,
//   the launch, the page size, or the choice between prefill and split kernels. All give the same bits.
// - Keys are taken in spans of SPAN absolute positions, and there in blocks of KEYS. A running maximum, sum and
//   weighted value carry over from block to block (online softmax, https://arxiv.org/abs/1805.02867). Each span
//   begins afresh, and the spans are merged in order. So blocks can share one long sequence (split-K).
//
// A block computes the queries of one tile for one key head: query q of a sequence is row q / group and head
// q % group of the key head's group. A warp owns some queries. For the scores a lane owns a key; for the values it
// owns some elements of the head. Keys and values pass through shared memory in 16-byte pieces, once per tile.
#pragma once

#include "element.cuh"

namespace attention {

constexpr u32 SPAN = 256;
constexpr u32 KEYS = 32;
constexpr u32 WARPS = 4;
constexpr u32 THREADS = WARPS * WARP;
static_assert(KEYS == WARP && SPAN % KEYS == 0, "a lane owns a key, and spans have whole blocks");

// N elements that move together.
template <class E, u32 N> struct alignas(sizeof(E) * N) Few {
    E elements[N];
};

// Head counts and scale, common to a launch.
struct Shape {
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    float scale;
};

// Keys and values of all sequences. Token s of key head h in page p begins at element
// p * page_elements + starts[h] + s * token_stride of the pool; values follow at starts[kv_heads + h].
template <class E> struct Cache {
    const E *pool;
    u64 page_elements;
    u32 page_count;
    u32 page_tokens;
    const u32 *page_table;
    u32 page_entries;
    const u32 *starts;
    u32 token_stride;

    // Whether the head lies inside a page, and its tokens begin at multiples of 16 bytes.
    __device__ bool has(u32 index, u32 head_dim) const {
        const u64 end = starts[index] + (u64)(page_tokens - 1) * token_stride + head_dim;
        return end <= page_elements && starts[index] % Pack<E>::N == 0;
    }
};

// Queries of one sequence that a block computes.
struct Tile {
    // Row of the queries and position of the sequence's first query.
    u32 first_row;
    u32 position;
    // First entry of the sequence in the page table.
    u32 first_page;
    // First query of the tile, and number of queries.
    u32 first;
    u32 count;

    __device__ u32 row(u32 query, u32 group) const { return first_row + (first + query) / group; }
    // Keys that the query sees.
    __device__ u32 visible(u32 query, u32 group) const { return position + (first + query) / group + 1; }
};

// Tables that the host prepares for a launch.
// sequences [sequence_count][4]: first row, rows, position of the first row, first entry of the page table.
// tiles [..][2]: sequence, first query.
struct Tables {
    const u32 *sequences;
    u32 sequence_count;
    const u32 *tiles;
    // Rows of the queries and results.
    u32 rows;
};

// Tile blockIdx.x of at most `most` queries. Empty if a table leads outside the rows or outside the page table, so
// that no table can make a kernel access other memory.
__device__ __forceinline__ Tile tile_at(const Tables &tables, u32 group, u32 most, u32 page_tokens, u32 page_entries) {
    Tile tile = {0, 0, 0, 0, 0};
    const u32 index = tables.tiles[2 * (u64)blockIdx.x];
    if (index >= tables.sequence_count) return tile;
    const u32 *sequence = tables.sequences + 4 * (u64)index;
    const u32 rows = sequence[1];
    tile.first_row = sequence[0];
    tile.position = sequence[2];
    tile.first_page = sequence[3];
    tile.first = tables.tiles[2 * (u64)blockIdx.x + 1];
    const u64 all = (u64)rows * group, tokens = (u64)tile.position + rows;
    const u64 pages = tile.first_page + (tokens + page_tokens - 1) / page_tokens;
    if ((u64)tile.first_row + rows > tables.rows || pages > page_entries || tile.first >= all) return tile;
    tile.count = all - tile.first < most ? (u32)(all - tile.first) : most;
    return tile;
}

// Sums of one query over some keys: the largest score, the sum of the weights relative to it, and this lane's
// elements of the weighted values.
template <u32 PER_LANE> struct Sums {
    float largest;
    float weight;
    float values[PER_LANE];

    __device__ __forceinline__ void clear() {
        largest = -infinite();
        weight = 0.0f;
        for (u32 i = 0; i < PER_LANE; i++) values[i] = 0.0f;
    }

    // Adds the sums of the next span, which has at least one key. The first span is copied exactly: its factor
    // is 1, and that of nothing is 0.
    __device__ __forceinline__ void merge(const Sums &span) {
        const float both = larger(largest, span.largest);
        const float own = expf(largest - both), other = expf(span.largest - both);
        largest = both;
        weight = fmaf(weight, own, span.weight * other);
        for (u32 i = 0; i < PER_LANE; i++) values[i] = fmaf(values[i], own, span.values[i] * other);
    }
};

// T: queries and results. E: keys and values. DIM: largest head_dim, 64 or 128. OWN: queries per warp.
template <class T, class E, u32 DIM, u32 OWN> struct Block {
    static constexpr u32 QUERIES = WARPS * OWN;
    static constexpr u32 PER_LANE = DIM / WARP;
    static constexpr u32 N = Pack<E>::N;
    static constexpr u32 PACKS = DIM / N;
    // 16 bytes more than a row, so that the lanes of a warp read their keys from different banks.
    static constexpr u32 KEY_STRIDE = DIM + N;

    struct alignas(16) Shared {
        E keys[KEYS * KEY_STRIDE];
        E values[KEYS * DIM];
        float queries[QUERIES * DIM];
        float weights[QUERIES * KEYS];
    };

    // Copies the tile's scaled queries. Needs a barrier before their use.
    static __device__ void load_queries(Shared &shared, const Tile &tile, const Shape &shape, u32 kv_head,
                                        const T *queries, u32 query_stride) {
        const u32 group = shape.heads / shape.kv_heads;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < QUERIES * DIM; i += THREADS) {
            const u32 query = i / DIM, element = i % DIM;
            float value = 0.0f;
            if (query < tile.count && element < shape.head_dim) {
                const u32 head = kv_head * group + (tile.first + query) % group;
                const T *row = queries + (u64)tile.row(query, group) * query_stride;
                value = to_float(row[head * shape.head_dim + element]) * shape.scale;
            }
            shared.queries[i] = value;
        }
    }

    // Copies the keys and values at positions [start, end), at most KEYS. Others become zero.
    static __device__ void load_block(Shared &shared, const Tile &tile, const Shape &shape, u32 kv_head,
                                      const Cache<E> &cache, u32 start, u32 end) {
        const u32 lane = threadIdx.x % WARP, position = start + lane;
        u32 page = ~0u, slot = 0;
        if (position < end) {
            page = cache.page_table[tile.first_page + position / cache.page_tokens];
            slot = position % cache.page_tokens;
            // A page outside the pool must not be read.
            if (page >= cache.page_count) page = ~0u;
        }
        const E *keys = cache.pool + cache.starts[kv_head];
        const E *values = cache.pool + cache.starts[shape.kv_heads + kv_head];
        // Every thread takes part in each turn, because the lanes exchange the places of their keys.
        for (u32 i = threadIdx.x; i < KEYS * PACKS; i += THREADS) {
            const u32 key = i / PACKS, at = i % PACKS * N;
            const u32 key_page = __shfl_sync(ALL_LANES, page, key);
            const u32 key_slot = __shfl_sync(ALL_LANES, slot, key);
            if (at >= shape.head_dim) continue;
            Words4 key_words = {{0, 0, 0, 0}}, value_words = {{0, 0, 0, 0}};
            if (key_page != ~0u) {
                const u64 offset = key_page * cache.page_elements + (u64)key_slot * cache.token_stride + at;
                key_words = *(const Words4 *)(keys + offset);
                value_words = *(const Words4 *)(values + offset);
            }
            *(Words4 *)(shared.keys + key * KEY_STRIDE + at) = key_words;
            *(Words4 *)(shared.values + key * DIM + at) = value_words;
        }
    }

    // Scores of this lane's key with the warp's queries. Four sums take turns over the elements, which hides the
    // latency of an addition.
    static __device__ __forceinline__ void scores(const Shared &shared, u32 head_dim, float (&out)[OWN]) {
        const u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
        const E *key = shared.keys + lane * KEY_STRIDE;
        float sums[OWN][4];
        for (u32 q = 0; q < OWN; q++) {
            for (u32 i = 0; i < 4; i++) sums[q][i] = 0.0f;
        }
#pragma unroll 2
        for (u32 at = 0; at < head_dim; at += N) {
            float elements[N];
            unpack(*(const Words4 *)(key + at), elements, E());
            for (u32 q = 0; q < OWN; q++) {
                for (u32 part = 0; part < N; part += 4) {
                    const Words4 query = *(const Words4 *)(shared.queries + (first + q) * DIM + at + part);
                    for (u32 i = 0; i < 4; i++) {
                        sums[q][i] = fmaf(__uint_as_float(query.w[i]), elements[part + i], sums[q][i]);
                    }
                }
            }
        }
        for (u32 q = 0; q < OWN; q++) out[q] = (sums[q][0] + sums[q][1]) + (sums[q][2] + sums[q][3]);
    }

    // Adds the weighted values of the keys from `start` on to the sums of the warp's queries. Query q sees the
    // first limits[q] keys. Later ones may hold anything, so a weight of zero would not hide them.
    static __device__ __forceinline__ void add_some(const Shared &shared, u32 start, const u32 (&limits)[OWN],
                                                    Sums<PER_LANE> (&sums)[OWN]) {
        const u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
        u32 most = 0;
        for (u32 q = 0; q < OWN; q++) most = most < limits[q] ? limits[q] : most;
#pragma unroll 1
        for (u32 key = start; key < most; key++) {
            const auto value = *(const Few<E, PER_LANE> *)(shared.values + key * DIM + lane * PER_LANE);
            for (u32 q = 0; q < OWN; q++) {
                if (key >= limits[q]) continue;
                const float weight = shared.weights[(first + q) * KEYS + key];
                for (u32 i = 0; i < PER_LANE; i++) {
                    sums[q].values[i] = fmaf(weight, to_float(value.elements[i]), sums[q].values[i]);
                }
            }
        }
    }

    // The same for all keys of the block. Takes four keys at a time where every query sees them.
    static __device__ __forceinline__ void add_values(const Shared &shared, u32 head_dim, const u32 (&limits)[OWN],
                                                      Sums<PER_LANE> (&sums)[OWN]) {
        const u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
        if (lane * PER_LANE >= head_dim) return;
        u32 common = KEYS;
        for (u32 q = 0; q < OWN; q++) common = limits[q] < common ? limits[q] : common;
        common = common / 4 * 4;
#pragma unroll 2
        for (u32 key = 0; key < common; key += 4) {
            float values[4][PER_LANE];
            for (u32 k = 0; k < 4; k++) {
                const auto value = *(const Few<E, PER_LANE> *)(shared.values + (key + k) * DIM + lane * PER_LANE);
                for (u32 i = 0; i < PER_LANE; i++) values[k][i] = to_float(value.elements[i]);
            }
            for (u32 q = 0; q < OWN; q++) {
                const Words4 weights = *(const Words4 *)(shared.weights + (first + q) * KEYS + key);
                for (u32 k = 0; k < 4; k++) {
                    for (u32 i = 0; i < PER_LANE; i++) {
                        sums[q].values[i] = fmaf(__uint_as_float(weights.w[k]), values[k][i], sums[q].values[i]);
                    }
                }
            }
        }
        add_some(shared, common, limits, sums);
    }

    // Computes the sums of the warp's queries over the keys of one span, up to the last key that the tile sees.
    static __device__ void span(Shared &shared, const Tile &tile, const Shape &shape, u32 kv_head,
                                const Cache<E> &cache, u32 span, Sums<PER_LANE> (&sums)[OWN]) {
        const u32 group = shape.heads / shape.kv_heads;
        const u32 lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
        const u32 all = tile.visible(tile.count - 1, group);
        const u32 end = (span + 1) * SPAN < all ? (span + 1) * SPAN : all;
        for (u32 q = 0; q < OWN; q++) sums[q].clear();
#pragma unroll 1
        for (u32 start = span * SPAN; start < end; start += KEYS) {
            // The warps have read the block before.
            __syncthreads();
            load_block(shared, tile, shape, kv_head, cache, start, end);
            __syncthreads();
            float score[OWN];
            u32 limits[OWN];
            scores(shared, shape.head_dim, score);
            for (u32 q = 0; q < OWN; q++) {
                const u32 visible = first + q < tile.count ? tile.visible(first + q, group) : 0;
                limits[q] = visible <= start ? 0 : (visible - start < KEYS ? visible - start : KEYS);
                // A query that sees no key of the block keeps its sums, also in the last bit.
                if (limits[q] == 0) continue;
                const bool is_visible = lane < limits[q];
                const float largest = larger(sums[q].largest, warp_max(is_visible ? score[q] : -infinite()));
                const float weight = is_visible ? expf(score[q] - largest) : 0.0f;
                const float correction = expf(sums[q].largest - largest);
                shared.weights[(first + q) * KEYS + lane] = weight;
                sums[q].largest = largest;
                sums[q].weight = fmaf(sums[q].weight, correction, warp_sum(weight));
                for (u32 i = 0; i < PER_LANE; i++) sums[q].values[i] *= correction;
            }
            // The lanes of the warp read each other's weights.
            __syncwarp();
            add_values(shared, shape.head_dim, limits, sums);
        }
    }
};

// Writes the weighted mean of the values.
template <class T, u32 PER_LANE>
__device__ __forceinline__ void write(const Sums<PER_LANE> &sums, u32 head_dim, T *out) {
    const u32 at = threadIdx.x % WARP * PER_LANE;
    if (at >= head_dim) return;
    const float scale = 1.0f / sums.weight;
    for (u32 i = 0; i < PER_LANE; i++) out[at + i] = from_float<T>(sums.values[i] * scale);
}

// Tile blockIdx.x, key head blockIdx.y: all spans, one after the other.
template <class T, class E, u32 DIM>
__device__ void prefill(const T *queries, u32 query_stride, Tables tables, Shape shape, Cache<E> cache, T *out) {
    constexpr u32 OWN = 4;
    typedef Block<T, E, DIM, OWN> B;
    __shared__ typename B::Shared shared;
    const u32 group = shape.heads / shape.kv_heads, kv_head = blockIdx.y;
    const Tile tile = tile_at(tables, group, B::QUERIES, cache.page_tokens, cache.page_entries);
    if (tile.count == 0 || !cache.has(kv_head, shape.head_dim)) return;
    if (!cache.has(shape.kv_heads + kv_head, shape.head_dim)) return;
    B::load_queries(shared, tile, shape, kv_head, queries, query_stride);
    const u32 first = threadIdx.x / WARP * OWN;
    Sums<B::PER_LANE> totals[OWN], sums[OWN];
    for (u32 q = 0; q < OWN; q++) totals[q].clear();
    const u32 all = tile.visible(tile.count - 1, group);
#pragma unroll 1
    for (u32 span = 0; span * SPAN < all; span++) {
        B::span(shared, tile, shape, kv_head, cache, span, sums);
        for (u32 q = 0; q < OWN; q++) {
            if (first + q < tile.count && tile.visible(first + q, group) > span * SPAN) totals[q].merge(sums[q]);
        }
    }
    for (u32 q = 0; q < OWN; q++) {
        if (first + q >= tile.count) continue;
        const u32 head = kv_head * group + (tile.first + first + q) % group;
        const u64 at = ((u64)tile.row(first + q, group) * shape.heads + head) * shape.head_dim;
        write(totals[q], shape.head_dim, out + at);
    }
}

// Tile blockIdx.x, key head blockIdx.y, span blockIdx.z. Writes the sums for `combine`.
template <class T, class E, u32 DIM>
__device__ void split(const T *queries, u32 query_stride, Tables tables, Shape shape, Cache<E> cache, float *partials) {
    typedef Block<T, E, DIM, 1> B;
    __shared__ typename B::Shared shared;
    const u32 group = shape.heads / shape.kv_heads, kv_head = blockIdx.y, span = blockIdx.z;
    const Tile tile = tile_at(tables, group, B::QUERIES, cache.page_tokens, cache.page_entries);
    if (tile.count == 0 || span * SPAN >= tile.visible(tile.count - 1, group)) return;
    if (!cache.has(kv_head, shape.head_dim) || !cache.has(shape.kv_heads + kv_head, shape.head_dim)) return;
    B::load_queries(shared, tile, shape, kv_head, queries, query_stride);
    Sums<B::PER_LANE> sums[1];
    B::span(shared, tile, shape, kv_head, cache, span, sums);
    const u32 query = threadIdx.x / WARP, at = threadIdx.x % WARP * B::PER_LANE;
    if (query >= tile.count || span * SPAN >= tile.visible(query, group)) return;
    const u32 head = kv_head * group + (tile.first + query) % group;
    const u64 index = ((u64)tile.row(query, group) * shape.heads + head) * gridDim.z + span;
    float *partial = partials + index * (shape.head_dim + 2);
    if (at == 0) {
        partial[shape.head_dim] = sums[0].largest;
        partial[shape.head_dim + 1] = sums[0].weight;
    }
    if (at >= shape.head_dim) return;
    for (u32 i = 0; i < B::PER_LANE; i++) partial[at + i] = sums[0].values[i];
}

// Tile blockIdx.x, key head blockIdx.y; a warp merges the spans of one query in order.
template <class T>
__device__ void combine(const float *partials, u32 spans, Tables tables, Shape shape, u32 page_tokens, u32 page_entries,
                        T *out) {
    // Lanes own the elements l * 4 to l * 4 + 3, whatever `split` had. An element's sums do not depend on it.
    constexpr u32 PER_LANE = 4;
    const u32 group = shape.heads / shape.kv_heads, query = threadIdx.x / WARP;
    const u32 at = threadIdx.x % WARP * PER_LANE;
    // The same tiles as in `split`, which has written nothing for others.
    const Tile tile = tile_at(tables, group, WARPS, page_tokens, page_entries);
    if (query >= tile.count) return;
    const u32 head = blockIdx.y * group + (tile.first + query) % group;
    const u64 index = (u64)tile.row(query, group) * shape.heads + head;
    const float *partial = partials + index * spans * (shape.head_dim + 2);
    Sums<PER_LANE> totals, sums;
    totals.clear();
    for (u32 span = 0; span < spans && span * SPAN < tile.visible(query, group); span++) {
        sums.largest = partial[shape.head_dim];
        sums.weight = partial[shape.head_dim + 1];
        for (u32 i = 0; i < PER_LANE; i++) sums.values[i] = at < shape.head_dim ? partial[at + i] : 0.0f;
        totals.merge(sums);
        partial += shape.head_dim + 2;
    }
    write(totals, shape.head_dim, out + index * shape.head_dim);
}

} // namespace attention

// attention_prefill_T_E_dD: many queries per sequence. Grid (tiles, kv_heads), tiles of 16 queries.
// attention_split_T_E_dD: few queries with many keys. Grid (tiles, kv_heads, spans), tiles of 4 queries. Writes
// the sums of each span to partials, and attention_combine_T computes the results from them.
// All have 128 threads per block. D is the largest head_dim, a multiple of 8.
//
// Shapes: queries [rows][query_stride], each row begins with [heads][head_dim]; sequences and tiles [gridDim.x][2],
// see Tables; page_table [page_entries], the indices of each sequence's pages from position 0; starts
// [2 * kv_heads], the key heads, then the value heads; out [rows][heads][head_dim]; partials
// [rows][heads][spans][head_dim + 2], the weighted values, the largest score and the sum of weights.
// page_elements, starts and token_stride are multiples of 16 bytes, and so is the address of the pool.
// Query r of a sequence sees the keys up to position `position + r`. scale multiplies the scores. Positions are
// below 2^31.
#define ATTENTION_PARAMETERS(T, E)                                                                                  \
    const T *queries, u32 query_stride, const u32 *sequences, u32 sequence_count, const u32 *tiles, u32 rows,       \
        u32 heads, u32 kv_heads, u32 head_dim, float scale, const E *pool, u64 page_elements, u32 page_count,       \
        u32 page_tokens, const u32 *page_table, u32 page_entries, const u32 *starts, u32 token_stride

#define ATTENTION_ARGUMENTS(E)                                                                                      \
    queries, query_stride, attention::Tables{sequences, sequence_count, tiles, rows},                               \
        attention::Shape{heads, kv_heads, head_dim, scale}, attention::Cache<E> {                                   \
        pool, page_elements, page_count, page_tokens, page_table, page_entries, starts, token_stride                \
    }

#define ATTENTION_KERNELS(NAME, T, E, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 3)                                                               \
        attention_prefill_##NAME##_d##D(ATTENTION_PARAMETERS(T, E), T *out) {                                       \
        attention::prefill<T, E, D>(ATTENTION_ARGUMENTS(E), out);                                                   \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(128, 3)                                                               \
        attention_split_##NAME##_d##D(ATTENTION_PARAMETERS(T, E), float *partials) {                                \
        attention::split<T, E, D>(ATTENTION_ARGUMENTS(E), partials);                                                \
    }

#define COMBINE_KERNEL(NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, 3)                                                               \
        attention_combine_##NAME(const float *partials, u32 spans, const u32 *sequences, u32 sequence_count,        \
                                 const u32 *tiles, u32 rows, u32 heads, u32 kv_heads, u32 head_dim,                 \
                                 u32 page_tokens, u32 page_entries, T *out) {                                       \
        const attention::Shape shape = {heads, kv_heads, head_dim, 0.0f};                                           \
        attention::combine<T>(partials, spans, attention::Tables{sequences, sequence_count, tiles, rows}, shape,    \
                              page_tokens, page_entries, out);                                                      \
    }
