//! The policy of L2: which pages it keeps, and which pages are written to L3 when.
//!
//! Invariants:
//! 1. The pages in L2 take at most its capacity. Each counts once, with the bytes of its slot.
//! 2. Bytes reserved for puts plus bytes being written to L3 exceed their budget by at most one
//!    page.
//! 3. A dirty page leaves L2 only after its write to L3 was requested. Exceptions: the policy is
//!    write-through-selective, the page has expired, the write budget is spent, or the node has no
//!    L3.
//! 4. L2 may refuse a put that is written to L3 at once, and a page that was read from L3: every
//!    page that could make room is worth more. It refuses no page of a namespace within its floor,
//!    and none that is loaded for a warm or a pin.
//! 5. Hard pins keep at most a quarter of L2, including the ancestors that stay because of them.
//! 6. A page of a namespace at or below its floor makes room only if no namespace is above its
//!    floor. Expiry, quotas and forgets are exempt.
//!
//! This module decides and `tiers` executes. It does no I/O and reads neither clock nor randomness,
//! so a model test can drive it. Time comes in as Unix milliseconds. Decisions come back as
//! [`PolicyActions`], in the order of execution: writes begin before evictions, so that no page is
//! unreachable in between.
//!
//! The owner guards the whole policy with one lock: see the lock order in [`crate::tiers`].
//! Decision record 0016 tells why L2 has this table besides its index.

mod hints;
mod namespaces;
mod options;
mod pins;
mod slots;
#[cfg(test)]
mod tests;
mod write_budget;

use crate::page::Page;
use larder_evict::{
    Evicted, EvictionReason, Evictor, HitDensity, InsertError, NamespaceIndex, NewPage, Outlook, PageHandle, Slot,
};
use larder_format::{PageId, PageKey};
use larder_runtime::fail_point;
use namespaces::NamespaceTable;
use pins::Pins;
use slots::SlotTable;
use std::collections::BTreeSet;
use std::sync::Arc;
use write_budget::WriteBudget;

pub(crate) use hints::PageHint;
pub(crate) use slots::hash_shards;

pub use options::{NamespacePrefix, NamespaceQuota, PolicyOptions, WritePolicy};
pub use pins::PinRefused;

/// L3 is told of every sixteenth hit of a page: often enough to rank it, rarely enough to cost
/// nothing.
const TOUCH_EVERY: u16 = 16;
/// Slots that one step of [`L2Policy::next_from`] looks at, at most. It bounds the time under the
/// lock where few slots have a page.
const SCAN_SLOTS: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageInfo {
    pub id: PageId,
    pub parent: PageKey,
    /// Position in its sequence, in pages.
    pub position: u32,
    /// Number of the put, unique on a node and growing.
    pub generation: u64,
    pub bytes: u32,
    /// Expiry in Unix milliseconds; 0 means never.
    pub expires_unix_ms: u64,
}

/// Decisions to be executed, in the order of the fields.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PolicyActions {
    /// Pages to write to L3. The caller reports the end of each write to [`L2Policy::written`].
    pub write: Vec<PageId>,
    pub evict: Vec<(PageId, EvictionReason)>,
    /// Pages with hits in L2 that L3 has too, and what the eviction policy expects of them. L3
    /// retains its pages by such touches.
    pub touch: Vec<(PageId, Outlook)>,
    /// Pages whose pin expired, or that left L2 with a pin. L3 unpins them too.
    pub unpin: Vec<PageId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// L2 keeps the page, or its write to L3 was requested, or it has expired already.
    Stored,
    /// L2 has no room that the rules allow, and L3 does not take the page.
    Rejected,
}

/// State of a resident page with respect to L3. It decides about the page's eviction: only a dirty
/// page is written then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Persistence {
    Clean,
    Writing,
    /// Only L2 has the page; it is written before it leaves.
    Dirty,
    /// Only L2 has the page; it is written once it has had enough hits.
    Candidate,
    /// Only L2 has the page, and it stays so: the node has no L3, or L3 refused the page.
    Unbacked,
}

