//! Changes of L2 and L3, queued for the publisher of KV events.
//!
//! Invariants:
//! - The store never waits for the publisher. A change is copied into memory that was allocated at
//!   the start, under a lock that the publisher holds for a few instructions.
//! - Changes of L2 are in the order in which it changed, because the tiers record them under the
//!   lock of their state. Those of each device of L3 are, because its log records them under its
//!   lock.
//! - The queue has at most [`CHANGES_MAX`] changes. A further one marks an overflow, and from then
//!   on the queue takes no more. The publisher drops all of them, and describes the whole of L2
//!   again: the changes before this walk are in L2 by then.
//! - The token ids of a change count as those of its page, until the publisher has encoded them.

use crate::page::Page;
use crate::policy::NamespacePrefix;
use crate::token_ids::{TokenIds, TokenMemory};
use larder_format::footer::PageSummary;
use larder_format::{NamespaceId, PageKey};
use larder_log::{NamedPage, PageListener, PageName};
use larder_runtime::sync::Mutex;
use prometheus_client::metrics::counter::Counter;
use std::sync::Arc;
use tokio::sync::Notify;

/// Maximum number of queued changes. A node that puts 100,000 pages per second into a full L2 has
/// 200,000 changes per second, and the publisher takes them every 10 ms.
const CHANGES_MAX: usize = 64 << 10;
/// Memory of a queue in bytes: its own buffer and the one of the publisher.
pub(crate) const QUEUE_BYTES: u64 = (2 * CHANGES_MAX * size_of::<PageChange>()) as u64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    /// The tier has the page from now on.
    Stored {
        /// Hash of the preceding page of the sequence, `None` for the first.
        parent: Option<i64>,
        /// Ids of the page's tokens, if they are known.
        token_ids: Option<Arc<TokenIds>>,
    },
    /// The tier has evicted, forgotten or dropped the page.
    Removed,
}

/// Tier that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Medium {
    L2,
    L3,
}

/// One change of a tier, as indexers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageChange {
    pub(crate) namespace: NamespaceId,
    /// Hash of the page: see [`block_hash`].
    pub(crate) hash: i64,
    pub(crate) kind: ChangeKind,
    pub(crate) medium: Medium,
}

const _: () = assert!(size_of::<PageChange>() <= 72);

/// Number of a page in events: the first 8 bytes of its key, big-endian and signed. SGLang derives
/// the numbers of its own events from the same chain of hashes in this way.
pub(crate) fn block_hash(key: &PageKey) -> i64 {
    i64::from_be_bytes(key.prefix_u64().to_le_bytes())
}

fn parent_hash(parent: &PageKey) -> Option<i64> {
    (*parent != PageKey::NONE).then(|| block_hash(parent))
}

impl PageChange {
    fn of(page: &Page, kind: ChangeKind) -> PageChange {
        let id = page.id();
        PageChange { namespace: id.namespace, hash: block_hash(&id.key), kind, medium: Medium::L2 }
    }
}

pub(crate) struct ChangeQueue {
    /// Namespaces whose changes are queued. `None` stands for all.
    namespace: Option<NamespacePrefix>,
    /// A leaf lock: see the lock order in [`crate::tiers`].
    queued: Mutex<Queued>,
    /// Notified by the first change in an empty queue.
    begun: Notify,
    dropped: Counter,
}

struct Queued {
    changes: Vec<PageChange>,
    overflowed: bool,
}

impl ChangeQueue {
    /// Creates a queue for the changes of these namespaces. `dropped` counts changes that an
    /// overflow drops. Allocates the memory of the queue.
    pub(crate) fn new(namespace: Option<NamespacePrefix>, dropped: Counter) -> ChangeQueue {
        let queued = Queued { changes: Self::buffer(), overflowed: false };
        ChangeQueue { namespace, queued: Mutex::new(queued), begun: Notify::new(), dropped }
    }

    /// An empty buffer for [`ChangeQueue::take`].
    pub(crate) fn buffer() -> Vec<PageChange> {
        Vec::with_capacity(CHANGES_MAX)
    }

    /// Queues the entry of a page into L2. Called under the lock of the tiers' state.
    pub(crate) fn stored(&self, page: &Page) {
        if let Some(change) = self.describe(page) {
            self.push(change);
        }
    }

    /// Queues the end of a page in L2. Called under the lock of the tiers' state.
    pub(crate) fn removed(&self, page: &Page) {
        if self.has_events(page) {
            self.push(PageChange::of(page, ChangeKind::Removed));
        }
    }

    /// Describes a page in L2. `None` if its namespace is not published.
    pub(crate) fn describe(&self, page: &Page) -> Option<PageChange> {
        if !self.has_events(page) {
            return None;
        }
        let parent = parent_hash(&page.parent());
        let kind = ChangeKind::Stored { parent, token_ids: page.token_ids().cloned() };
        Some(PageChange::of(page, kind))
    }

