//! The states of a segment.
//!
//! ```text
//! (made) ──► Preparing ──► Ready ──► Open ──► Sealed ──► Reclaiming ──► Preparing …
//! Free ────────┘
//! ```

use crate::planted::{Bug, has};
use larder_format::NamespaceId;
use larder_format::disk::BLOCK_BYTES;
use larder_format::footer::{FooterRoom, RecordSummary};
use std::collections::BTreeSet;

/// What one writing of a segment holds.
#[derive(Debug)]
pub(super) struct Life {
    /// Its number.
    pub(super) number: u64,
    /// Where the next record goes.
    pub(super) end: u64,
    /// Slots of the index whose page stood here when it was written; they may have another page since.
    pub(super) slots: Vec<u32>,
    /// Records that the footer will list. Empty once it is planned.
    pub(super) records: Vec<RecordSummary>,
    /// Whether a footer is to be written once nothing is under way and all is durable.
    pub(super) wants_footer: bool,
    /// What the footer will take.
    pub(super) footer_room: FooterRoom,
    /// Bytes that are kept for records of pages to be rescued; their entries in the footer are in `footer_room`.
    pub(super) reserved_bytes: u64,
    /// Writes planned and not reported.
    pub(super) writes: u32,
    /// Where records were planned that were not written, or not yet.
    pub(super) missing: BTreeSet<u64>,
    /// All before this offset is durable.
    pub(super) durable: u64,
    /// Reads begun and not ended.
    pub(super) reads: u32,
    /// Writes that completed.
    pub(super) completed: u64,
    /// How many of them are known to be durable.
    pub(super) synced: u64,
    /// A sync failed: what had completed before it may never become durable, whatever later syncs say.
    pub(super) sync_failed: bool,
}

impl Life {
    pub(super) fn new(number: u64) -> Life {
        Life {
            number,
            end: BLOCK_BYTES as u64,
            slots: Vec::new(),
            records: Vec::new(),
            wants_footer: true,
            footer_room: FooterRoom::default(),
            reserved_bytes: 0,
            writes: 0,
            missing: BTreeSet::new(),
            durable: BLOCK_BYTES as u64,
            reads: 0,
            completed: 0,
            synced: 0,
            sync_failed: false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        (self.writes == 0 || has(Bug::ReuseUnderWrite)) && (self.reads == 0 || has(Bug::ReuseUnderRead))
    }

    /// Whether a record fits beside what is reserved and the footer.
    pub(super) fn fits(&self, segment_bytes: u64, namespace: &NamespaceId, bytes: u64) -> bool {
        self.end + bytes + self.reserved_bytes + self.footer_room.bytes_with(namespace) <= segment_bytes
    }

    /// Takes `bytes` at the end; where they begin.
    pub(super) fn take(&mut self, bytes: u64) -> u64 {
        let offset = self.end;
        self.end += bytes;
        self.writes += 1;
        self.missing.insert(offset);
        offset
    }

    /// Up to where all that was planned is written.
    pub(super) fn written(&self) -> u64 {
        self.missing.first().copied().unwrap_or(self.end)
    }

    /// What it holds will not be vouched for by a footer.
    pub(super) fn renounce_footer(&mut self) {
        self.wants_footer = false;
        self.records = Vec::new();
    }

    /// Bytes of memory of its lists.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>() + self.records.capacity() * size_of::<RecordSummary>()
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

    /// Bytes that an open segment still takes, footer included.
    pub(super) fn room(&self, segment_bytes: u64) -> u64 {
        match self {
            Segment::Open(life) => segment_bytes.saturating_sub(life.end + life.reserved_bytes),
            _ => 0,
        }
    }

    /// Open → sealed.
    pub(super) fn seal(&mut self) {
        *self = match std::mem::replace(self, Segment::Free) {
            Segment::Open(mut life) => {
                life.slots.shrink_to_fit();
                Segment::Sealed(life)
            }
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