/// State of a resident page. The evictor keeps it beside its own, in place of a name. There are
/// millions, so facts that few pages have are elsewhere.
#[derive(Debug, Clone, Copy)]
struct PageState {
    /// Since the page came, or was demoted. Saturates, at no multiple of [`TOUCH_EVERY`].
    hits: u16,
    persistence: Persistence,
    marks: Marks,
}

const _: () = assert!(size_of::<PageState>() <= 4);

/// Facts of a page, a bit each.
#[derive(Debug, Clone, Copy, Default)]
struct Marks(u8);

impl Marks {
    /// The page has a pin or is kept because of one. [`Pins`] has the details.
    const IN_PINS: u8 = 1;
    /// The page was loaded for a read that has not come yet.
    const ANNOUNCED: u8 = 1 << 1;

    fn has(self, mark: u8) -> bool {
        self.0 & mark != 0
    }

    fn set(&mut self, mark: u8, value: bool) {
        self.0 = if value { self.0 | mark } else { self.0 & !mark };
    }
}

/// A put of a page, as the policy keeps it: a cheap reference to its facts.
pub trait Resident: Clone {
    fn info(&self) -> PageInfo;
    fn id(&self) -> PageId;
    fn generation(&self) -> u64;
    /// Returns `true` if this is a put of that page.
    fn is(&self, id: &PageId) -> bool;
}

impl Resident for Arc<Page> {
    fn info(&self) -> PageInfo {
        PageInfo {
            id: Page::id(self),
            parent: self.parent(),
            position: self.position(),
            generation: Page::generation(self),
            bytes: self.bytes(),
            expires_unix_ms: self.expires_unix_ms(),
        }
    }

    fn id(&self) -> PageId {
        Page::id(self)
    }

    fn generation(&self) -> u64 {
        Page::generation(self)
    }

    fn is(&self, id: &PageId) -> bool {
        Page::is(self, id)
    }
}

/// Pages resident in L2 and the rules for them. Methods append their decisions to
/// [`PolicyActions`]. The caller executes them before it releases the lock.
///
/// A page is named by its slot in the evictor's table. `P` is the reference to a page.
#[derive(Debug)]
pub struct L2Policy<P> {
    options: PolicyOptions,
    evictor: Evictor<PageState, HitDensity>,
    /// Resident pages by slot.
    pages: Vec<Option<P>>,
    by_id: SlotTable,
    dirty: BTreeSet<Slot>,
    namespaces: NamespaceTable,
    pins: Pins,
    reserved_bytes: u64,
    writing_bytes: u64,
    write_budget: WriteBudget,
    writable: bool,
}

impl<P: Resident> L2Policy<P> {
    pub fn new(options: PolicyOptions) -> L2Policy<P> {
        L2Policy {
            evictor: Evictor::new(options.capacity_bytes, HitDensity::new(options.seed)),
            pages: Vec::new(),
            by_id: SlotTable::new(options.seed, options.capacity_bytes),
            dirty: BTreeSet::new(),
            namespaces: NamespaceTable::new(options.quota_default, &options.quotas),
            pins: Pins::default(),
            reserved_bytes: 0,
            writing_bytes: 0,
            write_budget: WriteBudget::new(options.l3_write_bytes_per_day),
            writable: true,
            options,
        }
    }

    /// Tells whether L3 accepts writes now. While it does not, write-back admits no page that would
    /// push a dirty one out.
    pub fn set_writable(&mut self, writable: bool) {
        self.writable = writable;
    }

    /// Reserves bytes for a page that is about to be put. Returns `false` if the node is busy. The
    /// caller ends the reservation with [`L2Policy::put`] or [`L2Policy::release`].
    pub fn reserve(&mut self, bytes: u32) -> bool {
        let may = self.has_budget(bytes) && (!self.writes_back() || self.writable || self.fits_beside_reserved(bytes));
        if may {
            self.reserved_bytes += u64::from(bytes);
        }
        may
    }

