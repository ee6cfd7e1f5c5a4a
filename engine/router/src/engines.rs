//! The engines that are there, and which of them gets a request.
//!
//! What always holds: an engine's outstanding work is the sum of the [`Work`] guards that are alive, so a request that
//! ends in any way gives its share back; and an engine that a request has tried is never chosen for it again.

use crate::breaker::Breaker;
use larder_format::{NamespaceId, PageKey};
use larder_worker::api::{EngineInfo, Role};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Most engines in the table; further members are ignored.
pub const ENGINES_MAX: usize = 4096;

/// One engine.
#[derive(Debug)]
pub struct Engine {
    /// The name it registered under.
    pub name: String,
    /// What it said of itself.
    pub info: EngineInfo,
    /// The namespace of its pages.
    pub namespace: NamespaceId,
    breaker: Mutex<Breaker>,
    outstanding_tokens: AtomicU64,
    requests: AtomicU64,
}

impl Engine {
    /// An engine that just came.
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

    /// Whether requests may go there now.
    pub fn is_admitted(&self) -> bool {
        self.breaker.lock().admits(Instant::now())
    }

    /// It could not be reached, or the connection broke.
    pub fn note_lost(&self) {
        self.breaker.lock().lost(Instant::now());
    }

    /// It answered that it failed.
    pub fn note_fault(&self) {
        self.breaker.lock().fault(Instant::now());
    }

    /// It answered well.
    pub fn note_success(&self) {
        self.breaker.lock().success();
    }

    /// Tokens it was asked for and has not answered for yet.
    pub fn outstanding_tokens(&self) -> u64 {
        self.outstanding_tokens.load(Ordering::Relaxed)
    }

    /// Requests it is working on for this router.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Books `tokens` of work until the guard is dropped.
    pub fn book(self: &Arc<Self>, tokens: u64) -> Work {
        self.outstanding_tokens.fetch_add(tokens, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        Work { engine: self.clone(), tokens }
    }
}

/// A share of an engine's outstanding work.
#[derive(Debug)]
pub struct Work {
    engine: Arc<Engine>,
    tokens: u64,
}

impl Work {
    /// Who does the work.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Part of it is done: `tokens` are left at most.
    pub fn reduce_to(&mut self, tokens: u64) {
        let done = self.tokens.saturating_sub(tokens);
        self.engine.outstanding_tokens.fetch_sub(done, Ordering::Relaxed);
        self.tokens -= done;
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.engine.outstanding_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        self.engine.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a request needs of an engine.
#[derive(Debug, Clone, Copy)]
pub struct Need<'a> {
    /// Prefill or decode.
    pub role: Role,
    /// Whose pages.
    pub namespace: NamespaceId,
    /// Tokens that must fit its context: the prompt and the first one of the answer.
    pub context: usize,
    /// Tokens that should fit it: an engine that has so much is taken before any that has not.
    pub context_wanted: usize,
    /// Draws requests with one beginning to one engine, among equals.
    pub affinity: PageKey,
    /// Names of the engines that this request has tried.
    pub tried: &'a [String],
}

/// The table.
#[derive(Debug, Default)]
pub struct EngineTable {
    engines: RwLock<BTreeMap<String, Arc<Engine>>>,
}

impl EngineTable {
    /// Adds an engine, or replaces the one of this name.
    pub fn insert(&self, engine: Engine) {
        let mut engines = self.engines.write();
        if engines.len() < ENGINES_MAX || engines.contains_key(&engine.name) {
            engines.insert(engine.name.clone(), Arc::new(engine));
        }
    }

    /// Takes an engine out; requests that it works on go on.
    pub fn remove(&self, name: &str) -> bool {
        self.engines.write().remove(name).is_some()
    }

    /// The engine of this name.
    pub fn get(&self, name: &str) -> Option<Arc<Engine>> {
        self.engines.read().get(name).cloned()
    }

    /// All engines, by name.
    pub fn list(&self) -> Vec<Arc<Engine>> {
        self.engines.read().values().cloned().collect()
    }

    /// Whether there is none at all.
    pub fn is_empty(&self) -> bool {
        self.engines.read().is_empty()
    }

    /// Engines of `role` in `namespace` that requests may go to.
    pub fn admitted(&self, role: Role, namespace: NamespaceId) -> usize {
        let fits = |e: &&Arc<Engine>| e.info.role == role && e.namespace == namespace && e.is_admitted();
        self.engines.read().values().filter(fits).count()
    }

    /// The longest context that any engine of `role` in `namespace` offers, in tokens; `None` if there is no such engine.
    pub fn context_max(&self, role: Role, namespace: NamespaceId) -> Option<usize> {
        let engines = self.engines.read();
        let fitting = engines.values().filter(|e| e.info.role == role && e.namespace == namespace);
        fitting.map(|e| e.info.max_context as usize).max()
    }

