//! An index entry, and the fingerprint that names its page.

use super::retention::Worth;
use larder_format::PageId;
use larder_format::disk::{BLOCK_BYTES, SEGMENT_BYTES_MAX, record_bytes};
use larder_format::footer::PageSummary;
use larder_runtime::fail_point;
use std::hash::{DefaultHasher, Hasher};

/// Segment of an entry without a page.
const NONE: u16 = u16::MAX;
/// Maximum number of segments, which also bounds their numbers.
pub(super) const SEGMENTS_MAX: u32 = NONE as u32;
const NEVER: u32 = u32::MAX;
/// Bits of an offset in blocks. Those above hold the page's [`Worth`].
const BLOCK_BITS: u32 = 30;
const BLOCK_MASK: u32 = (1 << BLOCK_BITS) - 1;
const _: () = assert!(SEGMENT_BYTES_MAX / BLOCK_BYTES as u64 <= BLOCK_MASK as u64);

/// 96 bits of a keyed hash of a page's namespace and key.
///
/// The key is secret, so clients cannot choose pages that collide. By chance, two of 2^26 pages
/// have the same fingerprint with a probability of 2^-45.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint([u32; 3]);

impl Fingerprint {
    /// The keyed hash of a page's name.
    pub(super) fn of(seed: u64, id: &PageId) -> Fingerprint {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(seed);
        if !fail_point!("log.index-ignores-namespace") {
            hasher.write(&id.namespace.0);
        }
        hasher.write(&id.key.0);
        let first = hasher.finish();
        // A longer message has an independent hash.
        hasher.write_u8(1);
        Fingerprint([first as u32, (first >> 32) as u32, hasher.finish() as u32])
    }

    /// The fingerprint of all pages, for tests of collisions.
    #[cfg(test)]
    pub(super) fn zero() -> Fingerprint {
        Fingerprint([0; 3])
    }

    /// Number of the shard, of `shards`. The first shards get twice the pages of the last ones, and
    /// the others lie between. Tables double when they are full, so equal shards would all grow at
    /// once, and all be half empty afterwards.
    pub(super) fn shard(&self, shards: usize) -> usize {
        let hash = u64::from(self.0[0]);
        let skewed = (2 * hash + ((hash * hash) >> 32)) / 3;
        ((skewed * shards as u64) >> 32) as usize
    }

    /// Hash in the table of a shard. Independent of the bits that choose the shard.
    pub(super) fn hash(&self) -> u64 {
        u64::from(self.0[1]) << 32 | u64::from(self.0[2])
    }
}

/// The index entry of a page: 46 bytes. A log of 1 TiB with pages of 64 KiB has some 16 million
/// entries, so the size matters.
#[derive(Debug, Clone, Copy)]
// Not aligned to 8, which would add 2 bytes.
#[repr(C, packed(2))]
pub(super) struct PackedEntry {
    pub(super) number: u64,
    pub(super) generation: u64,
    pub(super) fingerprint: Fingerprint,
    pub(super) namespace: u32,
    segment: u16,
    /// Offset of the record in its segment, in blocks, and the page's worth.
    block: u32,
    pub(super) payload_bytes: u32,
    /// Expiry in seconds since 1970, rounded down: a page expires up to a second early, never late.
    expires_s: u32,
}

const _: () = assert!(size_of::<PackedEntry>() == 46);

impl PackedEntry {
    /// An entry without a page.
    pub(super) const FREE: PackedEntry = PackedEntry {
        number: 0,
        generation: 0,
        fingerprint: Fingerprint([0; 3]),
        namespace: 0,
        segment: NONE,
        block: 0,
        payload_bytes: 0,
        expires_s: NEVER,
    };

    pub(super) fn new(fingerprint: Fingerprint, namespace: u32, segment: u32, page: &PageSummary) -> PackedEntry {
        let mut entry = PackedEntry {
            generation: page.generation,
            fingerprint,
            namespace,
            payload_bytes: page.payload_bytes,
            expires_s: seconds(page.expires_unix_ms),
            ..PackedEntry::FREE
        };
        entry.move_to(segment, page.offset, page.number);
        entry
    }

    /// Points the entry to another record. The page's worth is [`Worth::Usual`] again.
    pub(super) fn move_to(&mut self, segment: u32, offset: u64, number: u64) {
        assert!(segment < SEGMENTS_MAX, "the log has more segments than an entry can name");
        self.segment = segment as u16;
        self.block = (offset / BLOCK_BYTES as u64) as u32;
        self.number = number;
    }

    pub(super) fn is_free(&self) -> bool {
        self.segment == NONE
    }

    pub(super) fn segment(&self) -> u32 {
        u32::from(self.segment)
    }

    pub(super) fn offset(&self) -> u64 {
        u64::from(self.block & BLOCK_MASK) * BLOCK_BYTES as u64
    }

    pub(super) fn worth(&self) -> Worth {
        match self.block >> BLOCK_BITS {
            0 => Worth::Usual,
            1 => Worth::Low,
            _ => Worth::High,
        }
    }

    pub(super) fn set_worth(&mut self, worth: Worth) {
        let bits = match worth {
            Worth::Usual => 0,
            Worth::Low => 1,
            Worth::High => 2,
        };
        self.block = (self.block & BLOCK_MASK) | bits << BLOCK_BITS;
    }

    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(self.payload_bytes as usize) as u64
    }

    /// Expiry in seconds since 1970. `None` if the page never expires.
    pub(super) fn expires_s(&self) -> Option<u32> {
        let seconds = self.expires_s;
        (seconds != NEVER).then_some(seconds)
    }

    pub(super) fn expires_unix_ms(&self) -> u64 {
        self.expires_s().map_or(0, milliseconds)
    }

    pub(super) fn is_same_put(&self, page: &PageSummary) -> bool {
        self.generation == page.generation
            && self.payload_bytes == page.payload_bytes
            && self.expires_s == seconds(page.expires_unix_ms)
    }
}

/// Expiry in milliseconds since 1970, of one in seconds. Never 0, which stands for none.
pub(super) fn milliseconds(expires_s: u32) -> u64 {
    (u64::from(expires_s) * 1000).max(1)
}

fn seconds(expires_unix_ms: u64) -> u32 {
    match expires_unix_ms {
        0 => NEVER,
        ms => (ms / 1000).min(u64::from(NEVER - 1)) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worth_and_offset_share_a_word() {
        let last = SEGMENT_BYTES_MAX - BLOCK_BYTES as u64;
        let mut entry = PackedEntry::FREE;
        entry.move_to(3, last, 9);
        assert_eq!(entry.worth(), Worth::Usual);
        for worth in [Worth::Low, Worth::High, Worth::Usual, Worth::High] {
            entry.set_worth(worth);
            assert_eq!((entry.worth(), entry.offset(), entry.segment()), (worth, last, 3));
        }
        entry.move_to(4, 0, 10);
        assert_eq!((entry.worth(), entry.offset()), (Worth::Usual, 0));
    }
}
