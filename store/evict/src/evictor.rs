//! The resident pages of one tier, and the rules of their eviction.
//!
//! Invariants:
//! 1. Resident pages never exceed the capacity. The pages of a namespace never exceed its quota,
//!    except for pages that were pinned when the quota was lowered.
//! 2. A page with resident children is neither evicted nor expired: its children leave first. Only
//!    [`Evictor::remove`] can take it out before them. They stay, as roots.
//! 3. A pinned page is neither evicted nor expired until its last pin is gone. By 2 the same holds
//!    for its ancestors.
//! 4. A soft-pinned page is evicted only if no other page can make the needed room.
//! 5. A page is a miss after its deadline. A deadline is never later than that of the parent.
//! 6. A page of a namespace at or below its floor makes room for others only if no namespace is
//!    above its floor. The order in 4 holds within a namespace then.
//!
//! A page is *evictable* if it has no pins and no resident children. Exactly the evictable pages
//! are offered: to the policy, or in the order of soft-pinned pages, and in the list of their
//! namespace. Of the pages with a deadline, only the offered ones can expire. Every change of
//! pins and children passes through [`Evictor::update_offer`], which maintains this.

mod deadlines;
mod namespaces;

use crate::policy::{Advice, Arrival, Policy, Removal, Slot, Stamp, TICKS_PER_MS};
use crate::push_tight;
use deadlines::{DEADLINE_END, Deadlines};
use namespaces::{Links, ListEnd, Namespaces};
use std::collections::BTreeSet;
use thiserror::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceIndex(pub u32);

/// Reference to a resident page. It is stale once the page left: all methods then report the page
/// as absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHandle {
    slot: Slot,
    generation: u32,
}

impl PageHandle {
    /// Slot of the page. It is below the largest number of pages that were resident at once, so it
    /// can index a table of the caller.
    pub fn slot(self) -> Slot {
        self.slot
    }
}

#[derive(Debug, Clone, Copy)]
pub struct NewPage<T> {
    pub name: T,
    /// Hash of the full name, including the namespace.
    pub fingerprint: u64,
    /// The same hash of the preceding page's name, resident or not. 0 for a first page.
    pub parent_fingerprint: u64,
    pub namespace: NamespaceIndex,
    pub parent: Option<PageHandle>,
    /// Position in the sequence, in pages.
    pub position: u32,
    pub bytes: u32,
    /// Expiry on the caller's clock, in milliseconds. The evictor limits it to the parent's
    /// deadline. From 2^63 - 1 on it counts as none.
    pub deadline_ms: Option<u64>,
    /// The policy may refuse the page. Otherwise it is admitted as far as the rules allow.
    pub may_refuse: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionReason {
    Capacity,
    Quota,
    Expired,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted<T> {
    pub name: T,
    /// Slot that the page had. The next page may get it.
    pub slot: Slot,
    pub bytes: u32,
    pub reason: EvictionReason,
}

/// Reason that the evictor refused a page. Pages evicted in the attempt stay evicted, and the
/// caller must handle them also after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum InsertError {
    /// The page exceeds the tier or the quota of its namespace.
    #[error("the page of {bytes} bytes exceeds the limit of {most} bytes")]
    TooLarge { bytes: u32, most: u64 },
    /// The parent is not resident, so no reader could reach the page.
    #[error("the parent page is not resident")]
    ParentGone,
    #[error("the deadline of the page has passed")]
    Expired,
    #[error("every page that could make room is pinned")]
    Pinned,
    /// The policy values every page that could make room more. It has observed the arrival.
    #[error("every page that could make room is worth more")]
    Refused,
}

/// State of a page. Millions of pages are resident, so it is packed: see [`PAGE_BYTES_MAX`]. The
/// policy knows the time of its last access, and most pages have no deadline. A freed entry keeps
/// its generation, which makes old handles stale.
#[derive(Debug)]
struct Page<T> {
    name: T,
    parent: PageHandle,
    namespace: NamespaceIndex,
    bytes: u32,
    generation: u32,
    /// Neighbours in the list of its namespace, while it is offered. Otherwise its children.
    links: Links,
    pins: u16,
    flags: Flags,
}

impl<T> Page<T> {
    /// Number of resident pages that came behind this one. An offered page has none.
    fn children(&self) -> u32 {
        if self.flags.has(Flags::OFFERED) { 0 } else { self.links.children() }
    }
}

/// Facts of a page, a bit each.
#[derive(Debug, Clone, Copy, Default)]
struct Flags(u8);

impl Flags {
    const RESIDENT: Flags = Flags(1);
    const SOFT_PINNED: Flags = Flags(1 << 1);
    const OFFERED: Flags = Flags(1 << 2);
    /// The page was touched since it came, or since the clock last passed over it.
    const TOUCHED: Flags = Flags(1 << 3);
    /// `deadlines` has its deadline.
    const EXPIRES: Flags = Flags(1 << 4);

