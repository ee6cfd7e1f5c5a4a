//! Table of known engines, and the load balancer that picks one for a request.
//!
//! Invariants:
//!
//! - The outstanding load of an engine is the sum of its live [`LoadGuard`]s. A request gives its
//!   share back however it ends.
//! - The balancer never picks an engine that the request has already tried.
//! - An expelled engine does not return under its name before [`EXPELLED_FOR`] has passed.

use crate::breaker::CircuitBreaker;
use crate::models::ModelKey;
use larder_format::{NamespaceId, PageKey};
use larder_runtime::lock::{Mutex, RwLock};
use larder_worker::api::{EngineInfo, Role};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of engines in the table. Further members of the store are ignored.
pub const ENGINES_MAX: usize = 4096;

/// Time for which an engine that broke the interface stays out of the table. It may have been
/// repaired by then. One that was restarted has another name and joins at once.
pub const EXPELLED_FOR: Duration = Duration::from_secs(60);

/// Engine as seen by this router: its self-description, its circuit breaker and the load this
/// router put on it.
#[derive(Debug)]
pub struct RemoteEngine {
    pub name: String,
    /// Self-description, confirmed over HTTP before the engine enters the table. It never changes:
    /// an engine with another description replaces this one.
    pub info: EngineInfo,
    pub namespace: NamespaceId,
    breaker: Mutex<CircuitBreaker>,
    // Load counters are heuristics of the balancer and guard no other data: relaxed ordering is
    // enough for all of them.
    outstanding_tokens: AtomicU64,
    requests: AtomicU64,
}

impl RemoteEngine {
    pub fn new(name: String, info: EngineInfo) -> Self {
        let namespace = info.descriptor.id();
        Self {
            name,
            info,
            namespace,
            breaker: Mutex::default(),
            outstanding_tokens: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        }
    }

    /// Model that the engine serves. Engines with the same name of a model in different namespaces
    /// serve different models.
    pub fn model_key(&self) -> ModelKey {
        (self.info.model.clone(), self.namespace)
    }

    fn serves(&self, role: Role, namespace: NamespaceId, tokens: usize) -> bool {
        self.info.role == role && self.namespace == namespace && self.info.max_context as usize > tokens
    }

    pub fn is_admitted(&self) -> bool {
        self.breaker.lock().admits(Instant::now())
    }

    /// Reports to the circuit breaker that the engine could not be reached, or that a connection
    /// broke.
    pub fn note_lost(&self) {
        self.breaker.lock().lost(Instant::now());
    }

    pub fn note_fault(&self) {
        self.breaker.lock().fault(Instant::now());
    }

    pub fn note_success(&self) {
        self.breaker.lock().success();
    }

    /// Tokens that this router requested and that the engine has not finished yet. Load from other
    /// routers is not known here.
    pub fn outstanding_tokens(&self) -> u64 {
        self.outstanding_tokens.load(Ordering::Relaxed)
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Adds one request of `tokens` tokens to the engine's load until the guard is dropped. Callers
    /// count the prompt tokens to compute, and at most 64 tokens of the answer.
    pub fn add_load(self: &Arc<Self>, tokens: u64) -> LoadGuard {
        self.outstanding_tokens.fetch_add(tokens, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        LoadGuard { engine: self.clone(), tokens }
    }
}

/// Sum of the requests that idle engines take at a time. `None` if one does not tell, or without
/// engines.
fn room_of<'a>(
    engines: impl Iterator<Item = &'a Arc<RemoteEngine>>,
    tokens: usize,
    parameter_bytes: usize,
) -> Option<usize> {
    let rooms = engines.map(|e| e.info.requests_at_once(tokens, parameter_bytes));
    rooms.reduce(|sum, room| Some(sum?.saturating_add(room?))).flatten()
}

/// One request's share of an engine's load. Dropping it gives the share back. It holds the engine,
/// also after the engine has left the table.
#[derive(Debug)]
pub struct LoadGuard {
    engine: Arc<RemoteEngine>,
    tokens: u64,
}

impl LoadGuard {
    pub fn engine(&self) -> &Arc<RemoteEngine> {
        &self.engine
    }

