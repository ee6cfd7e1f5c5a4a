//! Queued payloads of one connection, by the request that they belong to.

use larder_runtime::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Payloads of one connection that wait to be sent, or are being sent. A cancelled request abandons
/// its payloads here. Bounded by the queues of the connection, because each entry lives as long as
/// its frame.
#[derive(Default)]
pub struct QueuedPayloads {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By request and a number of our own: a request may have several payloads.
    abandoned: BTreeMap<(u64, u64), Arc<AtomicBool>>,
    next: u64,
}

/// Entry of one payload. Dropping it removes the entry.
pub struct PayloadGuard {
    payloads: Arc<QueuedPayloads>,
    entry: (u64, u64),
    is_abandoned: Arc<AtomicBool>,
}

impl QueuedPayloads {
    /// Adds a payload of request `request`.
    pub fn add(self: &Arc<Self>, request: u64) -> PayloadGuard {
        let is_abandoned = Arc::<AtomicBool>::default();
        let mut table = self.table.lock();
        let entry = (request, table.next);
        table.next += 1;
        table.abandoned.insert(entry, is_abandoned.clone());
        drop(table);
        PayloadGuard { payloads: self.clone(), entry, is_abandoned }
    }

    /// Abandons all payloads that were added for a request. Later ones are not affected.
    pub fn abandon(&self, request: u64) {
        for (_, is_abandoned) in self.table.lock().abandoned.range((request, 0)..=(request, u64::MAX)) {
            // Relaxed: a writer that sees the flag late sends some bytes in vain.
            is_abandoned.store(true, Ordering::Relaxed);
        }
    }
}

impl PayloadGuard {
    /// Returns `true` once the payload's request was cancelled.
    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Relaxed)
    }
}

impl Drop for PayloadGuard {
    fn drop(&mut self) {
        self.payloads.table.lock().abandoned.remove(&self.entry);
    }
}
