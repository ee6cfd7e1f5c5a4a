// CRC-32 of chunks in device memory or pinned memory of the host.

#include "crc32.cuh"

namespace {

// Copies up to a tile from `source` to shared memory. Whole words are read at once where the source is aligned.
__device__ inline void load_tile(crc32::Shared &shared, const unsigned char *source, unsigned int bytes) {
    unsigned int done = 0;
    if ((size_t)source % 16u == 0) {
        const unsigned int units = bytes / 16u;
        for (unsigned int i = threadIdx.x; i < units; i += crc32::THREADS) {
            const uint4 unit = ((const uint4 *)source)[i];
            unsigned int *const to = shared.tile + crc32::word_at(16u * i);
            to[0] = unit.x;
            to[1] = unit.y;
            to[2] = unit.z;
            to[3] = unit.w;
        }
        done = units * 16u;
    }
    for (unsigned int i = done + threadIdx.x; i < bytes; i += crc32::THREADS) {
        ((unsigned char *)(shared.tile + crc32::word_at(i)))[i % 4u] = source[i];
    }
}

}  // namespace

// Computes crcs[i] of the lengths[i] bytes at the address starts[i], for i < count. Lengths are below 2^31.
// Block: crc32::THREADS threads. Grid: any number of blocks; they share the chunks.
extern "C" __global__ void larder_crc32_chunks(const unsigned long long *starts, const unsigned int *lengths,
                                               unsigned int count, unsigned int *crcs) {
    __shared__ crc32::Shared shared;
    crc32::prepare(shared);
    for (unsigned int chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const unsigned char *const source = (const unsigned char *)starts[chunk];
        const unsigned int bytes = lengths[chunk];
        unsigned int crc = 0, last = 0;
        for (unsigned int offset = 0; offset < bytes; offset += crc32::TILE_BYTES) {
            const unsigned int tile = min(bytes - offset, crc32::TILE_BYTES);
            load_tile(shared, source + offset, tile);
            __syncthreads();
            if (tile == crc32::TILE_BYTES) {
                crc = crc32::add_piece(shared, crc);
            } else {
                last = crc32::last_piece(shared, tile);
            }
            __syncthreads();
        }
        const unsigned int result = crc32::combine(shared, crc, last, bytes);
        if (threadIdx.x == 0) crcs[chunk] = result;
    }
}
