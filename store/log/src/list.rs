//! Enumeration of the pages of one namespace.

use crate::machine::{Entry, NamespacePages, RecordRef};
use crate::shared::LogShared;
use crate::{L3, L3Error};
use larder_format::{NamespaceId, PageId, PageMeta};
use larder_io::Priority;
use larder_memory::Slot;
use std::sync::Arc;

/// Segments that one call looks at. Each costs its list of pages.
const SEGMENTS_MAX: usize = 16;

/// Pages of one step of an enumeration.
#[derive(Debug, Default)]
pub struct ListedPages {
    pub pages: Vec<(PageMeta, Slot)>,
    /// Place of the next step: the epoch of a segment, and the offset of a record in it. `None` at
    /// the end.
    pub next: Option<(u64, u64)>,
}

impl L3 {
    /// Reads the next pages of a namespace in the order of their records, at most `max`. Begins
    /// behind `after`, which is (0, 0) at first.
    ///
    /// A page that stays in the log is met at least once: a copy of its record lies in a newer
    /// segment. Pages that cannot be read are left out.
    ///
    /// # Errors
    /// If the log is closed.
    pub async fn list(&self, namespace: &NamespaceId, after: (u64, u64), max: usize) -> Result<ListedPages, L3Error> {
        let shared = self.shared();
        shared.ensure_open()?;
        let mut after = after;
        let mut pages = Vec::new();
        for _ in 0..SEGMENTS_MAX {
            let Some(mut list) = shared.with_log(|log| log.scrub_list(Some(after))) else {
                return Ok(ListedPages { pages, next: None });
            };
            // Without the lock: a segment may have 100,000 pages.
            list.sort(shared.entries());
            let found = shared.with_log(|log| log.next_of_namespace(&mut list, namespace, max - pages.len()));
            let is_end = found.len() < max - pages.len();
            for (record, entry) in found {
                after = (entry.place.epoch, entry.place.offset);
                pages.extend(read(shared, record, &entry).await);
            }
            if !is_end {
                break;
            }
            after = list.next_segment();
        }
        Ok(ListedPages { pages, next: Some(after) })
    }

    /// Number of pages of a namespace.
    pub fn pages_of(&self, namespace: &NamespaceId) -> u64 {
        self.shared().with_log(|log| log.pages_of(namespace))
    }

    /// Namespaces with pages, in the order of their ids, at most `max`. Costs time under the lock
    /// of the log for each of them.
    pub fn namespaces(&self, max: usize) -> Vec<NamespacePages> {
        self.shared().with_log(|log| log.namespaces(max))
    }

    /// Time at which a page last left the log for lack of room, in milliseconds since 1970, to the
    /// second. `None` if it did not since the start, or if the log has no record of it any more.
    pub fn departed_unix_ms(&self, id: &PageId) -> Option<u64> {
        self.shared().entries().departed_unix_ms(id)
    }
}

/// Reads a page unless it has expired or gone.
async fn read(shared: &Arc<LogShared>, record: RecordRef, entry: &Entry) -> Option<(PageMeta, Slot)> {
    if entry.expires_unix_ms != 0 && entry.expires_unix_ms <= shared.clock.now_unix_ms() {
        return None;
    }
    let ticket = shared.entries().begin_maintenance_read(record)?;
    shared.read_record(ticket, Priority::Background).await.ok().flatten()
}
