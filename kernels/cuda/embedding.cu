// Rows of the embedding table, by token.

#include "element.cuh"

namespace embedding {

constexpr u32 THREADS = 256;

// T: type of the result. E: type of the table.
template <class T, class E>
__device__ void gather(const E *table, u32 vocab, u32 width, const u32 *tokens, T *out) {
    constexpr u32 N = Pack<E>::N;
    const u32 token = tokens[blockIdx.x];
    const E *from = table + (u64)(token < vocab ? token : 0) * width;
    out += (u64)blockIdx.x * width;
    const bool wide = is_aligned(from) && is_aligned(out);
    for (u32 at = threadIdx.x * N; at < width; at += THREADS * N) {
        float values[N];
        // A token outside the vocabulary must not read outside the table.
        load_pack(from + at, token < vocab ? width - at : 0, wide, values);
        if constexpr (sizeof(T) == sizeof(E)) {
            store_pack(out + at, width - at, wide, values);
        } else {
            for (u32 i = 0; i < N; i++) {
                if (at + i < width) out[at + i] = from_float<T>(values[i]);
            }
        }
    }
}

} // namespace embedding

// embedding_T_E: out[r] = table[tokens[r]], or zeros for a token outside the vocabulary.
// Shapes: table [vocab][width], tokens [gridDim.x], out [gridDim.x][width]. 256 threads per block.
#define EMBEDDING_KERNEL(NAME, T, E)                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        embedding_##NAME(const E *table, u32 vocab, u32 width, const u32 *tokens, T *out) {                         \
        embedding::gather<T, E>(table, vocab, width, tokens, out);                                                  \
    }

EMBEDDING_KERNEL(f32_f32, float, float)
EMBEDDING_KERNEL(f32_f16, float, f16)
EMBEDDING_KERNEL(f32_bf16, float, bf16)
EMBEDDING_KERNEL(f16_f16, f16, f16)
EMBEDDING_KERNEL(bf16_bf16, bf16, bf16)
