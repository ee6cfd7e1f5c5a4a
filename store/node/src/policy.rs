//! Which pages L2 keeps, and which are written to L3.
//!
//! Always true:
//! 1. The pages in L2 take no more than its capacity, each counted once by the bytes of its slot.
//! 2. Room given to puts and bytes being written to L3 are no more than the budget for them, and one page.
//! 3. A page that was taken and is not on L3 leaves L2 only after it was given out to be written, unless the policy is to
//!    drop such pages (write-through-selective), its time is over, or there is no L3.
//! 4. Hard pins hold no more than a quarter of L2, the pages that stay because of them included.
//!
//! This is decided here and carried out by `tiers`: no I/O, no clock, no randomness, so that a simulation can drive it.
//! Time comes in as Unix milliseconds. What is to be done comes back in [`Decisions`], in the order in which it must be
//! done: writes begin before evictions, so that no page is nowhere in between.

mod accounts;
mod pins;
#[cfg(test)]
mod tests;

use crate::options::{NamespaceQuota, WritePolicy};
use accounts::Accounts;
use larder_core::planted::{Bug, has};
use larder_evict::{Evicted, Evictor, Handle, Larder, NamespaceIndex, NewPage, Reason};
use larder_format::{NamespaceId, PageId, PageKey};
use pins::{Pin, Pins};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

pub use pins::PinRefused;

/// One in so many hits of a page is told to L3.
const TOUCH_EVERY: u32 = 16;

/// What the rules need to know at the start.
#[derive(Debug, Clone)]
pub struct PolicyOptions {
    /// Most bytes of pages in L2.
    pub capacity_bytes: u64,
    /// Budget for puts and for pages being written to L3, in bytes.
    pub dirty_bytes_max: u64,
    /// Whether there is an L3.
    pub has_l3: bool,
    /// When pages are written to it.
    pub write_policy: WritePolicy,
    /// Hits after which write-through-selective writes a page.
    pub write_after_hits: u32,
    /// Most bytes of a namespace in L2 that has no quota of its own.
    pub quota_default: Option<u64>,
    /// Quotas of namespaces.
    pub quotas: Vec<NamespaceQuota>,
    /// Keeps strangers from choosing which pages are sampled.
    pub seed: u64,
}

/// A page as far as the rules care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageFacts {
    /// Its name.
    pub id: PageId,
    /// The page before it.
    pub parent: PageKey,
    /// Place in its sequence, in pages.
    pub position: u32,
    /// Number of the put.
    pub generation: u64,
    /// Bytes of its slot.
    pub bytes: u32,
    /// When it is to be gone, in Unix milliseconds; 0: never.
    pub expires_unix_ms: u64,
}

/// What is to be done, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Pages to be written to L3. The end of each is to be told with [`Residency::written`].
    pub write: Vec<PageId>,
    /// Pages that leave L2, and why.
    pub evict: Vec<(PageId, Reason)>,
    /// Pages that were asked for in L2 and lie on L3 too: it should learn of it.
    pub touch: Vec<PageId>,
    /// Pages whose pin is over: L3 is to let go of them too.
    pub unpin: Vec<PageId>,
}

/// Where a page is that was put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// In L2, or on its way to L3, or its time is over already.
    Stored,
    /// No tier takes it.
    Nowhere,
}

/// What there is of a page outside of L2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// L3 has it.
    OnL3,
    /// A write to L3 is under way.
    Writing,
    /// Nothing: to be written before it leaves.
    Dirty,
    /// Nothing: to be written when it was asked for often enough.
    Unproven,
    /// Nothing, and it stays so: there is no L3, or it refused the page.
    Only,
}

#[derive(Debug)]
struct Entry {
    handle: Handle,
    facts: PageFacts,
    /// The resident page before it, when it came.
    parent: Option<(PageId, Handle)>,
    hits: u32,
    state: State,
    pin: Option<Pin>,
    /// Reasons why it is held: its own hard pin, and the pages right behind it that are held.
    holds: u32,
}

