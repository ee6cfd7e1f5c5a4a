//! Pages, made of their facts, and the record of pages on L3.

use super::Tiers;
use crate::devices::Devices;
use crate::options::NodeOptions;
use crate::page::Page;
use crate::page_changes::{ChangeQueue, L3Changes};
use crate::token_ids::{TokenIds, TokenMemory};
use larder_format::PageMeta;
use larder_memory::Slot;
use std::sync::Arc;

/// Records changes of L3 in the queue for KV events, if the options ask for them.
pub(super) fn record_l3(
    options: &NodeOptions,
    devices: &Devices,
    queue: Option<&Arc<ChangeQueue>>,
    token_memory: &Arc<TokenMemory>,
) {
    if let Some(queue) = queue.filter(|_| options.kv_events_l3) {
        devices.listen(&Arc::new(L3Changes::new(queue.clone(), token_memory.clone())));
    }
}

impl Tiers {
    /// Makes a page that shares the facts of its namespace. Keeps its token ids if there is room.
    pub(crate) fn page(&self, mut meta: PageMeta, payload: Slot) -> Page {
        let token_ids = self.token_memory.keep(&meta.id.namespace, std::mem::take(&mut meta.token_ids));
        self.put_page(meta, payload, token_ids)
    }

    /// Like [`Tiers::page`], with token ids that are kept already.
    pub(crate) fn put_page(&self, meta: PageMeta, payload: Slot, token_ids: Option<Arc<TokenIds>>) -> Page {
        self.shapes.page(meta, payload).with_token_ids(token_ids)
    }

    pub(crate) fn token_memory(&self) -> &Arc<TokenMemory> {
        &self.token_memory
    }
}
