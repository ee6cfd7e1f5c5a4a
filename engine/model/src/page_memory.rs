//! Memory for the pages of a pool, on huge pages where the system has them.
//!
//! A step of decode reads some hundred bytes per token, head and layer, all over the pages of a
//! sequence. On pages of 4 KiB, most of these reads also wait for the translation of an address.
//!
//! Invariants:
//! - A byte of a mapping belongs to at most one [`PageBuffer`] during the life of the mapping.
//! - A mapping lives as long as one of its buffers, or until its owner begins the next one.

use memmap2::{Advice, MmapOptions, MmapRaw};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Alignment of buffers: one cache line.
pub(crate) const CACHE_LINE_BYTES: usize = 64;
/// Size of a huge page where base pages have 4 KiB.
const HUGE_BYTES: usize = 2 << 20;
/// Fewest bytes of a mapping. It takes memory only as its pages are used.
const MAPPING_BYTES: usize = 64 << 20;

/// Hands out buffers of one length.
pub(crate) struct PageMemory {
    buffer_bytes: usize,
    current: Option<Arc<MmapRaw>>,
    /// Bytes at the start of `current` that belong to buffers.
    used: usize,
}

impl PageMemory {
    /// Memory for buffers of at least `buffer_bytes`. Maps nothing yet.
    pub(crate) fn new(buffer_bytes: usize) -> PageMemory {
        let buffer_bytes = buffer_bytes.next_multiple_of(CACHE_LINE_BYTES).max(CACHE_LINE_BYTES);
        PageMemory { buffer_bytes, current: None, used: 0 }
    }

    /// Takes a buffer of zeros that has no other owner. Memory that the buffers give back returns
    /// to the system only with their whole mapping.
    ///
    /// # Errors
    /// If the system has no addresses left for another mapping.
    pub(crate) fn take(&mut self) -> io::Result<PageBuffer> {
        let mapping = match &self.current {
            Some(mapping) if mapping.len() - self.used >= self.buffer_bytes => mapping,
            _ => {
                let bytes = self.buffer_bytes.max(MAPPING_BYTES).next_multiple_of(HUGE_BYTES);
                let mapping = MmapOptions::new().len(bytes).no_reserve_swap().map_anon()?;
                // The memory works on small pages, too.
                let _ = mapping.advise(Advice::HugePage);
                self.used = 0;
                self.current.insert(Arc::new(MmapRaw::from(mapping)))
            }
        };
        let range = self.used..self.used + self.buffer_bytes;
        let mapping = Arc::clone(mapping);
        self.used = range.end;
        Ok(PageBuffer { mapping, range })
    }
}

/// Exclusive part of a mapping, aligned to [`CACHE_LINE_BYTES`].
pub(crate) struct PageBuffer {
    mapping: Arc<MmapRaw>,
    range: Range<usize>,
}

impl PageBuffer {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping, which this buffer keeps. No other buffer has bytes
        // of the range, and writes need this one exclusively.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(self.range.start), self.range.len()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_mut_ptr().add(self.range.start), self.range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_share_no_byte() {
        // Three buffers per mapping, and a rest.
        let mut memory = PageMemory::new((20 << 20) + 1);
        let mut buffers: Vec<PageBuffer> = (0..7).map(|_| memory.take().unwrap()).collect();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            let bytes = buffer.bytes_mut();
            assert!(bytes.len() > 20 << 20 && bytes.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            assert!(bytes[0] == 0 && bytes[bytes.len() - 1] == 0, "buffer {index} is new");
            let end = bytes.len() - 1;
            (bytes[0], bytes[end]) = (index as u8 + 1, index as u8 + 1);
        }
        let mut ranges: Vec<_> = buffers.iter().map(|buffer| buffer.bytes().as_ptr_range()).collect();
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
        drop(memory);
        for (index, buffer) in buffers.iter().enumerate() {
            let ends = (buffer.bytes().first().copied(), buffer.bytes().last().copied());
            assert_eq!(ends, (Some(index as u8 + 1), Some(index as u8 + 1)));
        }
    }

    #[test]
    fn large_buffer_gets_a_mapping_of_its_own() {
        let mut memory = PageMemory::new(MAPPING_BYTES + 1);
        let buffers = [memory.take().unwrap(), memory.take().unwrap()];
        assert!(buffers.iter().all(|buffer| buffer.bytes().len() > MAPPING_BYTES && buffer.range.start == 0));
    }
}
