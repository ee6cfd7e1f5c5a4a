//! Pages in an engine's pool and in the store's layout, and the reference for moving them.

use std::ops::Range;

/// Bytes that one CRC covers, at most. The store's chunks have this length (`larder_format`).
pub const CHUNK_BYTES: u32 = 64 << 10;

/// Shape of a page in the store.
///
/// Its parts follow each other: for each group of layers one part per head group. A part holds its
/// layers in order, a layer its tensors (keys, then values), a tensor `[tokens][heads of the
/// group][head_bytes]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageShape {
    pub tokens: u32,
    pub layers: u32,
    pub kv_heads: u32,
    /// Bytes of one head of one token: the head's dimension times the size of an element.
    pub head_bytes: u32,
    /// 2 for keys and values, 1 for a latent.
    pub layer_tensors: u32,
    /// Layers per part. The last part of a head group may hold fewer.
    pub layers_per_part: u32,
    /// Number of head groups. It divides `kv_heads`.
    pub head_groups: u32,
}

impl PageShape {
    /// Returns `true` if no field is 0, the groups divide the heads, and a page has less than
    /// 2 GiB.
    pub fn is_valid(&self) -> bool {
        let fields = [self.tokens, self.layers, self.kv_heads, self.head_bytes, self.layer_tensors];
        let positive = fields.iter().all(|&field| field > 0) && self.layers_per_part > 0 && self.head_groups > 0;
        let bytes = fields.iter().try_fold(1_u64, |product, &field| product.checked_mul(u64::from(field)));
        positive
            && self.kv_heads.is_multiple_of(self.head_groups)
            && self.layers <= 1 << 15
            && self.head_groups <= 1 << 15
            && bytes.is_some_and(|bytes| bytes < 1 << 31)
    }

    pub fn group_heads(&self) -> u32 {
        self.kv_heads / self.head_groups
    }

    /// Bytes of one tensor of one part.
    pub fn tensor_bytes(&self) -> u32 {
        self.tokens * self.group_heads() * self.head_bytes
    }

    pub fn part_count(&self) -> u32 {
        self.layers.div_ceil(self.layers_per_part) * self.head_groups
    }

    pub fn part_layers(&self, part: u32) -> Range<u32> {
        let first = part / self.head_groups * self.layers_per_part;
        first..(first + self.layers_per_part).min(self.layers)
    }

    /// Range of a part in the page, in bytes.
    pub fn part_range(&self, part: u32) -> Range<u32> {
        // All layers before the part's, in all groups, and the same layers in the groups before.
        let layers = self.part_layers(part);
        let layer_bytes = self.layer_tensors * self.tensor_bytes();
        let bytes = layers.end.saturating_sub(layers.start) * layer_bytes;
        let start = layers.start * self.head_groups * layer_bytes + part % self.head_groups * bytes;
        start..start + bytes
    }

    pub fn page_bytes(&self) -> u32 {
        self.layers * self.layer_tensors * self.tokens * self.kv_heads * self.head_bytes
    }

    /// Calls `visit` with the offset of every row in the page, in order. A row is one head of one
    /// token in one tensor.
    fn for_each_row(&self, mut visit: impl FnMut(usize, Row)) {
        let mut offset = 0;
        for part in 0..self.part_count() {
            let first_head = part % self.head_groups * self.group_heads();
            for layer in self.part_layers(part) {
                for tensor in layer * self.layer_tensors..(layer + 1) * self.layer_tensors {
                    for token in 0..self.tokens {
                        for head in first_head..first_head + self.group_heads() {
                            visit(offset, Row { tensor, token, head });
                            offset += self.head_bytes as usize;
                        }
                    }
                }
            }
        }
    }
}

struct Row {
    tensor: u32,
    token: u32,
    head: u32,
}

/// Strides of an engine's pool in bytes. Each tensor of each layer has its own start; a pool whose
/// pages hold all layers has starts that lie inside its first page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLayout {
    /// Tokens of an engine page. It may differ from the store's.
    pub page_tokens: u32,
    pub page_stride: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

impl PoolLayout {
    /// Layer-first: each tensor of a layer is `[pages][page_tokens][kv_heads][head]`.
    pub fn layer_first(shape: &PageShape, page_tokens: u32) -> PoolLayout {
        let head_stride = u64::from(shape.head_bytes);
        let token_stride = head_stride * u64::from(shape.kv_heads);
        PoolLayout { page_tokens, page_stride: token_stride * u64::from(page_tokens), token_stride, head_stride }
    }

