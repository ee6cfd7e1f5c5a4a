//! Pages that are being written to L3. They are readable here until the write has ended, whether L2 keeps them or not.

use crate::tiers::Page;
use larder_core::planted::{Bug, has};
use larder_device::Bell;
use larder_format::PageId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Whether a write has ended.
pub(crate) type Ended = Arc<Bell<bool>>;

/// A write, by page, number of the put, and number of the write: a page may have been forgotten and put again while it was
/// being written, and one that L3 lost at once is written twice.
pub(crate) type Ticket = (PageId, u64, u64);

struct Entry {
    page: Arc<Page>,
    ended: Ended,
    /// Served no longer, though the write is still under way.
    withheld: bool,
}

#[derive(Default)]
struct State {
    entries: BTreeMap<Ticket, Entry>,
    writes_ever: u64,
}

/// All writes under way.
#[derive(Default)]
pub(crate) struct Writing {
    state: Mutex<State>,
}

impl Writing {
    /// A write begins. It ends with [`Writing::end`], however it went.
    pub(crate) fn begin(&self, page: &Arc<Page>) -> Ticket {
        let mut state = self.state.lock();
        state.writes_ever += 1;
        let ticket = (page.meta.id, page.meta.generation, state.writes_ever);
        let entry = Entry { page: page.clone(), ended: Arc::default(), withheld: false };
        state.entries.insert(ticket, entry);
        ticket
    }

    /// A write ended: who waits for that hears of it.
    pub(crate) fn end(&self, ticket: &Ticket) {
        let entry = self.state.lock().entries.remove(ticket);
        if let Some(entry) = entry {
            entry.ended.change(|ended| *ended = true);
        }
    }

    /// The page, if it is being written and may be served.
    pub(crate) fn get(&self, id: &PageId) -> Option<Arc<Page>> {
        if has(Bug::GapBeforeWritten) {
            return None;
        }
        let state = self.state.lock();
        let mut writes = state.entries.range(writes_of(id)).map(|(_, entry)| entry);
        writes.rfind(|entry| !entry.withheld).map(|entry| entry.page.clone())
    }

    /// The page is served no longer; the ends of its writes.
    pub(crate) fn withhold(&self, id: &PageId) -> Vec<Ended> {
        let mut state = self.state.lock();
        let writes = state.entries.range_mut(writes_of(id)).map(|(_, entry)| entry);
        writes
            .map(|entry| {
                entry.withheld = true;
                entry.ended.clone()
            })
            .collect()
    }

    /// Writes under way.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().entries.len()
    }
}

fn writes_of(id: &PageId) -> std::ops::RangeInclusive<Ticket> {
    (*id, 0, 0)..=(*id, u64::MAX, u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_device::Arena;
    use larder_format::{NamespaceId, PageKey, PageMeta};

    #[test]
    fn the_end_of_one_write_is_not_that_of_another_of_the_same_page() {
        let arena = Arena::new(1 << 20).unwrap();
        let payload = arena.allocate(100).unwrap().freeze();
        let id = PageId { namespace: NamespaceId([7; 32]), key: PageKey::chain(None, &[1]) };
        let page = Arc::new(Page { meta: PageMeta::describe(id, PageKey::NONE, 0, vec![100], &payload), payload });
        let writing = Writing::default();
        let (first, second) = (writing.begin(&page), writing.begin(&page));
        writing.end(&first);
        assert!(writing.get(&id).is_some(), "the second write is under way");
        let ends = writing.withhold(&id);
        assert!(ends.len() == 1 && !ends[0].now() && writing.get(&id).is_none());
        writing.end(&second);
        assert!(ends[0].now() && writing.len() == 0);
    }
}
