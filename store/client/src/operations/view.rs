//! Views: pages read in place, in the memory of a node on this machine.

use super::get::{COPY_GRACE, GET_PAGES_MAX, GetOptions, get_from_node};
use super::lookup::Tier;
use crate::buffer::{DynBuffer, downcast};
use crate::client::{Client, Namespace};
use crate::connection::{Connection, PageRequest, PageResponse, PageResult, StoredAt, UncopiedBytes};
use futures::future::join_all;
use larder_format::{PageId, PageKey};
use larder_memory::share::{HeldBytes, SharedBlock};
use larder_runtime::{fail_point, now};
use larder_wire::YieldBudget;
use std::ops::Deref;
use std::time::Instant;

/// A verified page. It dereferences to the bytes that were put.
///
/// If the node is on this machine, the bytes are in the node's own memory. The node keeps them
/// there until the view is dropped. Otherwise they are a copy. Views count against the node's limit
/// of held memory, so drop them soon.
#[derive(Debug)]
pub struct PageView {
    bytes: ViewBytes,
    tier: Tier,
}

#[derive(Debug)]
enum ViewBytes {
    /// In the node's arena.
    Held(HeldBytes),
    /// In shared client memory, after an RDMA read.
    Read(SharedBlock),
    /// In heap memory, received over TCP.
    Received(Vec<u8>),
}

impl ViewBytes {
    fn new(location: StoredAt) -> Option<ViewBytes> {
        match location {
            StoredAt::Arena(held) => Some(ViewBytes::Held(held)),
            StoredAt::ClientMemory(block) => Some(ViewBytes::Read(block)),
            StoredAt::Reading(_) => None,
        }
    }
}

impl PageView {
    /// Tier that served the page.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Returns `true` if the bytes are in the node's memory, and `false` if they are a copy.
    pub fn in_place(&self) -> bool {
        matches!(self.bytes, ViewBytes::Held(_))
    }
}

impl Deref for PageView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            ViewBytes::Held(held) => held,
            ViewBytes::Read(block) => block,
            ViewBytes::Received(bytes) => bytes,
        }
    }
}

/// A buffer that allocates when a payload arrives. Pages in place never need it.
struct LazyBuffer {
    length: usize,
    bytes: Vec<u8>,
}

impl AsMut<[u8]> for LazyBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.resize(self.length, 0);
        &mut self.bytes
    }
}

impl Client {
    /// Reads whole pages in place: in the memory of nodes on this machine, without a copy. Pages of
    /// other nodes, and pages above a node's limit of held memory, are copied. `None` is a miss.
    ///
    /// Verification reads every byte once, wherever the page is.
    ///
    /// # Panics
    /// If the client was attached without a namespace.
    pub async fn view(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PageView>> {
        let Namespace { id: namespace, geometry } = *self.namespace();
        let page_bytes = geometry.page_bytes();
        let part_table = geometry.part_table();
        let mut views: Vec<Option<PageView>> = keys.iter().map(|_| None).collect();
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let id = |index: usize| PageId { namespace, key: keys[index] };
        let gets = nodes.batches(keys, GET_PAGES_MAX, page_bytes).into_iter().map(|(connection, indices)| {
            let buffer = || Box::new(LazyBuffer { length: page_bytes, bytes: Vec::new() }) as DynBuffer;
            let request = |&index: &usize| PageRequest { id: id(index), range: None, buffer: buffer() };
            let requests = indices.iter().map(request).collect();
            let part_table = &part_table;
            async move {
                let options = GetOptions::default();
                let (pages, _) = get_from_node(&connection, requests, part_table, options, deadline).await;
                (connection, indices, pages)
            }
        });
        for (connection, indices, pages) in join_all(gets).await {
            // Verifies on this task, and yields after every few megabytes.
            let mut yields = YieldBudget::default();
            for (index, page) in indices.into_iter().zip(pages) {
                let (bytes, result) = verify(&connection, &id(index), page, deadline);
                views[index] = self.record(result).zip(bytes).map(|(tier, bytes)| PageView { bytes, tier });
                yields.spend(page_bytes).await;
            }
        }
        self.counters().count_gets(views.iter().filter(|view| view.is_some()).count(), views.len());
        views
    }
}

/// Verifies bytes in place. Bytes that were received over TCP were verified on arrival.
fn verify(
    connection: &Connection,
    id: &PageId,
    page: PageResponse,
    deadline: Instant,
) -> (Option<ViewBytes>, PageResult) {
    let PageResponse { buffer, result, uncopied, .. } = page;
    match uncopied {
        // Too late: verification takes time of its own.
        Some(_) if now() > deadline + COPY_GRACE || fail_point!("client.view-misses-held-page") => {
            (None, PageResult::Missed)
        }
        Some(UncopiedBytes { location, meta, tier, .. }) if meta.verify(id, location.bytes()).is_ok() => {
            (ViewBytes::new(location), PageResult::Hit(tier, meta.generation))
        }
        Some(_) => {
            connection.report_corrupt(id);
            (None, PageResult::Corrupt)
        }
        None => (Some(ViewBytes::Received(downcast::<LazyBuffer>(buffer).bytes)), result),
    }
}
