//! The resident pages of one tier, and the rules under which they go.
//!
//! Always true:
//! 1. The resident pages never take more bytes than the capacity. Those of a namespace take no more than its quota, or
//!    than what pins held when the quota was lowered below it.
//! 2. A page with resident children is never evicted and never expires: they go first. Only [`Evictor::remove`] can
//!    take it away before them; they stay, as roots.
//! 3. A pinned page is never evicted and does not expire before its last pin is gone; nor, by 2, the pages before it.
//! 4. A soft-pinned page is evicted only when no other page that would help may go.
//! 5. A page is not found after its deadline, which is never later than that of the page before it.
//!
//! How: a page is *free to go* when it has no pins and no resident children. Exactly the pages free to go are offered
//! to the policy (or stand among the soft-pinned ones), and stand in the orders of deadlines and of their namespace
//! if they have a deadline or a quota. Every change of pins and children passes through [`Evictor::settle`], which
//! keeps it so.

use crate::policy::{Arrival, Farewell, Policy, Slot, Stamp};
use crate::push_tight;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// A namespace, by a small number of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceIndex(pub u32);

/// A resident page; stale once it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    slot: Slot,
    life: u32,
}

impl Handle {
    /// Its place, below the largest number of pages that were ever resident at once.
    pub fn slot(self) -> Slot {
        self.slot
    }
}

/// A page that wants in.
#[derive(Debug, Clone, Copy)]
pub struct NewPage<T> {
    /// The caller's name for it; comes back when it goes.
    pub name: T,
    /// A hash of its whole name, namespace and all.
    pub fingerprint: u64,
    /// Whose it is.
    pub namespace: NamespaceIndex,
    /// The resident page before it; `None` for the first of a sequence.
    pub parent: Option<Handle>,
    /// Place in its sequence, in pages.
    pub position: u32,
    /// Bytes it takes.
    pub bytes: u32,
    /// When it is to be gone, in the caller's milliseconds. Brought forward to that of its parent.
    pub deadline_ms: Option<u64>,
}

/// Why a page went without being asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The tier is full.
    Capacity,
    /// Its namespace is.
    Quota,
    /// Its deadline passed.
    Expired,
}

/// A page that went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted<T> {
    /// The caller's name for it.
    pub name: T,
    /// Bytes that are free now.
    pub bytes: u32,
    /// Why.
    pub reason: Reason,
}

/// Why a page was not taken. What was evicted for it stays evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// It is larger than the tier or the quota of its namespace.
    #[error("the page takes {bytes} bytes, of {most}")]
    TooLarge {
        /// Bytes of the page.
        bytes: u32,
        /// Bytes there are.
        most: u64,
    },
    /// The page before it is not resident: it could not be found.
    #[error("the page before it is not resident")]
    ParentGone,
    /// Its deadline, or that of the page before it, has passed.
    #[error("its deadline has passed")]
    Expired,
    /// Whatever could make room is pinned, or has children that are.
    #[error("all that could make room is pinned")]
    Pinned,
}

/// The memory of a page is what is spent most on, so this is packed: see [`PAGE_BYTES_MAX`].
#[derive(Debug)]
struct Page<T> {
    /// See [`Stamp`].
    run: u64,
    /// `u64::MAX`: none.
    deadline_ms: u64,
    name: T,
    position: u32,
    /// In [`NO_SLOT`] if there is none.
    parent: Handle,
    namespace: NamespaceIndex,
    bytes: u32,
    life: u32,
    children: u32,
    pins: u16,
    /// It is there; otherwise the slot is empty.
    resident: bool,
    soft_pinned: bool,
    /// Stands in the orders of pages that may go.
    offered: bool,
    /// Its namespace had a quota when it was offered.
    in_quota_order: bool,
}

/// No page stands there: there are never so many.
const NO_SLOT: Slot = Slot(u32::MAX);
/// Most bytes of an entry, with a name of four. With what the policy has of a page and remembers of those that went, a page
/// takes at most 124 bytes.
const PAGE_BYTES_MAX: usize = 56;
const _: () = assert!(size_of::<Page<u32>>() <= PAGE_BYTES_MAX);

#[derive(Debug, Clone, Copy)]
struct Account {
    used_bytes: u64,
    quota_bytes: u64,
}

/// Namespace, whether soft-pinned, and how long ago.
type QuotaOrder = (NamespaceIndex, bool, Stamp, Slot);

