// Keys and values of some rows, from their pages to one row after the other.
//
// Invariant: a block copies one row and reads nothing else.

#include "element.cuh"

// kv_rows: out[r] = the key heads, then the value heads of row r. The pool may change meanwhile in places that no
// slot names. Sizes count packs of 16 bytes; `starts` counts elements.
// Shapes: slots [gridDim.x], page * page_tokens + token in the page; starts [heads], first element of each head in a
// page; out [gridDim.x][heads][head_packs]. A slot outside the pool, or a head outside its page, gives zeros.
// 128 threads per block.
extern "C" __global__ void __launch_bounds__(128)
    kv_rows(const Words4 *pool, u64 page_packs, u32 page_count, u32 page_tokens, const u32 *starts, u32 pack_elements,
            u32 token_packs, u32 heads, u32 head_packs, const u32 *slots, Words4 *out) {
    const u32 slot = slots[blockIdx.x];
    const u32 page = slot / page_tokens, token = slot % page_tokens;
    out += (u64)blockIdx.x * heads * head_packs;
    for (u32 i = threadIdx.x; i < heads * head_packs; i += 128) {
        const u64 at = starts[i / head_packs] / pack_elements + (u64)token * token_packs + i % head_packs;
        Words4 words = {{0, 0, 0, 0}};
        if (page < page_count && at < page_packs) words = pool[page * page_packs + at];
        out[i] = words;
    }
}