    /// Describes a page on L3, without its parent and token ids: only its record has them. `None`
    /// if its namespace is not published.
    pub(crate) fn describe_named(&self, page: &NamedPage) -> Option<PageChange> {
        let NamedPage { namespace, name } = *page;
        let kind = ChangeKind::Stored { parent: None, token_ids: None };
        let change = PageChange { namespace, hash: i64::from_be_bytes(name), kind, medium: Medium::L3 };
        self.is_published(&namespace).then_some(change)
    }

    fn has_events(&self, page: &Page) -> bool {
        self.is_published(&page.id().namespace)
    }

    fn is_published(&self, namespace: &NamespaceId) -> bool {
        self.namespace.as_ref().is_none_or(|prefix| prefix.matches(namespace))
    }

    /// Makes the publisher describe all pages again, because the queue lacks changes.
    fn mark_incomplete(&self) {
        self.queued.lock().overflowed = true;
        self.begun.notify_one();
    }

    fn push(&self, change: PageChange) {
        let mut queued = self.queued.lock();
        if queued.changes.len() >= CHANGES_MAX {
            self.dropped.inc();
            queued.overflowed = true;
            return;
        }
        queued.changes.push(change);
        let is_first = queued.changes.len() == 1;
        drop(queued);
        if is_first {
            self.begun.notify_one();
        }
    }

    /// Returns `true` if the publisher must take the changes soon, whatever else it does.
    pub(crate) fn is_half_full(&self) -> bool {
        self.queued.lock().changes.len() >= CHANGES_MAX / 2
    }

    /// Waits until the queue has a change.
    pub(crate) async fn wait(&self) {
        self.begun.notified().await;
    }

    /// Moves all changes into `changes`, whose memory the queue uses from now on: it must come from
    /// [`ChangeQueue::buffer`]. After an overflow there are none, and the result is `true`.
    pub(crate) fn take(&self, changes: &mut Vec<PageChange>) -> bool {
        changes.clear();
        let mut queued = self.queued.lock();
        std::mem::swap(&mut queued.changes, changes);
        let overflowed = std::mem::take(&mut queued.overflowed);
        drop(queued);
        if overflowed {
            // Here: token ids are freed with them, and the store must not wait for that.
            self.dropped.inc_by(changes.len() as u64);
            changes.clear();
        }
        overflowed
    }
}

/// Records the changes of L3 in a queue. The logs call it under their locks.
pub(crate) struct L3Changes {
    queue: Arc<ChangeQueue>,
    token_memory: Arc<TokenMemory>,
}

impl L3Changes {
    pub(crate) fn new(queue: Arc<ChangeQueue>, token_memory: Arc<TokenMemory>) -> L3Changes {
        L3Changes { queue, token_memory }
    }
}

impl PageListener for L3Changes {
    fn stored(&self, page: &PageSummary, token_ids: &[u32]) {
        let namespace = page.id.namespace;
        if self.queue.is_published(&namespace) {
            let token_ids = self.token_memory.keep(&namespace, token_ids.to_vec());
            let kind = ChangeKind::Stored { parent: parent_hash(&page.parent), token_ids };
            let hash = block_hash(&page.id.key);
            self.queue.push(PageChange { namespace, hash, kind, medium: Medium::L3 });
        }
    }

    fn removed(&self, namespace: &NamespaceId, name: PageName) {
        if self.queue.is_published(namespace) {
            let (namespace, hash) = (*namespace, i64::from_be_bytes(name));
            self.queue.push(PageChange { namespace, hash, kind: ChangeKind::Removed, medium: Medium::L3 });
        }
    }

