// Moves pages as pages.cu does, by bulk copies (TMA, compute capability 9.0).
//
// A few threads start copies of whole rows between global and shared memory, and no byte passes through registers. So
// few blocks keep many bytes on their way. A chunk moves in tiles of crc32::TILE_BYTES through two buffers: while a tile
// is stored and its CRC computed, the next one arrives. All addresses and lengths are multiples of 16.
//
// The plain twin copies with ordinary instructions and takes the block's barrier for the barrier in shared memory. The
// emulator runs it. Older devices could too, but use pages.cu.
//
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/, sections on cp.async.bulk and mbarrier.
//
// Block: crc32::THREADS threads. Grid: any number of blocks.

#include "pages.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LARDER_HAS_BULK 1
#endif

namespace bulk {

constexpr unsigned int LANES = 32;
constexpr unsigned int STAGES = 2;

struct alignas(128) Shared {
    // Its tile is the buffer of stage 0. Pieces lie there without a word between them.
    crc32::Shared crc;
    unsigned int second[crc32::TILE_BYTES / 4];
    unsigned long long barriers[STAGES];
};
static_assert(sizeof(crc32::Shared) % 16 == 0 && sizeof(crc32::Shared::tile) >= crc32::TILE_BYTES, "buffers");

__device__ inline unsigned char *buffer(Shared &shared, unsigned int stage) {
    return (unsigned char *)(stage == 0 ? shared.crc.tile : shared.second);
}

#if defined(LARDER_HAS_BULK)
__device__ inline unsigned int shared_address(const void *pointer) {
    return (unsigned int)__cvta_generic_to_shared(pointer);
}
#elif !defined(LARDER_EMULATOR)
__device__ inline void copy_now(void *to, const void *from, unsigned int bytes) {
    for (unsigned int i = 0; i < bytes / 16u; i++) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
}
#endif

// Prepares the barriers. All threads call it once.
__device__ inline void prepare(Shared &shared) {
#if defined(LARDER_HAS_BULK)
    if (threadIdx.x == 0) {
        for (unsigned int stage = 0; stage < STAGES; stage++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                         :
                         : "r"(shared_address(&shared.barriers[stage]))
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    }
#endif
    __syncthreads();
}

// Announces the bytes that arrive in a stage. One thread calls it before the loads.
__device__ inline void expect(Shared &shared, unsigned int stage, unsigned int bytes) {
#if defined(LARDER_HAS_BULK)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(&shared.barriers[stage])), "r"(bytes)
                 : "memory");
#endif
}

// Starts a copy to shared memory.
__device__ inline void load(Shared &shared, unsigned int stage, void *to, const void *from, unsigned int bytes) {
#if defined(LARDER_HAS_BULK)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&shared.barriers[stage]))
                 : "memory");
#elif defined(LARDER_EMULATOR)
    larder_copy_async(to, from, bytes);
#else
    copy_now(to, from, bytes);
#endif
}

// Waits for the bytes of a stage. All threads call it. `phase` changes with each use of the stage.
__device__ inline void wait_loads(Shared &shared, unsigned int stage, unsigned int phase) {
#if defined(LARDER_HAS_BULK)
    asm volatile("{\n\t"
                 ".reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t"
                 "}"
                 :
                 : "r"(shared_address(&shared.barriers[stage])), "r"(phase)
                 : "memory");
#else
#if defined(LARDER_EMULATOR)
    larder_commit_async();
    larder_wait_async(0);
#endif
    __syncthreads();
#endif
}

// Starts a copy from shared memory. Copies of a thread up to `end_stores` are a group.
__device__ inline void store(void *to, const void *from, unsigned int bytes) {
#if defined(LARDER_HAS_BULK)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
#elif defined(LARDER_EMULATOR)
    larder_copy_async(to, from, bytes);
#else
    copy_now(to, from, bytes);
#endif
}

