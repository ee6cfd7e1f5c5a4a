//! Models that clients can request: name, tokenizer and page index.

use crate::engines::EngineTable;
use crate::store::PageIndex;
use crate::templates::ChatRenderer;
use crate::tokenise::text_bytes_max;
use larder_format::NamespaceId;
use larder_http::PeerAddress;
use larder_model::Tokenizer;
use larder_runtime::lock::RwLock;
use larder_worker::api::Role;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum number of models in the table. A full table drops models without engines and then
/// ignores new ones.
pub const MODELS_MAX: usize = 64;

/// Maximum size of all models' files, in bytes. A tokenizer takes several times the size of its
/// file.
pub const MODELS_BYTES_MAX: usize = 256 << 20;

/// Part of both limits that the models of one address have at most: 1 / this. Otherwise one hostile
/// member with large files could keep all others out.
const HOST_SHARE: usize = 2;

/// Number of prompts of the longest text for which a body has room. A request may have more prompts
/// that are shorter.
const BODY_PROMPTS: usize = 16;
/// Size of a request body that is accepted for every model, in bytes.
const BODY_BYTES_FLOOR: usize = 1 << 20;
/// Longest form of one byte of text in JSON: `\u0000`.
const JSON_BYTES_PER_BYTE: usize = 6;

/// Name and namespace of a model. Two namespaces may share a name while new weights replace old
/// ones.
pub type ModelKey = (String, NamespaceId);

pub struct ServedModel {
    pub name: String,
    pub namespace: NamespaceId,
    /// Tokens per page, at least 1.
    pub page_tokens: usize,
    /// Number of token ids in the vocabulary, from the model's `config.json`. `None` if that does
    /// not say. Valid ids are below it.
    pub vocab_size: Option<u32>,
    pub tokenizer: Arc<Tokenizer>,
    /// `None` if the model has no chat template.
    pub chat: Option<ChatRenderer>,
    pub pages: Arc<dyn PageIndex>,
    /// Name of the engine that its files came from.
    pub source: String,
    /// Address that sent them. An engine may have many names for one address.
    pub source_host: PeerAddress,
    /// Set when that engine broke the interface. Its files may be as wrong, so discovery replaces
    /// the model by one with the files of another engine.
    pub is_distrusted: AtomicBool,
    /// Size of its files in bytes.
    pub file_bytes: usize,
    /// Time at which the router first loaded it, in seconds since 1970. The API reports it as
    /// `created`.
    pub created: u64,
}

impl ServedModel {
    /// Name of the weights, their format and the numerics, for clients.
    pub fn fingerprint(&self) -> String {
        let namespace = self.namespace.to_string();
        format!("fp_{}", namespace.get(..12).unwrap_or(&namespace))
    }

    pub fn key(&self) -> ModelKey {
        (self.name.clone(), self.namespace)
    }
}

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

pub enum ModelLookup {
    Model(Arc<ServedModel>),
    /// Some models are known, but none of this name.
    Unknown,
    /// No model is known yet, so the name may still turn out valid. Callers answer 503 instead of
    /// 404.
    NoneKnown,
}

#[derive(Default)]
pub struct ModelTable {
    models: RwLock<Models>,
}

#[derive(Default)]
struct Models {
    by_key: BTreeMap<ModelKey, Listed>,
    listed: u64,
}

struct Listed {
    /// Order of arrival. New files of a model keep its number.
    number: u64,
    model: Arc<ServedModel>,
}

impl ModelTable {
    /// Adds a model. Returns `false` if the table or its host's share has no room for it.
    pub fn insert(&self, model: ServedModel, engines: &EngineTable) -> bool {
        let mut models = self.models.write();
        let has_room = |models: &Models| {
            // A model with its key makes room.
            let others = models.by_key.iter().filter(|(key, _)| **key != model.key());
            let others: Vec<_> = others.map(|(_, other)| (other.model.source_host, other.model.file_bytes)).collect();
            has_room(&others, model.source_host, model.file_bytes)
        };
        if !has_room(&models) {
            // Only models without engines may go: clients can still be using the others.
            models.by_key.retain(|_, m| engines.context_max(Role::Decode, m.model.namespace).is_some());
        }
        let has_room = has_room(&models);
        if has_room {
            let Models { by_key, listed } = &mut *models;
            *listed += 1;
            let number = by_key.get(&model.key()).map_or(*listed, |before| before.number);
            by_key.insert(model.key(), Listed { number, model: Arc::new(model) });
        }
        has_room
    }

    /// First model with the name of this one, if that is another one.
    pub fn first_of_name(&self, key: &ModelKey) -> Option<Arc<ServedModel>> {
        let models = self.models.read();
        let same = models.by_key.values().filter(|listed| listed.model.name == key.0);
        let first = same.min_by_key(|listed| listed.number)?;
        (first.model.namespace != key.1).then(|| first.model.clone())
    }

