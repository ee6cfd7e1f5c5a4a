//! Pins. A hard pin keeps a page and its ancestors; a soft pin makes a page go last. Both expire.
//!
//! Invariants:
//! - L2 keeps a page while the page has a hard pin, or while it keeps a child that came after it.
//! - All pages kept by hard pins take at most a quarter of L2: the *pinnable bytes*.
//! - Half of the pinnable bytes is divided into floors, as L2 itself is. Beyond their floors, the
//!   namespaces together pin at most the other half. One alone pins at most three quarters of all,
//!   so that the next one finds a floor. Pins from before a change of the floors stay until they
//!   expire.
//! - The soft-pinned pages of each namespace take at most a quarter of L2.

use super::{L2Policy, Marks, Resident};
use larder_evict::Slot;
use larder_format::{NamespaceId, PageId};
use larder_wire::{PagePin, PinKind};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Pins may keep one part in this many of L2. The rest stays for other pages.
pub(super) const PINNED_PART: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pin {
    pub(super) kind: PinKind,
    pub(super) until_ms: u64,
    /// A hint has made it, and a hint may end it.
    pub(super) of_hint: bool,
}

impl Pin {
    fn is(pin: Option<Pin>, kind: PinKind) -> bool {
        pin.is_some_and(|pin| pin.kind == kind)
    }
}

#[derive(Debug, Default)]
pub(super) struct Pins {
    by_slot: BTreeMap<Slot, Pin>,
    by_expiry: BTreeSet<(u64, Slot)>,
    /// Number of reasons to keep a page, without zeros: its own hard pin, and each child that is
    /// kept.
    keep_counts: BTreeMap<Slot, u32>,
    /// Bytes of pages kept by hard pins, ancestors included.
    kept_bytes: u64,
    /// The same per namespace, without zeros.
    kept_by: BTreeMap<NamespaceId, u64>,
    /// Sum over all namespaces of the part of `kept_by` within the namespace's floor of pins.
    kept_within_floors: u64,
    /// Bytes of soft-pinned pages per namespace, without zeros.
    soft_bytes: BTreeMap<NamespaceId, u64>,
}

impl Pins {
    pub(super) fn has_pin(&self, slot: Slot) -> bool {
        self.by_slot.contains_key(&slot)
    }

    pub(super) fn is_of_hint(&self, slot: Slot) -> bool {
        self.by_slot.get(&slot).is_some_and(|pin| pin.of_hint)
    }

    pub(super) fn soft_bytes(&self, namespace: &NamespaceId) -> u64 {
        self.soft_bytes.get(namespace).copied().unwrap_or_default()
    }

    fn add_soft(&mut self, namespace: NamespaceId, bytes: u32) {
        *self.soft_bytes.entry(namespace).or_default() += u64::from(bytes);
    }

    fn remove_soft(&mut self, namespace: NamespaceId, bytes: u32) {
        let before = self.soft_bytes(&namespace);
        assert!(before >= u64::from(bytes), "unpinned {bytes} bytes of {before}");
        match before - u64::from(bytes) {
            0 => self.soft_bytes.remove(&namespace),
            after => self.soft_bytes.insert(namespace, after),
        };
    }

    pub(super) fn kept_by(&self, namespace: &NamespaceId) -> u64 {
        self.kept_by.get(namespace).copied().unwrap_or_default()
    }

    /// Returns `true` if a page has a pin of its own.
    pub(super) fn is_pinned(&self, slot: Slot) -> bool {
        self.by_slot.contains_key(&slot)
    }

    /// Adds bytes of a namespace whose floor of pins is `floor`.
    fn add_kept(&mut self, namespace: NamespaceId, bytes: u64, floor: u64) {
        let before = self.kept_by(&namespace);
        self.set_kept(namespace, (before, before + bytes), floor);
    }

    /// Removes bytes of a namespace whose floor of pins is `floor`.
    fn remove_kept(&mut self, namespace: NamespaceId, bytes: u64, floor: u64) {
        let before = self.kept_by(&namespace);
        assert!(before >= bytes, "let go of {bytes} bytes of {before}");
        self.set_kept(namespace, (before, before - bytes), floor);
    }

    fn set_kept(&mut self, namespace: NamespaceId, (before, after): (u64, u64), floor: u64) {
        match after {
            0 => self.kept_by.remove(&namespace),
            _ => self.kept_by.insert(namespace, after),
        };
        self.kept_bytes = self.kept_bytes - before + after;
        self.kept_within_floors = self.kept_within_floors - before.min(floor) + after.min(floor);
    }

    /// Records a change of a namespace's floor of pins.
    pub(super) fn change_floor(&mut self, namespace: &NamespaceId, before: u64, after: u64) {
        let kept = self.kept_by(namespace);
        self.kept_within_floors = self.kept_within_floors - kept.min(before) + kept.min(after);
    }

