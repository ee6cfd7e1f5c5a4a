//! Report and progress of a recovery, for callers.

use crate::machine::RecoveryResult;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// `true` if the log was created by this start.
    pub created: bool,
    pub pages: u64,
    pub tombstones: u64,
    pub segments: u64,
    /// Segments of these that were read from their footers. The others were scanned record by
    /// record.
    pub segments_by_footer: u64,
    /// Segments removed: unused ones, the oldest ones beyond the capacity, and those whose
    /// tombstones may be lost with a damaged segment.
    pub segments_removed: u64,
    /// Files with the name of a segment that do not belong to this log, because an operator copied
    /// or renamed them. They were renamed to `*.stray`.
    pub misplaced_files: u64,
    /// Segments that could not be read to their end, or that lost records.
    pub segments_cut_short: u64,
    /// Pages in these segments and in older ones. They are not served, because a lost tombstone may
    /// have deleted them.
    pub pages_untrusted: u64,
    /// Records of pages that the index had no room for, because its bound was lowered. They are not
    /// served.
    pub pages_beyond_index: u64,
    /// Records that were begun and are incomplete: writes that a crash interrupted.
    pub torn_records: u64,
    pub io_errors: u64,
    pub milliseconds: u64,
}

impl RecoveryReport {
    pub(crate) fn with_result(self, result: RecoveryResult) -> RecoveryReport {
        RecoveryReport {
            tombstones: result.tombstones,
            segments: result.segments,
            segments_by_footer: result.footers,
            segments_cut_short: result.cut_short,
            pages_untrusted: result.untrusted,
            pages_beyond_index: result.beyond_index,
            torn_records: result.torn_records,
            ..self
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryProgress {
    pub segments_scanned: u64,
    pub segments: u64,
    /// Present once all segments are scanned.
    pub report: Option<RecoveryReport>,
}