    pub fn keys(&self) -> Vec<ModelKey> {
        self.models.read().by_key.keys().cloned().collect()
    }

    /// Drops a model. Requests that have it go on.
    pub fn remove(&self, key: &ModelKey) {
        self.models.write().by_key.remove(key);
    }

    /// Marks the models whose files came from this engine. They serve until discovery has replaced
    /// them.
    pub fn distrust_files_of(&self, engine: &str) {
        for Listed { model, .. } in self.models.read().by_key.values().filter(|listed| listed.model.source == engine) {
            // Relaxed: discovery may see it a moment later.
            model.is_distrusted.store(true, Ordering::Relaxed);
        }
    }

    /// Returns `true` if the table has the model, from an engine that has kept to the interface.
    pub fn contains(&self, key: &ModelKey) -> bool {
        let models = self.models.read();
        models.by_key.get(key).is_some_and(|listed| !listed.model.is_distrusted.load(Ordering::Relaxed))
    }

    /// Models that have a decode engine, ordered by name. A name stands for one namespace: the
    /// first one that the router loaded, while it has engines. So new weights take over when the
    /// last engine of the old ones has left, and no other member can take a name in use.
    pub fn served(&self, engines: &EngineTable) -> Vec<Arc<ServedModel>> {
        let mut by_name: BTreeMap<String, (u64, Arc<ServedModel>)> = BTreeMap::new();
        // Lock order: models before engines. Nothing takes them the other way round.
        for Listed { number, model } in self.models.read().by_key.values() {
            if engines.context_max(Role::Decode, model.namespace).is_none() {
                continue;
            }
            match by_name.get(&model.name) {
                Some((first, _)) if first < number => {}
                _ => drop(by_name.insert(model.name.clone(), (*number, model.clone()))),
            }
        }
        by_name.into_values().map(|(_, model)| model).collect()
    }

    /// Finds a model by name. A known model whose engines are all gone is found too, until
    /// discovery drops it: they may be restarting.
    pub fn find(&self, name: &str, engines: &EngineTable) -> ModelLookup {
        if let Some(model) = self.served(engines).into_iter().find(|m| m.name == name) {
            return ModelLookup::Model(model);
        }
        // `served` has released the lock. A model added in between is found here.
        let models = self.models.read();
        let named = models.by_key.values().filter(|listed| listed.model.name == name);
        match named.min_by_key(|listed| listed.number) {
            Some(listed) => ModelLookup::Model(listed.model.clone()),
            None if models.by_key.is_empty() => ModelLookup::NoneKnown,
            None => ModelLookup::Unknown,
        }
    }

    /// Largest request body in bytes that some model's context can need: several prompts at
    /// their limit. `None` while no model has a decode engine.
    pub fn body_bytes_max(&self, engines: &EngineTable) -> Option<usize> {
        let models = self.models.read();
        let needs = models.by_key.values().filter_map(|Listed { model, .. }| {
            let context = engines.context_max(Role::Decode, model.namespace)?;
            Some(text_bytes_max(&model.tokenizer, context))
        });
        let text = needs.max()?;
        Some(text.saturating_mul(BODY_PROMPTS * JSON_BYTES_PER_BYTE).saturating_add(BODY_BYTES_FLOOR))
    }

    pub fn is_ready(&self, engines: &EngineTable) -> bool {
        let models = self.models.read();
        models.by_key.values().any(|listed| engines.admitted(Role::Decode, listed.model.namespace) > 0)
    }
}

/// Returns `true` if files of `bytes` bytes from `host` fit beside those of other models, each with
/// its address and size.
fn has_room(others: &[(PeerAddress, usize)], host: PeerAddress, bytes: usize) -> bool {
    let fits = |sizes: &[usize], share| {
        sizes.len() < MODELS_MAX / share && sizes.iter().sum::<usize>() + bytes <= MODELS_BYTES_MAX / share
    };
    let all: Vec<usize> = others.iter().map(|(_, size)| *size).collect();
    let same: Vec<usize> = others.iter().filter(|(other, _)| *other == host).map(|(_, size)| *size).collect();
    fits(&all, 1) && fits(&same, HOST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_one_host_leave_room_for_those_of_others() {
        let large = MODELS_BYTES_MAX / 4;
        let of = |last: u8| PeerAddress::of([10, 0, 0, last].into());
        let (hostile, honest) = (of(1), of(2));
        let mut table = Vec::new();
        while has_room(&table, hostile, large) {
            table.push((hostile, large));
        }
        assert_eq!(table.len(), 2);
        assert!(has_room(&table, honest, large));
        let mut table = Vec::new();
        while has_room(&table, hostile, 1) {
            table.push((hostile, 1));
        }
        assert!(table.len() < MODELS_MAX && has_room(&table, honest, large));
        let table: Vec<_> = (0..4).map(|last| (of(last), large)).collect();
        assert!(!has_room(&table, of(4), 1), "the table is full");
    }
}
