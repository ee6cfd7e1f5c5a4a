//! The models that can be asked for: a name, a tokenizer, and whose pages they read.

use crate::engines::EngineTable;
use crate::store::PageIndex;
use larder_format::NamespaceId;
use larder_model::Tokenizer;
use larder_worker::api::Role;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Most models that are kept. Above it those without engines are dropped, and new ones are not taken.
pub const MODELS_MAX: usize = 64;

/// Name for people, and namespace: engines may serve two namespaces under one name while one replaces the other.
pub type ModelKey = (String, NamespaceId);

/// One model.
pub struct ServedModel {
    /// The name that requests give.
    pub name: String,
    /// Whose pages.
    pub namespace: NamespaceId,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// What the store holds of it.
    pub pages: Arc<dyn PageIndex>,
    /// When it was first seen, seconds since 1970.
    pub created: u64,
}

impl ServedModel {
    /// Its place in the table.
    pub fn key(&self) -> ModelKey {
        (self.name.clone(), self.namespace)
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Which model a request means.
pub enum Found {
    /// This one.
    Model(Arc<ServedModel>),
    /// There is no such model.
    Unknown,
    /// No engine has come yet, so nothing can be said.
    NothingKnown,
}

/// All models.
#[derive(Default)]
pub struct ModelTable {
    models: RwLock<BTreeMap<ModelKey, Arc<ServedModel>>>,
}

impl ModelTable {
    /// Adds a model, or replaces it.
    pub fn insert(&self, model: ServedModel, engines: &EngineTable) {
        let mut models = self.models.write();
        if models.len() >= MODELS_MAX {
            models.retain(|_, m| engines.context_max(Role::Decode, m.namespace).is_some());
        }
        if models.len() < MODELS_MAX {
            models.insert(model.key(), Arc::new(model));
        }
    }

    /// Whether it is known already.
    pub fn contains(&self, key: &ModelKey) -> bool {
        self.models.read().contains_key(key)
    }

    /// Models that have a decode engine, by name. A name stands for one namespace: the one with most engines.
    pub fn served(&self, engines: &EngineTable) -> Vec<Arc<ServedModel>> {
        let mut by_name: BTreeMap<String, (usize, Arc<ServedModel>)> = BTreeMap::new();
        for model in self.models.read().values() {
            if engines.context_max(Role::Decode, model.namespace).is_none() {
                continue;
            }
            let count = engines.admitted(Role::Decode, model.namespace);
            match by_name.get(&model.name) {
                Some((most, _)) if *most >= count => {}
                _ => drop(by_name.insert(model.name.clone(), (count, model.clone()))),
            }
        }
        by_name.into_values().map(|(_, model)| model).collect()
    }

    /// The model called `name`; one that is known but has no engine now is found, too.
    pub fn find(&self, name: &str, engines: &EngineTable) -> Found {
        if let Some(model) = self.served(engines).into_iter().find(|m| m.name == name) {
            return Found::Model(model);
        }
        let models = self.models.read();
        match models.values().find(|m| m.name == name) {
            Some(model) => Found::Model(model.clone()),
            None if models.is_empty() => Found::NothingKnown,
            None => Found::Unknown,
        }
    }

    /// Whether any model can be served now.
    pub fn is_ready(&self, engines: &EngineTable) -> bool {
        self.models.read().values().any(|m| engines.admitted(Role::Decode, m.namespace) > 0)
    }
}