/// The pages of one tier.
#[derive(Debug)]
pub struct Evictor<T, P> {
    policy: P,
    capacity_bytes: u64,
    used_bytes: u64,
    tick: u64,
    pages: Vec<Page<T>>,
    empty: Vec<Slot>,
    accounts: BTreeMap<NamespaceIndex, Account>,
    soft: BTreeSet<(Stamp, Slot)>,
    quota_order: BTreeSet<QuotaOrder>,
    deadlines: BTreeSet<(u64, Slot)>,
}

impl<T: Copy, P: Policy> Evictor<T, P> {
    /// Empty.
    pub fn new(capacity_bytes: u64, policy: P) -> Evictor<T, P> {
        Evictor {
            policy,
            capacity_bytes,
            used_bytes: 0,
            tick: 0,
            pages: Vec::new(),
            empty: Vec::new(),
            accounts: BTreeMap::new(),
            soft: BTreeSet::new(),
            quota_order: BTreeSet::new(),
            deadlines: BTreeSet::new(),
        }
    }

    /// Takes a page, and puts what went for it into `evicted`. The page before it is not among that.
    pub fn insert(&mut self, page: NewPage<T>, now_ms: u64, evicted: &mut Vec<Evicted<T>>) -> Result<Handle, Refused> {
        self.expire(now_ms, evicted);
        let deadline_ms = self.deadline_of(&page, now_ms)?;
        if let Some(parent) = page.parent {
            self.settle(parent.slot, |parent| parent.children += 1);
        }
        let room = self.make_room(page.namespace, page.bytes, evicted);
        if let (Err(_), Some(parent)) = (room, page.parent) {
            self.settle(parent.slot, |parent| parent.children -= 1);
        }
        room?;
        Ok(self.admit(page, deadline_ms))
    }

    /// The page was asked for: `false` if it is not, or no longer, there.
    pub fn touch(&mut self, handle: Handle, now_ms: u64) -> bool {
        if !self.contains(handle, now_ms) {
            return false;
        }
        self.tick += 1;
        let page = &self.pages[handle.slot.index()];
        let stamp = Stamp::new(self.tick, page.position);
        let in_own_order = page.offered && (page.soft_pinned || page.in_quota_order);
        if in_own_order {
            self.withdraw(handle.slot);
        }
        self.pages[handle.slot.index()].run = stamp.run;
        self.policy.touch(handle.slot, stamp);
        if in_own_order {
            self.offer(handle.slot);
        }
        true
    }

    /// Whether the page is there, and its deadline ahead.
    pub fn contains(&self, handle: Handle, now_ms: u64) -> bool {
        self.page(handle).is_some_and(|page| now_ms < page.deadline_ms)
    }

