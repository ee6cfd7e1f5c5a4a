//! Amounts of data: for a GPU, and for the emulator.

use larder_kernels::cpu::PageShape;

/// Bytes of a random block that fills larger memory.
const TILE_BYTES: usize = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SizeName {
    /// Llama-3-8B, 8 k tokens: fills caches of a GPU many times
    Full,
    /// Takes seconds in the emulator
    Tiny,
}

impl SizeName {
    pub fn name(self) -> &'static str {
        match self {
            SizeName::Full => "full",
            SizeName::Tiny => "tiny",
        }
    }
}

/// Pages of a transfer between pool and store.
#[derive(Debug, Clone, Copy)]
pub struct PagesSize {
    pub shape: PageShape,
    /// Tokens of a page of the engine's pool. Divides the tokens of a page.
    pub engine_tokens: u32,
    pub pages: u32,
}

/// A batch of sequences with equal lengths.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSize {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub page_tokens: usize,
    pub sequences: usize,
    /// Tokens of a sequence before its queries.
    pub position: usize,
    /// Queries of a sequence.
    pub rows: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct ProductSize {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct StorageSize {
    pub pages: usize,
    /// A multiple of 4,096.
    pub page_bytes: usize,
}

#[derive(Debug, Clone)]
pub struct Sizes {
    pub name: SizeName,
    /// Bytes of the copy inside the device that measures its memory.
    pub copy_bytes: usize,
    /// Steps of the kernels that measure arithmetic.
    pub rate_steps: u32,
    pub tile_bytes: usize,
    pub pages: PagesSize,
    /// Bytes whose CRCs one launch computes.
    pub crc_bytes: usize,
    pub storage: StorageSize,
    pub decode: AttentionSize,
    pub prefill: AttentionSize,
    pub many_rows: ProductSize,
    pub few_rows: ProductSize,
}

/// Geometry of Llama-3-8B: <https://huggingface.co/meta-llama/Meta-Llama-3-8B>, `config.json`.
const LLAMA: AttentionSize =
    AttentionSize { heads: 32, kv_heads: 8, head_dim: 128, page_tokens: 64, sequences: 1, position: 0, rows: 1 };
const LLAMA_PAGE: PageShape = PageShape {
    tokens: 64,
    layers: 32,
    kv_heads: 8,
    head_bytes: 256,
    layer_tensors: 2,
    layers_per_part: 4,
    head_groups: 1,
};

/// Two small pages, with rows and parts as those of the full size.
pub const CHECKED_PAGES: PagesSize = PagesSize {
    shape: PageShape { tokens: 32, layers: 3, layers_per_part: 2, ..LLAMA_PAGE },
    engine_tokens: 16,
    pages: 2,
};
/// Sequences of two spans.
pub const CHECKED_DECODE: AttentionSize =
    AttentionSize { heads: 8, kv_heads: 2, page_tokens: 16, sequences: 3, position: 300, ..LLAMA };
pub const CHECKED_PREFILL: AttentionSize =
    AttentionSize { heads: 8, kv_heads: 2, page_tokens: 16, sequences: 2, position: 5, rows: 37, ..LLAMA };
pub const CHECKED_MANY_ROWS: ProductSize = ProductSize { rows: 70, inputs: 96, outputs: 132 };
pub const CHECKED_FEW_ROWS: ProductSize = ProductSize { rows: 5, inputs: 96, outputs: 132 };

impl Sizes {
    pub fn of(name: SizeName) -> Sizes {
        match name {
            SizeName::Full => Sizes {
                name,
                copy_bytes: 1 << 30,
                rate_steps: 1 << 15,
                tile_bytes: TILE_BYTES,
                pages: PagesSize { shape: LLAMA_PAGE, engine_tokens: 16, pages: 128 },
                crc_bytes: 1 << 30,
                storage: StorageSize { pages: 512, page_bytes: 1 << 20 },
                decode: AttentionSize { sequences: 32, position: 8191, ..LLAMA },
                prefill: AttentionSize { rows: 8192, ..LLAMA },
                many_rows: ProductSize { rows: 2048, inputs: 4096, outputs: 14_336 },
                few_rows: ProductSize { rows: 8, inputs: 4096, outputs: 14_336 },
            },
            SizeName::Tiny => Sizes {
                name,
                copy_bytes: 1 << 20,
                rate_steps: 16,
                tile_bytes: 256 << 10,
                pages: CHECKED_PAGES,
                crc_bytes: 256 << 10,
                storage: StorageSize { pages: 8, page_bytes: 128 << 10 },
                decode: CHECKED_DECODE,
                prefill: CHECKED_PREFILL,
                many_rows: CHECKED_MANY_ROWS,
                few_rows: CHECKED_FEW_ROWS,
            },
        }
    }

    /// Numbers of blocks to measure on a device with so many multiprocessors.
    pub fn blocks(&self, multiprocessors: u32) -> Vec<u32> {
        let mut blocks = match self.name {
            SizeName::Full => vec![8, 32, multiprocessors, 2 * multiprocessors, 4 * multiprocessors],
            SizeName::Tiny => vec![1, multiprocessors],
        };
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }
}
