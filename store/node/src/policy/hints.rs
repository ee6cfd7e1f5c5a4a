//! Hints: knowledge of clients about the use of pages, which the eviction policy lacks.
//!
//! Invariants:
//! - A hint changes the rank of pages in its namespace. All rules stay in force: pins, floors,
//!   quotas, and children before their parents.
//! - Retained pages have a soft pin. With its other soft pins a namespace keeps at most a quarter
//!   of L2, and at most the bytes that it could pin hard now.
//! - A hint replaces no pin that a client asked for.
//! - A hint takes memory for resident pages only.

use super::pins::{PINNED_PART, Pin};
use super::{L2Policy, Resident};
use larder_evict::{Advice, Slot};
use larder_format::PageId;
use larder_wire::{Hint, PinKind};

/// A hint for pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageHint {
    /// The generation that used the pages has ended.
    pub(crate) ended: bool,
    pub(crate) advice: Hint,
    pub(crate) retain_until_ms: u64,
}

impl<P: Resident> L2Policy<P> {
    /// Takes a hint for pages of one namespace, in the order of their sequence. Returns how many of
    /// them are in L2, and `false` if the advice does not apply to further pages of the sequence.
    pub(crate) fn hint(&mut self, ids: &[PageId], hint: PageHint, now_ms: u64) -> (usize, bool) {
        let mut found = 0;
        for id in ids {
            let slot = self.slot_of(id);
            found += usize::from(slot.is_some());
            if hint.ended {
                self.end_generation(id, slot, now_ms);
            }
        }
        let goes_on = match hint.advice {
            Hint::None => true,
            Hint::Retain => self.retain(ids, hint.retain_until_ms),
            Hint::Demote => {
                ids.iter().for_each(|id| _ = self.demote(id, u32::MAX, now_ms));
                true
            }
            // From the end: the pages that only this session uses are behind the shared ones.
            Hint::SessionEnded => ids.iter().rev().all(|id| self.demote(id, 1, now_ms)),
        };
        (found, goes_on)
    }

    fn end_generation(&mut self, id: &PageId, slot: Option<Slot>, now_ms: u64) {
        match slot.and_then(|slot| self.evictor.handle_at(slot)) {
            Some(handle) => _ = self.evictor.advise(handle, Advice::GenerationEnded, now_ms),
            None => self.evictor.generation_ended(self.by_id.hash(id), now_ms),
        }
    }

    /// Demotes a page with at most `children_max` resident children. Returns `false` if it has
    /// more.
    fn demote(&mut self, id: &PageId, children_max: u32, now_ms: u64) -> bool {
        let Some(slot) = self.slot_of(id) else { return true };
        let Some(handle) = self.evictor.handle_at(slot) else { return true };
        if self.evictor.children(handle).is_some_and(|children| children > children_max) {
            return false;
        }
        if self.pins.is_of_hint(slot) {
            self.set_pin(slot, None);
        }
        self.evictor.advise(handle, Advice::Demote, now_ms);
        // So L3 does not retain the page for its past uses. The count for `write_after_hits` starts
        // anew, and a write of the dirty page takes the write budget as a first use.
        if let Some(state) = self.state_mut(slot) {
            state.hits = 0;
        }
        true
    }

    /// Retains pages from the first on, as far as the bounds allow. Returns `false` if they end it.
    fn retain(&mut self, ids: &[PageId], until_ms: u64) -> bool {
        let Some(namespace) = ids.first().map(|id| id.namespace) else { return true };
        let most = self.hard_pins_max(&namespace).min(self.options.capacity_bytes / PINNED_PART);
        let pin = Pin { kind: PinKind::Soft, until_ms, of_hint: true };
        for slot in ids.iter().filter_map(|id| self.slot_of(id)).collect::<Vec<_>>() {
            let renews = self.pins.is_of_hint(slot);
            if !renews && self.pins.has_pin(slot) {
                continue;
            }
            let more = if renews { 0 } else { u64::from(self.bytes_at(slot)) };
            if self.pins.soft_bytes(&namespace) + more > most {
                return false;
            }
            self.set_pin(slot, Some(pin));
        }
        true
    }
}
