//! What workers do with their client, and the check of every answer.

use super::{LANDING_MS, LATE_MS, Wire, put, soon, worker_dice};
use crate::dice::Dice;
use crate::faults::Profile;
use crate::model::Bytes;
use crate::payload::page_key;
use crate::wire::model::Asked;
use crate::workload::Limit;
use futures::FutureExt;
use larder_client::{Client, Fetched, FollowEnd, GetOptions, Lease, PageView, PinKind, Tier};
use larder_format::PageKey;
use larder_wire::TierCode;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// How long a request waits that does not say so.
const PATIENCE: Duration = Duration::from_secs(5);
/// Views and leases that a worker keeps.
const KEPT_MAX: usize = 6;

/// A page that is read in place or was copied, and looked at again now and then.
struct Kept {
    view: PageView,
    key: u64,
    content: u64,
}

pub(super) struct Worker {
    pub(super) wire: Arc<Wire>,
    pub(super) client: Client,
    pub(super) dice: Dice,
    views: Vec<Kept>,
    leases: Vec<Lease>,
}

/// All workers, until their operations are done and nothing is kept.
pub(super) async fn work(wire: &Arc<Wire>, clients: &[Client], round: u64, operations: u64) {
    let workers = clients.len() as u64 * wire.setup.workers;
    let work = (0..workers).map(|number| {
        let client = clients[(number % clients.len() as u64) as usize].clone();
        let dice = worker_dice(wire, round, number);
        let mut worker = Worker { wire: wire.clone(), client, dice, views: Vec::new(), leases: Vec::new() };
        tokio::spawn(async move {
            worker.client.ready(Duration::from_secs(1)).await;
            for _ in 0..operations / workers {
                if worker.wire.world.failed() {
                    return;
                }
                if worker.dice.chance(300_000) {
                    sleep(Duration::from_millis(worker.dice.below(100))).await;
                }
                worker.operation().await;
                worker.wire.operations.fetch_add(1, Ordering::Relaxed);
            }
            worker.look_again(usize::MAX);
        })
    });
    for worker in work.collect::<Vec<_>>() {
        if worker.await.is_err() {
            wire.violate("a worker panicked".into());
        }
    }
}

impl Worker {
    async fn operation(&mut self) {
        let key = self.pick();
        match self.dice.below(1000) {
            ..170 => put::parts(self, key).await,
            170..300 => put::pages(self).await,
            300..430 => self.get().await,
            430..500 => self.ranges().await,
            500..620 => self.view().await,
            620..700 => self.lookup().await,
            700..740 => self.locate().await,
            740..820 => self.follow(key).await,
            820..900 => self.forget().await,
            900..920 => self.warm().await,
            920..940 => self.pin().await,
            940..960 => self.flip(key).await,
            _ => self.look_again(1),
        }
    }

    pub(super) fn pick(&mut self) -> u64 {
        // Some keys are asked for more than others.
        let keys = self.wire.setup.keys;
        if self.dice.chance(500_000) { self.dice.below(keys) } else { self.dice.below(keys.min(6)) }
    }

