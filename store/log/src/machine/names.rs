//! Names of the indexed pages, for listeners that follow what the log has.
//!
//! The index has only a hash of each page, so a log cannot name the pages that it evicts. A log
//! that keeps names has the first 8 bytes of each key, by slot. Other logs spend no memory on them.
//!
//! Invariants:
//! - A name is set before the log announces its page, and stays until the slot has another page.
//! - A recovery announces no page. Its end announces that all pages may have changed.

use super::shared_index::{position_of, shard_of, slot_of};
use super::*;
use larder_format::PageKey;
use larder_format::footer::PageSummary;
use std::fmt;

/// First bytes of a page's key.
pub type PageName = [u8; 8];

/// Listener for the pages of a log. The log calls it under its own lock, so a call must be short,
/// and must not use the log.
pub trait PageListener: Send + Sync {
    /// The log has the page from now on. `token_ids` are those that its writer gave.
    fn stored(&self, page: &PageSummary, token_ids: &[u32]);
    /// The log has evicted, forgotten, replaced or dropped a page.
    fn removed(&self, namespace: &NamespaceId, name: PageName);
    /// Pages came and went without an announcement.
    fn all_changed(&self);
}

/// A page of the log, as far as the index names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedPage {
    pub namespace: NamespaceId,
    pub name: PageName,
}

pub(super) struct Names {
    /// By shard and position.
    shards: Vec<Vec<PageName>>,
    listener: Option<Arc<dyn PageListener>>,
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("shards", &self.shards.len()).finish_non_exhaustive()
    }
}

impl Names {
    pub(super) fn set(&mut self, slot: u32, key: &PageKey) {
        let (names, at) = (&mut self.shards[shard_of(slot)], position_of(slot) as usize);
        if names.len() <= at {
            names.resize(at + 1, PageName::default());
        }
        names[at].copy_from_slice(&key.0[..size_of::<PageName>()]);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|names| names.capacity() * size_of::<PageName>()).sum()
    }

    fn get(&self, slot: u32) -> Option<PageName> {
        self.shards[shard_of(slot)].get(position_of(slot) as usize).copied()
    }
}

impl Log {
    /// Keeps the names of pages from now on. Called before the first page enters the index.
    pub fn keep_names(&mut self) {
        let shards = vec![Vec::new(); self.index.entries.shards()];
        self.names = Some(Names { shards, listener: None });
    }

    /// Sets the listener of a log that keeps names. The listener may have missed pages before.
    pub fn listen(&mut self, listener: Arc<dyn PageListener>) {
        if let Some(names) = &mut self.names {
            names.listener = Some(listener);
        }
    }

    pub(super) fn listener(&self) -> Option<&Arc<dyn PageListener>> {
        self.names.as_ref()?.listener.as_ref()
    }

    /// Announces the end of the page in `slot`, which is still there.
    pub(super) fn announce_removal(&self, slot: u32) {
        if let Some(names) = &self.names
            && let (Some(listener), Some(name)) = (&names.listener, names.get(slot))
        {
            listener.removed(self.index.namespace_of(slot), name);
        }
    }

    /// Names of the pages behind a place of the index, which is 0 at first. Visits at most `max`
    /// slots. Returns the next place, `None` at the end. A page that stays in the log during a walk
    /// is met.
    pub fn names_from(&self, place: u64, max: usize) -> (Vec<NamedPage>, Option<u64>) {
        let mut pages = Vec::new();
        let Some(names) = &self.names else { return (pages, None) };
        let (mut shard, mut at) = ((place >> 32) as usize, place as u32);
        for _ in 0..max {
            while names.shards.get(shard).is_some_and(|names| names.len() <= at as usize) {
                (shard, at) = (shard + 1, 0);
            }
            let Some(&name) = names.shards.get(shard).and_then(|names| names.get(at as usize)) else {
                return (pages, None);
            };
            let slot = slot_of(shard, at);
            if !self.index.entries.get(slot).is_free() {
                pages.push(NamedPage { namespace: *self.index.namespace_of(slot), name });
            }
            at += 1;
        }
        (pages, Some((shard as u64) << 32 | u64::from(at)))
    }
}