    fn has(self, flag: Flags) -> bool {
        self.0 & flag.0 != 0
    }

    fn set(&mut self, flag: Flags, value: bool) {
        self.0 = if value { self.0 | flag.0 } else { self.0 & !flag.0 };
    }
}

/// Pins and children of a page, which keep it from being offered.
struct Holds {
    children: u32,
    pins: u16,
}

/// Slot of no page: the table never grows that large.
const NO_SLOT: Slot = Slot(u32::MAX);
/// Maximum size of a table entry with a name of four bytes. With the state of the policy and its
/// ghost entries a page takes at most 105 bytes.
const PAGE_BYTES_MAX: usize = 36;
const _: () = assert!(size_of::<Page<u32>>() <= PAGE_BYTES_MAX);

/// The resident pages of one tier. The evictor enforces capacity, quotas, floors, pins and
/// deadlines. The [`Policy`] ranks the pages that these rules allow to leave.
#[derive(Debug)]
pub struct Evictor<T, P> {
    policy: P,
    capacity_bytes: u64,
    used_bytes: u64,
    tick: u64,
    pages: Vec<Page<T>>,
    empty: Vec<Slot>,
    namespaces: Namespaces,
    soft: BTreeSet<(Stamp, Slot)>,
    deadlines: Deadlines,
}

impl<T: Copy, P: Policy> Evictor<T, P> {
    pub fn new(capacity_bytes: u64, policy: P) -> Evictor<T, P> {
        Evictor {
            policy,
            capacity_bytes,
            used_bytes: 0,
            tick: 0,
            pages: Vec::new(),
            empty: Vec::new(),
            namespaces: Namespaces::default(),
            soft: BTreeSet::new(),
            deadlines: Deadlines::default(),
        }
    }

    /// Inserts a page. Appends the pages evicted for it to `evicted`, which never include its
    /// parent.
    ///
    /// # Errors
    /// See [`InsertError`].
    pub fn insert(
        &mut self,
        page: NewPage<T>,
        now_ms: u64,
        evicted: &mut Vec<Evicted<T>>,
    ) -> Result<PageHandle, InsertError> {
        self.expire(now_ms, evicted);
        let deadline_ms = self.limited_deadline(&page, now_ms)?;
        self.tick = self.next_tick(now_ms);
        if self.refuses(&page) {
            let arrival = self.arrival(&page);
            self.policy.decline(&arrival);
            return Err(InsertError::Refused);
        }
        // The parent counts the child before room is made, so that no eviction takes the parent.
        if let Some(parent) = page.parent {
            self.update_offer(parent.slot, ListEnd::Back, |parent| parent.children += 1);
        }
        let room = self.make_room(page.namespace, page.bytes, evicted);
        if let (Err(_), Some(parent)) = (room, page.parent) {
            self.update_offer(parent.slot, ListEnd::Back, |parent| parent.children -= 1);
        }
        room?;
        Ok(self.admit(page, deadline_ms))
    }

    /// Records an access to a page. Returns `false` if the page is gone or has expired. The page
    /// moves within every order that holds it.
    pub fn touch(&mut self, handle: PageHandle, now_ms: u64) -> bool {
        if !self.contains(handle, now_ms) {
            return false;
        }
        self.tick = self.next_tick(now_ms);
        let page = &mut self.pages[handle.slot.index()];
        page.flags.set(Flags::TOUCHED, true);
        let before = self.policy.stamp(handle.slot);
        let stamp = Stamp::new(self.tick, before.position.0);
        if page.flags.has(Flags::OFFERED) && page.flags.has(Flags::SOFT_PINNED) {
            self.soft.remove(&(before, handle.slot));
            self.soft.insert((stamp, handle.slot));
        }
        self.policy.touch(handle.slot, stamp);
        true
    }

    /// Passes a client's knowledge of a page on to the policy. Returns `false` if the page is gone
    /// or has expired. A demoted page is also the next of its namespace to leave. Rules stay in
    /// force: pins keep the page, and its children leave first.
    pub fn advise(&mut self, handle: PageHandle, advice: Advice, now_ms: u64) -> bool {
        if !self.contains(handle, now_ms) {
            return false;
        }
        self.tick = self.next_tick(now_ms);
        let slot = handle.slot;
        let before = self.policy.stamp(slot);
        self.policy.advise(slot, advice, self.tick);
        let page = &mut self.pages[slot.index()];
        if page.flags.has(Flags::OFFERED) && page.flags.has(Flags::SOFT_PINNED) {
            self.soft.remove(&(before, slot));
            self.soft.insert((self.policy.stamp(slot), slot));
        }
        if advice == Advice::Demote {
            page.flags.set(Flags::TOUCHED, false);
            if page.flags.has(Flags::OFFERED) {
                self.unlink(slot);
                self.link(slot, ListEnd::Front);
            }
        }
        true
    }