__device__ inline void end_stores() {
#if defined(LARDER_HAS_BULK)
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
#elif defined(LARDER_EMULATOR)
    larder_commit_async();
#endif
}

// Waits until the thread's stores have read shared memory, so that it can be replaced.
__device__ inline void wait_reads() {
#if defined(LARDER_HAS_BULK)
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
#elif defined(LARDER_EMULATOR)
    larder_wait_async(0);
#endif
}

// Waits until the thread's stores have ended.
__device__ inline void wait_stores() {
#if defined(LARDER_HAS_BULK)
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
#elif defined(LARDER_EMULATOR)
    larder_wait_async(0);
#endif
}

// A tile of a chunk, in both of its places.
struct Tile {
    const Pool &pool;
    unsigned int page, part, offset, bytes;
    unsigned char *store;

    // Calls `move` for each run of bytes that follow each other in the pool: place in the pool, first byte, and length.
    // The lanes of a warp share the runs.
    template <class Move> __device__ inline void for_each_run(Move move) const {
        const unsigned int run = pool.head_bytes, first = offset / run, last = (offset + bytes - 1) / run;
        for (unsigned int i = first + threadIdx.x % LANES; i <= last; i += LANES) {
            const unsigned int start = max(i * run, offset), end = min((i + 1) * run, offset + bytes);
            move(in_pool(pool, page, part, start), start - offset, end - start);
        }
    }
};

// Starts the loads of a tile. One warp calls it.
template <bool TO_STORE> __device__ inline void load_tile(Shared &shared, unsigned int stage, const Tile &tile) {
    if (threadIdx.x == 0) expect(shared, stage, tile.bytes);
    __syncwarp();
    unsigned char *const to = buffer(shared, stage);
    if (TO_STORE) {
        tile.for_each_run([&](const unsigned char *from, unsigned int at, unsigned int bytes) {
            load(shared, stage, to + at, from, bytes);
        });
    } else if (threadIdx.x == 0) {
        load(shared, stage, to, tile.store, tile.bytes);
    }
}

// Starts the stores of a tile. One warp calls it.
template <bool TO_STORE> __device__ inline void store_tile(Shared &shared, unsigned int stage, const Tile &tile) {
    const unsigned char *const from = buffer(shared, stage);
    if (!TO_STORE) {
        tile.for_each_run([&](unsigned char *to, unsigned int at, unsigned int bytes) { store(to, from + at, bytes); });
    } else if (threadIdx.x == 0) {
        store(tile.store, from, tile.bytes);
    }
    end_stores();
}

// CRC of the first `bytes` bytes of the thread's piece behind `crc`. `bytes` is a multiple of 16.
__device__ inline unsigned int add_bytes(const Shared &shared, const unsigned char *tile, unsigned int bytes,
                                         unsigned int crc) {
    const uint4 *const piece = (const uint4 *)(tile + threadIdx.x * crc32::PIECE_BYTES);
    for (unsigned int i = 0; i < bytes / 16u; i++) {
        const uint4 words = piece[i];
        crc = crc32::add_word(shared.crc, crc, words.x);
        crc = crc32::add_word(shared.crc, crc, words.y);
        crc = crc32::add_word(shared.crc, crc, words.z);
        crc = crc32::add_word(shared.crc, crc, words.w);
    }
    return crc;
}