    /// Lowers the share to `tokens` because part of the request is finished. A share that is lower
    /// already stays.
    pub fn reduce_to(&mut self, tokens: u64) {
        let done = self.tokens - self.tokens.min(tokens);
        self.engine.outstanding_tokens.fetch_sub(done, Ordering::Relaxed);
        self.tokens -= done;
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        let tokens_before = self.engine.outstanding_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        let requests_before = self.engine.requests.fetch_sub(1, Ordering::Relaxed);
        // Every guard added exactly these amounts, so a smaller counter means that some guard gave
        // back twice.
        debug_assert!(tokens_before >= self.tokens && requests_before >= 1, "load of {} underflows", self.engine.name);
    }
}

#[derive(Debug, Clone, Copy)]
pub struct EngineRequirement<'a> {
    pub role: Role,
    pub namespace: NamespaceId,
    /// Minimum context of the engine, in tokens: the prompt and the first token of the answer.
    pub context: usize,
    /// Preferred context, in tokens: prompt and whole answer. Engines with less are picked only if
    /// no engine has as much.
    pub context_preferred: usize,
    /// Key of the prompt's beginning. Among equally loaded engines, requests with one beginning go
    /// to one engine, because its L1 may hold their pages.
    pub affinity: PageKey,
    pub tried: &'a [String],
}

/// Engines by name, each with the time when it left the table. A map with [`ENGINES_MAX`] names
/// notes no further ones.
type Departures = Mutex<BTreeMap<String, (Arc<RemoteEngine>, Instant)>>;

#[derive(Debug, Default)]
pub struct EngineTable {
    engines: RwLock<BTreeMap<String, Arc<RemoteEngine>>>,
    /// Engines that broke the interface. Locked after `engines`.
    expelled: Departures,
    /// Engines that left in any way, at most [`ENGINES_MAX`]. Locked after `engines`.
    left: Departures,
}

/// Adds an engine to those that left, and drops those that left more than [`EXPELLED_FOR`] ago.
fn note_left(left: &Departures, engine: &Arc<RemoteEngine>) {
    let mut left = left.lock();
    left.retain(|_, (_, at)| at.elapsed() < EXPELLED_FOR);
    // Bounds the map: a member can return under many names.
    if left.len() < ENGINES_MAX {
        left.insert(engine.name.clone(), (engine.clone(), Instant::now()));
    }
}

impl EngineTable {
    /// Adds an engine, or replaces the one of the same name. A full table ignores new names, which
    /// bounds memory against a faulty store.
    pub fn insert(&self, engine: RemoteEngine) {
        // One lock for check and insert, so that two engines joining at once cannot exceed the
        // limit.
        let mut engines = self.engines.write();
        if engines.len() < ENGINES_MAX || engines.contains_key(&engine.name) {
            engines.insert(engine.name.clone(), Arc::new(engine));
        }
    }

    /// Removes an engine. Requests that it is serving continue. Returns `false` if the table has no
    /// such engine.
    pub fn remove(&self, name: &str) -> bool {
        let mut engines = self.engines.write();
        let Some(engine) = engines.remove(name) else { return false };
        note_left(&self.left, &engine);
        true
    }

    /// Removes an engine that broke the interface, and keeps its name out for a while. Returns
    /// `false` if the table has no such engine, or another one of its name.
    pub fn expel(&self, engine: &Arc<RemoteEngine>) -> bool {
        let mut engines = self.engines.write();
        if !engines.get(&engine.name).is_some_and(|known| Arc::ptr_eq(known, engine)) {
            return false;
        }
        engines.remove(&engine.name);
        note_left(&self.expelled, engine);
        note_left(&self.left, engine);
        true
    }

    /// Returns `true` if the engine of this name broke the interface within [`EXPELLED_FOR`].
    /// [`EngineTable::insert`] does not check that: its caller does.
    pub fn is_expelled(&self, name: &str) -> bool {
        self.expelled.lock().get(name).is_some_and(|(_, at)| at.elapsed() < EXPELLED_FOR)
    }