    /// Tells the policy that the generation ended that used a page, which is not resident.
    pub fn generation_ended(&mut self, fingerprint: u64, now_ms: u64) {
        // Not the next tick: many unknown pages must not carry the time away.
        self.tick = self.tick.max(now_ms.saturating_mul(TICKS_PER_MS));
        self.policy.generation_ended(fingerprint, self.tick);
    }

    pub fn contains(&self, handle: PageHandle, now_ms: u64) -> bool {
        self.deadline_ms(handle).is_some_and(|deadline_ms| now_ms < deadline_ms)
    }

    /// Returns the deadline of a page, `u64::MAX` if it does not expire.
    pub fn deadline_ms(&self, handle: PageHandle) -> Option<u64> {
        let page = self.page(handle)?;
        let deadline_ms = if page.flags.has(Flags::EXPIRES) { self.deadlines.get(handle.slot) } else { None };
        Some(deadline_ms.unwrap_or(u64::MAX))
    }

    /// Returns the name that the page came with, for changes in place.
    pub fn name_mut(&mut self, handle: PageHandle) -> Option<&mut T> {
        self.page(handle)?;
        Some(&mut self.pages[handle.slot.index()].name)
    }

    pub fn name(&self, handle: PageHandle) -> Option<&T> {
        self.page(handle).map(|page| &page.name)
    }

    /// Bytes that the page counts for.
    pub fn bytes(&self, handle: PageHandle) -> Option<u32> {
        self.page(handle).map(|page| page.bytes)
    }

    /// Number of resident pages that came behind this one.
    pub fn children(&self, handle: PageHandle) -> Option<u32> {
        self.page(handle).map(Page::children)
    }

    /// Returns the parent that the page came behind, if that is still resident.
    pub fn parent(&self, handle: PageHandle) -> Option<PageHandle> {
        let parent = self.page(handle)?.parent;
        self.page(parent).map(|_| parent)
    }

    /// Returns the handle of the page that is in a slot now.
    pub fn handle_at(&self, slot: Slot) -> Option<PageHandle> {
        let page = self.pages.get(slot.index()).filter(|page| page.flags.has(Flags::RESIDENT))?;
        Some(PageHandle { slot, generation: page.generation })
    }

    /// Number of slots in use or empty. All slots are below it.
    pub fn slots(&self) -> usize {
        self.pages.len()
    }

    /// Removes a page, pinned or not, and returns its name. Its children stay, as roots. A stale
    /// handle returns `None`.
    pub fn remove(&mut self, handle: PageHandle) -> Option<T> {
        self.page(handle)?;
        self.vacate(handle.slot, Removal::Removed)
    }

    /// Takes out the expired pages that no pin or child holds. [`Evictor::insert`] begins with
    /// this.
    pub fn expire(&mut self, now_ms: u64, evicted: &mut Vec<Evicted<T>>) {
        while let Some(slot) = self.deadlines.due(now_ms) {
            self.evict(slot, EvictionReason::Expired, evicted);
        }
    }

    /// Adds a pin, which keeps the page and its ancestors resident. Returns `false` if the page is
    /// gone, or has 65,535 pins.
    pub fn pin(&mut self, handle: PageHandle) -> bool {
        let may = self.page(handle).is_some_and(|page| page.pins < u16::MAX);
        if may {
            self.update_offer(handle.slot, ListEnd::Back, |page| page.pins += 1);
        }
        may
    }

    /// Removes a pin. Returns `false` if the page is gone, or has no pin. The last pin of a page
    /// without children makes it evictable again.
    pub fn unpin(&mut self, handle: PageHandle) -> bool {
        let may = self.page(handle).is_some_and(|page| page.pins > 0);
        if may {
            self.update_offer(handle.slot, ListEnd::Back, |page| page.pins -= 1);
        }
        may
    }

