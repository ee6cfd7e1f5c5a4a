//! Pins: hard ones hold a page and those before it, soft ones make it go last. Each has an end in time.
//!
//! Always true: a page is held while it has a hard pin or a page right behind it, that came behind it, is held; the bytes
//! of all held pages are at most a quarter of L2, and so are those of the softly pinned pages of each namespace.

use super::Residency;
use larder_format::{NamespaceId, PageId};
use larder_wire::PinKind;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Hard pins hold at most one in so many bytes of L2, and so do the soft ones of each namespace.
const HELD_PART: u64 = 4;

/// A pin of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pin {
    kind: PinKind,
    until_ms: u64,
}

/// All pins.
#[derive(Debug, Default)]
pub(super) struct Pins {
    ends: BTreeSet<(u64, PageId)>,
    held_bytes: u64,
    /// Bytes of softly pinned pages, of namespaces that have some.
    soft_bytes: BTreeMap<NamespaceId, u64>,
}

impl Pins {
    fn soft_bytes(&self, namespace: &NamespaceId) -> u64 {
        self.soft_bytes.get(namespace).copied().unwrap_or_default()
    }

    fn soft_began(&mut self, namespace: NamespaceId, bytes: u32) {
        *self.soft_bytes.entry(namespace).or_default() += u64::from(bytes);
    }

    fn soft_ended(&mut self, namespace: NamespaceId, bytes: u32) {
        let left = self.soft_bytes(&namespace).saturating_sub(u64::from(bytes));
        match left {
            0 => self.soft_bytes.remove(&namespace),
            _ => self.soft_bytes.insert(namespace, left),
        };
    }

    pub(super) fn first_over(&self, now_ms: u64) -> Option<PageId> {
        self.ends.first().filter(|(until_ms, _)| *until_ms <= now_ms).map(|(_, id)| *id)
    }
}

/// Pins would hold too much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PinRefused {
    /// The hard ones of all namespaces.
    #[error("hard pins may hold {most} bytes, a quarter of L2; with these pages they would hold more")]
    Hard {
        /// Most bytes.
        most: u64,
    },
    /// The soft ones of the namespace.
    #[error("soft pins of a namespace may hold {most} bytes, a quarter of L2; with these pages they would hold more")]
    Soft {
        /// Most bytes.
        most: u64,
    },
}

impl Residency {
    /// Pins those of `ids` that are in L2 until `until_ms`, in place of the pins they have; how many those are. With
    /// [`PinKind::None`] their pins end; the answer is how many had one.
    pub fn pin(&mut self, ids: &BTreeSet<PageId>, kind: PinKind, until_ms: u64) -> Result<usize, PinRefused> {
        let most = self.options.capacity_bytes / HELD_PART;
        let pin = (kind != PinKind::None).then_some(Pin { kind, until_ms });
        let mut before = Vec::new();
        for id in ids {
            let Some(entry) = self.entries.get(id) else { continue };
            if pin.is_none() && entry.pin.is_none() {
                continue;
            }
            before.push((*id, entry.pin));
            self.set_pin(id, pin);
            let refused = match kind {
                PinKind::Hard if self.pins.held_bytes > most => PinRefused::Hard { most },
                PinKind::Soft if self.pins.soft_bytes(&id.namespace) > most => PinRefused::Soft { most },
                _ => continue,
            };
            before.into_iter().rev().for_each(|(id, pin)| self.set_pin(&id, pin));
            return Err(refused);
        }
        Ok(before.len())
    }

    /// Pages with a pin, and bytes that hard pins hold.
    pub fn pinned(&self) -> (usize, u64) {
        (self.pins.ends.len(), self.pins.held_bytes)
    }

    pub(super) fn set_pin(&mut self, id: &PageId, pin: Option<Pin>) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        let (handle, bytes, old) = (entry.handle, entry.facts.bytes, std::mem::replace(&mut entry.pin, pin));
        let is = |pin: Option<Pin>, kind| pin.is_some_and(|pin| pin.kind == kind);
        if let Some(old) = old {
            self.pins.ends.remove(&(old.until_ms, *id));
        }
        if let Some(pin) = pin {
            self.pins.ends.insert((pin.until_ms, *id));
        }
        match (is(old, PinKind::Soft), is(pin, PinKind::Soft)) {
            (false, true) => self.pins.soft_began(id.namespace, bytes),
            (true, false) => self.pins.soft_ended(id.namespace, bytes),
            _ => {}
        }
        self.evictor.soft_pin(handle, is(pin, PinKind::Soft));
        match (is(old, PinKind::Hard), is(pin, PinKind::Hard)) {
            (false, true) => {
                self.evictor.pin(handle);
                self.hold(*id);
            }
            (true, false) => {
                self.evictor.unpin(handle);
                self.let_go(*id);
            }
            _ => {}
        }
    }

    /// One more reason to hold a page. The first one is one to hold the page before it.
    fn hold(&mut self, id: PageId) {
        let mut next = Some(id);
        while let Some(entry) = next.and_then(|id| self.entries.get_mut(&id)) {
            entry.holds += 1;
            if entry.holds > 1 {
                return;
            }
            self.pins.held_bytes += u64::from(entry.facts.bytes);
            let id = entry.facts.id;
            next = self.live_parent(&id);
        }
    }

    /// One reason less.
    fn let_go(&mut self, id: PageId) {
        let mut next = Some(id);
        while let Some(entry) = next.and_then(|id| self.entries.get_mut(&id)) {
            let last = entry.holds == 1;
            entry.holds = entry.holds.saturating_sub(1);
            if !last {
                return;
            }
            self.pins.held_bytes -= u64::from(entry.facts.bytes);
            let id = entry.facts.id;
            next = self.live_parent(&id);
        }
    }

    /// The page before this one, if it is still the one that this came behind.
    fn live_parent(&self, id: &PageId) -> Option<PageId> {
        let (parent, handle) = self.entries.get(id)?.parent?;
        self.entries.get(&parent).filter(|entry| entry.handle == handle).map(|_| parent)
    }

    /// A page leaves: its pin ends, and it is no reason any more to hold the page before it. Those behind it stay, held or
    /// not, as the first of what is left.
    pub(super) fn drop_holds(&mut self, id: &PageId) {
        let parent = self.live_parent(id);
        let Some(entry) = self.entries.get_mut(id) else { return };
        if let Some(pin) = entry.pin.take() {
            self.pins.ends.remove(&(pin.until_ms, *id));
            if pin.kind == PinKind::Soft {
                self.pins.soft_ended(id.namespace, entry.facts.bytes);
            }
        }
        if std::mem::take(&mut entry.holds) == 0 {
            return;
        }
        self.pins.held_bytes -= u64::from(entry.facts.bytes);
        if let Some(parent) = parent {
            self.let_go(parent);
        }
    }
}
