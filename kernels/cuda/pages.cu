// Moves pages between an engine's paged pool and the store's layout, in both directions.
//
// pages.cuh describes both layouts. A block takes one chunk of one page at a time, so that a small grid limits the
// multiprocessors in use. A chunk moves in tiles by aligned units of `unit_bytes`, and its CRC is computed on the way
// if `crcs` is given.
//
// Block: crc32::THREADS threads. Grid: any number of blocks.

#include "pages.cuh"

namespace {

__device__ inline void keep(unsigned int *words, unsigned int, uint4 unit) {
    words[0] = unit.x;
    words[1] = unit.y;
    words[2] = unit.z;
    words[3] = unit.w;
}
__device__ inline void keep(unsigned int *words, unsigned int, uint2 unit) {
    words[0] = unit.x;
    words[1] = unit.y;
}
__device__ inline void keep(unsigned int *words, unsigned int, unsigned int unit) { words[0] = unit; }
__device__ inline void keep(unsigned int *words, unsigned int offset, unsigned short unit) {
    ((unsigned short *)words)[offset % 4u / 2u] = unit;
}
__device__ inline void keep(unsigned int *words, unsigned int offset, unsigned char unit) {
    ((unsigned char *)words)[offset % 4u] = unit;
}

// Moves `bytes` bytes from `offset` of a part on, and keeps them in shared memory if `keeps`.
template <bool TO_STORE, typename Unit>
__device__ inline void move_tile(const Pool &pool, crc32::Shared &shared, unsigned int page, unsigned int part,
                                 unsigned int offset, unsigned int bytes, unsigned char *store, bool keeps) {
    const unsigned int units = bytes / (unsigned int)sizeof(Unit);
#pragma unroll 4
    for (unsigned int i = threadIdx.x; i < units; i += crc32::THREADS) {
        const unsigned int at = i * (unsigned int)sizeof(Unit);
        Unit *const outside = (Unit *)(store + at);
        Unit *const inside = (Unit *)in_pool(pool, page, part, offset + at);
        const Unit unit = TO_STORE ? *inside : *outside;
        if (TO_STORE) {
            *outside = unit;
        } else {
            *inside = unit;
        }
        if (keeps) keep(shared.tile + crc32::word_at(at), at, unit);
    }
}

template <bool TO_STORE, typename Unit>
__device__ inline void move_chunks(const Pool &pool, crc32::Shared &shared, const unsigned long long *pages,
                                   unsigned int page_count, const uint4 *chunks, unsigned int chunk_count,
                                   unsigned int *crcs) {
    // The launcher keeps the product below 2^31, and the grid no larger than it.
    const unsigned int items = page_count * chunk_count;
    for (unsigned int item = blockIdx.x; item < items; item += gridDim.x) {
        const unsigned int page = item / chunk_count;
        const uint4 chunk = chunks[item % chunk_count];
        unsigned char *const store = (unsigned char *)(pages[page] + chunk.x + chunk.y);
        unsigned int crc = 0, last = 0;
        for (unsigned int offset = 0; offset < chunk.z; offset += crc32::TILE_BYTES) {
            const unsigned int tile = min(chunk.z - offset, crc32::TILE_BYTES);
            move_tile<TO_STORE, Unit>(pool, shared, page, chunk.w, chunk.y + offset, tile, store + offset, crcs != 0);
            if (!crcs) continue;
            __syncthreads();
            if (tile == crc32::TILE_BYTES) {
                crc = crc32::add_piece(shared, crc);
            } else {
                last = crc32::last_piece(shared, tile);
            }
            __syncthreads();
        }
        if (!crcs) continue;
        const unsigned int result = crc32::combine(shared, crc, last, chunk.z);
        if (threadIdx.x == 0) crcs[item] = result;
    }
}

template <bool TO_STORE>
__device__ inline void move(const Pool &pool, const unsigned long long *pages, unsigned int page_count,
                            const uint4 *chunks, unsigned int chunk_count, unsigned int unit_bytes, unsigned int *crcs) {
    __shared__ crc32::Shared shared;
    if (crcs) crc32::prepare(shared);
    switch (unit_bytes) {
        case 16: return move_chunks<TO_STORE, uint4>(pool, shared, pages, page_count, chunks, chunk_count, crcs);
        case 8: return move_chunks<TO_STORE, uint2>(pool, shared, pages, page_count, chunks, chunk_count, crcs);
        case 4: return move_chunks<TO_STORE, unsigned int>(pool, shared, pages, page_count, chunks, chunk_count, crcs);
        case 2: return move_chunks<TO_STORE, unsigned short>(pool, shared, pages, page_count, chunks, chunk_count, crcs);
        default: return move_chunks<TO_STORE, unsigned char>(pool, shared, pages, page_count, chunks, chunk_count, crcs);
    }
}

}  // namespace

// Copies the chunks of all pages from the pool to the store's layout at the addresses `pages`.
extern "C" __global__ void __launch_bounds__(256, 3)
larder_gather_pages(const unsigned long long *tensors, const unsigned int *table, const unsigned int *firsts,
                    unsigned long long page_stride, unsigned long long token_stride, unsigned long long head_stride,
                    unsigned int table_stride, unsigned int engine_tokens, unsigned int tokens, unsigned int heads,
                    unsigned int head_bytes, unsigned int layer_tensors, const unsigned long long *pages,
                    unsigned int page_count, const uint4 *chunks, unsigned int chunk_count, unsigned int unit_bytes,
                    unsigned int *crcs) {
    const Pool pool = {tensors, table, firsts, page_stride, token_stride, head_stride, table_stride, engine_tokens,
                       tokens, heads, head_bytes, layer_tensors};
    move<true>(pool, pages, page_count, chunks, chunk_count, unit_bytes, crcs);
}

// Copies the chunks of all pages from the store's layout to the pool.
extern "C" __global__ void __launch_bounds__(256, 3)
larder_scatter_pages(const unsigned long long *tensors, const unsigned int *table, const unsigned int *firsts,
                     unsigned long long page_stride, unsigned long long token_stride, unsigned long long head_stride,
                     unsigned int table_stride, unsigned int engine_tokens, unsigned int tokens, unsigned int heads,
                     unsigned int head_bytes, unsigned int layer_tensors, const unsigned long long *pages,
                     unsigned int page_count, const uint4 *chunks, unsigned int chunk_count, unsigned int unit_bytes,
                     unsigned int *crcs) {
    const Pool pool = {tensors, table, firsts, page_stride, token_stride, head_stride, table_stride, engine_tokens,
                       tokens, heads, head_bytes, layer_tensors};
    move<false>(pool, pages, page_count, chunks, chunk_count, unit_bytes, crcs);
}