    /// Releases reserved bytes. Panics if fewer are reserved: a clamped counter would hide that the
    /// budget leaks.
    pub fn release(&mut self, bytes: u32) {
        assert!(self.reserved_bytes >= u64::from(bytes), "released {bytes} bytes that were not reserved");
        self.reserved_bytes -= u64::from(bytes);
    }

    /// Admits a sealed page and ends its reservation of `reserved` bytes. An expired page counts as
    /// stored, although no tier keeps it.
    pub fn put(&mut self, page: P, reserved: u32, now_ms: u64, actions: &mut PolicyActions) -> PutOutcome {
        self.release(reserved);
        let info = page.info();
        if info.is_expired(now_ms) {
            return PutOutcome::Stored;
        }
        // Before the page is resident: the policy then knows only this use.
        let is_reused = self.evictor.policy().has_seen(self.by_id.hash(&info.id));
        let writes_now = self.options.has_l3
            && self.options.write_policy == WritePolicy::Through
            && self.write_budget.take(info.bytes, is_reused, now_ms);
        // L2 refuses only pages that L3 takes now. A put that no tier keeps would be repeated.
        let admitted =
            self.admit(page, &info, self.persistence_of_put(writes_now), writes_now, now_ms, actions).is_ok();
        let write = match (self.options.write_policy, admitted) {
            _ if !self.options.has_l3 => false,
            (WritePolicy::Through, _) => writes_now,
            // Deferred while L2 keeps the page. Refused by L2, it goes to L3 at once.
            (WritePolicy::Back, admitted) => !admitted && self.write_budget.take(info.bytes, is_reused, now_ms),
            // A page without hits is not worth a write.
            (WritePolicy::Selective, _) => false,
        };
        if write {
            self.begin_write(info.id, info.bytes, actions);
        }
        if admitted || write { PutOutcome::Stored } else { PutOutcome::Rejected }
    }

    /// Offers a page that was read from L3. Returns `true` if L2 admits it. With `may_refuse` the
    /// eviction policy decides, as about a put. The reader that paid for the read has the page
    /// anyway.
    pub fn loaded(&mut self, page: P, may_refuse: bool, now_ms: u64, actions: &mut PolicyActions) -> bool {
        let info = page.info();
        // Under write-back a read must not push out a dirty page that L3 cannot take now.
        let may_evict = !self.writes_back() || (self.writable && self.has_budget(info.bytes));
        if info.is_expired(now_ms) || !may_evict {
            return false;
        }
        self.admit(page, &info, Persistence::Clean, may_refuse, now_ms, actions).is_ok()
    }

    /// Notes that a page was loaded for a read that is about to come. The load has told the
    /// eviction policy of that read. If it counted both, it would take the time between them for a
    /// gap between two requests.
    pub fn announce_read(&mut self, id: &PageId) {
        let Some(slot) = self.slot_of(id) else { return };
        if let Some(state) = self.state_mut(slot) {
            state.marks.set(Marks::ANNOUNCED, true);
        }
    }

    /// Returns `true` if the read of a page was announced, once.
    fn take_announcement(&mut self, slot: Slot) -> bool {
        let Some(state) = self.state_mut(slot) else { return false };
        let announced = state.marks.has(Marks::ANNOUNCED);
        state.marks.set(Marks::ANNOUNCED, false);
        announced
    }