/// The pages of L2.
#[derive(Debug)]
pub struct Residency {
    options: PolicyOptions,
    evictor: Evictor<PageId, Larder>,
    entries: BTreeMap<PageId, Entry>,
    dirty: BTreeSet<PageId>,
    accounts: Accounts,
    pins: Pins,
    reserved_bytes: u64,
    writing_bytes: u64,
    writable: bool,
}

impl Residency {
    /// Empty.
    pub fn new(options: PolicyOptions) -> Residency {
        Residency {
            evictor: Evictor::new(options.capacity_bytes, Larder::new(options.seed)),
            entries: BTreeMap::new(),
            dirty: BTreeSet::new(),
            accounts: Accounts::new(options.quota_default, options.quotas.clone()),
            pins: Pins::default(),
            reserved_bytes: 0,
            writing_bytes: 0,
            writable: true,
            options,
        }
    }

    /// Whether L3 takes writes at the moment. While it does not, write-back takes no pages that others would have to be
    /// written for.
    pub fn set_writable(&mut self, writable: bool) {
        self.writable = writable;
    }

    /// Room for a page that is about to be put; `false` means busy. It ends with [`Residency::put`] or
    /// [`Residency::release`].
    pub fn reserve(&mut self, bytes: u32) -> bool {
        let may = self.has_budget(bytes) && (!self.writes_back() || self.writable || self.fits_beside_reserved(bytes));
        if may {
            self.reserved_bytes += u64::from(bytes);
        }
        may
    }

    /// Gives reserved room back.
    pub fn release(&mut self, bytes: u32) {
        self.reserved_bytes = self.reserved_bytes.saturating_sub(u64::from(bytes));
    }

    /// A page was put, for which `reserved` bytes were reserved.
    pub fn put(&mut self, page: PageFacts, reserved: u32, now_ms: u64, out: &mut Decisions) -> Placed {
        self.release(reserved);
        if page.is_over(now_ms) {
            return Placed::Stored;
        }
        let (state, policy) = (self.state_of_new(), self.options.write_policy);
        let taken = self.admit(page, state, now_ms, out);
        let write = match (taken, self.options.has_l3) {
            (_, false) => false,
            (true, true) => policy == WritePolicy::Through,
            (false, true) => policy != WritePolicy::Selective,
        };
        if write {
            self.begin_write(page.id, page.bytes, out);
        }
        if taken || write { Placed::Stored } else { Placed::Nowhere }
    }

    /// A page was read from L3; `true` if L2 takes it.
    pub fn loaded(&mut self, page: PageFacts, now_ms: u64, out: &mut Decisions) -> bool {
        if page.is_over(now_ms) || (self.writes_back() && !(self.writable && self.has_budget(page.bytes))) {
            return false;
        }
        self.admit(page, State::OnL3, now_ms, out)
    }

    /// A page in L2 was asked for; `false` if it is not this one that L2 has.
    pub fn hit(&mut self, id: &PageId, generation: u64, now_ms: u64, out: &mut Decisions) -> bool {
        let Some(entry) = self.entries.get_mut(id).filter(|entry| entry.facts.generation == generation) else {
            return false;
        };
        if !self.evictor.touch(entry.handle, now_ms) {
            return false;
        }
        entry.hits = entry.hits.saturating_add(1);
        let (state, hits, bytes) = (entry.state, entry.hits, entry.facts.bytes);
        if state == State::Unproven && hits >= self.options.write_after_hits && self.has_budget(bytes) {
            self.set_state(id, State::Writing);
            self.begin_write(*id, bytes, out);
        } else if state == State::OnL3 && hits.is_multiple_of(TOUCH_EVERY) {
            out.touch.push(*id);
        }
        true
    }

    /// A write to L3 ended. `bytes` are those of the page's slot.
    pub fn written(&mut self, id: &PageId, generation: u64, bytes: u32, ok: bool) {
        self.writing_bytes = self.writing_bytes.saturating_sub(u64::from(bytes));
        let entry = self.entries.get_mut(id);
        if let Some(entry) = entry.filter(|entry| entry.facts.generation == generation && entry.state == State::Writing)
        {
            entry.state = if ok { State::OnL3 } else { State::Only };
        }
    }

