//! The states of a segment.
//!
//! ```text
//! (made) ──► Preparing ──► Ready ──► Open ──► Sealed ──► Reclaiming ──► Preparing …
//! Free ────────┘
//! ```

use larder_format::PageId;
use larder_format::disk::BLOCK_BYTES;

/// What one writing of a segment holds.
#[derive(Debug)]
pub(super) struct Life {
    /// Its number.
    pub(super) number: u64,
    /// Where the next record goes.
    pub(super) end: u64,
    /// Pages whose newest record was here when it was written, with the record's number.
    pub(super) pages: Vec<(PageId, u64)>,
    /// Writes planned and not reported.
    pub(super) writes: u32,
    /// Reads begun and not ended.
    pub(super) reads: u32,
    /// Writes that completed.
    pub(super) completed: u64,
    /// How many of them are known to be durable.
    pub(super) synced: u64,
}

impl Life {
    pub(super) fn new(number: u64) -> Life {
        let end = BLOCK_BYTES as u64;
        Life { number, end, pages: Vec::new(), writes: 0, reads: 0, completed: 0, synced: 0 }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.writes == 0 && self.reads == 0
    }
}

/// A segment in one of its states.
#[derive(Debug)]
pub(super) enum Segment {
    /// The file is there, and nothing in it counts.
    Free,
    /// Its header is being written.
    Preparing,
    /// Its header is durable; the next to be opened.
    Ready(u64),
    /// Takes records.
    Open(Life),
    /// Takes no more records.
    Sealed(Life),
    /// None of its pages can be found; reads and writes of it still end.
    Reclaiming(Life),
}

impl Segment {
    pub(super) fn life(&self) -> Option<&Life> {
        match self {
            Segment::Open(life) | Segment::Sealed(life) | Segment::Reclaiming(life) => Some(life),
            Segment::Free | Segment::Preparing | Segment::Ready(_) => None,
        }
    }

    pub(super) fn life_mut(&mut self) -> Option<&mut Life> {
        match self {
            Segment::Open(life) | Segment::Sealed(life) | Segment::Reclaiming(life) => Some(life),
            Segment::Free | Segment::Preparing | Segment::Ready(_) => None,
        }
    }

    /// Bytes that an open segment still takes.
    pub(super) fn room(&self, segment_bytes: u64) -> u64 {
        match self {
            Segment::Open(life) => segment_bytes.saturating_sub(life.end),
            _ => 0,
        }
    }

    /// Open → sealed.
    pub(super) fn seal(&mut self) {
        *self = match std::mem::replace(self, Segment::Free) {
            Segment::Open(life) => Segment::Sealed(life),
            other => other,
        };
    }

    /// Sealed → reclaiming.
    pub(super) fn reclaim(&mut self) {
        *self = match std::mem::replace(self, Segment::Free) {
            Segment::Sealed(life) => Segment::Reclaiming(life),
            other => other,
        };
    }
}