    /// Records a hit of the put with this generation, whose id has this [`page_hash`]. Returns
    /// `false` if L2 does not have it.
    pub fn hit(&mut self, hash: u64, generation: u64, now_ms: u64, actions: &mut PolicyActions) -> bool {
        // Generations are unique on a node, so the id itself need not be compared.
        let found =
            self.by_id.find(hash, |slot| page_at(&self.pages, slot).is_some_and(|p| p.generation() == generation));
        let Some((slot, handle)) = found.and_then(|slot| Some((slot, self.evictor.handle_at(slot)?))) else {
            return false;
        };
        let is_known = self.take_announcement(slot) && self.evictor.contains(handle, now_ms);
        if !is_known && !self.evictor.touch(handle, now_ms) {
            return false;
        }
        let bytes = self.evictor.bytes(handle).unwrap_or_default();
        let Some(state) = self.evictor.name_mut(handle) else { return false };
        state.hits = state.hits.saturating_add(1);
        let PageState { hits, persistence, .. } = *state;
        let write_after = if self.options.write_policy == WritePolicy::Through {
            1
        } else {
            self.options.write_after_hits.min(u16::MAX.into())
        };
        let is_due = persistence == Persistence::Candidate && u32::from(hits) >= write_after;
        let tells_l3 = persistence == Persistence::Clean && hits.is_multiple_of(TOUCH_EVERY);
        let writes = is_due && self.has_budget(bytes) && self.write_budget.take(bytes, true, now_ms);
        if writes || tells_l3 {
            let Some(id) = self.id_at(slot) else { return false };
            if tells_l3 {
                actions.touch.push((id, self.evictor.policy().outlook_of_resident(slot)));
            } else {
                self.set_persistence(slot, Persistence::Writing);
                self.begin_write(id, bytes, actions);
            }
        }
        true
    }

    /// Records the end of a write to L3. `bytes` are those of the page's slot.
    pub fn written(&mut self, id: &PageId, generation: u64, bytes: u32, stored: bool) {
        assert!(self.writing_bytes >= u64::from(bytes), "ended a write of {bytes} bytes that never began");
        self.writing_bytes -= u64::from(bytes);
        // The page may have left L2, been replaced by a newer put, or been lost on L3 again.
        let Some(slot) = self.slot_of(id).filter(|_| self.generation(id) == Some(generation)) else { return };
        if self.persistence(slot) == Some(Persistence::Writing) {
            self.set_persistence(slot, if stored { Persistence::Clean } else { Persistence::Unbacked });
        }
    }

    /// Records that L3 lost a page. Writes it again if L2 has it.
    pub fn lost_on_l3(&mut self, id: &PageId, actions: &mut PolicyActions) {
        let Some(slot) = self.slot_of(id).filter(|slot| self.persistence(*slot) == Some(Persistence::Clean)) else {
            return;
        };
        let bytes = self.bytes_at(slot);
        if self.has_budget(bytes) {
            self.set_persistence(slot, Persistence::Writing);
            self.begin_write(*id, bytes, actions);
        } else {
            let later = if self.writes_back() { Persistence::Dirty } else { Persistence::Unbacked };
            self.set_persistence(slot, later);
        }
    }

    /// Removes a page. Returns `true` if it was in L2.
    pub fn forget(&mut self, id: &PageId) -> bool {
        let Some(slot) = self.slot_of(id) else { return false };
        let Some(handle) = self.evictor.handle_at(slot) else { return false };
        // Pins first: they need the page's parent, which the evictor knows.
        self.release_pins(slot);
        self.evictor.remove(handle);
        self.remove_page(slot).is_some()
    }

    /// Ends expired pins and evicts expired pages.
    pub fn tick(&mut self, now_ms: u64, actions: &mut PolicyActions) {
        while let Some(slot) = self.pins.first_expired(now_ms).filter(|_| !fail_point!("node.pins-never-expire")) {
            self.set_pin(slot, None);
            actions.unpin.extend(self.id_at(slot));
        }
        let mut evicted = Vec::new();
        self.evictor.expire(now_ms, &mut evicted);
        self.remove_evicted(evicted, now_ms, actions);
    }

