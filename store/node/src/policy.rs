//! The policy of L2: which pages it keeps, and which pages are written to L3 when.
//!
//! Invariants:
//! 1. The pages in L2 take at most its capacity. Each counts once, with the bytes of its slot.
//! 2. Bytes reserved for puts plus bytes being written to L3 exceed their budget by at most one
//!    page.
//! 3. A dirty page leaves L2 only after its write to L3 was requested. Exceptions: the policy is
//!    write-through-selective, the page has expired, or the node has no L3.
//! 4. Hard pins keep at most a quarter of L2, including the ancestors that stay because of them.
//!
//! This module decides and `tiers` executes. It does no I/O and reads neither clock nor randomness,
//! so a model test can drive it. Time comes in as Unix milliseconds. Decisions come back as
//! [`PolicyActions`], in the order of execution: writes begin before evictions, so that no page is
//! unreachable in between.
//!
//! The owner guards the whole policy with one lock: see the lock order in [`crate::tiers`].
//! Decision record 0016 tells why L2 has this index besides foyer.

mod namespaces;
mod options;
mod pins;
#[cfg(test)]
mod tests;

use larder_evict::{Evicted, EvictionReason, Evictor, HitDensity, NamespaceIndex, NewPage, PageHandle};
use larder_format::{NamespaceId, PageId, PageKey};
use larder_runtime::fail_point;
use namespaces::NamespaceTable;
use pins::{Pin, Pins};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

pub use options::{NamespacePrefix, NamespaceQuota, PolicyOptions, WritePolicy};
pub use pins::PinRefused;

/// L3 is told of every sixteenth hit of a page: often enough to rank it, rarely enough to cost
/// nothing.
const TOUCH_EVERY: u32 = 16;

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
    /// Pages with hits in L2 that L3 has too. L3 ranks its pages by such touches.
    pub touch: Vec<PageId>,
    /// Pages whose pin expired. L3 unpins them too.
    pub unpin: Vec<PageId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// L2 keeps the page, or its write to L3 was requested, or it has expired already.
    Stored,
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

/// Record of a resident page. There are millions, so it has only the facts that outlive admission.
#[derive(Debug)]
struct ResidentPage {
    handle: PageHandle,
    generation: u64,
    deadline_ms: u64,
    /// Parent that was resident when this page came, in the same namespace. The handle tells it
    /// from a later put of the same key.
    parent: Option<(PageKey, PageHandle)>,
    pin: Option<Pin>,
    bytes: u32,
    hits: u32,
    /// Number of reasons to keep the page: its own hard pin, and each child that is kept.
    keep_count: u32,
    persistence: Persistence,
}

// A node has millions of these: each further 8 bytes cost it megabytes.
const _: () = assert!(size_of::<ResidentPage>() <= 104);

/// Pages resident in L2 and the rules for them. Methods append their decisions to
/// [`PolicyActions`]. The caller executes them before it releases the lock.
#[derive(Debug)]
pub struct L2Policy {
    options: PolicyOptions,
    evictor: Evictor<PageId, HitDensity>,
    /// Ordered by id: the scrub resumes behind its cursor, whatever came and went meanwhile.
    pages: BTreeMap<PageId, ResidentPage>,
    dirty: BTreeSet<PageId>,
    namespaces: NamespaceTable,
    pins: Pins,
    reserved_bytes: u64,
    writing_bytes: u64,
    writable: bool,
}

