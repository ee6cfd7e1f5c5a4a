//! RDMA writes of the parts of a put.
//!
//! The node grants a range of its memory for each part. The client writes the part there and then
//! sends its checksums. Each grant serves one write.

use super::multiplex::Connection;
use super::rdma_channels::{WritablePart, remote_range};
use super::rdma_progress::with_reports;
use bytes::Bytes;
use larder_format::{CHUNK_BYTES, chunk_crcs};
use larder_runtime::fail_point;
use larder_wire::{Entry, PartLocation, Request, Response};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Grants to write the parts of a Reserve, until this is dropped.
pub(crate) struct OpenParts {
    connection: Arc<Connection>,
    reserve: u64,
    granted_parts: usize,
}

impl OpenParts {
    /// Records that the node has accepted some of the pages, so that it could have granted parts.
    pub(crate) fn record_accepted(&self) {
        self.connection.rdma().record_answer(self.granted_parts > 0);
    }
}

impl Drop for OpenParts {
    fn drop(&mut self) {
        self.connection.rdma().close_parts(self.reserve);
    }
}

pub(super) enum PartWrite<P> {
    /// The part is in the node's memory, and the node has its checksums.
    Written,
    /// The part has to be sent another way.
    Unavailable(P),
    Lost,
}

/// Bytes of a part, with the guards that account for them.
pub(crate) trait PartSource: AsRef<[u8]> + Send + Sync + 'static {
    fn shared(&self) -> Bytes;
}

impl PartSource for Bytes {
    fn shared(&self) -> Bytes {
        self.clone()
    }
}

/// Asks the node for grants to write the parts of request `reserve`. `None` if no channel works, or
/// if the node does not answer before `deadline`.
pub(crate) async fn open_parts(connection: &Arc<Connection>, reserve: u64, deadline: Instant) -> Option<OpenParts> {
    // Without channels the request would cost a round trip for nothing.
    let channels = connection.rdma().in_turn();
    if channels.is_empty() {
        return None;
    }
    let answer = connection.request(&Request::GrantParts { reserve, channels }, deadline).await;
    let Some(Response::PartGrants(grants)) = answer else { return None };
    let granted_parts = connection.rdma().open_parts(reserve, grants);
    Some(OpenParts { connection: connection.clone(), reserve, granted_parts })
}

/// Abandons the puts of a Reserve at the node, once no part is being written any more.
pub(crate) fn cancel_puts(connection: &Connection, reserve: u64) {
    connection.abandon_parts(reserve);
    if fail_point!("client.cancel-under-rdma-write") || !connection.rdma().cancel_after_writes(reserve) {
        connection.send_detached(&Request::Cancel(reserve));
    }
}

/// A write in progress. Dropping it sends a Cancel that had to wait for it.
struct WriteInProgress {
    connection: Arc<Connection>,
    reserve: u64,
}

impl WriteInProgress {
    fn begin(connection: &Arc<Connection>, reserve: u64) -> WriteInProgress {
        connection.rdma().begin_write(reserve);
        WriteInProgress { connection: connection.clone(), reserve }
    }
}

impl Drop for WriteInProgress {
    fn drop(&mut self) {
        if self.connection.rdma().end_write(self.reserve) {
            self.connection.send_detached(&Request::Cancel(self.reserve));
        }
    }
}

/// Writes a part by RDMA if the node has granted that. Bytes in registered memory are written from
/// there, others from a copy. Without `crcs`, it computes the checksums from the bytes.
///
/// At `deadline`, or if the future is dropped, the write ends when the device is done with the
/// requests that it has. The memory and the guards stay until then.
pub(super) async fn write_part<P: PartSource>(
    connection: &Arc<Connection>,
    put: Entry,
    part: u32,
    bytes: P,
    crcs: Option<&[u32]>,
    deadline: Instant,
) -> PartWrite<P> {
    let Some(WritablePart { channel, grant, devices }) = connection.rdma().take_part(put, part) else {
        return PartWrite::Unavailable(bytes);
    };
    let shared = bytes.shared();
    let mut block = None;
    let crcs = if channel.reaches(&shared) {
        crcs.map_or_else(|| chunk_crcs(&shared).collect(), <[u32]>::to_vec)
    } else {
        // The node takes an unused grant back when the part arrives another way.
        let Some(copy) = devices.memory.allocate(shared.len()) else { return PartWrite::Unavailable(bytes) };
        let copy = block.insert(copy);
        match crcs {
            Some(crcs) => {
                copy.copy_from_slice(&shared);
                crcs.to_vec()
            }
            None => copy_with_crcs(&shared, copy),
        }
    };
    let write = WriteInProgress::begin(connection, put.request);
    let (waits, stopped) = oneshot::channel::<()>();
    let reporter = connection.clone();
    // A task of its own, because the guards must outlast an abandoned put.
    let writing = tokio::spawn(async move {
        let moved = Arc::default();
        let stop = async { drop(stopped.await) };
        let transfer = async {
            match block {
                Some(block) => channel.write(block, remote_range(grant), &moved, stop).await.map(drop),
                None => channel.write(shared, remote_range(grant), &moved, stop).await.map(drop),
            }
        };
        let report = |bytes| Request::RdmaProgress { entry: put, part: Some(part), bytes };
        let written = with_reports(&reporter, &moved, report, transfer).await;
        drop(write);
        (written, bytes)
    });
    // Sent after the write: the node revokes the grant before it checks the bytes.
    let message = Request::Part { put, part, crcs, bytes: PartLocation::Rdma };
    let written = tokio::time::timeout_at(deadline.into(), writing).await;
    drop(waits);
    match written {
        Ok(Ok((Ok(()), _))) if connection.send(&message, deadline).await => PartWrite::Written,
        Ok(Ok((Err(error), bytes))) => {
            tracing::debug!(%error, channel = grant.channel, "RDMA write of a part failed; sending it over the connection");
            PartWrite::Unavailable(bytes)
        }
        Ok(Ok((Ok(()), _)) | Err(_)) | Err(_) => PartWrite::Lost,
    }
}

/// Copies bytes chunk by chunk and returns the checksum of each chunk. Each chunk is in the
/// processor's cache for the second pass.
fn copy_with_crcs(from: &[u8], into: &mut [u8]) -> Vec<u32> {
    let chunks = from.chunks(CHUNK_BYTES).zip(into.chunks_mut(CHUNK_BYTES));
    let copied = chunks.map(|(from, into)| {
        let crc = crc32fast::hash(from);
        into.copy_from_slice(from);
        crc
    });
    copied.collect()
}