    pub(super) fn picks(&mut self, most: u64) -> Vec<u64> {
        let mut keys: Vec<u64> = (0..self.dice.between(1, most)).map(|_| self.pick()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// How a request is ended early, if it is, and its deadline.
    pub(super) fn limit(&mut self) -> (Limit, Instant) {
        let limit = match self.dice.below(10) {
            0 => Limit::Deadline(Duration::from_millis(self.dice.below(30))),
            1 => Limit::Deadline(Duration::from_millis(self.dice.between(100, 1500))),
            2 => Limit::Cancel(Duration::from_millis(self.dice.below(60))),
            _ => Limit::None,
        };
        let deadline = limit.deadline_within(PATIENCE);
        (limit, deadline)
    }

    /// Whether these are bytes that may be had; their content.
    fn check(&self, what: &str, key: u64, bytes: &[u8], asked: Asked) -> Option<u64> {
        let suspect = self.wire.world.is_suspect(key);
        let checked = self.wire.model.lock().check(key, bytes, asked, suspect);
        checked.map_err(|problem| self.wire.violate(format!("a {what}: {problem}"))).ok()
    }

    fn count_hit(&self, tier: Tier) {
        self.wire.world.count(if tier == Tier::L2 { "hits in L2" } else { "hits on L3" }, 1);
    }

    async fn get(&mut self) {
        let keys = self.picks(6);
        let bytes = self.wire.setup.geometry.page_bytes();
        let pages = keys.iter().map(|&key| (page_key(key), vec![0xee; bytes])).collect();
        let ((limit, deadline), asked) = (self.limit(), self.wire.asks());
        let hedge = self.dice.chance(200_000).then(|| Duration::from_millis(self.dice.below(300)));
        let options = GetOptions { hedge_after: hedge, busy_retries: self.dice.below(3) as u32 };
        let got = limit.run(self.client.get_with(pages, options, deadline)).await;
        self.wire.check_end("get", deadline, LANDING_MS + LATE_MS);
        let Some(got) = got else { return self.wire.world.count("cancelled", 1) };
        for (key, (bytes, fetched)) in keys.into_iter().zip(got) {
            let Some(tier) = fetched.tier() else {
                let busy = matches!(fetched, Fetched::Busy { .. });
                self.wire.world.event("miss", [key, busy.into(), 0]);
                self.wire.world.count(if busy { "busy" } else { "misses" }, 1);
                continue;
            };
            let content = self.check("get", key, &bytes, asked);
            self.wire.world.event("hit", [key, content.unwrap_or(0), tier as u64]);
            self.count_hit(tier);
        }
    }

    /// A part, some bytes anywhere, a few, or none of a page.
    fn range(&mut self) -> Range<u32> {
        let geometry = self.wire.setup.geometry;
        let bytes = geometry.page_bytes() as u64;
        let start = self.dice.below(bytes);
        let end = match self.dice.below(8) {
            0..3 => {
                let part = self.dice.below(geometry.part_count() as u64) as usize;
                return geometry.part_range(part).unwrap_or(0..0);
            }
            3..6 => start + 1 + self.dice.below(bytes - start),
            6 => (start + 1 + self.dice.below(16)).min(bytes),
            _ => [start, bytes + 1][self.dice.below(2) as usize],
        };
        start as u32..end as u32
    }

    async fn ranges(&mut self) {
        let asked: Vec<(u64, Range<u32>)> = self.picks(5).into_iter().map(|key| (key, self.range())).collect();
        let ranges =
            asked.iter().map(|(key, range)| (page_key(*key), range.clone(), vec![0xee; range.len()])).collect();
        let ((limit, deadline), since) = (self.limit(), self.wire.asks());
        let got = limit.run(self.client.get_ranges(ranges, deadline)).await;
        self.wire.check_end("get of ranges", deadline, LANDING_MS + LATE_MS);
        let Some(got) = got else { return self.wire.world.count("cancelled", 1) };
        for ((key, range), (bytes, tier)) in asked.into_iter().zip(got) {
            let Some(tier) = tier else {
                self.wire.world.count("ranges missed", 1);
                continue;
            };
            if range.is_empty() || range.end as usize > self.wire.setup.geometry.page_bytes() {
                self.wire.violate(format!("key {key}: {range:?} is none of a page, and is had"));
            }
            let suspect = self.wire.world.is_suspect(key);
            let checked = self.wire.model.lock().check_range(key, range.start as usize, &bytes, since, suspect);
            self.wire.world.event("range", [key, range.start.into(), *checked.as_ref().unwrap_or(&0)]);
            if let Err(problem) = checked {
                self.wire.violate(format!("a range: {problem}"));
            }
            self.wire.world.count("ranges", 1);
            self.count_hit(tier);
        }
    }

    async fn view(&mut self) {
        let keys = self.picks(4);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let ((limit, deadline), asked) = (self.limit(), self.wire.asks());
        let views = limit.run(self.client.view(&names, deadline)).await;
        self.wire.check_end("view", deadline, LANDING_MS + LATE_MS);
        for (key, view) in keys.into_iter().zip(views.unwrap_or_default()) {
            let Some(view) = view else { continue };
            let content = self.check("view", key, &view, asked);
            self.wire.world.event("view", [key, content.unwrap_or(0), view.in_place().into()]);
            self.wire.world.count(if view.in_place() { "views in place" } else { "views copied" }, 1);
            if let Some(content) = content {
                self.views.push(Kept { view, key, content });
            }
        }
        while self.views.len() > KEPT_MAX {
            self.look_again(1);
        }
    }

    /// Looks at pages that are kept, and lets go of them, and of leases.
    fn look_again(&mut self, most: usize) {
        for _ in 0..most.min(self.views.len()) {
            let which = self.dice.below(self.views.len() as u64) as usize;
            let Kept { view, key, content } = &self.views[which];
            // A device's fault in memory may be a page's that is read in place.
            if let Err(problem) = crate::payload::check(*key, *content, view)
                && !(self.wire.setup.profile.memory_fails() && view.in_place())
            {
                self.wire.violate(format!("bytes changed while they were read: {problem}"));
            }
            self.wire.world.count("views looked at again", 1);
            if most > 1 || self.dice.chance(500_000) {
                drop(self.views.swap_remove(which));
            }
        }
        if most > 1 || self.dice.chance(300_000) {
            self.leases.clear();
        }
    }

    async fn lookup(&mut self) {
        let keys = self.picks(6);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let hold = Duration::from_millis([0, 100, 3_000, 60_000][self.dice.below(4) as usize]);
        let ((limit, deadline), asked) = (self.limit(), self.wire.asks());
        let found = limit.run(self.client.lookup(&names, hold, deadline)).await;
        self.wire.check_end("lookup", deadline, LATE_MS);
        let Some(found) = found else { return };
        self.wire.world.event("lookup", [keys[0], found.tiers.len() as u64, found.held as u64]);
        for (&key, tier) in keys.iter().zip(&found.tiers) {
            self.told_of(key, *tier, asked);
        }
        if found.held > 0 {
            self.wire.world.count("pages held", found.held as u64);
            // Of several nodes, another may own the pages when it comes back.
            let alone = self.wire.setup.nodes == 1 && self.wire.setup.profile == Profile::Calm;
            if alone && hold.as_secs() > 1 {
                self.read_held(&keys[..found.held], asked).await;
            }
        }
        self.leases.push(found.lease);
        if self.leases.len() > KEPT_MAX {
            self.leases.remove(0);
        }
    }

    /// Nothing fails, and pages are held: they are had, unless somebody forgot them, or the node was closed.
    async fn read_held(&mut self, keys: &[u64], asked: Asked) {
        let closed_before = self.wire.world.counts().get("nodes closed").copied();
        sleep(Duration::from_millis(self.dice.below(800))).await;
        let bytes = self.wire.setup.geometry.page_bytes();
        let pages = keys.iter().map(|&key| (page_key(key), vec![0; bytes])).collect();
        let got = self.client.get_with(pages, GetOptions::default(), soon(Duration::from_secs(1))).await;
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let again = self.client.lookup(&names, Duration::ZERO, soon(Duration::from_secs(1))).await;
        let mut untouched_so_far = true;
        for (place, (&key, (_, fetched))) in keys.iter().zip(got).enumerate() {
            let closed = self.wire.world.counts().get("nodes closed").copied() != closed_before;
            let untouched = !closed && self.wire.model.lock().untouched(key, asked);
            if untouched {
                self.wire.world.count("held pages read", 1);
                if fetched == Fetched::Miss && self.wire.setup.busy_is_told() {
                    self.wire.violate(format!("key {key} is held for a lookup, and is a miss"));
                }
            }
            // Behind a page that may be gone, a prefix says nothing.
            untouched_so_far &= untouched;
            if untouched_so_far && again.answered && again.tiers.len() <= place {
                self.wire.violate(format!("key {key} is held for a lookup, and another says that it is nowhere"));
            }
        }
    }

    fn told_of(&self, key: u64, tier: Tier, asked: Asked) {
        if !self.wire.model.lock().may_be(key, Bytes::Any, asked) && !self.wire.world.is_suspect(key) {
            self.wire
                .violate(format!("key {key} is said to be in {tier:?}; it was forgotten, is over, or was never put"));
        }
    }

    async fn locate(&mut self) {
        let keys = self.picks(6);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let ((limit, deadline), asked) = (self.limit(), self.wire.asks());
        let found = limit.run(self.client.locate(&names, deadline)).await;
        self.wire.check_end("locate", deadline, LATE_MS);
        for (key, tier) in keys.into_iter().zip(found.unwrap_or_default()) {
            if let Some(tier) = tier {
                self.told_of(key, tier, asked);
            }
        }
    }

    async fn follow(&mut self, key: u64) {
        let buffer = vec![0xee; self.wire.setup.geometry.page_bytes()];
        let ((limit, _), asked) = (self.limit(), self.wire.asks());
        let deadline = limit.deadline_within(Duration::from_millis(self.dice.below(3000)));
        let followed = limit.run(self.client.follow(page_key(key), buffer, deadline).finish()).await;
        self.wire.check_end(
            "follow",
            deadline.max(soon(Duration::ZERO) - Duration::from_millis(60)),
            LANDING_MS + LATE_MS,
        );
        let Some((bytes, end)) = followed else { return self.wire.world.count("cancelled", 1) };
        self.wire.world.event("follow", [key, end as u64, 0]);
        self.wire.world.count(
            match end {
                FollowEnd::Sealed => "follows to the end",
                FollowEnd::Aborted => "follows of puts given up",
                FollowEnd::Miss => "follows in vain",
            },
            1,
        );
        if end == FollowEnd::Sealed {
            self.check("follow", key, &bytes, asked);
        }
    }

    async fn forget(&mut self) {
        let keys = self.picks(3);
        let (limit, deadline) = self.limit();
        forget(&self.wire, &self.client, keys, limit, deadline).await;
    }

    async fn warm(&mut self) {
        let keys: Vec<PageKey> = self.picks(4).into_iter().map(page_key).collect();
        let (limit, deadline) = self.limit();
        let warmed = limit.run(self.client.warm(&keys, deadline)).await;
        self.wire.check_end("warming", deadline, LATE_MS);
        if warmed.is_some_and(|warmed| warmed > keys.len()) {
            self.wire.violate(format!("{warmed:?} of {} pages were warmed", keys.len()));
        }
    }

    async fn pin(&mut self) {
        let keys: Vec<PageKey> = self.picks(3).into_iter().map(page_key).collect();
        let kind = [PinKind::None, PinKind::Soft, PinKind::Hard][self.dice.below(3) as usize];
        let ttl = Duration::from_millis(self.dice.between(1, 20_000));
        let (limit, deadline) = self.limit();
        let pinned = limit.run(self.client.pin(&keys, kind, ttl, deadline)).await;
        self.wire.check_end("pin", deadline, LATE_MS);
        self.wire.world.event("pin", [keys.len() as u64, kind as u64, pinned.map_or(0, |pinned| pinned.pages as u64)]);
    }

    /// A bit flips in a page in L2 that nobody looks at.
    async fn flip(&mut self, key: u64) {
        if !self.wire.setup.profile.memory_fails() {
            return;
        }
        let node = self.dice.below(self.wire.setup.nodes as u64) as usize;
        let Some((server, arena)) = self.wire.network.host(&super::address(node)) else { return };
        let found = server.store().get(&self.wire.id(key), soon(PATIENCE)).now_or_never().flatten();
        let Some((page, TierCode::L2)) = found else { return };
        // L2 has it, and this.
        if Arc::strong_count(&page) > 2 {
            return;
        }
        let byte = page.payload.arena_offset() + self.dice.below(page.payload.len() as u64) as usize;
        self.wire.world.fault("L2 flip", [key, byte as u64, 0]);
        // SAFETY: the simulation has one thread, and nobody but L2 has the page.
        unsafe { arena.flip_bit(byte, self.dice.below(8) as u32) };
    }
}

/// Forgets keys; whether it is complete.
pub(super) async fn forget(wire: &Wire, client: &Client, keys: Vec<u64>, limit: Limit, deadline: Instant) -> bool {
    let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
    keys.iter().for_each(|&key| wire.world.event("forget", [key, 0, 0]));
    let forgetting = wire.model.lock().forget_begins(keys.clone());
    let forgotten = limit.run(client.forget(&names, deadline)).await;
    wire.check_end("forgetting", deadline, LATE_MS);
    let complete = forgotten.is_some_and(|forgotten| forgotten.complete);
    keys.iter().for_each(|&key| wire.world.event("forget answer", [key, complete.into(), 0]));
    wire.world.count(if complete { "forgets complete" } else { "forgets not complete" }, 1);
    wire.model.lock().forget_ends(forgetting, complete);
    complete
}