    /// Page-first: the pool is `[pages][layers][tensors][page_tokens][kv_heads][head]`.
    pub fn page_first(shape: &PageShape, page_tokens: u32) -> PoolLayout {
        let tensors = u64::from(shape.layers) * u64::from(shape.layer_tensors);
        let inner = PoolLayout::layer_first(shape, page_tokens);
        PoolLayout { page_stride: inner.page_stride * tensors, ..inner }
    }

    /// Head-first: each tensor of a layer is `[pages][kv_heads][page_tokens][head]`.
    pub fn head_first(shape: &PageShape, page_tokens: u32) -> PoolLayout {
        let token_stride = u64::from(shape.head_bytes);
        let head_stride = token_stride * u64::from(page_tokens);
        PoolLayout { page_tokens, page_stride: head_stride * u64::from(shape.kv_heads), token_stride, head_stride }
    }

    /// Bytes between the first and the last byte of an engine page in one tensor. `None` if they
    /// exceed the range of integers.
    pub fn page_extent(&self, shape: &PageShape) -> Option<u64> {
        let tokens = u64::from(self.page_tokens).checked_sub(1)?.checked_mul(self.token_stride)?;
        let heads = u64::from(shape.kv_heads).checked_sub(1)?.checked_mul(self.head_stride)?;
        tokens.checked_add(heads)?.checked_add(u64::from(shape.head_bytes))
    }

    fn offset(&self, engine_pages: &[u32], token: u32, head: u32) -> usize {
        let page = u64::from(engine_pages[(token / self.page_tokens) as usize]);
        let token = u64::from(token % self.page_tokens);
        (page * self.page_stride + token * self.token_stride + u64::from(head) * self.head_stride) as usize
    }
}

/// Copies one page from a pool to the store's layout. `tensors` holds the tensors of all layers in
/// order, each from its start on. The page's first token is token `first` of `engine_pages`.
///
/// # Panics
/// If a row leaves its tensor, or if `page` has another length than the shape says.
pub fn gather_page(
    shape: &PageShape,
    layout: &PoolLayout,
    tensors: &[&[u8]],
    engine_pages: &[u32],
    first: u32,
    page: &mut [u8],
) {
    assert_eq!(page.len(), shape.page_bytes() as usize, "the page has the length of its shape");
    let bytes = shape.head_bytes as usize;
    shape.for_each_row(|offset, row| {
        let at = layout.offset(engine_pages, first + row.token, row.head);
        page[offset..offset + bytes].copy_from_slice(&tensors[row.tensor as usize][at..at + bytes]);
    });
}

/// Copies one page from the store's layout to a pool. The inverse of [`gather_page`].
///
/// # Panics
/// As for [`gather_page`].
pub fn scatter_page(
    shape: &PageShape,
    layout: &PoolLayout,
    tensors: &mut [&mut [u8]],
    engine_pages: &[u32],
    first: u32,
    page: &[u8],
) {
    assert_eq!(page.len(), shape.page_bytes() as usize, "the page has the length of its shape");
    let bytes = shape.head_bytes as usize;
    shape.for_each_row(|offset, row| {
        let at = layout.offset(engine_pages, first + row.token, row.head);
        tensors[row.tensor as usize][at..at + bytes].copy_from_slice(&page[offset..offset + bytes]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> PageShape {
        PageShape {
            tokens: 3,
            layers: 5,
            kv_heads: 4,
            head_bytes: 6,
            layer_tensors: 2,
            layers_per_part: 2,
            head_groups: 2,
        }
    }

    #[test]
    fn parts_cover_the_page_in_order() {
        let shape = shape();
        let mut end = 0;
        for part in 0..shape.part_count() {
            let range = shape.part_range(part);
            assert_eq!(range.start, end);
            end = range.end;
        }
        assert_eq!(end, shape.page_bytes());
        assert_eq!(shape.part_layers(5), 4..5);
    }

    #[test]
    fn rows_of_a_part_have_its_layers_and_heads() {
        let shape = shape();
        let mut rows = 0;
        shape.for_each_row(|offset, row| {
            let part = (0..shape.part_count()).find(|&part| shape.part_range(part).contains(&(offset as u32)));
            let part = part.expect("each offset has a part");
            assert!(shape.part_layers(part).contains(&(row.tensor / 2)));
            assert_eq!(row.head / 2, part % 2);
            rows += 1;
        });
        assert_eq!(rows * 6, shape.page_bytes());
    }

    #[test]
    fn shapes_with_zeros_odd_groups_or_huge_pages_are_invalid() {
        assert!(shape().is_valid());
        assert!(!PageShape { tokens: 0, ..shape() }.is_valid());
        assert!(!PageShape { head_groups: 3, ..shape() }.is_valid());
        assert!(!PageShape { head_bytes: u32::MAX, ..shape() }.is_valid());
    }
}
