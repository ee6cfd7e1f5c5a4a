//! What will be asked for again.
//!
//! The keeper ranks pages up to a share of the log's bytes. A page enters it when it becomes visible and whenever it is
//! used; what it gives up for lack of room is *condemned*: still found, but not copied when its segment is reclaimed. Nor is
//! what nobody has asked for since it was put, or since the start: so traffic that is never read is written once.
//!
//! Always true: the entry of a page says where the keeper has it, and the keeper has it under the slot of that entry;
//! only [`Log::keep`], [`Log::given_up`] and [`Log::take_out`] change that. The condemned pages of a namespace with a
//! quota, and no others, stand in `condemned`, by number. The bytes of hard-pinned pages are at most a quarter of the
//! log's, and all of those pages are in the keeper.

use super::index::{Index, NONE, Original, Stored};
use super::*;
use larder_evict::{Evicted, Evictor, Handle, NamespaceIndex, NewPage, Reason};
use larder_format::footer::PageSummary;
use std::collections::BTreeSet;

/// How firmly a page is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pin {
    /// Not at all.
    #[default]
    None,
    /// The keeper gives it up after all that are not pinned. It ends when that happens.
    Soft,
    /// It is copied whenever its segment is reclaimed, and never given up; nor are the pages before it. It does not
    /// outlive a restart, nor the page: damage, an expiry or a failing device can still take it.
    Hard,
}

/// Why a page cannot be pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PinError {
    /// It is not in the log.
    #[error("the page is not in the log")]
    NotFound,
    /// Pinned pages would take more than a quarter of the log, or the log is too small to keep any.
    #[error("pinned pages would take {bytes} bytes of {max}")]
    Full {
        /// Bytes that would be pinned.
        bytes: u64,
        /// Most that may be.
        max: u64,
    },
    /// What is kept leaves no room for it, or its segment is being reclaimed without it.
    #[error("there is no room among the pages that are kept")]
    NotKept,
}

/// The pages that are kept, and what else is known of pages beside their entry.
#[derive(Debug)]
pub(super) struct Keeper {
    evictor: Evictor<u32, Larder>,
    /// By the number that an entry has of it.
    handles: Vec<Handle>,
    pins: BTreeMap<u32, Pin>,
    pinned_bytes: u64,
    /// Namespace, number of the record, slot.
    condemned: BTreeSet<(u32, u64, u32)>,
    /// Expiry and slot of pages that have one.
    expiring: BTreeSet<(u64, u32)>,
}