    /// Takes a page away, pinned or not. Its children stay, as roots.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        self.page(handle)?;
        self.take_out(handle.slot, Farewell::Removed)
    }

    /// Takes away what has no time left. [`Evictor::insert`] begins with it.
    pub fn expire(&mut self, now_ms: u64, evicted: &mut Vec<Evicted<T>>) {
        while let Some(&(deadline_ms, slot)) = self.deadlines.first() {
            if now_ms < deadline_ms {
                break;
            }
            self.evict(slot, Reason::Expired, evicted);
        }
    }

    /// Holds the page until as many calls of [`Evictor::unpin`]. `false` if it is not there, or has 65,535 pins.
    pub fn pin(&mut self, handle: Handle) -> bool {
        let may = self.page(handle).is_some_and(|page| page.pins < u16::MAX);
        if may {
            self.settle(handle.slot, |page| page.pins += 1);
        }
        may
    }

    /// Gives back one pin. `false` if the page is not there, or has none.
    pub fn unpin(&mut self, handle: Handle) -> bool {
        let may = self.page(handle).is_some_and(|page| page.pins > 0);
        if may {
            self.settle(handle.slot, |page| page.pins -= 1);
        }
        may
    }

    /// Whether the page goes only when nothing else can. `false` if it is not there.
    pub fn soft_pin(&mut self, handle: Handle, soft_pinned: bool) -> bool {
        if self.page(handle).is_none() {
            return false;
        }
        let offered = self.pages[handle.slot.index()].offered;
        if offered {
            self.withdraw(handle.slot);
        }
        self.pages[handle.slot.index()].soft_pinned = soft_pinned;
        if offered {
            self.offer(handle.slot);
        }
        true
    }

    /// Most bytes of a namespace, `u64::MAX` for no limit; evicts what is over it. What pins hold may stay over it,
    /// and no page of the namespace is taken until it is not.
    pub fn set_quota(&mut self, namespace: NamespaceIndex, quota_bytes: u64, evicted: &mut Vec<Evicted<T>>) {
        let account = self.accounts.entry(namespace).or_insert(Account::UNLIMITED);
        let starts = account.quota_bytes == u64::MAX && quota_bytes != u64::MAX;
        account.quota_bytes = quota_bytes;
        if starts {
            self.order_by_quota(namespace);
        }
        while self.account(namespace).over(0) && self.evict_of(namespace, evicted) {}
    }

    /// Bytes of the resident pages.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Most bytes of the resident pages.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes of the resident pages of a namespace.
    pub fn namespace_bytes(&self, namespace: NamespaceIndex) -> u64 {
        self.account(namespace).used_bytes
    }

    /// Resident pages.
    pub fn len(&self) -> usize {
        self.pages.len() - self.empty.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The policy.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    fn page(&self, handle: Handle) -> Option<&Page<T>> {
        self.pages.get(handle.slot.index()).filter(|page| page.life == handle.life && page.resident)
    }

    fn account(&self, namespace: NamespaceIndex) -> Account {
        self.accounts.get(&namespace).copied().unwrap_or(Account::UNLIMITED)
    }

    fn deadline_of(&self, page: &NewPage<T>, now_ms: u64) -> Result<u64, Refused> {
        let most = self.capacity_bytes.min(self.account(page.namespace).quota_bytes);
        if u64::from(page.bytes) > most {
            return Err(Refused::TooLarge { bytes: page.bytes, most });
        }
        let own_ms = page.deadline_ms.unwrap_or(u64::MAX);
        let deadline_ms = match page.parent {
            Some(parent) => self.page(parent).ok_or(Refused::ParentGone)?.deadline_ms.min(own_ms),
            None => own_ms,
        };
        if deadline_ms <= now_ms { Err(Refused::Expired) } else { Ok(deadline_ms) }
    }

    fn make_room(
        &mut self,
        namespace: NamespaceIndex,
        bytes: u32,
        evicted: &mut Vec<Evicted<T>>,
    ) -> Result<(), Refused> {
        while self.account(namespace).over(bytes) {
            if !self.evict_of(namespace, evicted) {
                return Err(Refused::Pinned);
            }
        }
        while self.used_bytes + u64::from(bytes) > self.capacity_bytes {
            let soft = |soft: &BTreeSet<(Stamp, Slot)>| soft.first().map(|(_, slot)| *slot);
            let slot = self.policy.victim().or_else(|| soft(&self.soft)).ok_or(Refused::Pinned)?;
            self.evict(slot, Reason::Capacity, evicted);
        }
        Ok(())
    }

    /// `false` if no page of the namespace may go.
    fn evict_of(&mut self, namespace: NamespaceIndex, evicted: &mut Vec<Evicted<T>>) -> bool {
        let oldest = (namespace, false, Stamp { run: 0, position: std::cmp::Reverse(u32::MAX) }, Slot(0));
        let first = self.quota_order.range(oldest..).next().copied();
        let Some((_, _, _, slot)) = first.filter(|first| first.0 == namespace) else { return false };
        self.evict(slot, Reason::Quota, evicted);
        true
    }

    fn order_by_quota(&mut self, namespace: NamespaceIndex) {
        for index in 0..self.pages.len() {
            let page = &self.pages[index];
            if page.offered && page.namespace == namespace {
                self.withdraw(Slot(index as u32));
                self.offer(Slot(index as u32));
            }
        }
    }

    fn evict(&mut self, slot: Slot, reason: Reason, evicted: &mut Vec<Evicted<T>>) {
        let page = &self.pages[slot.index()];
        assert!(page.offered && page.pins == 0 && page.children == 0, "a page that may not go was to be evicted");
        let bytes = page.bytes;
        let farewell = if reason == Reason::Expired { Farewell::Removed } else { Farewell::Evicted };
        if let Some(name) = self.take_out(slot, farewell) {
            evicted.push(Evicted { name, bytes, reason });
        }
    }

    fn admit(&mut self, new: NewPage<T>, deadline_ms: u64) -> Handle {
        self.tick += 1;
        let stamp = Stamp::new(self.tick, new.position);
        let slot = self.empty.pop().unwrap_or(Slot(self.pages.len() as u32));
        let life = self.pages.get(slot.index()).map_or(0, |before| before.life.wrapping_add(1));
        let page = Page {
            run: stamp.run,
            deadline_ms,
            name: new.name,
            position: new.position,
            parent: new.parent.unwrap_or(Handle { slot: NO_SLOT, life: 0 }),
            namespace: new.namespace,
            bytes: new.bytes,
            life,
            children: 0,
            pins: 0,
            resident: true,
            soft_pinned: false,
            offered: false,
            in_quota_order: false,
        };
        match self.pages.get_mut(slot.index()) {
            Some(empty) => *empty = page,
            None => push_tight(&mut self.pages, page),
        }
        self.used_bytes += u64::from(new.bytes);
        self.accounts.entry(new.namespace).or_insert(Account::UNLIMITED).used_bytes += u64::from(new.bytes);
        let parent = new.parent.map(|parent| parent.slot);
        self.policy.insert(slot, &Arrival { fingerprint: new.fingerprint, parent, stamp });
        self.offer(slot);
        Handle { slot, life }
    }

    fn take_out(&mut self, slot: Slot, farewell: Farewell) -> Option<T> {
        if self.pages[slot.index()].offered {
            self.withdraw(slot);
        }
        self.policy.remove(slot, farewell);
        let page = &mut self.pages[slot.index()];
        let name = std::mem::take(&mut page.resident).then_some(page.name);
        let (parent, bytes, namespace) = (page.parent, u64::from(page.bytes), page.namespace);
        self.used_bytes -= bytes;
        self.credit(namespace, bytes);
        push_tight(&mut self.empty, slot);
        if self.page(parent).is_some() {
            self.settle(parent.slot, |parent| parent.children -= 1);
        }
        name
    }

    fn credit(&mut self, namespace: NamespaceIndex, bytes: u64) {
        let Some(account) = self.accounts.get_mut(&namespace) else { return };
        account.used_bytes -= bytes;
        if account.used_bytes == 0 && account.quota_bytes == u64::MAX {
            self.accounts.remove(&namespace);
        }
    }

    /// Changes pins or children of a page, then offers or withdraws it.
    fn settle(&mut self, slot: Slot, change: impl FnOnce(&mut Page<T>)) {
        let page = &mut self.pages[slot.index()];
        change(page);
        let free = page.pins == 0 && page.children == 0;
        if free && !page.offered {
            self.offer(slot);
        } else if !free && page.offered {
            self.withdraw(slot);
        }
    }

    fn offer(&mut self, slot: Slot) {
        let has_quota = self.account(self.pages[slot.index()].namespace).quota_bytes != u64::MAX;
        let page = &mut self.pages[slot.index()];
        page.offered = true;
        page.in_quota_order = has_quota;
        if page.soft_pinned {
            self.soft.insert((page.stamp(), slot));
        } else {
            self.policy.offer(slot);
        }
        if page.in_quota_order {
            self.quota_order.insert((page.namespace, page.soft_pinned, page.stamp(), slot));
        }
        if page.deadline_ms != u64::MAX {
            self.deadlines.insert((page.deadline_ms, slot));
        }
    }

    fn withdraw(&mut self, slot: Slot) {
        let page = &mut self.pages[slot.index()];
        page.offered = false;
        if page.soft_pinned {
            self.soft.remove(&(page.stamp(), slot));
        } else {
            self.policy.withdraw(slot);
        }
        if page.in_quota_order {
            self.quota_order.remove(&(page.namespace, page.soft_pinned, page.stamp(), slot));
        }
        if page.deadline_ms != u64::MAX {
            self.deadlines.remove(&(page.deadline_ms, slot));
        }
    }
}

impl<T> Page<T> {
    fn stamp(&self) -> Stamp {
        Stamp { run: self.run, position: std::cmp::Reverse(self.position) }
    }
}

impl Account {
    const UNLIMITED: Account = Account { used_bytes: 0, quota_bytes: u64::MAX };

    fn over(&self, more_bytes: u32) -> bool {
        self.used_bytes.saturating_add(u64::from(more_bytes)) > self.quota_bytes
    }
}
