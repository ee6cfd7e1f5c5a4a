//! Identity of a stored page, and verification of its bytes.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::limits::{CHUNK_BYTES, MAX_CHUNKS, MAX_PAGE_BYTES, MAX_PARTS, MAX_TOKEN_IDS};
use crate::range::{chunks, whole_chunks};
use crate::{NamespaceId, PageKey};
use std::fmt;
use std::ops::Range;
use thiserror::Error;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    pub namespace: NamespaceId,
    pub key: PageKey,
}

impl fmt::Debug for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageId({:?}/{:?})", self.namespace, self.key)
    }
}

/// Source of a copy of a page. It proves to the node that the copy is not older than the last
/// forget of its page. Another node, or another run of the node, cannot judge it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageOrigin {
    /// Hash of the node's id and epoch.
    pub run: u64,
    /// Generation of the page there, never 0.
    pub generation: u64,
}

/// CRC-32 (IEEE) of each chunk of `part`, in order. The last chunk may be shorter. Lazy: the cost
/// of a chunk arises when the caller takes its CRC.
pub fn chunk_crcs(part: &[u8]) -> impl Iterator<Item = u32> + '_ {
    part.chunks(CHUNK_BYTES).map(crc32fast::hash)
}

/// Identity, shape and CRCs of one sealed page. With it a reader can prove that its bytes are the
/// bytes that a client put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMeta {
    pub id: PageId,
    /// Key of the preceding page in the sequence, [`PageKey::NONE`] for the first.
    pub parent: PageKey,
    /// Position in the sequence, in pages from 0.
    pub position: u32,
    /// Number of the put. It grows with every put on a node, so two puts of one key differ.
    pub generation: u64,
    /// Expiry in Unix milliseconds: from then on the page is a miss. 0: it does not expire.
    pub expires_unix_ms: u64,
    pub part_bytes: Vec<u32>,
    /// CRC-32 of each chunk, part by part.
    pub chunk_crcs: Vec<u32>,
    /// Ids of the page's tokens, in order, if its writer gave them: at most [`MAX_TOKEN_IDS`]. They
    /// serve indexers of KV events. A record of the log has them, and [`encode`](Self::encode)
    /// leaves them out.
    pub token_ids: Vec<u32>,
}

/// Difference between a page and the bytes that should be it. A reader that finds one must not use
/// the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Mismatch {
    #[error("the bytes are of another page: {0:?}")]
    Identity(Box<PageId>),
    #[error("the payload has {found} bytes instead of {expected}")]
    Length { expected: usize, found: usize },
    #[error("CRC mismatch in chunk {chunk} of part {part}")]
    Crc { part: usize, chunk: usize },
}

/// Returns `true` if a page with this expiry has expired at `now_unix_ms`. Both are Unix
/// milliseconds, and a page with expiry 0 never expires.
pub fn is_expired(expires_unix_ms: u64, now_unix_ms: u64) -> bool {
    expires_unix_ms != 0 && expires_unix_ms <= now_unix_ms
}

impl PageMeta {
    pub fn payload_bytes(&self) -> usize {
        self.part_bytes.iter().map(|&b| b as usize).sum()
    }

    /// Range of part `part` in the payload. `None` if there is no such part.
    pub fn part_range(&self, part: usize) -> Option<Range<usize>> {
        let len = *self.part_bytes.get(part)? as usize;
        let start: usize = self.part_bytes[..part].iter().map(|&b| b as usize).sum();
        Some(start..start + len)
    }

    pub fn chunks_of(bytes: u32) -> usize {
        (bytes as usize).div_ceil(CHUNK_BYTES)
    }

    /// CRCs of the chunks of part `part`. `None` if there is no such part.
    pub fn part_crcs(&self, part: usize) -> Option<&[u32]> {
        let count = Self::chunks_of(*self.part_bytes.get(part)?);
        let start: usize = self.part_bytes[..part].iter().map(|&b| Self::chunks_of(b)).sum();
        self.chunk_crcs.get(start..start + count)
    }

    /// Chunks that overlap `range`, with their CRCs. The first and the last chunk may reach beyond
    /// the range.
    pub fn chunks_in(&self, range: &Range<u32>) -> impl Iterator<Item = (Range<u32>, u32)> {
        chunks(&self.part_bytes)
            .zip(self.chunk_crcs.iter().copied())
            .skip_while(|(chunk, _)| chunk.end <= range.start)
            .take_while(|(chunk, _)| chunk.start < range.end)
    }