    /// All engines that may hold pages: those of the table, and those that were expelled within
    /// [`EXPELLED_FOR`]. Each name occurs once.
    pub fn list_with_expelled(&self) -> Vec<Arc<RemoteEngine>> {
        let table = self.engines.read();
        let expelled = self.expelled.lock();
        let is_out = |name: &String, at: Instant| at.elapsed() < EXPELLED_FOR && !table.contains_key(name);
        let expelled = expelled.iter().filter(|(name, (_, at))| is_out(name, *at)).map(|(_, (engine, _))| engine);
        table.values().chain(expelled).cloned().collect()
    }

    pub fn get(&self, name: &str) -> Option<Arc<RemoteEngine>> {
        self.engines.read().get(name).cloned()
    }

    /// Snapshot of all engines, ordered by name. The order keeps status output stable.
    pub fn list(&self) -> Vec<Arc<RemoteEngine>> {
        // Clones the handles, so that no caller holds the lock across an await.
        self.engines.read().values().cloned().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.engines.read().is_empty()
    }

    /// Number of engines of `role` in `namespace` that their circuit breakers admit now. Costs a
    /// scan of the table, and a lock for each engine that fits.
    pub fn admitted(&self, role: Role, namespace: NamespaceId) -> usize {
        let fits = |e: &&Arc<RemoteEngine>| e.info.role == role && e.namespace == namespace && e.is_admitted();
        self.engines.read().values().filter(fits).count()
    }

    /// Longest context among the engines of `role` in `namespace`, in tokens. Excluded engines
    /// count too. Returns `None` if there is no such engine.
    pub fn context_max(&self, role: Role, namespace: NamespaceId) -> Option<usize> {
        let engines = self.engines.read();
        let fitting = engines.values().filter(|e| e.info.role == role && e.namespace == namespace);
        fitting.map(|e| e.info.max_context as usize).max()
    }

    /// Number of requests that the idle engines of `role` in `namespace` take from this router at a
    /// time, each of `tokens` tokens and `parameter_bytes` bytes of other parameters. `None` if one
    /// of them does not tell, or if none has so long a context.
    pub fn requests_at_once(
        &self,
        role: Role,
        namespace: NamespaceId,
        tokens: usize,
        parameter_bytes: usize,
    ) -> Option<usize> {
        let fits = |e: &RemoteEngine| e.serves(role, namespace, tokens);
        let engines = self.engines.read();
        room_of(engines.values().filter(|e| fits(e)), tokens, parameter_bytes)
    }

    /// As [`EngineTable::requests_at_once`], with the engines that left within [`EXPELLED_FOR`].
    /// They may return.
    pub fn requests_at_once_lately(
        &self,
        role: Role,
        namespace: NamespaceId,
        tokens: usize,
        parameter_bytes: usize,
    ) -> Option<usize> {
        let engines = self.engines.read();
        let left = self.left.lock();
        let is_out = |name: &String, at: Instant| at.elapsed() < EXPELLED_FOR && !engines.contains_key(name);
        let left = left.iter().filter(|(name, (_, at))| is_out(name, *at)).map(|(_, (engine, _))| engine);
        let fits = |e: &RemoteEngine| e.serves(role, namespace, tokens);
        room_of(engines.values().chain(left).filter(|e| fits(e)), tokens, parameter_bytes)
    }

    /// Picks the least loaded admitted engine that meets `need`.
    ///
    /// Engines with the preferred context come before those without. Ties go by prefix affinity.
    /// Returns `None` if no engine qualifies. Costs a scan of the table.
    pub fn choose(&self, need: &EngineRequirement<'_>) -> Option<Arc<RemoteEngine>> {
        let engines = self.engines.read();
        let fitting = engines.values().filter(|e| {
            e.info.role == need.role
                && e.namespace == need.namespace
                && e.info.max_context as usize >= need.context
                && !need.tried.contains(&e.name)
                // Last, because it is the only condition that takes a lock.
                && e.is_admitted()
        });
        fitting
            .min_by_key(|e| {
                let is_short = (e.info.max_context as usize) < need.context_preferred;
                (is_short, e.outstanding_tokens(), std::cmp::Reverse(rendezvous_weight(&e.name, &need.affinity)))
            })
            .cloned()
    }
}