    /// Sets or clears the soft pin. A soft-pinned page leaves only when no other page can make
    /// room. Returns `false` if the page is gone.
    pub fn soft_pin(&mut self, handle: PageHandle, soft_pinned: bool) -> bool {
        if self.page(handle).is_none() {
            return false;
        }
        let offered = self.pages[handle.slot.index()].flags.has(Flags::OFFERED);
        if offered {
            self.withdraw(handle.slot);
        }
        self.pages[handle.slot.index()].flags.set(Flags::SOFT_PINNED, soft_pinned);
        if offered {
            self.offer(handle.slot, ListEnd::Back);
        }
        true
    }

    /// Sets the quota of a namespace in bytes, `u64::MAX` for none, and evicts what exceeds it.
    /// Pinned pages may keep the namespace above its quota. Until they leave, the evictor refuses
    /// its new pages.
    pub fn set_quota(&mut self, namespace: NamespaceIndex, quota_bytes: u64, evicted: &mut Vec<Evicted<T>>) {
        self.namespaces.update(namespace, |usage| usage.quota_bytes = quota_bytes);
        while self.namespaces.usage_of(namespace).over(0) && self.evict_of(namespace, evicted) {}
    }

    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub fn namespace_bytes(&self, namespace: NamespaceIndex) -> u64 {
        self.namespaces.usage_of(namespace).used_bytes
    }

