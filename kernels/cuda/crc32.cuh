// CRC-32 of one chunk by one block: the polynomial of IEEE 802.3, reflected, as crc32fast computes it.
//
// A CRC without its initial and final value is linear: the CRC of a chunk is the sum (exclusive or) of the CRCs of
// its pieces, each multiplied by x^(8 n) modulo the polynomial, where n is the number of bytes behind the piece.
// See Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
//
// A chunk passes through shared memory in tiles. Thread i owns piece i of every tile, and carries its CRC from tile
// to tile. A piece is read word by word with four tables (Kounavis and Berry, "Novel Table Lookup-Based Algorithms
// for High-Performance CRC Generation", 2008).
//
// Representation: bit 31 is the coefficient of x^0. So 0x80000000 is 1, and 0x00800000 is x^8.
#pragma once

namespace crc32 {

constexpr unsigned int POLYNOMIAL = 0xEDB88320u;
// One thread per entry of a table.
constexpr unsigned int THREADS = 256;
constexpr unsigned int PIECE_WORDS = 16;
constexpr unsigned int PIECE_BYTES = 4 * PIECE_WORDS;
constexpr unsigned int TILE_BYTES = THREADS * PIECE_BYTES;
// A word between pieces lets the threads of a warp read from different banks.
constexpr unsigned int PIECE_STRIDE = PIECE_WORDS + 1;
// x^(8 * 2^k) for lengths below 2^32.
constexpr unsigned int POWERS = 32;

struct Shared {
    unsigned int tile[THREADS * PIECE_STRIDE];
    unsigned int table[4][THREADS];
    // Multiplies by x^(8 (TILE_BYTES - PIECE_BYTES)), byte by byte.
    unsigned int advance[4][THREADS];
    unsigned int power[POWERS];
    unsigned int partial[THREADS / 32];
};

__device__ inline unsigned int times_x(unsigned int a) { return a >> 1 ^ (a & 1u ? POLYNOMIAL : 0u); }

// Product modulo the polynomial.
__device__ inline unsigned int multiply(unsigned int a, unsigned int b) {
    unsigned int product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        if (a >> bit & 1u) product ^= b;
        b = times_x(b);
    }
    return product;
}

// a * x^(8 bytes).
__device__ inline unsigned int shift(const Shared &shared, unsigned int a, unsigned int bytes) {
    for (unsigned int k = 0; bytes != 0; k++, bytes >>= 1) {
        if (bytes & 1u) a = multiply(a, shared.power[k]);
    }
    return a;
}

// Fills the tables. All threads of the block call it once.
__device__ inline void prepare(Shared &shared) {
    const unsigned int thread = threadIdx.x;
    unsigned int entry = thread;
    for (int bit = 0; bit < 8; bit++) entry = times_x(entry);
    shared.table[0][thread] = entry;
    if (thread < POWERS) {
        unsigned int power = 0x00800000u;
        for (unsigned int k = 0; k < thread; k++) power = multiply(power, power);
        shared.power[thread] = power;
    }
    __syncthreads();
    for (int k = 1; k < 4; k++) {
        entry = entry >> 8 ^ shared.table[0][entry & 255u];
        shared.table[k][thread] = entry;
    }
    const unsigned int factor = shift(shared, 0x80000000u, TILE_BYTES - PIECE_BYTES);
    for (int k = 0; k < 4; k++) shared.advance[k][thread] = multiply(factor, thread << 8 * k);
    __syncthreads();
}

// Word of the tile that holds the bytes from `offset`.
__device__ inline unsigned int word_at(unsigned int offset) {
    return offset / PIECE_BYTES * PIECE_STRIDE + offset % PIECE_BYTES / 4u;
}

__device__ inline unsigned int add_word(const Shared &shared, unsigned int crc, unsigned int word) {
    crc ^= word;
    return shared.table[3][crc & 255u] ^ shared.table[2][crc >> 8 & 255u] ^ shared.table[1][crc >> 16 & 255u] ^
           shared.table[0][crc >> 24];
}

// `crc`, the thread's CRC of the last tile, behind the pieces of other threads up to the thread's next one.
__device__ inline unsigned int advance_tile(const Shared &shared, unsigned int crc) {
    return shared.advance[0][crc & 255u] ^ shared.advance[1][crc >> 8 & 255u] ^ shared.advance[2][crc >> 16 & 255u] ^
           shared.advance[3][crc >> 24];
}

// CRC of a whole piece behind `crc`, the thread's CRC of the last tile.
__device__ inline unsigned int add_piece(const Shared &shared, unsigned int crc) {
    crc = advance_tile(shared, crc);
    const unsigned int *const piece = shared.tile + threadIdx.x * PIECE_STRIDE;
    for (unsigned int i = 0; i < PIECE_WORDS; i++) crc = add_word(shared, crc, piece[i]);
    return crc;
}

// CRC of the thread's part of a last tile of `tile_bytes` bytes.
__device__ inline unsigned int last_piece(const Shared &shared, unsigned int tile_bytes) {
    const unsigned int start = threadIdx.x * PIECE_BYTES;
    const unsigned int bytes = tile_bytes > start ? min(tile_bytes - start, PIECE_BYTES) : 0u;
    const unsigned int *const piece = shared.tile + threadIdx.x * PIECE_STRIDE;
    unsigned int crc = 0;
    for (unsigned int i = 0; i < bytes / 4u; i++) crc = add_word(shared, crc, piece[i]);
    for (unsigned int i = bytes & ~3u; i < bytes; i++) {
        const unsigned int byte = piece[i / 4u] >> 8 * (i % 4u) & 255u;
        crc = crc >> 8 ^ shared.table[0][(crc ^ byte) & 255u];
    }
    return crc;
}

// Combines the threads' CRCs of `bytes` bytes. `crc` covers the whole tiles, `last` the rest. Thread 0 gets the result.
__device__ inline unsigned int combine(Shared &shared, unsigned int crc, unsigned int last, unsigned int bytes) {
    const unsigned int end = (threadIdx.x + 1u) * PIECE_BYTES, rest = bytes % TILE_BYTES;
    unsigned int sum = 0;
    if (bytes >= TILE_BYTES) sum = shift(shared, crc, TILE_BYTES - end + rest);
    if (rest != 0) sum ^= shift(shared, last, rest > end ? rest - end : 0u);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum ^= __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    if (threadIdx.x % 32u == 0) shared.partial[threadIdx.x / 32u] = sum;
    __syncthreads();
    unsigned int result = 0;
    if (threadIdx.x == 0) {
        // The initial value counts as bytes before the chunk.
        result = ~shift(shared, 0xFFFFFFFFu, bytes);
        for (unsigned int i = 0; i < THREADS / 32u; i++) result ^= shared.partial[i];
    }
    // The next chunk writes `partial` again.
    __syncthreads();
    return result;
}

}  // namespace crc32