template <bool TO_STORE>
__device__ inline void move(const Pool &pool, const unsigned long long *pages, unsigned int page_count,
                            const uint4 *chunks, unsigned int chunk_count, unsigned int *crcs) {
    __shared__ Shared shared;
    if (crcs) crc32::prepare(shared.crc);
    prepare(shared);
    const bool moves = threadIdx.x < LANES;
    unsigned int stage = 0, phases = 0;
    // The launcher keeps the product below 2^31, and the grid no larger than it.
    const unsigned int items = page_count * chunk_count;
    for (unsigned int item = blockIdx.x; item < items; item += gridDim.x) {
        const unsigned int page = item / chunk_count;
        const uint4 chunk = chunks[item % chunk_count];
        unsigned char *const start = (unsigned char *)(pages[page] + chunk.x + chunk.y);
        const auto tile_at = [&](unsigned int offset) {
            return Tile{pool, page, chunk.w, chunk.y + offset, min(chunk.z - offset, crc32::TILE_BYTES), start + offset};
        };
        // The stores of the chunk before may still read the buffer.
        if (moves) {
            wait_reads();
            __syncwarp();
            load_tile<TO_STORE>(shared, stage, tile_at(0));
        }
        unsigned int crc = 0, last = 0;
        for (unsigned int offset = 0; offset < chunk.z; offset += crc32::TILE_BYTES) {
            const Tile tile = tile_at(offset);
            if (moves && offset + crc32::TILE_BYTES < chunk.z) {
                wait_reads();
                __syncwarp();
                load_tile<TO_STORE>(shared, stage ^ 1u, tile_at(offset + crc32::TILE_BYTES));
            }
            wait_loads(shared, stage, phases >> stage & 1u);
            phases ^= 1u << stage;
            if (moves) store_tile<TO_STORE>(shared, stage, tile);
            if (crcs) {
                const unsigned char *const bytes = buffer(shared, stage);
                const unsigned int begin = threadIdx.x * crc32::PIECE_BYTES;
                if (tile.bytes == crc32::TILE_BYTES) {
                    crc = add_bytes(shared, bytes, crc32::PIECE_BYTES, crc32::advance_tile(shared.crc, crc));
                } else if (tile.bytes > begin) {
                    last = add_bytes(shared, bytes, min(tile.bytes - begin, crc32::PIECE_BYTES), 0);
                }
            }
            // All threads have read the buffer, which the next turn but one replaces.
            __syncthreads();
            stage ^= 1u;
        }
        if (!crcs) continue;
        const unsigned int result = crc32::combine(shared.crc, crc, last, chunk.z);
        if (threadIdx.x == 0) crcs[item] = result;
    }
    if (moves) wait_stores();
}

}  // namespace bulk

// As larder_gather_pages. `unit_bytes` is 16.
extern "C" __global__ void __launch_bounds__(256, 3)
larder_gather_pages_bulk(const unsigned long long *tensors, const unsigned int *table, const unsigned int *firsts,
                         unsigned long long page_stride, unsigned long long token_stride,
                         unsigned long long head_stride, unsigned int table_stride, unsigned int engine_tokens,
                         unsigned int tokens, unsigned int heads, unsigned int head_bytes, unsigned int layer_tensors,
                         const unsigned long long *pages, unsigned int page_count, const uint4 *chunks,
                         unsigned int chunk_count, unsigned int unit_bytes, unsigned int *crcs) {
    const Pool pool = {tensors, table, firsts, page_stride, token_stride, head_stride, table_stride, engine_tokens,
                       tokens, heads, head_bytes, layer_tensors};
    bulk::move<true>(pool, pages, page_count, chunks, chunk_count, crcs);
}

// As larder_scatter_pages. `unit_bytes` is 16.
extern "C" __global__ void __launch_bounds__(256, 3)
larder_scatter_pages_bulk(const unsigned long long *tensors, const unsigned int *table, const unsigned int *firsts,
                          unsigned long long page_stride, unsigned long long token_stride,
                          unsigned long long head_stride, unsigned int table_stride, unsigned int engine_tokens,
                          unsigned int tokens, unsigned int heads, unsigned int head_bytes, unsigned int layer_tensors,
                          const unsigned long long *pages, unsigned int page_count, const uint4 *chunks,
                          unsigned int chunk_count, unsigned int unit_bytes, unsigned int *crcs) {
    const Pool pool = {tensors, table, firsts, page_stride, token_stride, head_stride, table_stride, engine_tokens,
                       tokens, heads, head_bytes, layer_tensors};
    bulk::move<false>(pool, pages, page_count, chunks, chunk_count, crcs);
}
