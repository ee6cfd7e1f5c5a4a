// Places of pages in an engine's paged pool and in the store's layout, for the kernels that move them.
//
// The store's layout of a page: parts one after the other; in a part its layers; in a layer its tensors (keys, then
// values); in a tensor [tokens][heads of the part's group][bytes of a head].
//
// The pool: byte b of head h of token t in tensor i begins at
//   tensors[i] + engine_page * page_stride + t_in_page * token_stride + h * head_stride + b.
// These strides describe pools that are layer-first, page-first or head-first. Engine pages may be smaller or larger
// than pages of the store: token t of page p is token (firsts[p] + t) of the engine pages table[p * table_stride ...].
//
// Chunks: x = start of the part in the page, y = start of the chunk in the part, z = bytes,
// w = first layer of the part * 65536 + head group.
#pragma once

#include "crc32.cuh"

namespace {

struct Pool {
    const unsigned long long *tensors;
    const unsigned int *table;
    const unsigned int *firsts;
    unsigned long long page_stride, token_stride, head_stride;
    unsigned int table_stride, engine_tokens;
    unsigned int tokens, heads, head_bytes, layer_tensors;
};

// Address of the byte `offset` of a part of page `page`.
__device__ inline unsigned char *in_pool(const Pool &pool, unsigned int page, unsigned int part, unsigned int offset) {
    const unsigned int row_bytes = pool.heads * pool.head_bytes, tensor_bytes = pool.tokens * row_bytes;
    const unsigned int tensor = (part >> 16) * pool.layer_tensors + offset / tensor_bytes;
    const unsigned int in_tensor = offset % tensor_bytes, in_row = in_tensor % row_bytes;
    const unsigned int token = pool.firsts[page] + in_tensor / row_bytes;
    const unsigned int head = (part & 0xFFFFu) * pool.heads + in_row / pool.head_bytes;
    const unsigned int engine_page = pool.table[page * pool.table_stride + token / pool.engine_tokens];
    return (unsigned char *)(pool.tensors[tensor] + engine_page * pool.page_stride +
                             token % pool.engine_tokens * pool.token_stride + head * pool.head_stride +
                             in_row % pool.head_bytes);
}

}  // namespace
