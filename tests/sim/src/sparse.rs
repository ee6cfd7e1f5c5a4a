//! Bytes of a simulated file, in blocks that share memory.
//!
//! Invariant: a block stores no trailing zeros, and a block of zeros takes no memory. Copies share
//! their blocks until one of them changes. So a log of gigabytes fits into memory, because most of
//! its bytes are padding, and the stored and the durable bytes are mostly equal.

use larder_format::disk::BLOCK_BYTES;
use std::ops::Range;
use std::sync::Arc;

/// File of `len` bytes in blocks of [`BLOCK_BYTES`]. The block `None` reads as zeros, and so do the
/// bytes of a block beyond those that it stores.
#[derive(Debug, Clone, Default)]
pub(crate) struct SparseBytes {
    len: usize,
    blocks: Vec<Option<Arc<[u8]>>>,
}

impl SparseBytes {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Changes the length. New bytes are zeros. Bytes beyond a smaller length are lost: zeros stand
    /// there if the file grows again.
    pub(crate) fn resize(&mut self, len: usize) {
        if len < self.len {
            self.fill_zeros(len..self.len);
        }
        self.len = len;
        self.blocks.resize(len.div_ceil(BLOCK_BYTES), None);
    }

    /// Returns `true` if the range lies within the file.
    pub(crate) fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len
    }

    /// Copies bytes from offset `start` on into `target`.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub(crate) fn read(&self, start: usize, target: &mut [u8]) {
        assert!(self.contains(&(start..start + target.len())), "a read beyond the end");
        for (number, within, part) in pieces(start..start + target.len()) {
            let target = &mut target[part];
            target.fill(0);
            let stored = self.blocks[number].as_deref().unwrap_or_default();
            let stored = stored.get(within.start..within.end.min(stored.len())).unwrap_or_default();
            target[..stored.len()].copy_from_slice(stored);
        }
    }

    pub(crate) fn to_vec(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        self.read(range.start, &mut bytes);
        bytes
    }

    /// Replaces bytes from offset `start` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) {
        assert!(self.contains(&(start..start + bytes.len())), "a write beyond the end");
        for (number, within, part) in pieces(start..start + bytes.len()) {
            self.blocks[number] = match within.len() {
                BLOCK_BYTES => stored(&bytes[part]),
                _ => {
                    let mut block = self.block(number);
                    block[within].copy_from_slice(&bytes[part]);
                    stored(&block)
                }
            };
        }
    }

    /// Copies a range of another file to the same place. Whole blocks are shared.
    pub(crate) fn copy_from(&mut self, other: &SparseBytes, range: Range<usize>) {
        for (number, within, part) in pieces(range.clone()) {
            match within.len() {
                BLOCK_BYTES => self.blocks[number].clone_from(&other.blocks[number]),
                _ => {
                    let from = range.start + part.start;
                    self.write(from, &other.to_vec(from..range.start + part.end));
                }
            }
        }
    }

    /// The blocks in their order. Each has [`BLOCK_BYTES`] bytes. Zeros fill the last one beyond
    /// the end of the file.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        (0..self.blocks.len()).map(|number| self.block(number))
    }

    fn block(&self, number: usize) -> Vec<u8> {
        let mut block = self.blocks[number].as_deref().unwrap_or_default().to_vec();
        block.resize(BLOCK_BYTES, 0);
        block
    }

    fn fill_zeros(&mut self, range: Range<usize>) {
        let zeros = vec![0; range.len()];
        self.write(range.start, &zeros);
    }
}

fn stored(block: &[u8]) -> Option<Arc<[u8]>> {
    let end = block.iter().rposition(|&byte| byte != 0)? + 1;
    Some(block[..end].into())
}

/// Cuts a range at the block boundaries: number of the block, range within it, and range within the
/// whole.
fn pieces(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let number = at / BLOCK_BYTES;
        let from = at;
        at = ((number + 1) * BLOCK_BYTES).min(range.end);
        let first = number * BLOCK_BYTES;
        Some((number, from - first..at - first, from - range.start..at - range.start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{RandomSource, Stream};

    #[test]
    fn behaves_like_a_vector() {
        let mut random = RandomSource::new(1, Stream::Setup);
        let mut sparse = SparseBytes::default();
        let mut plain: Vec<u8> = Vec::new();
        for turn in 0..2_000 {
            if turn % 100 == 0 {
                let len = random.below(40_000) as usize;
                sparse.resize(len);
                plain.resize(len, 0);
            }
            let start = random.below(plain.len() as u64 + 1) as usize;
            let end = random.between(start as u64, (start as u64 + 9_000).min(plain.len() as u64)) as usize;
            let mut bytes = vec![0; end - start];
            if random.chance(700_000) {
                random.fill(&mut bytes);
            }
            sparse.write(start, &bytes);
            plain[start..end].copy_from_slice(&bytes);
            let mut copy = sparse.clone();
            copy.resize(plain.len() + 5_000);
            copy.copy_from(&sparse, start..end);
            assert!(
                copy.to_vec(0..plain.len()) == plain && copy.to_vec(plain.len()..copy.len()).iter().all(|&b| b == 0)
            );
            assert_eq!(sparse.to_vec(start..end), bytes);
        }
        assert!(sparse.blocks().flatten().take(plain.len()).eq(plain.iter().copied()));
    }
}