    fn all_changed(&self) {
        self.queue.mark_incomplete();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageShapes;
    use crate::token_ids::test_memory;
    use larder_format::{PageId, PageMeta};
    use larder_memory::{Arena, Slot};

    fn slot(arena: &Arc<Arena>) -> Slot {
        arena.allocate(1).unwrap().freeze()
    }

    /// A page with these first bytes of its namespace and key, after another one.
    fn page(arena: &Arc<Arena>, namespace: u8, key: u8, parent: PageKey) -> Page {
        let id = PageId { namespace: NamespaceId([namespace; 32]), key: PageKey([key; 32]) };
        let slot = slot(arena);
        PageShapes::default().page(PageMeta::describe(id, parent, 1, vec![1], &slot), slot)
    }

    #[test]
    fn changes_are_taken_in_order_with_hash_and_parent() {
        let arena = Arena::new(1 << 20).unwrap();
        let queue = ChangeQueue::new(None, Counter::default());
        let child = page(&arena, 7, 0x82, PageKey([1; 32]));
        queue.stored(&page(&arena, 7, 1, PageKey::NONE));
        queue.stored(&child);
        queue.removed(&child);
        let mut changes = ChangeQueue::buffer();
        assert!(!queue.take(&mut changes));
        let change = |hash, kind| PageChange { namespace: NamespaceId([7; 32]), hash, kind, medium: Medium::L2 };
        let (first, second) = (0x0101_0101_0101_0101, 0x8282_8282_8282_8282_u64.cast_signed());
        let expected = [
            change(first, ChangeKind::Stored { parent: None, token_ids: None }),
            change(second, ChangeKind::Stored { parent: Some(first), token_ids: None }),
            change(second, ChangeKind::Removed),
        ];
        assert_eq!(changes, expected);
        assert!(!queue.take(&mut changes) && changes.is_empty());
    }

    #[test]
    fn stored_page_brings_its_token_ids() {
        let arena = Arena::new(1 << 20).unwrap();
        let queue = ChangeQueue::new(None, Counter::default());
        let token_ids = test_memory().keep(&NamespaceId([7; 32]), vec![4, 5]);
        let page = page(&arena, 7, 1, PageKey::NONE).with_token_ids(token_ids.clone());
        queue.stored(&page);
        queue.removed(&page);
        let mut changes = ChangeQueue::buffer();
        queue.take(&mut changes);
        let kinds: Vec<ChangeKind> = changes.into_iter().map(|change| change.kind).collect();
        assert!(token_ids.is_some());
        assert_eq!(kinds, [ChangeKind::Stored { parent: None, token_ids }, ChangeKind::Removed]);
    }

    #[test]
    fn changes_of_l3_have_the_names_of_those_of_l2() {
        let arena = Arena::new(1 << 20).unwrap();
        let queue = Arc::new(ChangeQueue::new(Some("0707".parse().unwrap()), Counter::default()));
        let l3 = L3Changes::new(queue.clone(), test_memory());
        let page = page(&arena, 7, 0x82, PageKey([1; 32]));
        let summary = |namespace| PageSummary {
            id: PageId { namespace: NamespaceId([namespace; 32]), ..page.id() },
            offset: 4096,
            number: 1,
            parent: page.parent(),
            payload_bytes: 1,
            generation: 1,
            position: 1,
            expires_unix_ms: 0,
        };
        l3.stored(&summary(8), &[]);
        l3.stored(&summary(7), &[4, 5]);
        l3.removed(&NamespaceId([7; 32]), [0x82; 8]);
        let mut changes = ChangeQueue::buffer();
        assert!(!queue.take(&mut changes));
        let token_ids = test_memory().keep(&NamespaceId([7; 32]), vec![4, 5]);
        let of_l2 = queue.describe(&page.with_token_ids(token_ids)).unwrap();
        let stored = PageChange { medium: Medium::L3, ..of_l2 };
        let removed = PageChange { kind: ChangeKind::Removed, ..stored.clone() };
        assert_eq!(changes, [stored.clone(), removed]);
        let named = NamedPage { namespace: NamespaceId([7; 32]), name: [0x82; 8] };
        assert_eq!(queue.describe_named(&named).map(|change| change.hash), Some(stored.hash));
        l3.all_changed();
        assert!(queue.take(&mut changes) && changes.is_empty());
    }

    #[test]
    fn other_namespaces_are_left_out() {
        let arena = Arena::new(1 << 20).unwrap();
        let queue = ChangeQueue::new(Some("0707".parse().unwrap()), Counter::default());
        queue.stored(&page(&arena, 8, 1, PageKey::NONE));
        queue.stored(&page(&arena, 7, 2, PageKey::NONE));
        let mut changes = ChangeQueue::buffer();
        queue.take(&mut changes);
        assert_eq!(changes.iter().map(|change| change.hash).collect::<Vec<_>>(), [0x0202_0202_0202_0202]);
    }

    #[test]
    fn full_queue_drops_its_changes_and_never_grows() {
        let arena = Arena::new(1 << 20).unwrap();
        let dropped: Counter = Counter::default();
        let queue = ChangeQueue::new(None, dropped.clone());
        let page = page(&arena, 7, 1, PageKey::NONE);
        (0..CHANGES_MAX + 3).for_each(|_| queue.stored(&page));
        let mut changes = ChangeQueue::buffer();
        assert!(queue.take(&mut changes), "the overflow is reported once");
        assert_eq!(dropped.get(), CHANGES_MAX as u64 + 3);
        assert!(changes.is_empty() && changes.capacity() < 2 * CHANGES_MAX, "{}", changes.capacity());
        queue.removed(&page);
        assert!(!queue.take(&mut changes) && changes.len() == 1);
    }
}