    /// The engine with the least outstanding work among those that can serve `need`, and among those that can serve it
    /// wholly if there is any; ties go by prefix affinity.
    pub fn choose(&self, need: &Need<'_>) -> Option<Arc<Engine>> {
        let engines = self.engines.read();
        let fitting = engines.values().filter(|e| {
            e.info.role == need.role
                && e.namespace == need.namespace
                && e.info.max_context as usize >= need.context
                && !need.tried.contains(&e.name)
                && e.is_admitted()
        });
        fitting
            .min_by_key(|e| {
                let is_short = (e.info.max_context as usize) < need.context_wanted;
                (is_short, e.outstanding_tokens(), std::cmp::Reverse(attraction(&e.name, &need.affinity)))
            })
            .cloned()
    }
}

/// Rendezvous weight of an engine for a beginning: the same in every router, and it moves only the requests of engines
/// that come or go.
fn attraction(name: &str, affinity: &PageKey) -> u64 {
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
            max_context,
            page_tokens: 4,
        }
    }

    fn table() -> EngineTable {
        let table = EngineTable::default();
        for name in ["d1", "d2", "d3"] {
            table.insert(Engine::new(name.into(), info(Role::Decode, 1, 100)));
        }
        table.insert(Engine::new("p1".into(), info(Role::Prefill, 1, 100)));
        table.insert(Engine::new("other".into(), info(Role::Decode, 2, 1000)));
        table
    }

    fn need(tried: &[String]) -> Need<'_> {
        let namespace = info(Role::Decode, 1, 0).descriptor.id();
        Need { role: Role::Decode, namespace, context: 50, context_wanted: 0, affinity: PageKey([9; 32]), tried }
    }

    #[test]
    fn the_least_loaded_engine_is_chosen() {
        let table = table();
        let loads = [("d1", 10), ("d2", 3), ("d3", 10)];
        let mut booked: Vec<Work> = loads.iter().map(|(name, tokens)| table.get(name).unwrap().book(*tokens)).collect();
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d2");
        booked[2].reduce_to(1);
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d3");
    }

    #[test]
    fn work_is_given_back_in_steps() {
        let table = table();
        let engine = table.get("d1").unwrap();
        let mut work = engine.book(100);
        work.reduce_to(30);
        work.reduce_to(60);
        assert_eq!((engine.outstanding_tokens(), engine.requests()), (30, 1));
        drop(work);
        assert_eq!((engine.outstanding_tokens(), engine.requests()), (0, 0));
    }

    #[test]
    fn ties_go_by_the_beginning_of_the_prompt() {
        let table = table();
        let mut chosen = std::collections::BTreeMap::<String, usize>::new();
        for i in 0..90u8 {
            let need = Need { affinity: PageKey([i; 32]), ..need(&[]) };
            let first = table.choose(&need).unwrap().name.clone();
            assert_eq!(table.choose(&need).unwrap().name, first);
            *chosen.entry(first).or_default() += 1;
        }
        assert_eq!(chosen.len(), 3);
        assert!(chosen.values().all(|&count| count > 10), "{chosen:?}");
    }

    #[test]
    fn an_engine_that_has_room_for_the_whole_answer_goes_first() {
        let table = table();
        table.insert(Engine::new("large".into(), info(Role::Decode, 1, 200)));
        let busy = table.get("large").unwrap().book(1000);
        let wants = |context_wanted| Need { context_wanted, ..need(&[]) };
        assert_ne!(table.choose(&wants(100)).unwrap().name, "large");
        assert_eq!(table.choose(&wants(101)).unwrap().name, "large");
        assert_ne!(table.choose(&wants(201)).unwrap().name, "large", "none has it all: the least loaded");
        drop(busy);
    }

    #[test]
    fn what_cannot_serve_is_not_chosen() {
        let table = table();
        let mut tried = Vec::new();
        while let Some(engine) = table.choose(&need(&tried)) {
            assert!(engine.name.starts_with('d') && !tried.contains(&engine.name));
            tried.push(engine.name.clone());
        }
        assert_eq!(tried.len(), 3);
        assert!(table.choose(&Need { context: 101, ..need(&[]) }).is_none(), "the context is too short");
        for name in ["d1", "d3"] {
            table.get(name).unwrap().note_lost();
        }
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d2");
        assert!(table.remove("d2"));
        assert!(table.choose(&need(&[])).is_none());
        table.get("d3").unwrap().note_success();
        assert_eq!(table.choose(&need(&[])).unwrap().name, "d3");
    }
}