    /// Checks that the tables agree with each other and with the limits. A decoded page has passed
    /// this check.
    pub fn validate(&self) -> Result<()> {
        let too_large =
            |what, value: usize, max: usize| DecodeError::TooLarge { what, value: value as u64, max: max as u64 };
        if self.part_bytes.is_empty() || self.part_bytes.contains(&0) {
            return Err(DecodeError::Invalid("part table"));
        }
        if self.part_bytes.len() > MAX_PARTS {
            return Err(too_large("parts", self.part_bytes.len(), MAX_PARTS));
        }
        let bytes = self.part_bytes.iter().map(|&b| u64::from(b)).sum::<u64>();
        if bytes > MAX_PAGE_BYTES as u64 {
            return Err(DecodeError::TooLarge { what: "page bytes", value: bytes, max: MAX_PAGE_BYTES as u64 });
        }
        if self.part_bytes.iter().map(|&b| Self::chunks_of(b)).sum::<usize>() != self.chunk_crcs.len() {
            return Err(DecodeError::Invalid("chunk count"));
        }
        if self.token_ids.len() > MAX_TOKEN_IDS {
            return Err(too_large("token ids", self.token_ids.len(), MAX_TOKEN_IDS));
        }
        Ok(())
    }

    /// Checks that this is the page `expected`: a reader must never accept another page's bytes.
    pub fn check_identity(&self, expected: &PageId) -> std::result::Result<(), Mismatch> {
        if self.id == *expected {
            return Ok(());
        }
        Err(Mismatch::Identity(Box::new(self.id)))
    }

    /// Checks length and CRCs of one part. Reports the first chunk that differs, and does not look
    /// at other parts.
    pub fn verify_part(&self, part: usize, bytes: &[u8]) -> std::result::Result<(), Mismatch> {
        let expected = self.part_bytes.get(part).map_or(0, |&b| b as usize);
        let crcs = self.part_crcs(part).unwrap_or_default();
        if bytes.len() != expected || crcs.is_empty() {
            return Err(Mismatch::Length { expected, found: bytes.len() });
        }
        match chunk_crcs(bytes).zip(crcs).position(|(found, &expected)| found != expected) {
            Some(chunk) => Err(Mismatch::Crc { part, chunk }),
            None => Ok(()),
        }
    }

    /// Checks identity, length and every CRC of a whole page. Costs one pass over the payload.
    /// [`PayloadVerifier`] does the same while the bytes arrive.
    pub fn verify(&self, expected: &PageId, payload: &[u8]) -> std::result::Result<(), Mismatch> {
        self.check_identity(expected)?;
        if payload.len() != self.payload_bytes() {
            return Err(Mismatch::Length { expected: self.payload_bytes(), found: payload.len() });
        }
        for part in 0..self.part_bytes.len() {
            let range = self.part_range(part).expect("part < part_bytes.len()");
            self.verify_part(part, &payload[range])?;
        }
        Ok(())
    }

    /// Appends the encoding, which disk and wire share, without the token ids. The metadata must be
    /// valid, because decoders refuse tables beyond the limits.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(&self.id.namespace.0);
        out.put(&self.id.key.0);
        out.put(&self.parent.0);
        out.put_u32(self.position);
        out.put_u64(self.generation);
        out.put_u64(self.expires_unix_ms);
        out.put_list(&self.part_bytes, |out, &b| out.put_u32(b));
        out.put_list(&self.chunk_crcs, |out, &c| out.put_u32(c));
    }

    /// Decodes and validates, without token ids. No field is trusted before
    /// [`validate`](Self::validate) accepts it, so a forged header cannot cause a large allocation.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let meta = Self {
            id: PageId { namespace: NamespaceId(reader.array("namespace")?), key: PageKey(reader.array("page key")?) },
            parent: PageKey(reader.array("parent key")?),
            position: reader.u32("position")?,
            generation: reader.u64("generation")?,
            expires_unix_ms: reader.u64("expiry")?,
            part_bytes: reader.list(MAX_PARTS, "part table", |r| r.u32("part bytes"))?,
            chunk_crcs: reader.list(MAX_CHUNKS, "chunk table", |r| r.u32("chunk crc"))?,
            token_ids: Vec::new(),
        };
        meta.validate()?;
        Ok(meta)
    }

    /// Describes a payload that is cut into `part_bytes`: computes its CRCs. The page does not
    /// expire, and has no token ids.
    pub fn describe(id: PageId, parent: PageKey, position: u32, part_bytes: Vec<u32>, payload: &[u8]) -> Self {
        let mut crcs = Vec::new();
        let mut rest = payload;
        for &bytes in &part_bytes {
            let (part, tail) = rest.split_at(bytes as usize);
            crcs.extend(chunk_crcs(part));
            rest = tail;
        }
        let token_ids = Vec::new();
        Self { id, parent, position, generation: 0, expires_unix_ms: 0, part_bytes, chunk_crcs: crcs, token_ids }
    }
}

