//! Keys and values of rows, out of their pages.

use super::{DevicePages, PACK_BYTES, enqueue, expect, size};
use crate::device::{Arg, DeviceError, Launch, Slice, Stream};

const BLOCK_THREADS: u32 = 128;

/// Copies the keys and values of rows from their pages to `[rows][2 · kv_heads][head_dim]`: the key
/// heads of a row, then its value heads.
#[derive(Debug, Clone, Copy)]
pub struct KvRows<'a> {
    /// Tokens and heads begin at multiples of 16 bytes.
    pub pages: DevicePages<'a>,
    pub rows: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Place of each row: `page · page_tokens + token in the page`. `[rows]`, u32. A place outside
    /// the pool gives zeros.
    pub slots: &'a Slice,
    /// Result, of the pages' type. May be pinned memory.
    pub out: &'a Slice,
}

impl KvRows<'_> {
    /// Enqueues the copy.
    ///
    /// # Errors
    /// See [`launch`](super).
    pub fn launch(&self, stream: &dyn Stream) -> Result<(), DeviceError> {
        let bytes = self.pages.element.bytes();
        let pack = PACK_BYTES / bytes;
        let sizes = self.pages.check(self.kv_heads, self.head_dim)?;
        self.pages.check_alignment()?;
        if !self.head_dim.is_multiple_of(pack) || !self.out.address().is_multiple_of(PACK_BYTES as u64) {
            return Err(DeviceError::Shape("rows of keys: heads do not begin at multiples of 16 bytes"));
        }
        let heads = self.kv_heads.saturating_mul(2);
        expect(self.slots, &[self.rows], 4, "rows of keys: the slots are fewer than the rows")?;
        expect(self.out, &[self.rows, heads, self.head_dim], bytes, "rows of keys: the result is too short")?;
        let (rows, heads) = (size(self.rows)?, size(heads)?);
        if rows == 0 || heads == 0 || self.head_dim == 0 {
            return Ok(());
        }
        let launch = Launch::new("kv_rows", rows, BLOCK_THREADS)
            .arg(Arg::read(self.pages.pool))
            .arg(sizes.page_elements / pack as u64)
            .arg(sizes.page_count)
            .arg(sizes.page_tokens)
            .arg(Arg::read(self.pages.starts))
            .arg(size(pack)?)
            .arg(sizes.token_stride / size(pack)?)
            .arg(heads)
            .arg(size(self.head_dim / pack)?)
            .arg(Arg::read(self.slots))
            .arg(Arg::write(self.out));
        enqueue(stream, &launch)
    }
}
