//! Pages that are being written to L3. They are readable here until the write has ended, whether L2 keeps them or not.

use crate::tiers::Page;
use larder_format::PageId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

struct Entry {
    page: Arc<Page>,
    done: watch::Receiver<bool>,
    /// Served no longer, though the write is still under way.
    withheld: bool,
}

/// By name and number of the put: a page may have been forgotten and put again while it was being written.
#[derive(Default)]
pub(crate) struct Writing {
    entries: Mutex<BTreeMap<(PageId, u64), Entry>>,
}

impl Writing {
    /// A write begins. It ends with [`Writing::end`]; those who wait for that hear of it when the sender is dropped.
    pub(crate) fn begin(&self, page: &Arc<Page>) -> watch::Sender<bool> {
        let (sender, done) = watch::channel(false);
        let key = (page.meta.id, page.meta.generation);
        self.entries.lock().insert(key, Entry { page: page.clone(), done, withheld: false });
        sender
    }

    /// A write ended.
    pub(crate) fn end(&self, id: &PageId, generation: u64) {
        self.entries.lock().remove(&(*id, generation));
    }

    /// The page, if it is being written and may be served.
    pub(crate) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        let entries = self.entries.lock();
        let mut puts = entries.range((*id, 0)..=(*id, u64::MAX)).map(|(_, entry)| entry);
        puts.rfind(|entry| !entry.withheld).map(|entry| entry.page.clone())
    }

    /// The page is served no longer; the ends of its writes.
    pub(crate) fn withhold(&self, id: &PageId) -> Vec<watch::Receiver<bool>> {
        let mut entries = self.entries.lock();
        let puts = entries.range_mut((*id, 0)..=(*id, u64::MAX)).map(|(_, entry)| entry);
        puts.map(|entry| {
            entry.withheld = true;
            entry.done.clone()
        })
        .collect()
    }

    /// Pages that are being written.
    pub(crate) fn len(&self) -> usize {
        self.entries.lock().len()
    }
}