    /// Evicts at least `bytes`, as far as pins and write-back allow. Needed when the arena has no
    /// free run of bytes for a page that fits the budget.
    ///
    /// Under write-back, evicted pages take the budget until they are written. So the caller first
    /// releases what it reserved: the rest may be too little for a page, and nothing would go.
    pub fn make_room(&mut self, bytes: u32, now_ms: u64, actions: &mut PolicyActions) {
        let left = match self.writes_back() {
            false => u64::from(u32::MAX),
            true if self.writable => self.options.dirty_bytes_max.saturating_sub(self.in_flight_bytes()),
            true => 0,
        };
        let bytes = u64::from(bytes).min(left);
        if bytes == 0 {
            return;
        }
        let free = self.evictor.capacity_bytes() - self.evictor.used_bytes();
        let bytes = u32::try_from(bytes + free).unwrap_or(u32::MAX);
        // The evictor frees bytes only for a page. So a page of no namespace comes and goes at
        // once.
        let ballast = NewPage {
            name: PageState { hits: 0, persistence: Persistence::Unbacked, marks: Marks::default() },
            fingerprint: 0,
            parent_fingerprint: 0,
            namespace: NamespaceIndex(u32::MAX),
            parent: None,
            position: 0,
            bytes: bytes.min(u32::try_from(self.evictor.capacity_bytes()).unwrap_or(u32::MAX)),
            deadline_ms: None,
            may_refuse: false,
        };
        let mut evicted = Vec::new();
        if let Ok(handle) = self.evictor.insert(ballast, now_ms, &mut evicted) {
            self.evictor.remove(handle);
        }
        self.remove_evicted(evicted, now_ms, actions);
    }

    /// Requests writes of dirty pages as far as the budget allows. Returns `true` if none is left.
    /// A stopping node calls it again whenever a write ends.
    pub fn flush(&mut self, actions: &mut PolicyActions) -> bool {
        while let Some(&slot) = self.dirty.first() {
            let bytes = self.bytes_at(slot);
            if !self.has_budget(bytes) {
                return false;
            }
            self.set_persistence(slot, Persistence::Writing);
            if let Some(id) = self.id_at(slot) {
                self.begin_write(id, bytes, actions);
            }
        }
        true
    }

    /// Walks over the pages from a place in the table, for the scrub. Returns the next page, if one
    /// is near, and the place behind it: `None` at the end. Pages that stay are met once.
    pub fn next_from(&self, place: usize) -> (Option<P>, Option<usize>) {
        let end = self.pages.len().min(place.saturating_add(SCAN_SLOTS));
        let found = (place..end).find(|&at| self.pages[at].is_some());
        let next = found.map_or(end, |at| at + 1);
        (found.and_then(|at| self.pages[at].clone()), Some(next).filter(|next| *next < self.pages.len()))
    }

    pub fn generation(&self, id: &PageId) -> Option<u64> {
        self.slot_of(id).and_then(|slot| page_at(&self.pages, slot)).map(P::generation)
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.options.capacity_bytes
    }

    pub fn write_policy(&self) -> WritePolicy {
        self.options.write_policy
    }

    pub fn used_bytes(&self) -> u64 {
        self.evictor.used_bytes()
    }

    pub fn len(&self) -> usize {
        self.evictor.len()
    }

    pub fn is_empty(&self) -> bool {
        self.evictor.is_empty()
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.reserved_bytes + self.writing_bytes
    }

    pub fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Number of writes to L3 that the write budget denied.
    pub fn writes_denied(&self) -> u64 {
        self.write_budget.denied()
    }

    /// The eviction policy, for its figures.
    pub fn eviction(&self) -> &HitDensity {
        self.evictor.policy()
    }

    fn writes_back(&self) -> bool {
        self.options.has_l3 && self.options.write_policy == WritePolicy::Back
    }

    fn persistence_of_put(&self, writes_now: bool) -> Persistence {
        match self.options.write_policy {
            _ if !self.options.has_l3 => Persistence::Unbacked,
            WritePolicy::Through if writes_now => Persistence::Writing,
            // The write budget is short: the page is written at its second use.
            WritePolicy::Through => Persistence::Candidate,
            WritePolicy::Selective => Persistence::Candidate,
            WritePolicy::Back => Persistence::Dirty,
        }
    }