impl L2Policy {
    pub fn new(options: PolicyOptions) -> L2Policy {
        L2Policy {
            evictor: Evictor::new(options.capacity_bytes, HitDensity::new(options.seed)),
            pages: BTreeMap::new(),
            dirty: BTreeSet::new(),
            namespaces: NamespaceTable::new(options.quota_default, &options.quotas),
            pins: Pins::default(),
            reserved_bytes: 0,
            writing_bytes: 0,
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
    pub fn put(&mut self, page: PageInfo, reserved: u32, now_ms: u64, actions: &mut PolicyActions) -> PutOutcome {
        self.release(reserved);
        if page.is_expired(now_ms) {
            return PutOutcome::Stored;
        }
        let admitted = self.admit(page, self.persistence_of_put(), now_ms, actions);
        let write = match (self.options.write_policy, admitted) {
            _ if !self.options.has_l3 => false,
            (WritePolicy::Through, _) => true,
            // Deferred while L2 keeps the page. Refused by L2, it goes to L3 at once.
            (WritePolicy::Back, admitted) => !admitted,
            // A page without hits is not worth a write.
            (WritePolicy::Selective, _) => false,
        };
        if write {
            self.begin_write(page.id, page.bytes, actions);
        }
        if admitted || write { PutOutcome::Stored } else { PutOutcome::Rejected }
    }

    /// Offers a page that was read from L3. Returns `true` if L2 admits it.
    pub fn loaded(&mut self, page: PageInfo, now_ms: u64, actions: &mut PolicyActions) -> bool {
        // Under write-back a read must not push out a dirty page that L3 cannot take now.
        let may_evict = !self.writes_back() || (self.writable && self.has_budget(page.bytes));
        if page.is_expired(now_ms) || !may_evict {
            return false;
        }
        self.admit(page, Persistence::Clean, now_ms, actions)
    }

    /// Records a hit. Returns `false` if L2 does not have this put of the page.
    pub fn hit(&mut self, id: &PageId, generation: u64, now_ms: u64, actions: &mut PolicyActions) -> bool {
        let Some(page) = self.pages.get_mut(id).filter(|page| page.generation == generation) else {
            return false;
        };
        if !self.evictor.touch(page.handle, now_ms) {
            return false;
        }
        page.hits = page.hits.saturating_add(1);
        let hits = page.hits;
        let bytes = page.bytes;
        let persistence = page.persistence;
        if persistence == Persistence::Candidate && hits >= self.options.write_after_hits && self.has_budget(bytes) {
            self.set_persistence(id, Persistence::Writing);
            self.begin_write(*id, bytes, actions);
        } else if persistence == Persistence::Clean && hits.is_multiple_of(TOUCH_EVERY) {
            actions.touch.push(*id);
        }
        true
    }

    /// Records the end of a write to L3. `bytes` are those of the page's slot.
    pub fn written(&mut self, id: &PageId, generation: u64, bytes: u32, stored: bool) {
        assert!(self.writing_bytes >= u64::from(bytes), "ended a write of {bytes} bytes that never began");
        self.writing_bytes -= u64::from(bytes);
        // The page may have left L2, been replaced by a newer put, or been lost on L3 again.
        let page = self.pages.get_mut(id).filter(|page| page.generation == generation);
        if let Some(page) = page.filter(|page| page.persistence == Persistence::Writing) {
            page.persistence = if stored { Persistence::Clean } else { Persistence::Unbacked };
        }
    }

    /// Records that L3 lost a page. Writes it again if L2 has it.
    pub fn lost_on_l3(&mut self, id: &PageId, actions: &mut PolicyActions) {
        let Some(page) = self.pages.get(id).filter(|page| page.persistence == Persistence::Clean) else { return };
        let bytes = page.bytes;
        if self.has_budget(bytes) {
            self.set_persistence(id, Persistence::Writing);
            self.begin_write(*id, bytes, actions);
        } else {
            let later = if self.writes_back() { Persistence::Dirty } else { Persistence::Unbacked };
            self.set_persistence(id, later);
        }
    }

    /// Removes a page. Returns `true` if it was in L2.
    pub fn forget(&mut self, id: &PageId) -> bool {
        let Some(handle) = self.pages.get(id).map(|page| page.handle) else { return false };
        self.evictor.remove(handle);
        self.remove_page(id).is_some()
    }

    /// Ends expired pins and evicts expired pages.
    pub fn tick(&mut self, now_ms: u64, actions: &mut PolicyActions) {
        while let Some(id) = self.pins.first_expired(now_ms).filter(|_| !fail_point!("node.pins-never-expire")) {
            self.set_pin(&id, None);
            actions.unpin.push(id);
        }
        let mut evicted = Vec::new();
        self.evictor.expire(now_ms, &mut evicted);
        self.remove_evicted(evicted, now_ms, actions);
    }

    /// Evicts at least `bytes`, as far as pins and write-back allow. Needed when the arena has no
    /// free run of bytes for a page that fits the budget.
    pub fn make_room(&mut self, bytes: u32, now_ms: u64, actions: &mut PolicyActions) {
        if self.writes_back() && !(self.writable && self.has_budget(bytes)) {
            return;
        }
        let free = self.evictor.capacity_bytes() - self.evictor.used_bytes();
        let bytes = u32::try_from(u64::from(bytes) + free).unwrap_or(u32::MAX);
        // The evictor frees bytes only for a page. So a page of no namespace comes and goes at
        // once.
        let ballast = NewPage {
            name: PageId { namespace: NamespaceId([0; 32]), key: PageKey::NONE },
            fingerprint: 0,
            namespace: NamespaceIndex(u32::MAX),
            parent: None,
            position: 0,
            bytes: bytes.min(u32::try_from(self.evictor.capacity_bytes()).unwrap_or(u32::MAX)),
            deadline_ms: None,
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
        while let Some(&id) = self.dirty.first() {
            let bytes = self.pages.get(&id).map_or(0, |page| page.bytes);
            if !self.has_budget(bytes) {
                return false;
            }
            self.set_persistence(&id, Persistence::Writing);
            self.begin_write(id, bytes, actions);
        }
        true
    }

    pub fn next_after(&self, cursor: Option<&PageId>) -> Option<PageId> {
        match cursor {
            Some(cursor) => self.pages.range((Excluded(cursor), Unbounded)).next().map(|(id, _)| *id),
            None => self.pages.keys().next().copied(),
        }
    }

    pub fn generation(&self, id: &PageId) -> Option<u64> {
        self.pages.get(id).map(|page| page.generation)
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
        self.pages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.reserved_bytes + self.writing_bytes
    }

    pub fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Returns `true` while eviction follows LRU because the learnt order would do worse.
    pub fn follows_lru(&self) -> bool {
        self.evictor.policy().follows_lru()
    }

    fn writes_back(&self) -> bool {
        self.options.has_l3 && self.options.write_policy == WritePolicy::Back
    }

    fn persistence_of_put(&self) -> Persistence {
        match self.options.write_policy {
            _ if !self.options.has_l3 => Persistence::Unbacked,
            WritePolicy::Through => Persistence::Writing,
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

    fn set_persistence(&mut self, id: &PageId, persistence: Persistence) {
        if let Some(page) = self.pages.get_mut(id) {
            page.persistence = persistence;
        }
        if persistence == Persistence::Dirty {
            self.dirty.insert(*id);
        } else {
            self.dirty.remove(id);
        }
    }

    fn admit(&mut self, page: PageInfo, persistence: Persistence, now_ms: u64, actions: &mut PolicyActions) -> bool {
        self.forget(&page.id);
        let mut evicted = Vec::new();
        // Expired pages go first: they make room, and an expired parent must not be found below.
        self.evictor.expire(now_ms, &mut evicted);
        self.remove_evicted(std::mem::take(&mut evicted), now_ms, actions);
        let namespace = self.namespaces.add_page(page.id.namespace, page.bytes, &mut self.evictor, &mut evicted);
        let parent = self.parent_of(&page, now_ms);
        let new = NewPage {
            name: page.id,
            fingerprint: fingerprint(&page.id),
            namespace,
            parent,
            position: page.position,
            bytes: page.bytes,
            deadline_ms: Some(page.deadline_ms()),
        };
        let admitted = self.evictor.insert(new, now_ms, &mut evicted);
        if let Ok(handle) = admitted {
            let resident = ResidentPage {
                handle,
                generation: page.generation,
                deadline_ms: page.deadline_ms(),
                parent: parent.map(|handle| (page.parent, handle)),
                pin: None,
                bytes: page.bytes,
                hits: 0,
                keep_count: 0,
                persistence,
            };
            self.pages.insert(page.id, resident);
            self.set_persistence(&page.id, persistence);
        } else {
            self.namespaces.remove_page(page.id.namespace, page.bytes);
        }
        self.remove_evicted(evicted, now_ms, actions);
        admitted.is_ok()
    }

    /// Returns the handle of the page's parent, if it is resident and outlives the page.
    fn parent_of(&self, page: &PageInfo, now_ms: u64) -> Option<PageHandle> {
        let parent = self.pages.get(&PageId { key: page.parent, ..page.id })?;
        // The evictor expires children with their parent. A page that outlives its parent would be
        // evicted early, and under write-back any number of such pages would be written at once.
        let outlives = parent.deadline_ms >= page.deadline_ms() && self.evictor.contains(parent.handle, now_ms);
        if outlives { Some(parent.handle) } else { None }
    }

    /// Removes the pages that the evictor has removed, and requests writes of the dirty ones.
    fn remove_evicted(&mut self, evicted: Vec<Evicted<PageId>>, now_ms: u64, actions: &mut PolicyActions) {
        for Evicted { name, reason, .. } in evicted {
            let Some(page) = self.remove_page(&name) else { continue };
            if page.persistence == Persistence::Dirty
                && page.deadline_ms > now_ms
                && !fail_point!("node.write-back-drops-dirty")
            {
                self.begin_write(name, page.bytes, actions);
            }
            actions.evict.push((name, reason));
        }
    }

    fn remove_page(&mut self, id: &PageId) -> Option<ResidentPage> {
        self.release_pins(id);
        let page = self.pages.remove(id)?;
        self.dirty.remove(id);
        self.namespaces.remove_page(id.namespace, page.bytes);
        Some(page)
    }
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
fn fingerprint(id: &PageId) -> u64 {
    let words = id.namespace.0.chunks_exact(8).chain(id.key.0.chunks_exact(8));
    words.fold(0, |folded, word| {
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