    /// Returns a page whose pin has expired.
    pub(super) fn first_expired(&self, now_ms: u64) -> Option<Slot> {
        self.by_expiry.first().filter(|(until_ms, _)| *until_ms <= now_ms).map(|(_, slot)| *slot)
    }

    fn has(&self, slot: Slot) -> bool {
        self.by_slot.contains_key(&slot) || self.keep_counts.contains_key(&slot)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PinRefused {
    #[error(
        "hard pins of this namespace may keep {most} bytes now, its share of a quarter of L2, and these pages would \
         exceed that; unpin other pages, or wait until pins of others expire"
    )]
    Hard { most: u64 },
    #[error(
        "soft pins of a namespace may hold at most {most} bytes, a quarter of L2, and these pages would exceed that; \
         unpin other pages"
    )]
    Soft { most: u64 },
}

impl<P: Resident> L2Policy<P> {
    /// Pins those of `ids` that are in L2 until `until_ms`, replacing their pins. Returns how many
    /// those are. [`PinKind::None`] removes pins and returns how many pages had one. A refusal
    /// changes nothing.
    pub fn pin(&mut self, ids: &BTreeSet<PageId>, kind: PinKind, until_ms: u64) -> Result<usize, PinRefused> {
        let soft_most = self.options.capacity_bytes / PINNED_PART;
        // Bytes that the last namespace may keep. Newcomers may have lowered its maximum below what
        // it keeps: it can renew those pins, and add none.
        let mut hard_most = None::<(NamespaceId, u64)>;
        let pin = if kind == PinKind::None { None } else { Some(Pin { kind, until_ms, of_hint: false }) };
        let mut before = Vec::new();
        for id in ids {
            let Some(slot) = self.slot_of(id) else { continue };
            let old = self.pins.by_slot.get(&slot).copied();
            if pin.is_none() && old.is_none() {
                continue;
            }
            let most = match hard_most {
                Some((namespace, most)) if namespace == id.namespace => most,
                _ if kind == PinKind::Hard => self.hard_pins_max(&id.namespace).max(self.pins.kept_by(&id.namespace)),
                _ => 0,
            };
            hard_most = Some((id.namespace, most));
            before.push((slot, old));
            self.set_pin(slot, pin);
            let refused = match kind {
                PinKind::Hard if self.pins.kept_by(&id.namespace) > most => PinRefused::Hard { most },
                PinKind::Soft if self.pins.soft_bytes(&id.namespace) > soft_most => {
                    PinRefused::Soft { most: soft_most }
                }
                _ => continue,
            };
            // The caller holds the lock throughout, so no other thread sees the pins that are
            // undone.
            before.into_iter().rev().for_each(|(slot, pin)| self.set_pin(slot, pin));
            return Err(refused);
        }
        Ok(before.len())
    }

    /// Bytes that the hard pins of a namespace may keep now. Costs O(log n) for n namespaces.
    pub(super) fn hard_pins_max(&self, namespace: &NamespaceId) -> u64 {
        let most = self.options.capacity_bytes / PINNED_PART;
        let own = self.pins.kept_by(namespace);
        let others = self.pins.kept_bytes - own;
        let free = most - others.min(most);
        // A store without connections, as in tests, knows no namespace in use.
        if !self.namespaces.has_floors() {
            return free;
        }
        let floor = self.floor_of_pins(namespace);
        let beyond_floors = others - (self.pins.kept_within_floors - own.min(floor));
        let common = most / 2 - beyond_floors.min(most / 2);
        (floor + common).min(most / 4 * 3).min(free)
    }

    /// Bytes that the hard pins of a namespace can always keep, as far as pins from before the last
    /// change of the floors leave them.
    fn floor_of_pins(&self, namespace: &NamespaceId) -> u64 {
        self.namespaces.floor(namespace) / PINNED_PART
    }

    /// Compares the bytes within the floors with their sum over all namespaces.
    #[cfg(test)]
    pub(super) fn check_floors_of_pins(&self) {
        let kept = self.namespaces.floors().map(|(namespace, floor)| {
            let floor = floor / PINNED_PART;
            self.pins.kept_by(&namespace).min(floor)
        });
        assert_eq!(self.pins.kept_within_floors, kept.sum::<u64>());
    }

    /// Returns the pin of a page in L2, with the time until it expires.
    pub fn pin_of(&self, id: &PageId, now_ms: u64) -> Option<PagePin> {
        let pin = self.pins.by_slot.get(&self.slot_of(id)?)?;
        // A pin stays until the next tick after its expiry, but it no longer counts.
        let remaining_ms = pin.until_ms.checked_sub(now_ms).filter(|left| *left > 0)?;
        Some(PagePin { kind: pin.kind, remaining_ms })
    }

    pub fn pinned(&self) -> (usize, u64) {
        (self.pins.by_expiry.len(), self.pins.kept_bytes)
    }

