//! Extents of pages on the L3 of a node of this machine, which the caller reads by itself.
//!
//! Invariants:
//! - A page without an extent is no miss: the caller gets it from the node.
//! - The node holds the records until the last extent of a request is dropped, but a few seconds at
//!   most. The caller compares what it has read with the CRCs in any case.

use super::get::PageDescription;
use crate::client::Client;
use crate::connection::Connection;
use crate::stats::{Counters, count};
use crate::url::Transport;
use futures::future::join_all;
use larder_format::{PageId, PageKey, PageMeta};
use larder_wire::{MAX_EXTENTS, Request, Response, VERSION_EXTENTS};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;

/// Payload of a page in a file of L3. Dropping the last extent of a request ends the node's hold.
pub struct Extent {
    file: Arc<OwnedFd>,
    offset: u64,
    meta: PageMeta,
    hold: Arc<ExtentHold>,
}

/// Holds of one request, which its last extent ends.
struct ExtentHold {
    connection: Arc<Connection>,
    request: u64,
    counters: Arc<Counters>,
    /// Runtime of the client. Threads without one may drop the last extent.
    runtime: Handle,
}

impl Drop for ExtentHold {
    fn drop(&mut self) {
        // If the queue is full, the message waits in a task.
        let _runtime = self.runtime.enter();
        self.connection.send_detached(&Request::Cancel(self.request));
    }
}

impl Extent {
    /// Descriptor of the file, open for reads: with direct I/O if its file system has it. Extents
    /// of one request in one file share it.
    pub fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Start of the payload in the file, in bytes: a multiple of 4,096. Whole blocks of that size
    /// can be read, also the last one.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Identity and CRCs of the page. The page is the requested one, in the geometry of the
    /// namespace.
    pub fn meta(&self) -> &PageMeta {
        &self.meta
    }

    /// Description of the page, for a caller that has verified its bytes.
    pub fn description(&self) -> PageDescription {
        PageDescription::of(self.meta.clone(), &self.hold.connection)
    }

    /// Reports that the bytes differ from the CRCs. The node checks its copy.
    pub fn report_corrupt(&self) {
        count(&self.hold.counters.corrupt, 1);
        self.hold.connection.report_corrupt(&self.meta.id);
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extent").field("id", &self.meta.id).field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Returns `true` if the node of this connection may give extents.
pub(super) fn gives_extents(connection: &Connection) -> bool {
    connection.transport() == Transport::Shm && connection.version() >= VERSION_EXTENTS
}

impl Client {
    /// Asks the nodes of this machine for the extents of pages, in the order of `keys`. `None`: the
    /// page is in DRAM or absent, its node is on another machine or older, or it gives no extents
    /// now. [`Client::get`] tells.
    ///
    /// Sends one request per node and 256 keys.
    pub async fn extents(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Extent>> {
        let mut found: Vec<Option<Extent>> = keys.iter().map(|_| None).collect();
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let batches = nodes.batches(keys, MAX_EXTENTS, 0).into_iter();
        let requests = batches.filter(|(connection, _)| gives_extents(connection)).map(|(connection, indices)| {
            let keys = indices.iter().map(|&index| keys[index]).collect();
            async move { (indices, self.request_extents(connection, keys, deadline).await) }
        });
        for (indices, extents) in join_all(requests).await {
            for (index, extent) in indices.into_iter().zip(extents.into_iter().flatten()) {
                found[index] = extent;
            }
        }
        found
    }

    async fn request_extents(
        &self,
        connection: Arc<Connection>,
        keys: Vec<PageKey>,
        deadline: Instant,
    ) -> Option<Vec<Option<Extent>>> {
        let namespace = self.namespace_if_any()?;
        let request = connection.next_request();
        let expected = connection.expect_files(request)?;
        // Before the request leaves: if this future is dropped, the node must hear of it.
        let (hold, counters) = (connection.clone(), self.counters().clone());
        let hold = Arc::new(ExtentHold { connection: hold, request, counters, runtime: Handle::current() });
        let answer = connection.request_as(request, &Request::Extents(keys.clone()), deadline).await;
        let Some(Response::Extents { files, extents }) = answer else { return None };
        let received = expected.take().inspect_err(|error| tracing::warn!(%error, "the node sent no files of L3"));
        let received: Vec<Arc<OwnedFd>> = received.ok()?.into_iter().map(Arc::new).collect();
        if received.len() != files as usize {
            return None;
        }
        let part_table = namespace.geometry.part_table();
        let extent = |(key, extent): (PageKey, Option<larder_wire::Extent>)| {
            let larder_wire::Extent { file, offset, meta } = extent?;
            let is_wanted = meta.id == PageId { namespace: namespace.id, key } && meta.part_bytes == part_table;
            let file = received.get(file as usize)?.clone();
            is_wanted.then(|| Extent { file, offset, meta, hold: hold.clone() })
        };
        Some(keys.into_iter().zip(extents).map(extent).collect())
    }
}