    /// L3 lost a page: it is written again if L2 has it.
    pub fn lost_on_l3(&mut self, id: &PageId, out: &mut Decisions) {
        let Some(entry) = self.entries.get(id).filter(|entry| entry.state == State::OnL3) else { return };
        let bytes = entry.facts.bytes;
        if self.has_budget(bytes) {
            self.set_state(id, State::Writing);
            self.begin_write(*id, bytes, out);
        } else {
            let later = if self.writes_back() { State::Dirty } else { State::Only };
            self.set_state(id, later);
        }
    }

    /// Takes a page out; `true` if it was in L2.
    pub fn forget(&mut self, id: &PageId) -> bool {
        let Some(handle) = self.entries.get(id).map(|entry| entry.handle) else { return false };
        self.evictor.remove(handle);
        self.left(id).is_some()
    }

    /// Ends pins and pages whose time is over.
    pub fn tick(&mut self, now_ms: u64, out: &mut Decisions) {
        while let Some(id) = self.pins.first_over(now_ms).filter(|_| !has(Bug::PinsStay)) {
            self.set_pin(&id, None);
            out.unpin.push(id);
        }
        let mut evicted = Vec::new();
        self.evictor.expire(now_ms, &mut evicted);
        self.leave(evicted, now_ms, out);
    }

    /// Evicts at least `bytes`, if so much may go.
    pub fn make_room(&mut self, bytes: u32, now_ms: u64, out: &mut Decisions) {
        if self.writes_back() && !(self.writable && self.has_budget(bytes)) {
            return;
        }
        let free = self.evictor.capacity_bytes() - self.evictor.used_bytes();
        let bytes = u32::try_from(u64::from(bytes) + free).unwrap_or(u32::MAX);
        // A page of nobody's that comes, and goes again at once.
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
        self.leave(evicted, now_ms, out);
    }

    /// Begins to write what only L2 has, as far as the budget goes; `true` if nothing is left to begin. For write-back at
    /// the end.
    pub fn flush(&mut self, out: &mut Decisions) -> bool {
        while let Some(&id) = self.dirty.first() {
            let bytes = self.entries.get(&id).map_or(0, |entry| entry.facts.bytes);
            if !self.has_budget(bytes) {
                return false;
            }
            self.set_state(&id, State::Writing);
            self.begin_write(id, bytes, out);
        }
        true
    }

    /// The next page in L2 behind `cursor`, in the order of names.
    pub fn next_after(&self, cursor: Option<&PageId>) -> Option<PageId> {
        match cursor {
            Some(cursor) => self.entries.range((Excluded(cursor), Unbounded)).next().map(|(id, _)| *id),
            None => self.entries.keys().next().copied(),
        }
    }

    /// Which put of a page is in L2.
    pub fn generation(&self, id: &PageId) -> Option<u64> {
        self.entries.get(id).map(|entry| entry.facts.generation)
    }

    /// Most bytes of pages in L2.
    pub fn capacity_bytes(&self) -> u64 {
        self.options.capacity_bytes
    }

    /// When pages are written to L3.
    pub fn write_policy(&self) -> WritePolicy {
        self.options.write_policy
    }

    /// Bytes of pages in L2.
    pub fn used_bytes(&self) -> u64 {
        self.evictor.used_bytes()
    }

    /// Pages in L2.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes reserved for puts or being written to L3.
    pub fn in_flight_bytes(&self) -> u64 {
        self.reserved_bytes + self.writing_bytes
    }

    /// Pages that only L2 has and that are to be written before they leave.
    pub fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Whether the order of LRU is in force, in place of what was learnt.
    pub fn follows_lru(&self) -> bool {
        self.evictor.policy().follows_lru()
    }

    fn writes_back(&self) -> bool {
        self.options.has_l3 && self.options.write_policy == WritePolicy::Back
    }

    fn state_of_new(&self) -> State {
        match (self.options.has_l3, self.options.write_policy) {
            (false, _) => State::Only,
            (true, WritePolicy::Through) => State::Writing,
            (true, WritePolicy::Selective) => State::Unproven,
            (true, WritePolicy::Back) => State::Dirty,
        }
    }