    pub fn len(&self) -> usize {
        self.pages.len() - self.empty.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn policy(&self) -> &P {
        &self.policy
    }

    fn page(&self, handle: PageHandle) -> Option<&Page<T>> {
        self.pages
            .get(handle.slot.index())
            .filter(|page| page.generation == handle.generation && page.flags.has(Flags::RESIDENT))
    }

    fn limited_deadline(&self, page: &NewPage<T>, now_ms: u64) -> Result<u64, InsertError> {
        let most = self.capacity_bytes.min(self.namespaces.usage_of(page.namespace).quota_bytes);
        if u64::from(page.bytes) > most {
            return Err(InsertError::TooLarge { bytes: page.bytes, most });
        }
        let own_ms = page.deadline_ms.filter(|deadline_ms| *deadline_ms < DEADLINE_END).unwrap_or(u64::MAX);
        let deadline_ms = match page.parent {
            Some(parent) => self.deadline_ms(parent).ok_or(InsertError::ParentGone)?.min(own_ms),
            None => own_ms,
        };
        if deadline_ms <= now_ms { Err(InsertError::Expired) } else { Ok(deadline_ms) }
    }

    fn make_room(
        &mut self,
        namespace: NamespaceIndex,
        bytes: u32,
        evicted: &mut Vec<Evicted<T>>,
    ) -> Result<(), InsertError> {
        while self.namespaces.usage_of(namespace).over(bytes) {
            if !self.evict_of(namespace, evicted) {
                return Err(InsertError::Pinned);
            }
        }
        while self.used_bytes + u64::from(bytes) > self.capacity_bytes {
            let slot = self.victim().ok_or(InsertError::Pinned)?;
            self.evict(slot, EvictionReason::Capacity, evicted);
        }
        Ok(())
    }

    /// Evicts one page of a namespace. Returns `false` if none is evictable.
    fn evict_of(&mut self, namespace: NamespaceIndex, evicted: &mut Vec<Evicted<T>>) -> bool {
        let Some(slot) = self.oldest_of(namespace) else { return false };
        self.evict(slot, EvictionReason::Quota, evicted);
        true
    }

    fn evict(&mut self, slot: Slot, reason: EvictionReason, evicted: &mut Vec<Evicted<T>>) {
        let page = &self.pages[slot.index()];
        assert!(page.flags.has(Flags::OFFERED) && page.pins == 0, "the policy chose a page that is not evictable");
        let bytes = page.bytes;
        let removal = if reason == EvictionReason::Expired { Removal::Removed } else { Removal::Evicted };
        if let Some(name) = self.vacate(slot, removal) {
            evicted.push(Evicted { name, slot, bytes, reason });
        }
    }

    /// Asks the policy about a page that needs an eviction. A page is admitted unasked if its
    /// namespace stays within its floor, or if its quota makes room: the policy ranks neither.
    fn refuses(&mut self, page: &NewPage<T>) -> bool {
        if !page.may_refuse {
            return false;
        }
        let usage = self.namespaces.usage_of(page.namespace);
        let needs_eviction = self.used_bytes + u64::from(page.bytes) > self.capacity_bytes;
        if !needs_eviction || usage.over(page.bytes) || usage.within_floor(page.bytes) {
            return false;
        }
        let arrival = self.arrival(page);
        self.policy.refuses(&arrival)
    }

    fn arrival(&self, new: &NewPage<T>) -> Arrival {
        Arrival {
            fingerprint: new.fingerprint,
            parent: new.parent.map(|parent| parent.slot),
            parent_fingerprint: new.parent_fingerprint,
            stamp: Stamp::new(self.tick, new.position),
        }
    }

    /// Tick of an access now: the time, but later than all accesses before.
    fn next_tick(&self, now_ms: u64) -> u64 {
        (self.tick + 1).max(now_ms.saturating_mul(TICKS_PER_MS))
    }

    fn admit(&mut self, new: NewPage<T>, deadline_ms: u64) -> PageHandle {
        let arrival = self.arrival(&new);
        let slot = self.empty.pop().unwrap_or(Slot(self.pages.len() as u32));
        let generation = self.pages.get(slot.index()).map_or(0, |before| before.generation.wrapping_add(1));
        let mut page = Page {
            name: new.name,
            parent: new.parent.unwrap_or(PageHandle { slot: NO_SLOT, generation: 0 }),
            namespace: new.namespace,
            bytes: new.bytes,
            generation,
            links: Links::of_children(0),
            pins: 0,
            flags: Flags::RESIDENT,
        };
        self.deadlines.extend_to(slot);
        if deadline_ms != u64::MAX {
            page.flags.set(Flags::EXPIRES, true);
            self.deadlines.insert(slot, deadline_ms);
        }
        match self.pages.get_mut(slot.index()) {
            Some(empty) => *empty = page,
            None => push_tight(&mut self.pages, page),
        }
        self.used_bytes += u64::from(new.bytes);
        self.namespaces.update(new.namespace, |usage| usage.used_bytes += u64::from(new.bytes));
        self.policy.insert(slot, &arrival);
        self.offer(slot, ListEnd::Back);
        PageHandle { slot, generation }
    }

    fn vacate(&mut self, slot: Slot, removal: Removal) -> Option<T> {
        if self.pages[slot.index()].flags.has(Flags::OFFERED) {
            self.withdraw(slot);
        }
        self.policy.remove(slot, removal);
        let page = &mut self.pages[slot.index()];
        let name = page.flags.has(Flags::RESIDENT).then_some(page.name);
        page.flags.set(Flags::RESIDENT, false);
        let parent = page.parent;
        let bytes = u64::from(page.bytes);
        let namespace = page.namespace;
        if page.flags.has(Flags::EXPIRES) {
            self.deadlines.remove(slot);
        }
        self.used_bytes -= bytes;
        self.namespaces.update(namespace, |usage| usage.used_bytes -= bytes);
        push_tight(&mut self.empty, slot);
        if self.page(parent).is_some() {
            // The rest of an evicted sequence goes before others.
            let end = if removal == Removal::Evicted { ListEnd::Front } else { ListEnd::Back };
            self.update_offer(parent.slot, end, |parent| parent.children -= 1);
        }
        name
    }

    /// Changes pins or children of a page, then offers or withdraws it accordingly. All changes of
    /// either number go through here, so that offers stay correct. An offered page enters the list
    /// of its namespace at `end`.
    fn update_offer(&mut self, slot: Slot, end: ListEnd, change: impl FnOnce(&mut Holds)) {
        let page = &self.pages[slot.index()];
        let offered = page.flags.has(Flags::OFFERED);
        let mut holds = Holds { children: page.children(), pins: page.pins };
        change(&mut holds);
        let free = holds.pins == 0 && holds.children == 0;
        if offered && free {
            return;
        }
        // Before the children take the place of its links.
        if offered {
            self.withdraw(slot);
        }
        let page = &mut self.pages[slot.index()];
        page.pins = holds.pins;
        page.links = Links::of_children(holds.children);
        if free {
            self.offer(slot, end);
        }
    }

    fn offer(&mut self, slot: Slot, end: ListEnd) {
        self.link(slot, end);
        let page = &mut self.pages[slot.index()];
        page.flags.set(Flags::OFFERED, true);
        let stamp = self.policy.stamp(slot);
        if page.flags.has(Flags::SOFT_PINNED) {
            self.soft.insert((stamp, slot));
        } else {
            self.policy.offer(slot);
        }
        if page.flags.has(Flags::EXPIRES) {
            self.deadlines.offer(slot);
        }
    }

    fn withdraw(&mut self, slot: Slot) {
        self.unlink(slot);
        let page = &mut self.pages[slot.index()];
        page.flags.set(Flags::OFFERED, false);
        // The stamp of the offer: it changes only in `touch` and `advise`, which move the page.
        let stamp = self.policy.stamp(slot);
        if page.flags.has(Flags::SOFT_PINNED) {
            self.soft.remove(&(stamp, slot));
        } else {
            self.policy.withdraw(slot);
        }
        if page.flags.has(Flags::EXPIRES) {
            self.deadlines.withdraw(slot);
        }
    }
}
