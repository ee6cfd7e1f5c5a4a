//! One page in a file, and the memory that receives it.

use crate::{FileNumber, TransferError};
use crc32fast::Hasher;
use larder_format::disk::BLOCK_BYTES;
use larder_format::{CHUNK_BYTES, MAX_CHUNKS, MAX_PAGE_BYTES, PageMeta};
use larder_kernels::device::{DeviceError, Place, Slice};

/// Run of bytes with one CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Length, from 1 to [`CHUNK_BYTES`].
    pub bytes: u32,
    /// CRC-32 of the chunk. Its polynomial is the one of IEEE 802.3, as in the crate crc32fast.
    pub crc: u32,
}

/// Part of a chunk that lies in one target.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// Number of the chunk in the page.
    pub(crate) chunk: usize,
    pub(crate) target: Slice,
}

/// Payload of one page: its place in a file, its CRCs, and its targets.
#[derive(Debug, Clone)]
pub struct PageRead {
    pub file: FileNumber,
    /// Position of the payload in the file, a multiple of [`BLOCK_BYTES`].
    pub offset: u64,
    /// Chunks of the payload, in order. The file has whole blocks, so the block with the last byte
    /// must be complete.
    pub chunks: Vec<Chunk>,
    /// Memory of the device that receives the payload, in order. All together have its length.
    pub targets: Vec<Slice>,
}

impl PageRead {
    /// Describes the payload of the page `meta`, which starts at byte `offset` of `file`.
    pub fn of_page(meta: &PageMeta, file: FileNumber, offset: u64, targets: Vec<Slice>) -> PageRead {
        // A page is shorter than 4 GiB: `MAX_PAGE_BYTES`.
        let all = 0..meta.payload_bytes() as u32;
        let chunks = meta.chunks_in(&all).map(|(range, crc)| Chunk { bytes: range.end - range.start, crc }).collect();
        PageRead { file, offset, chunks, targets }
    }

    /// Length of the payload in bytes.
    pub fn bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes as usize).sum()
    }

    /// Fails if the request exceeds a limit, or if its lengths disagree. Offsets stay below
    /// `i64::MAX`, because libcufile takes an `off_t`.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] with the reason.
    pub(crate) fn check(&self) -> Result<(), TransferError> {
        let whole = |chunk: &Chunk| (1..=CHUNK_BYTES).contains(&(chunk.bytes as usize));
        if self.chunks.is_empty() || self.chunks.len() > MAX_CHUNKS || !self.chunks.iter().all(whole) {
            return Err(TransferError::Invalid("a page has chunks of 1 to 65,536 bytes, and not too many of them"));
        }
        if self.bytes() > MAX_PAGE_BYTES {
            return Err(TransferError::Invalid("the page is longer than 16 MiB"));
        }
        let end_max = i64::MAX as u64 - MAX_PAGE_BYTES as u64 - BLOCK_BYTES as u64;
        if !self.offset.is_multiple_of(BLOCK_BYTES as u64) || self.offset > end_max {
            return Err(TransferError::Invalid("the page does not start at a block of the file"));
        }
        // A path may write without a stream. The host could read pinned memory at the same time.
        if self.targets.iter().any(|target| target.memory().place() != Place::Device) {
            return Err(TransferError::Invalid("a target is not memory of the device"));
        }
        let room: u128 = self.targets.iter().map(|target| target.bytes() as u128).sum();
        if room != self.bytes() as u128 {
            return Err(TransferError::Invalid("the targets have another length than the page"));
        }
        Ok(())
    }

    /// Compares the payload with its CRCs. `bytes` may be longer. Missing bytes count as damage of
    /// the first chunk that lacks some.
    ///
    /// # Errors
    /// [`TransferError::Damaged`] with the first chunk that differs.
    pub(crate) fn verify(&self, bytes: &[u8]) -> Result<(), TransferError> {
        let mut rest = bytes;
        for (chunk, expected) in self.chunks.iter().enumerate() {
            let damaged = TransferError::Damaged { offset: self.offset, chunk };
            let Some((found, later)) = rest.split_at_checked(expected.bytes as usize) else {
                return Err(damaged);
            };
            if crc32fast::hash(found) != expected.crc {
                return Err(damaged);
            }
            rest = later;
        }
        Ok(())
    }

    /// Cuts the chunks at the ends of targets. Call it after [`check`](Self::check).
    ///
    /// # Errors
    /// If the targets are shorter than the chunks.
    pub(crate) fn pieces(&self) -> Result<Vec<Piece>, DeviceError> {
        let mut pieces = Vec::with_capacity(self.chunks.len() + self.targets.len());
        let mut targets = self.targets.iter();
        let mut rest: Option<Slice> = None;
        for (chunk, expected) in self.chunks.iter().enumerate() {
            let mut left = expected.bytes as usize;
            while left > 0 {
                let target = rest.take().or_else(|| targets.next().cloned());
                let target = target.ok_or(DeviceError::Shape("the targets are shorter than the page"))?;
                let bytes = left.min(target.bytes());
                if bytes > 0 {
                    pieces.push(Piece { chunk, target: target.slice(0..bytes)? });
                }
                if bytes < target.bytes() {
                    rest = Some(target.slice(bytes..target.bytes())?);
                }
                left -= bytes;
            }
        }
        Ok(pieces)
    }

    /// Compares the CRCs of all [`pieces`](Self::pieces), in order, with those of the chunks.
    ///
    /// # Errors
    /// [`TransferError::Damaged`] with the first chunk that differs.
    pub(crate) fn verify_pieces(&self, pieces: &[Piece], crcs: &[u32]) -> Result<(), TransferError> {
        let mut found = vec![Hasher::new(); self.chunks.len()];
        for (piece, crc) in pieces.iter().zip(crcs) {
            found[piece.chunk].combine(&Hasher::new_with_initial_len(*crc, piece.target.bytes() as u64));
        }
        let is_damaged = |(found, expected): (Hasher, &Chunk)| found.finalize() != expected.crc;
        match found.into_iter().zip(&self.chunks).position(is_damaged) {
            Some(chunk) => Err(TransferError::Damaged { offset: self.offset, chunk }),
            None => Ok(()),
        }
    }
}