    /// Bytes that the hard pins of a namespace keep.
    pub fn hard_pinned_bytes(&self, namespace: &NamespaceId) -> u64 {
        self.pins.kept_by(namespace)
    }

    pub(super) fn set_pin(&mut self, slot: Slot, pin: Option<Pin>) {
        let Some(handle) = self.evictor.handle_at(slot) else { return };
        let Some(id) = self.id_at(slot) else { return };
        let bytes = self.bytes_at(slot);
        let old = match pin {
            Some(pin) => self.pins.by_slot.insert(slot, pin),
            None => self.pins.by_slot.remove(&slot),
        };
        if let Some(old) = old {
            self.pins.by_expiry.remove(&(old.until_ms, slot));
        }
        if let Some(pin) = pin {
            self.pins.by_expiry.insert((pin.until_ms, slot));
        }
        match (Pin::is(old, PinKind::Soft), Pin::is(pin, PinKind::Soft)) {
            (false, true) => self.pins.add_soft(id.namespace, bytes),
            (true, false) => self.pins.remove_soft(id.namespace, bytes),
            _ => {}
        }
        self.evictor.soft_pin(handle, Pin::is(pin, PinKind::Soft));
        match (Pin::is(old, PinKind::Hard), Pin::is(pin, PinKind::Hard)) {
            (false, true) => {
                self.evictor.pin(handle);
                self.keep(slot);
            }
            (true, false) => {
                self.evictor.unpin(handle);
                self.let_go(slot);
            }
            _ => {}
        }
        self.update_in_pins(slot);
    }

    fn update_in_pins(&mut self, slot: Slot) {
        let in_pins = self.pins.has(slot);
        if let Some(state) = self.state_mut(slot) {
            state.marks.set(Marks::IN_PINS, in_pins);
        }
    }

    /// Adds a reason to keep a page. The first reason is one to keep its parent as well, so a call
    /// walks up to the first ancestor that is kept already. All of them are of one namespace.
    fn keep(&mut self, slot: Slot) {
        let Some(id) = self.id_at(slot) else { return };
        let mut next = Some(slot);
        while let Some(slot) = next {
            let count = self.pins.keep_counts.entry(slot).or_default();
            *count += 1;
            if *count > 1 {
                return;
            }
            let floor = self.floor_of_pins(&id.namespace);
            self.pins.add_kept(id.namespace, u64::from(self.bytes_at(slot)), floor);
            self.update_in_pins(slot);
            next = self.live_parent(slot);
        }
    }

    /// Removes a reason to keep a page. The last one removes a reason to keep its parent as well.
    fn let_go(&mut self, slot: Slot) {
        let Some(id) = self.id_at(slot) else { return };
        let mut next = Some(slot);
        while let Some(slot) = next {
            // Each `let_go` follows a `keep` of the same page: `live_parent` never returns a later
            // put of the parent, and `release_pins` removes all reasons with the page.
            let count = self.pins.keep_counts.get(&slot).copied().unwrap_or_default();
            assert!(count > 0, "no reason to keep the page is left to remove");
            if count > 1 {
                self.pins.keep_counts.insert(slot, count - 1);
                return;
            }
            self.pins.keep_counts.remove(&slot);
            let floor = self.floor_of_pins(&id.namespace);
            self.pins.remove_kept(id.namespace, u64::from(self.bytes_at(slot)), floor);
            self.update_in_pins(slot);
            next = self.live_parent(slot);
        }
    }

    /// Returns the page's parent if it is still the put that was there when the page came.
    fn live_parent(&self, slot: Slot) -> Option<Slot> {
        self.evictor.parent(self.evictor.handle_at(slot)?).map(|parent| parent.slot())
    }

    /// Ends the pin of a page that leaves L2, and its reason to keep the parent. Its children stay
    /// as roots, kept or not. Must be called before the page gives up its slot.
    ///
    /// The evictor may have removed the page. Then it was not kept: it had no hard pin, and no
    /// child.
    pub(super) fn release_pins(&mut self, slot: Slot) {
        let Some((id, bytes)) = self.pages.get(slot.index()).and_then(|page| {
            let info = page.as_ref()?.info();
            Some((info.id, info.bytes))
        }) else {
            return;
        };
        if let Some(pin) = self.pins.by_slot.remove(&slot) {
            self.pins.by_expiry.remove(&(pin.until_ms, slot));
            if pin.kind == PinKind::Soft {
                self.pins.remove_soft(id.namespace, bytes);
            }
        }
        if self.pins.keep_counts.remove(&slot).is_none() {
            return;
        }
        let floor = self.floor_of_pins(&id.namespace);
        self.pins.remove_kept(id.namespace, u64::from(bytes), floor);
        if let Some(parent) = self.live_parent(slot) {
            self.let_go(parent);
        }
    }
}