    fn has_budget(&self, bytes: u32) -> bool {
        self.in_flight_bytes() + u64::from(bytes) <= self.options.dirty_bytes_max
    }

    fn fits_beside_reserved(&self, bytes: u32) -> bool {
        let taken = self.evictor.used_bytes() + self.reserved_bytes;
        taken + u64::from(bytes) <= self.options.capacity_bytes
    }

    fn begin_write(&mut self, id: PageId, bytes: u32, actions: &mut PolicyActions) {
        self.writing_bytes += u64::from(bytes);
        actions.write.push(id);
    }

    /// Hash of an id, for [`L2Policy::hit`].
    #[cfg(test)]
    fn hash(&self, id: &PageId) -> u64 {
        self.by_id.hash(id)
    }

    fn slot_of(&self, id: &PageId) -> Option<Slot> {
        let hash = self.by_id.hash(id);
        self.by_id.find(hash, |slot| page_at(&self.pages, slot).is_some_and(|page| page.is(id)))
    }

    fn id_at(&self, slot: Slot) -> Option<PageId> {
        page_at(&self.pages, slot).map(P::id)
    }

    fn bytes_at(&self, slot: Slot) -> u32 {
        self.evictor.handle_at(slot).and_then(|handle| self.evictor.bytes(handle)).unwrap_or_default()
    }

    fn persistence(&self, slot: Slot) -> Option<Persistence> {
        let handle = self.evictor.handle_at(slot)?;
        self.evictor.name(handle).map(|state| state.persistence)
    }

    fn state_mut(&mut self, slot: Slot) -> Option<&mut PageState> {
        let handle = self.evictor.handle_at(slot)?;
        self.evictor.name_mut(handle)
    }

    fn set_persistence(&mut self, slot: Slot, persistence: Persistence) {
        if let Some(state) = self.state_mut(slot) {
            state.persistence = persistence;
        }
        if persistence == Persistence::Dirty {
            self.dirty.insert(slot);
        } else {
            self.dirty.remove(&slot);
        }
    }

    fn admit(
        &mut self,
        page: P,
        info: &PageInfo,
        persistence: Persistence,
        may_refuse: bool,
        now_ms: u64,
        actions: &mut PolicyActions,
    ) -> Result<(), InsertError> {
        self.forget(&info.id);
        let mut evicted = Vec::new();
        // Expired pages go first: they make room, and an expired parent must not be found below.
        self.evictor.expire(now_ms, &mut evicted);
        self.remove_evicted(std::mem::take(&mut evicted), now_ms, actions);
        let namespace = self.namespaces.add_page(info.id.namespace, info.bytes, &mut self.evictor, &mut evicted);
        let parent = self.parent_of(info, now_ms);
        let hash = self.by_id.hash(&info.id);
        let new = NewPage {
            name: PageState { hits: 0, persistence, marks: Marks::default() },
            fingerprint: hash,
            parent_fingerprint: self.parent_fingerprint(info),
            namespace,
            parent,
            position: info.position,
            bytes: info.bytes,
            deadline_ms: Some(info.deadline_ms()).filter(|deadline_ms| *deadline_ms != u64::MAX),
            may_refuse,
        };
        let admitted = self.evictor.insert(new, now_ms, &mut evicted);
        // Before the page takes its slot, which may be that of an evicted one.
        self.remove_evicted(evicted, now_ms, actions);
        match admitted {
            Ok(handle) => {
                self.take_slot(handle.slot(), hash, page);
                self.set_persistence(handle.slot(), persistence);
            }
            Err(_) => self.namespaces.remove_page(info.id.namespace, info.bytes),
        }
        admitted.map(|_| ())
    }

    /// Fingerprint of the parent's id, resident or not. 0 for a first page.
    fn parent_fingerprint(&self, info: &PageInfo) -> u64 {
        let parent = PageId { key: info.parent, ..info.id };
        if info.parent == PageKey::NONE { 0 } else { self.by_id.hash(&parent) }
    }