/// Verifies the bytes of a page, a part or a range of chunks as they arrive, in order. No second
/// pass over the memory is needed.
pub struct PayloadVerifier<'a> {
    part_bytes: &'a [u32],
    crcs: &'a [u32],
    /// Index of the part, and offset in it, of the next byte.
    part: usize,
    offset: usize,
    left: usize,
    hasher: crc32fast::Hasher,
    damaged: Option<Mismatch>,
}

impl<'a> PayloadVerifier<'a> {
    /// Expects parts of these lengths with these CRCs, part by part. CRCs that are missing or left
    /// over are damage.
    pub fn new(part_bytes: &'a [u32], crcs: &'a [u32]) -> Self {
        let left = part_bytes.iter().map(|&bytes| bytes as usize).sum();
        Self { part_bytes, crcs, part: 0, offset: 0, left, hasher: crc32fast::Hasher::new(), damaged: None }
    }

    /// Expects this range of a page. `None` if it does not consist of whole chunks, because a CRC
    /// covers a whole chunk.
    pub fn of(meta: &'a PageMeta, bytes: &Range<u32>) -> Option<Self> {
        if whole_chunks(&meta.part_bytes, bytes).as_ref() != Some(bytes) {
            return None;
        }
        let mut before = bytes.start as usize;
        let mut part = 0;
        let mut chunks = 0;
        while let Some(&length) = meta.part_bytes.get(part)
            && before >= length as usize
        {
            part += 1;
            chunks += PageMeta::chunks_of(length);
            before -= length as usize;
        }
        let first = chunks + before / CHUNK_BYTES;
        let crcs = meta.chunk_crcs.get(first..first + meta.chunks_in(bytes).count())?;
        Some(Self { part, offset: before, left: bytes.len(), ..Self::new(&meta.part_bytes, crcs) })
    }

    /// Takes the next bytes. Excess bytes count as damage. Damage is reported by
    /// [`finish`](Self::finish), not here.
    pub fn take(&mut self, mut bytes: &[u8]) {
        if bytes.len() > self.left {
            self.damaged.get_or_insert(Mismatch::Length { expected: self.left, found: bytes.len() });
            bytes = &bytes[..self.left];
        }
        self.left -= bytes.len();
        while let Some(&length) = self.part_bytes.get(self.part)
            && !bytes.is_empty()
        {
            let length = length as usize;
            let chunk_end = (self.offset / CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES).min(length);
            let (now, later) = bytes.split_at(bytes.len().min(chunk_end - self.offset));
            self.hasher.update(now);
            self.offset += now.len();
            bytes = later;
            if self.offset == chunk_end {
                self.end_chunk(length);
            }
        }
    }

    fn end_chunk(&mut self, length: usize) {
        let found = std::mem::take(&mut self.hasher).finalize();
        let (expected, later) =
            self.crcs.split_first().map_or((None, self.crcs), |(first, later)| (Some(first), later));
        self.crcs = later;
        if expected != Some(&found) {
            let chunk = (self.offset - 1) / CHUNK_BYTES;
            self.damaged.get_or_insert(Mismatch::Crc { part: self.part, chunk });
        }
        if self.offset == length {
            self.part += 1;
            self.offset = 0;
        }
    }

