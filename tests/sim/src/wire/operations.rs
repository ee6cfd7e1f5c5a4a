//! Workers of a cluster: they draw client operations and check every answer against the model.

use super::presence::Presence;
use super::{Cluster, LATE_MS, put, soon, worker_random};
use crate::faults::Profile;
use crate::model::ContentMatch;
use crate::payload::{key_in_namespace, page_key};
use crate::random::RandomSource;
use crate::wire::model::RequestTime;
use crate::workload::Limit;
use futures::FutureExt;
use larder_client::{Client, Fetched, FollowEnd, GetOptions, Hint, Lease, PageView, PinKind, Tier};
use larder_format::PageKey;
use larder_wire::TierCode;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::sleep;

const PATIENCE: Duration = Duration::from_secs(5);
const KEPT_MAX: usize = 6;

/// View of a page, rechecked now and then while the worker keeps it. Its bytes must not change,
/// whatever happens to page and node.
struct KeptView {
    view: PageView,
    key: u64,
    content: u64,
}

struct Worker {
    cluster: Arc<Cluster>,
    client: Client,
    namespace: u64,
    random: RandomSource,
    views: Vec<KeptView>,
    /// Pages to put again, as an engine puts pages of its L1.
    kept_pages: Vec<put::KeptPage>,
    leases: Vec<Lease>,
}

pub(super) async fn work(cluster: &Arc<Cluster>, clients: &[Client], round: u64, operations: u64) {
    let workers = clients.len() as u64 * cluster.setup.workers;
    let work = (0..workers).map(|number| {
        let at = (number % clients.len() as u64) as usize;
        let mut worker = Worker {
            cluster: cluster.clone(),
            client: clients[at].clone(),
            namespace: cluster.setup.namespace_of_client(at),
            random: worker_random(cluster, round, number),
            views: Vec::new(),
            kept_pages: Vec::new(),
            leases: Vec::new(),
        };
        tokio::spawn(async move {
            worker.client.ready(Duration::from_secs(1)).await;
            for _ in 0..operations / workers {
                if worker.cluster.world.failed() {
                    return;
                }
                if worker.random.chance(300_000) {
                    sleep(Duration::from_millis(worker.random.below(100))).await;
                }
                worker.run_operation().await;
                worker.cluster.operations.fetch_add(1, Ordering::Relaxed);
            }
            worker.recheck_views(usize::MAX);
        })
    });
    for worker in work.collect::<Vec<_>>() {
        if worker.await.is_err() {
            cluster.violate("a worker panicked".into());
        }
    }
}

impl Worker {
    async fn run_operation(&mut self) {
        let key = self.draw_key();
        match self.random.below(1000) {
            ..110 => self.put_parts(key).await,
            110..170 => self.put_copy().await,
            170..300 => self.put_pages().await,
            300..430 => self.get().await,
            430..500 => self.ranges().await,
            500..620 => self.view().await,
            620..700 => self.lookup().await,
            700..740 => self.locate().await,
            740..820 => self.follow(key).await,
            820..900 => self.forget().await,
            900..920 => self.warm().await,
            920..935 => self.pin().await,
            935..945 => self.hint().await,
            945..960 => self.flip(key).await,
            _ => self.recheck_views(1),
        }
    }

    fn draw_key(&mut self) -> u64 {
        // Some keys are more popular than others.
        let keys = self.cluster.setup.keys;
        let all = self.random.chance(500_000);
        let number = self.random.below(if all { keys } else { keys.min(6) });
        key_in_namespace(self.namespace, number)
    }