    fn take_slot(&mut self, slot: Slot, hash: u64, page: P) {
        while self.pages.len() <= slot.index() {
            if self.pages.len() == self.pages.capacity() {
                // By an eighth: doubling would leave up to half of the table unused.
                self.pages.reserve_exact((self.pages.len() / 8).max(64));
            }
            self.pages.push(None);
        }
        self.pages[slot.index()] = Some(page);
        let pages = &self.pages;
        self.by_id.insert(hash, slot, |slot| page_at(pages, slot).map(P::id));
    }

    /// Returns the handle of the page's parent, if it is resident and outlives the page.
    fn parent_of(&self, page: &PageInfo, now_ms: u64) -> Option<PageHandle> {
        let slot = self.slot_of(&PageId { key: page.parent, ..page.id })?;
        let parent = self.evictor.handle_at(slot)?;
        // The evictor expires children with their parent. A page that outlives its parent would be
        // evicted early, and under write-back any number of such pages would be written at once.
        let outlives = self.evictor.deadline_ms(parent)? >= page.deadline_ms() && self.evictor.contains(parent, now_ms);
        if outlives { Some(parent) } else { None }
    }

    /// Removes the pages that the evictor has removed, and requests writes of the dirty ones.
    fn remove_evicted(&mut self, evicted: Vec<Evicted<PageState>>, now_ms: u64, actions: &mut PolicyActions) {
        for Evicted { name: state, slot, bytes, reason } in evicted {
            if state.marks.has(Marks::IN_PINS) {
                let pinned = self.pins.is_pinned(slot).then(|| self.id_at(slot)).flatten();
                actions.unpin.extend(pinned);
                self.release_pins(slot);
            }
            let Some(page) = self.remove_page(slot) else { continue };
            let info = page.info();
            if state.persistence == Persistence::Dirty
                && info.deadline_ms() > now_ms
                && self.write_budget.take(bytes, state.hits > 0, now_ms)
                && !fail_point!("node.write-back-drops-dirty")
            {
                self.begin_write(info.id, bytes, actions);
            }
            // From now on only L3 sees the uses of the page. It retains pages that were used.
            if state.persistence == Persistence::Clean && state.hits > 0 && reason != EvictionReason::Expired {
                let outlook = self.evictor.policy().outlook(self.by_id.hash(&info.id), info.position);
                actions.touch.push((info.id, outlook));
            }
            actions.evict.push((info.id, reason));
        }
    }

    /// Removes a page that the evictor has removed.
    fn remove_page(&mut self, slot: Slot) -> Option<P> {
        let page = self.pages.get_mut(slot.index())?.take()?;
        let info = page.info();
        self.by_id.remove(self.by_id.hash(&info.id), slot);
        self.dirty.remove(&slot);
        self.namespaces.remove_page(info.id.namespace, info.bytes);
        Some(page)
    }
}

fn page_at<P>(pages: &[Option<P>], slot: Slot) -> Option<&P> {
    pages.get(slot.index())?.as_ref()
}

impl PageInfo {
    fn is_expired(&self, now_ms: u64) -> bool {
        self.deadline_ms() <= now_ms
    }

    fn deadline_ms(&self) -> u64 {
        if self.expires_unix_ms == 0 { u64::MAX } else { self.expires_unix_ms }
    }
}

/// Hash of the whole id. Foreign engines bring keys that differ in a few bytes only, so every byte
/// counts.
pub(crate) fn page_hash(seed: u64, id: &PageId) -> u64 {
    let words = id.namespace.0.chunks_exact(8).chain(id.key.0.chunks_exact(8));
    words.fold(seed, |folded, word| {
        let word = word.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        mixed(folded ^ word)
    })
}

/// Mixes all bits of a number: the finalizer of SplitMix64.
pub(crate) fn mixed(number: u64) -> u64 {
    let a = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