    /// Ends the verification. Succeeds if exactly the expected bytes arrived and every CRC matched.
    /// The caller must not use the bytes before.
    pub fn finish(self) -> std::result::Result<(), Mismatch> {
        match self.damaged {
            Some(mismatch) => Err(mismatch),
            None if self.left == 0 && self.crcs.is_empty() => Ok(()),
            None => Err(Mismatch::Length { expected: self.left, found: 0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn sample(parts: &[u32], seed: u8) -> (PageMeta, Vec<u8>) {
        let bytes: usize = parts.iter().map(|&b| b as usize).sum();
        let payload: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([seed; 32]) };
        (PageMeta::describe(id, PageKey::NONE, 3, parts.to_vec(), &payload), payload)
    }

    #[test]
    fn flipped_bit_is_detected() {
        let (meta, mut payload) = sample(&[CHUNK_BYTES as u32 + 10, 500], 1);
        assert_eq!(meta.verify(&meta.id, &payload), Ok(()));
        for at in [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 9, CHUNK_BYTES + 10, payload.len() - 1] {
            payload[at] ^= 0x10;
            assert!(matches!(meta.verify(&meta.id, &payload), Err(Mismatch::Crc { .. })), "byte {at}");
            payload[at] ^= 0x10;
        }
        assert!(matches!(meta.verify(&meta.id, &payload[1..]), Err(Mismatch::Length { .. })));
    }

    #[test]
    fn bytes_of_another_page_are_refused() {
        let (a, _) = sample(&[64], 1);
        let (b, payload) = sample(&[64], 2);
        assert!(matches!(b.verify(&a.id, &payload), Err(Mismatch::Identity(_))));
    }

    proptest! {
        #[test]
        fn encoding_round_trips(parts in prop::collection::vec(1u32..200_000, 1..20), seed: u8) {
            let (meta, payload) = sample(&parts, seed);
            let mut bytes = Vec::new();
            meta.encode(&mut bytes);
            let mut reader = Reader::new(&bytes);
            let back = PageMeta::decode(&mut reader).unwrap();
            reader.finish().unwrap();
            prop_assert_eq!(&back, &meta);
            prop_assert_eq!(back.verify(&meta.id, &payload), Ok(()));
        }

        #[test]
        fn incremental_verification_agrees_with_verify(
            parts in prop::collection::vec(1u32..200_000, 1..6),
            pieces in prop::collection::vec(1usize..150_000, 1..20),
            flip in prop::option::of(any::<prop::sample::Index>()),
            missing in 0usize..3,
            range in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let (meta, mut payload) = sample(&parts, 5);
            let flipped = flip.map(|at| at.index(payload.len()));
            if let Some(at) = flipped {
                payload[at] ^= 1;
            }
            let expected = meta.verify(&meta.id, &payload).is_ok() && missing == 0;
            let mut verifier = PayloadVerifier::new(&meta.part_bytes, &meta.chunk_crcs);
            let mut left = &payload[..payload.len() - missing.min(payload.len())];
            for piece in pieces.iter().cycle() {
                let (now, later) = left.split_at(left.len().min(*piece));
                verifier.take(now);
                left = later;
                if left.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(verifier.finish().is_ok(), expected);
            // A range of whole chunks verifies on its own.
            let (from, to) = (range.0.index(payload.len()) as u32, range.1.index(payload.len()) as u32);
            let wanted = from.min(to)..from.max(to) + 1;
            let bytes = whole_chunks(&meta.part_bytes, &wanted).unwrap();
            let there = &payload[bytes.start as usize..bytes.end as usize];
            let there = &there[..there.len() - missing.min(there.len())];
            let mut verifier = PayloadVerifier::of(&meta, &bytes).unwrap();
            there.chunks(pieces[0]).for_each(|piece| verifier.take(piece));
            let damaged = |at: usize| there.len() > at - bytes.start as usize;
            let hit = flipped.is_some_and(|at| bytes.contains(&(at as u32)) && damaged(at));
            prop_assert_eq!(verifier.finish().is_ok(), missing == 0 && !hit);
            let aligned = bytes == wanted;
            prop_assert_eq!(PayloadVerifier::of(&meta, &wanted).is_some(), aligned);
            // A page with an extra byte fails.
            let mut verifier = PayloadVerifier::new(&meta.part_bytes, &meta.chunk_crcs);
            verifier.take(&payload);
            verifier.take(&[0]);
            prop_assert!(verifier.finish().is_err());
        }

        #[test]
        fn decoder_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = PageMeta::decode(&mut Reader::new(&bytes));
        }
    }
}