    fn draw_keys(&mut self, most: u64) -> Vec<u64> {
        let mut keys: Vec<u64> = (0..self.random.between(1, most)).map(|_| self.draw_key()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    fn limit(&mut self) -> (Limit, Instant) {
        let limit = match self.random.below(10) {
            0 => Limit::Deadline(Duration::from_millis(self.random.below(30))),
            1 => Limit::Deadline(Duration::from_millis(self.random.between(100, 1500))),
            2 => Limit::Cancel(Duration::from_millis(self.random.below(60))),
            _ => Limit::None,
        };
        let deadline = limit.deadline_within(PATIENCE);
        (limit, deadline)
    }

    async fn put_parts(&mut self, key: u64) {
        let limit = self.limit();
        let written = put::parts(&self.cluster, &self.client, &mut self.random, key, limit).await;
        self.keep(written);
    }

    fn keep(&mut self, page: impl IntoIterator<Item = put::KeptPage>) {
        self.kept_pages.extend(page);
        while self.kept_pages.len() > KEPT_MAX {
            self.kept_pages.swap_remove(self.random.below(self.kept_pages.len() as u64) as usize);
        }
    }

    async fn put_copy(&mut self) {
        let limit = self.limit();
        if self.kept_pages.is_empty() {
            return;
        }
        let kept = self.kept_pages[self.random.below(self.kept_pages.len() as u64) as usize];
        put::copy(&self.cluster, &self.client, &mut self.random, kept, limit).await;
    }

    async fn put_pages(&mut self) {
        let keys = self.draw_keys(5);
        let limit = self.limit();
        put::pages(&self.cluster, &self.client, &mut self.random, keys, limit).await;
    }

    fn check(&self, operation: &str, key: u64, bytes: &[u8], started: RequestTime) -> Option<u64> {
        let model = self.cluster.model.lock();
        let checked = self.cluster.world.check_key(key, |suspect| model.check(key, bytes, started, suspect));
        drop(model);
        checked.map_err(|problem| self.cluster.violate(format!("{operation}: {problem}"))).ok()
    }

    fn count_hit(&self, tier: Tier) {
        self.cluster.world.count(if tier == Tier::L2 { "L2 hits" } else { "L3 hits" }, 1);
    }

    async fn get(&mut self) {
        let keys = self.draw_keys(6);
        let bytes = self.cluster.setup.geometry.page_bytes();
        let pages = keys.iter().map(|&key| (page_key(key), vec![0xee; bytes])).collect();
        let ((limit, deadline), started) = (self.limit(), self.cluster.request_time());
        let hedge = self.random.chance(200_000).then(|| Duration::from_millis(self.random.below(300)));
        let options = GetOptions { hedge_after: hedge, busy_retries: self.random.below(3) as u32 };
        let waits = matches!(limit, Limit::None) && hedge.is_none();
        let presence = Presence::before(&self.cluster, &self.client, &keys, waits);
        let got = limit.run(self.client.get_described(pages, options, deadline)).await;
        self.cluster.check_end("get", deadline, LATE_MS);
        let copied = self.cluster.model.lock().tick();
        let Some(got) = got else { return self.cluster.world.count("cancelled", 1) };
        for (at, (key, (bytes, fetched, description))) in keys.into_iter().zip(got).enumerate() {
            let Some(tier) = fetched.tier() else {
                let busy = matches!(fetched, Fetched::Busy { .. });
                if !busy && self.cluster.setup.reports_busy() {
                    presence.check_miss(&self.cluster, at, started, "get");
                }
                self.cluster.world.event("miss", [key, busy.into(), 0]);
                self.cluster.world.count(if busy { "busy" } else { "misses" }, 1);
                continue;
            };
            let content = self.check("get", key, &bytes, started);
            self.cluster.world.event("hit", [key, content.unwrap_or(0), tier as u64]);
            self.count_hit(tier);
            let origin = description.and_then(|description| description.origin);
            self.keep(content.map(|content| put::KeptPage { key, content, origin, copied }));
        }
    }

    fn range(&mut self) -> Range<u32> {
        let geometry = self.cluster.setup.geometry;
        let bytes = geometry.page_bytes() as u64;
        let start = self.random.below(bytes);
        let end = match self.random.below(8) {
            0..3 => {
                let part = self.random.below(geometry.part_count() as u64) as usize;
                return geometry.part_range(part).unwrap_or(0..0);
            }
            3..6 => start + 1 + self.random.below(bytes - start),
            6 => (start + 1 + self.random.below(16)).min(bytes),
            _ => [start, bytes + 1][self.random.below(2) as usize],
        };
        start as u32..end as u32
    }

    async fn ranges(&mut self) {
        let started: Vec<(u64, Range<u32>)> = self.draw_keys(5).into_iter().map(|key| (key, self.range())).collect();
        let ranges =
            started.iter().map(|(key, range)| (page_key(*key), range.clone(), vec![0xee; range.len()])).collect();
        let ((limit, deadline), since) = (self.limit(), self.cluster.request_time());
        let keys: Vec<u64> = started.iter().map(|(key, _)| *key).collect();
        let presence = Presence::before(&self.cluster, &self.client, &keys, matches!(limit, Limit::None));
        let got = limit.run(self.client.get_ranges_with(ranges, GetOptions::default(), deadline)).await;
        self.cluster.check_end("get of ranges", deadline, LATE_MS);
        let Some(got) = got else { return self.cluster.world.count("cancelled", 1) };
        let page_bytes = self.cluster.setup.geometry.page_bytes();
        for (at, ((key, range), (bytes, fetched))) in started.into_iter().zip(got).enumerate() {
            let is_valid = !range.is_empty() && range.end as usize <= page_bytes;
            let Some(tier) = fetched.tier() else {
                self.cluster.world.count("ranges missed", 1);
                if is_valid && fetched == Fetched::Miss && self.cluster.setup.reports_busy() {
                    presence.check_miss(&self.cluster, at, since, "get of ranges");
                }
                continue;
            };
            if !is_valid {
                self.cluster.violate(format!("key {key}: the invalid range {range:?} returned bytes"));
            }
            let model = self.cluster.model.lock();
            let check = |suspect| model.check_range(key, range.start as usize, &bytes, since, suspect);
            let checked = self.cluster.world.check_key(key, check);
            drop(model);
            self.cluster.world.event("range", [key, range.start.into(), *checked.as_ref().unwrap_or(&0)]);
            if let Err(problem) = checked {
                self.cluster.violate(format!("get_ranges: {problem}"));
            }
            self.cluster.world.count("ranges", 1);
            self.count_hit(tier);
        }
    }

    async fn view(&mut self) {
        let keys = self.draw_keys(4);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let ((limit, deadline), started) = (self.limit(), self.cluster.request_time());
        // A view does not tell a busy node from a miss.
        let waits = matches!(limit, Limit::None) && !self.cluster.setup.may_be_busy();
        let presence = Presence::before(&self.cluster, &self.client, &keys, waits);
        let views = limit.run(self.client.view(&names, deadline)).await;
        self.cluster.check_end("view", deadline, LATE_MS);
        for (at, (key, view)) in keys.into_iter().zip(views.unwrap_or_default()).enumerate() {
            let Some(view) = view else {
                presence.check_miss(&self.cluster, at, started, "view");
                continue;
            };
            let content = self.check("view", key, &view, started);
            self.cluster.world.event("view", [key, content.unwrap_or(0), view.in_place().into()]);
            self.cluster.world.count(if view.in_place() { "views in place" } else { "views copied" }, 1);
            if let Some(content) = content {
                self.views.push(KeptView { view, key, content });
            }
        }
        while self.views.len() > KEPT_MAX {
            self.recheck_views(1);
        }
    }

    fn recheck_views(&mut self, most: usize) {
        for _ in 0..most.min(self.views.len()) {
            let which = self.random.below(self.views.len() as u64) as usize;
            let KeptView { view, key, content } = &self.views[which];
            // A memory fault may change a page that is read in place.
            match crate::payload::check(*key, *content, view) {
                Ok(()) => {}
                Err(_) if self.cluster.setup.profile.memory_fails() && view.in_place() => {
                    self.cluster.world.forgive("forgiven: damage by failing memory", 1);
                }
                Err(problem) => {
                    self.cluster.violate(format!("bytes changed while a reader held the view: {problem}"));
                }
            }
            self.cluster.world.count("views rechecked", 1);
            if most > 1 || self.random.chance(500_000) {
                drop(self.views.swap_remove(which));
            }
        }
        if most > 1 || self.random.chance(300_000) {
            self.leases.clear();
        }
    }

    async fn lookup(&mut self) {
        let keys = self.draw_keys(6);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let hold = Duration::from_millis([0, 100, 3_000, 60_000][self.random.below(4) as usize]);
        let ((limit, deadline), started) = (self.limit(), self.cluster.request_time());
        let presence = Presence::before(&self.cluster, &self.client, &keys, matches!(limit, Limit::None));
        let found = limit.run(self.client.lookup(&names, hold, deadline)).await;
        self.cluster.check_end("lookup", deadline, LATE_MS);
        let Some(found) = found else { return };
        if found.answered {
            // The prefix ends at the first page that is not there.
            presence.check_miss(&self.cluster, found.tiers.len(), started, "lookup");
        }
        self.cluster.world.event("lookup", [keys[0], found.tiers.len() as u64, found.held as u64]);
        for (&key, tier) in keys.iter().zip(&found.tiers) {
            self.check_reported_tier(key, *tier, started);
        }
        if found.held > 0 {
            self.cluster.world.count("pages held", found.held as u64);
            // With several nodes, another one may own the pages when it returns.
            let alone = self.cluster.setup.nodes == 1 && self.cluster.setup.profile == Profile::Calm;
            if alone && hold.as_secs() > 1 {
                self.check_held_pages(&keys[..found.held], started).await;
            }
        }
        self.leases.push(found.lease);
        if self.leases.len() > KEPT_MAX {
            self.leases.remove(0);
        }
    }

    /// Reads pages that a lookup holds. Without faults they must be hits, unless they were
    /// forgotten or the node was closed.
    async fn check_held_pages(&mut self, keys: &[u64], started: RequestTime) {
        let closed_before = self.cluster.world.counts().get("nodes closed").copied();
        sleep(Duration::from_millis(self.random.below(800))).await;
        let bytes = self.cluster.setup.geometry.page_bytes();
        let pages = keys.iter().map(|&key| (page_key(key), vec![0; bytes])).collect();
        let got = self.client.get_with(pages, GetOptions::default(), soon(Duration::from_secs(1))).await;
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let again = self.client.lookup(&names, Duration::ZERO, soon(Duration::from_secs(1))).await;
        let mut untouched_so_far = true;
        for (place, (&key, (_, fetched))) in keys.iter().zip(got).enumerate() {
            let closed = self.cluster.world.counts().get("nodes closed").copied() != closed_before;
            let untouched = !closed && self.cluster.model.lock().is_untouched(key, started);
            if untouched {
                self.cluster.world.count("held pages read", 1);
                if fetched == Fetched::Miss && self.cluster.setup.reports_busy() {
                    self.cluster.violate(format!("key {key} is held by a lookup, and a get missed it"));
                }
            }
            // Lookups return a prefix. Behind a page that may be gone, they prove nothing.
            untouched_so_far &= untouched;
            if untouched_so_far && again.answered && again.tiers.len() <= place {
                self.cluster.violate(format!("key {key} is held by a lookup, and another lookup did not find it"));
            }
        }
    }

    fn check_reported_tier(&self, key: u64, tier: Tier, started: RequestTime) {
        let allowed = self.cluster.model.lock().may_exist(key, ContentMatch::Any, started);
        if !allowed && !self.cluster.world.forgives_suspect(key) {
            self.cluster.violate(format!(
                "key {key} is reported in {tier:?}, although it was forgotten, has expired, or was never put"
            ));
        }
    }

    async fn locate(&mut self) {
        let keys = self.draw_keys(6);
        let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
        let ((limit, deadline), started) = (self.limit(), self.cluster.request_time());
        let presence = Presence::before(&self.cluster, &self.client, &keys, matches!(limit, Limit::None));
        let found = limit.run(self.client.locate(&names, deadline)).await;
        self.cluster.check_end("locate", deadline, LATE_MS);
        for (at, (key, tier)) in keys.into_iter().zip(found.unwrap_or_default()).enumerate() {
            match tier {
                Some(tier) => self.check_reported_tier(key, tier, started),
                None => presence.check_miss(&self.cluster, at, started, "locate"),
            }
        }
    }

    async fn follow(&mut self, key: u64) {
        let buffer = vec![0xee; self.cluster.setup.geometry.page_bytes()];
        let ((limit, _), started) = (self.limit(), self.cluster.request_time());
        let deadline = limit.deadline_within(Duration::from_millis(self.random.below(3000)));
        let followed = limit.run(self.client.follow(page_key(key), buffer, deadline).finish_described()).await;
        let copied = self.cluster.model.lock().tick();
        self.cluster.check_end("follow", deadline.max(soon(Duration::ZERO) - Duration::from_millis(60)), LATE_MS);
        let Some((bytes, end, description)) = followed else { return self.cluster.world.count("cancelled", 1) };
        self.cluster.world.event("follow", [key, end as u64, 0]);
        self.cluster.world.count(
            match end {
                FollowEnd::Sealed => "follows completed",
                FollowEnd::Aborted => "follows of aborted puts",
                FollowEnd::Miss => "follows that missed",
                FollowEnd::Busy => "follows refused",
            },
            1,
        );
        if end == FollowEnd::Sealed {
            let content = self.check("follow", key, &bytes, started);
            let origin = description.and_then(|description| description.origin);
            self.keep(content.map(|content| put::KeptPage { key, content, origin, copied }));
        }
    }

    async fn forget(&mut self) {
        let keys = self.draw_keys(3);
        let (limit, deadline) = self.limit();
        forget(&self.cluster, &self.client, keys, limit, deadline).await;
    }

    async fn warm(&mut self) {
        let keys: Vec<PageKey> = self.draw_keys(4).into_iter().map(page_key).collect();
        let (limit, deadline) = self.limit();
        let warmed = limit.run(self.client.warm(&keys, deadline)).await;
        self.cluster.check_end("warming", deadline, LATE_MS);
        if warmed.is_some_and(|warmed| warmed > keys.len()) {
            self.cluster.violate(format!("warm reported {warmed:?} of {} pages", keys.len()));
        }
    }

    async fn pin(&mut self) {
        let keys: Vec<PageKey> = self.draw_keys(3).into_iter().map(page_key).collect();
        let kind = [PinKind::None, PinKind::Soft, PinKind::Hard][self.random.below(3) as usize];
        let ttl = Duration::from_millis(self.random.between(1, 20_000));
        let (limit, deadline) = self.limit();
        let pinned = limit.run(self.client.pin(&keys, kind, ttl, deadline)).await;
        self.cluster.check_end("pin", deadline, LATE_MS);
        self.cluster
            .world
            .event("pin", [keys.len() as u64, kind as u64, pinned.map_or(0, |pinned| pinned.pages as u64)]);
    }

    async fn hint(&mut self) {
        let keys: Vec<PageKey> = self.draw_keys(6).into_iter().map(page_key).collect();
        let time = Duration::from_millis(self.random.between(1, 20_000));
        let hint = [Hint::None, Hint::Retain(time), Hint::Demote, Hint::SessionEnded][self.random.below(4) as usize];
        let generated = self.random.chance(500_000).then(|| self.random.below(1000) as u32);
        let (limit, deadline) = self.limit();
        let found = limit.run(self.client.hint(&keys, generated, hint, deadline)).await;
        self.cluster.check_end("hint", deadline, LATE_MS);
        if found.is_some_and(|found| found > keys.len()) {
            self.cluster.violate(format!("a hint reached {found:?} of {} pages", keys.len()));
        }
        self.cluster.world.event("hint", [keys.len() as u64, found.unwrap_or(0) as u64, 0]);
        self.cluster.world.count("hints", 1);
    }

    async fn flip(&mut self, key: u64) {
        if !self.cluster.setup.profile.memory_fails() {
            return;
        }
        let node = self.random.below(self.cluster.setup.nodes as u64) as usize;
        let Some((server, arena)) = self.cluster.network.host(&super::address(node)) else { return };
        let found = server.store().tiers().get(&self.cluster.id(key), soon(PATIENCE)).now_or_never().flatten();
        let Some((page, TierCode::L2)) = found else { return };
        // L2's index, its policy and this function hold it. With a fourth owner, a reader could see
        // the bit change.
        if Arc::strong_count(&page) > 3 {
            return;
        }
        let byte = page.payload.arena_offset() + self.random.below(page.payload.len() as u64) as usize;
        self.cluster.world.fault("L2 flip", [key, byte as u64, 0]);
        // SAFETY: the simulation runs on one thread, and only L2 holds the page.
        unsafe { arena.flip_bit(byte, self.random.below(8) as u32) };
    }
}

pub(super) async fn forget(
    cluster: &Cluster,
    client: &Client,
    keys: Vec<u64>,
    limit: Limit,
    deadline: Instant,
) -> bool {
    let names: Vec<PageKey> = keys.iter().map(|&key| page_key(key)).collect();
    keys.iter().for_each(|&key| cluster.world.event("forget", [key, 0, 0]));
    let forgetting = cluster.model.lock().forget_begins(keys.clone());
    let forgotten = limit.run(client.forget(&names, deadline)).await;
    cluster.check_end("forgetting", deadline, LATE_MS);
    let complete = forgotten.is_some_and(|forgotten| forgotten.complete);
    keys.iter().for_each(|&key| cluster.world.event("forget answer", [key, complete.into(), 0]));
    cluster.world.count(if complete { "forgets complete" } else { "forgets not complete" }, 1);
    cluster.model.lock().forget_ends(forgetting, complete);
    complete
}