/// Rendezvous hash of an engine and a prompt's beginning. All routers compute the same weight. An
/// engine that joins or leaves moves only the prompts that it wins or held.
fn rendezvous_weight(name: &str, affinity: &PageKey) -> u64 {
    // Reuses the page-key hash, which is stable across builds. The standard hasher is not.
    let letters: Vec<u32> = name.bytes().map(u32::from).collect();
    PageKey::chain(Some(affinity), &letters).prefix_u64()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};

    pub(crate) fn info(role: Role, weights: u8, max_context: u32) -> EngineInfo {
        let geometry = PageGeometry {
            dtype: KvDtype::F32,
            layers: 2,
            kv_heads: 1,
            head_dim: 4,
            page_tokens: 4,
            layers_per_part: 1,
            head_groups: 1,
        };
        let descriptor =
            NamespaceDescriptor { model: "m".into(), weights: [weights; 32], geometry, tenant: "default".into() };
        EngineInfo {
            role,
            url: "http://127.0.0.1:1".into(),
            model: "m".into(),
            descriptor,
            numerics: String::new(),
            max_context,
            page_tokens: 4,
            request_bytes_max: 0,
            requests_max: 0,
        }
    }

    fn table() -> EngineTable {
        let table = EngineTable::default();
        for name in ["d1", "d2", "d3"] {
            table.insert(RemoteEngine::new(name.into(), info(Role::Decode, 1, 100)));
        }
        table.insert(RemoteEngine::new("p1".into(), info(Role::Prefill, 1, 100)));
        table.insert(RemoteEngine::new("other".into(), info(Role::Decode, 2, 1000)));
        table
    }

    fn need(tried: &[String]) -> EngineRequirement<'_> {
        let namespace = info(Role::Decode, 1, 0).descriptor.id();
        EngineRequirement {
            role: Role::Decode,
            namespace,
            context: 50,
            context_preferred: 0,
            affinity: PageKey([9; 32]),
            tried,
        }
    }

    #[test]
    fn choose_picks_the_least_loaded_engine() {
        let table = table();
        let loads = [("d1", 10), ("d2", 3), ("d3", 10)];
        let mut booked: Vec<LoadGuard> =
            loads.iter().map(|(name, tokens)| table.get(name).unwrap().add_load(*tokens)).collect();
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d2");
        booked[2].reduce_to(1);
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d3");
    }

    #[test]
    fn load_guard_gives_its_share_back_in_steps() {
        let table = table();
        let engine = table.get("d1").unwrap();
        let mut load = engine.add_load(100);
        load.reduce_to(30);
        load.reduce_to(60);
        assert_eq!((engine.outstanding_tokens(), engine.requests()), (30, 1));
        drop(load);
        assert_eq!((engine.outstanding_tokens(), engine.requests()), (0, 0));
    }

    #[test]
    fn choose_breaks_ties_by_prefix_affinity() {
        let table = table();
        let mut chosen = std::collections::BTreeMap::<String, usize>::new();
        for i in 0..90u8 {
            let need = EngineRequirement { affinity: PageKey([i; 32]), ..need(&[]) };
            let first = table.choose(&need).unwrap().name.clone();
            assert_eq!(table.choose(&need).unwrap().name, first);
            *chosen.entry(first).or_default() += 1;
        }
        assert_eq!(chosen.len(), 3);
        assert!(chosen.values().all(|&count| count > 10), "{chosen:?}");
    }

    #[test]
    fn choose_prefers_engines_with_room_for_the_whole_answer() {
        let table = table();
        table.insert(RemoteEngine::new("large".into(), info(Role::Decode, 1, 200)));
        let busy = table.get("large").unwrap().add_load(1000);
        let wants = |context_preferred| EngineRequirement { context_preferred, ..need(&[]) };
        assert_ne!(table.choose(&wants(100)).unwrap().name, "large");
        assert_eq!(table.choose(&wants(101)).unwrap().name, "large");
        assert_ne!(
            table.choose(&wants(201)).unwrap().name,
            "large",
            "no engine fits the whole answer, so load decides"
        );
        drop(busy);
    }

    #[test]
    fn choose_skips_tried_short_and_excluded_engines() {
        let table = table();
        let mut tried = Vec::new();
        while let Some(engine) = table.choose(&need(&tried)) {
            assert!(engine.name.starts_with('d') && !tried.contains(&engine.name));
            tried.push(engine.name.clone());
        }
        assert_eq!(tried.len(), 3);
        assert!(table.choose(&EngineRequirement { context: 101, ..need(&[]) }).is_none(), "the context is too short");
        for name in ["d1", "d3"] {
            table.get(name).unwrap().note_lost();
        }
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d2");
        assert!(table.remove("d2"));
        assert!(table.choose(&need(&[])).is_none());
        table.get("d3").unwrap().note_success();
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d3");
    }

    #[test]
    fn expelled_engine_is_out_and_still_counts_as_a_holder_of_pages() {
        let table = table();
        let engine = table.get("d1").unwrap();
        table.insert(RemoteEngine::new("d1".into(), info(Role::Decode, 1, 200)));
        assert!(!table.expel(&engine), "another engine of its name has joined");
        let engine = table.get("d1").unwrap();
        assert!(table.expel(&engine) && !table.expel(&engine));
        assert!(table.is_expelled("d1") && !table.is_expelled("d2") && table.get("d1").is_none());
        assert_eq!((table.list().len(), table.list_with_expelled().len()), (4, 5));
        table.insert(RemoteEngine::new("d1".into(), info(Role::Decode, 1, 200)));
        assert_eq!(table.list_with_expelled().len(), 5, "the engine that has its name stands for it");
    }

    #[test]
    fn expelled_engine_counts_as_a_holder_of_pages_only_for_a_while() {
        let table = table();
        let engine = table.get("d1").unwrap();
        assert!(table.expel(&engine));
        assert_eq!(table.list_with_expelled().len(), 5);
        // No other engine is expelled meanwhile, which would remove the entry.
        table.expelled.lock().get_mut("d1").unwrap().1 = Instant::now().checked_sub(EXPELLED_FOR).unwrap();
        assert_eq!(table.list_with_expelled().len(), 4, "a forget must become complete without it");
    }

    #[test]
    fn engine_that_left_counts_as_room_for_a_while() {
        let table = EngineTable::default();
        let namespace = info(Role::Decode, 1, 0).descriptor.id();
        for (name, requests_max) in [("d1", 3), ("d2", 4), ("d3", 5)] {
            let info = EngineInfo { requests_max, request_bytes_max: u64::MAX, ..info(Role::Decode, 1, 100) };
            table.insert(RemoteEngine::new(name.into(), info));
        }
        let now_and_lately = || {
            let now = table.requests_at_once(Role::Decode, namespace, 10, 0);
            (now, table.requests_at_once_lately(Role::Decode, namespace, 10, 0))
        };
        assert_eq!(now_and_lately(), (Some(12), Some(12)));
        assert!(table.remove("d1") && table.expel(&table.get("d2").unwrap()));
        assert_eq!(now_and_lately(), (Some(5), Some(12)));
        let info = table.left.lock()["d1"].0.info.clone();
        table.insert(RemoteEngine::new("d1".into(), info));
        assert_eq!(now_and_lately(), (Some(8), Some(12)), "an engine that is back counts once");
        table.left.lock().get_mut("d2").unwrap().1 = Instant::now().checked_sub(EXPELLED_FOR).unwrap();
        assert_eq!(now_and_lately(), (Some(8), Some(8)));
    }
}