    fn has_budget(&self, bytes: u32) -> bool {
        self.in_flight_bytes() + u64::from(bytes) <= self.options.dirty_bytes_max
    }

    fn fits_beside_reserved(&self, bytes: u32) -> bool {
        let taken = self.evictor.used_bytes() + self.reserved_bytes;
        taken + u64::from(bytes) <= self.options.capacity_bytes
    }

    fn begin_write(&mut self, id: PageId, bytes: u32, out: &mut Decisions) {
        self.writing_bytes += u64::from(bytes);
        out.write.push(id);
    }

    fn set_state(&mut self, id: &PageId, state: State) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.state = state;
        }
        if state == State::Dirty {
            self.dirty.insert(*id);
        } else {
            self.dirty.remove(id);
        }
    }

    /// Takes a page into L2 if the rules allow.
    fn admit(&mut self, page: PageFacts, state: State, now_ms: u64, out: &mut Decisions) -> bool {
        self.forget(&page.id);
        let mut evicted = Vec::new();
        self.evictor.expire(now_ms, &mut evicted);
        self.leave(std::mem::take(&mut evicted), now_ms, out);
        let namespace = self.accounts.open(page.id.namespace, &mut self.evictor, &mut evicted);
        let parent = self.parent_of(&page, now_ms);
        let new = NewPage {
            name: page.id,
            fingerprint: fingerprint(&page.id),
            namespace,
            parent: parent.map(|(_, handle)| handle),
            position: page.position,
            bytes: page.bytes,
            deadline_ms: Some(page.end_ms()),
        };
        let taken = self.evictor.insert(new, now_ms, &mut evicted);
        if let Ok(handle) = taken {
            let entry = Entry { handle, facts: page, parent, hits: 0, state, pin: None, holds: 0 };
            self.entries.insert(page.id, entry);
            self.set_state(&page.id, state);
        } else {
            self.accounts.left(page.id.namespace);
        }
        self.leave(evicted, now_ms, out);
        taken.is_ok()
    }

    fn parent_of(&self, page: &PageFacts, now_ms: u64) -> Option<(PageId, Handle)> {
        let id = PageId { key: page.parent, ..page.id };
        let parent = self.entries.get(&id)?;
        // A page that outlives the one before it would go with that, and in write-back be written in whatever number.
        let lasts = parent.facts.end_ms() >= page.end_ms() && self.evictor.contains(parent.handle, now_ms);
        lasts.then_some((id, parent.handle))
    }

    /// Carries over what the evictor let go.
    fn leave(&mut self, evicted: Vec<Evicted<PageId>>, now_ms: u64, out: &mut Decisions) {
        for Evicted { name, reason, .. } in evicted {
            let Some(entry) = self.left(&name) else { continue };
            if entry.state == State::Dirty && !entry.facts.is_over(now_ms) && !has(Bug::DirtyDropped) {
                self.begin_write(name, entry.facts.bytes, out);
            }
            out.evict.push((name, reason));
        }
    }

    /// Drops what is known of a page that the evictor has no more.
    fn left(&mut self, id: &PageId) -> Option<Entry> {
        self.drop_holds(id);
        let entry = self.entries.remove(id)?;
        self.dirty.remove(id);
        self.accounts.left(id.namespace);
        Some(entry)
    }
}

impl PageFacts {
    fn is_over(&self, now_ms: u64) -> bool {
        self.end_ms() <= now_ms
    }

    fn end_ms(&self) -> u64 {
        if self.expires_unix_ms == 0 { u64::MAX } else { self.expires_unix_ms }
    }
}

/// All of the name in 64 bits. Foreign engines bring keys of their own, so every byte counts.
fn fingerprint(id: &PageId) -> u64 {
    let words = id.namespace.0.chunks_exact(8).chain(id.key.0.chunks_exact(8));
    words.fold(0, |folded, word| {
        let word = word.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        mixed(folded ^ word)
    })
}

/// Spreads a number over all bits (the finalizer of SplitMix64).
pub(crate) fn mixed(number: u64) -> u64 {
    let a = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}