impl Keeper {
    pub(super) fn new(capacity_bytes: u64, policy: Larder) -> Keeper {
        Keeper {
            evictor: Evictor::new(capacity_bytes, policy),
            handles: Vec::new(),
            pins: BTreeMap::new(),
            pinned_bytes: 0,
            condemned: BTreeSet::new(),
            expiring: BTreeSet::new(),
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.evictor.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.evictor.used_bytes()
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    pub(super) fn pin_of(&self, slot: u32) -> Pin {
        self.pins.get(&slot).copied().unwrap_or_default()
    }

    pub(super) fn first_expired(&self, now_unix_ms: u64) -> Option<u32> {
        self.expiring.first().filter(|(expires, _)| is_expired(*expires, now_unix_ms)).map(|&(_, slot)| slot)
    }

    /// The oldest condemned page of a namespace with a quota.
    pub(super) fn first_condemned(&self, namespace: u32) -> Option<u32> {
        let first = self.condemned.range((namespace, 0, 0)..).next().filter(|(of, _, _)| *of == namespace);
        first.map(|&(_, _, slot)| slot)
    }

    pub(super) fn condemn(&mut self, slot: u32, stored: &Stored) {
        self.condemned.insert((stored.namespace, stored.number, slot));
    }

    fn reprieve(&mut self, slot: u32, stored: &Stored) {
        self.condemned.remove(&(stored.namespace, stored.number, slot));
    }

    /// Drops the order of a namespace that has no quota any more.
    pub(super) fn forget_order(&mut self, namespace: u32) {
        let of_it: Vec<_> =
            self.condemned.range((namespace, 0, 0)..=(namespace, u64::MAX, u32::MAX)).copied().collect();
        of_it.iter().for_each(|key| {
            self.condemned.remove(key);
        });
    }

    pub(super) fn set_quota(&mut self, namespace: u32, quota_bytes: u64) -> Vec<Evicted<u32>> {
        let mut evicted = Vec::new();
        self.evictor.set_quota(NamespaceIndex(namespace), quota_bytes, &mut evicted);
        evicted
    }

    fn handle(&self, stored: &Stored) -> Option<Handle> {
        self.handles.get(stored.keeper as usize).copied()
    }
}

impl Log {
    /// Takes a page into the index; not yet into the keeper.
    pub(super) fn enter(&mut self, segment: u32, page: &PageSummary) -> u32 {
        let slot = self.index.insert(segment, page);
        let stored = *self.index.get(slot);
        let namespace = self.index.namespace(stored.namespace);
        if namespace.pages == 1 {
            // The number may have been another's before. Without pages there is nothing to evict.
            self.keeper.set_quota(stored.namespace, namespace.quota_bytes);
        }
        if self.has_quota(&stored) {
            self.keeper.condemn(slot, &stored);
        }
        if stored.expires_unix_ms() != 0 {
            self.keeper.expiring.insert((stored.expires_unix_ms(), slot));
        }
        if let Some(life) = self.segments.get_mut(&segment).and_then(Segment::life_mut) {
            life.slots.push(slot);
        }
        slot
    }

    /// If `page` is the very put that is in `slot`, it stands at another place now, and is kept as it was.
    pub(super) fn move_page(&mut self, slot: u32, segment: u32, page: &PageSummary) -> bool {
        if !self.index.is_same_put(slot, page) {
            return false;
        }
        let &Stored { segment: from, number, generation, .. } = self.index.get(slot);
        let offset = self.index.get(slot).offset();
        self.originals.insert(page.id, Original { segment: from, offset, number, generation });
        self.restand(slot, |index| index.stand_at(slot, &Original::of(segment, page)));
        if let Some(life) = self.segments.get_mut(&segment).and_then(Segment::life_mut) {
            life.slots.push(slot);
        }
        true
    }

    /// Changes where a page stands.
    pub(super) fn restand(&mut self, slot: u32, change: impl FnOnce(&mut Index)) {
        let before = *self.index.get(slot);
        change(&mut self.index);
        if before.keeper == NONE && self.has_quota(&before) {
            self.keeper.reprieve(slot, &before);
            self.keeper.condemn(slot, self.index.get(slot));
        }
    }

    /// Takes a page out of the index and whatever else knows of it.
    pub(super) fn take_out(&mut self, slot: u32) -> Stored {
        let stored = *self.index.get(slot);
        self.originals.remove(&self.index.id_of(slot));
        self.unpin(slot);
        if let Some(handle) = self.keeper.handle(&stored) {
            self.keeper.evictor.remove(handle);
        }
        self.keeper.reprieve(slot, &stored);
        self.keeper.expiring.remove(&(stored.expires_unix_ms(), slot));
        self.index.remove(slot)
    }

    fn has_quota(&self, stored: &Stored) -> bool {
        self.index.namespace(stored.namespace).quota_bytes != u64::MAX
    }

    /// Gives a page its place in the keeper, at the cost of others; whether it has one.
    pub(super) fn keep(&mut self, slot: u32) -> bool {
        let stored = *self.index.get(slot);
        if stored.keeper != NONE {
            return true;
        }
        let parent = self.index.parent_of(slot).and_then(|parent| self.keeper.handle(self.index.get(parent)));
        let page = NewPage {
            name: slot,
            fingerprint: self.index.hash(&self.index.id_of(slot)),
            namespace: NamespaceIndex(stored.namespace),
            parent,
            position: stored.position,
            bytes: stored.record_bytes() as u32,
            // The log sees to that itself: a page that outlives the one before it is still worth its room.
            deadline_ms: None,
        };
        let mut evicted = Vec::new();
        let kept = self.keeper.evictor.insert(page, 0, &mut evicted);
        if let Ok(handle) = kept {
            let at = handle.slot().index();
            match self.keeper.handles.get_mut(at) {
                Some(before) => *before = handle,
                None => self.keeper.handles.push(handle),
            }
            self.index.get_mut(slot).keeper = at as u32;
            self.keeper.reprieve(slot, &stored);
        }
        self.given_up(evicted);
        kept.is_ok()
    }

    /// What the keeper gave up is condemned, or dropped if its namespace is over its quota.
    pub(super) fn given_up(&mut self, evicted: Vec<Evicted<u32>>) {
        for Evicted { name: slot, reason, .. } in evicted {
            self.index.get_mut(slot).keeper = NONE;
            self.keeper.pins.remove(&slot);
            let stored = *self.index.get(slot);
            if reason == Reason::Quota {
                self.counts.quota_pages += 1;
                self.drop_page(slot);
            } else if self.has_quota(&stored) {
                self.keeper.condemn(slot, &stored);
            }
        }
    }

    /// The page was asked for.
    pub(super) fn use_page(&mut self, slot: u32) {
        self.index.get_mut(slot).set_used();
        match self.keeper.handle(self.index.get(slot)) {
            Some(handle) => {
                self.keeper.evictor.touch(handle, 0);
            }
            None => {
                self.keep(slot);
            }
        }
    }

    /// Most bytes of the records of hard-pinned pages: a quarter of the log; none if it has too few segments to copy
    /// anything.
    pub fn pinned_bytes_max(&self) -> u64 {
        match self.can_rescue() {
            true => self.config.segment_bytes.saturating_mul(u64::from(self.config.segments_max)) / 4,
            false => 0,
        }
    }

    /// Holds a page as firmly as `pin` says, whatever held it before. On an error nothing changed.
    pub fn pin(&mut self, id: &PageId, pin: Pin) -> Result<(), PinError> {
        let slot = self.index.find(id).ok_or(PinError::NotFound)?;
        self.pin_slot(slot, pin)
    }

    pub(super) fn pin_slot(&mut self, slot: u32, pin: Pin) -> Result<(), PinError> {
        let before = self.keeper.pin_of(slot);
        if pin == before {
            return Ok(());
        }
        let bytes = self.index.get(slot).record_bytes();
        let (total, max) = (self.keeper.pinned_bytes + bytes, self.pinned_bytes_max());
        if pin == Pin::Hard && total > max {
            return Err(PinError::Full { bytes: total, max });
        }
        if pin == Pin::Hard && self.is_left_behind(slot) {
            return Err(PinError::NotKept);
        }
        if pin != Pin::None && !self.keep(slot) {
            return Err(PinError::NotKept);
        }
        self.unpin(slot);
        let Some(handle) = self.keeper.handle(self.index.get(slot)) else { return Ok(()) };
        match pin {
            Pin::None => return Ok(()),
            Pin::Soft => self.keeper.evictor.soft_pin(handle, true),
            Pin::Hard => self.keeper.evictor.pin(handle),
        };
        if pin == Pin::Hard {
            self.keeper.pinned_bytes += bytes;
            self.use_ancestors(slot);
        }
        self.keeper.pins.insert(slot, pin);
        Ok(())
    }

    /// The pages before a pinned one are as good as asked for: without them nobody comes to it.
    fn use_ancestors(&mut self, slot: u32) {
        // Tags are short, so a chain of them may be a ring; no sequence is longer than its last page's position.
        let mut steps = self.index.get(slot).position;
        let mut at = self.index.parent_of(slot);
        while let Some(slot) = at.filter(|_| steps > 0) {
            self.index.get_mut(slot).set_used();
            at = self.index.parent_of(slot);
            steps -= 1;
        }
    }

    fn unpin(&mut self, slot: u32) {
        let stored = *self.index.get(slot);
        let Some(pin) = self.keeper.pins.remove(&slot) else { return };
        let Some(handle) = self.keeper.handle(&stored) else { return };
        match pin {
            Pin::None => {}
            Pin::Soft => {
                self.keeper.evictor.soft_pin(handle, false);
            }
            Pin::Hard => {
                self.keeper.evictor.unpin(handle);
                self.keeper.pinned_bytes -= stored.record_bytes();
            }
        }
    }
}
