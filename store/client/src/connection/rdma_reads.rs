//! RDMA reads of pages that the node has granted.
//!
//! Invariants:
//! - Memory that a device may touch belongs to the transfer until the device is done, whatever
//!   becomes of the request. A caller keeps its buffer, but the block in it is taken out and
//!   restored.
//! - A page that was read counts only after its checksums matched, as with any other transport.
//! - A page that the node keeps open is released when it was read, or when the device is done with
//!   what was posted of it.

use super::multiplex::Connection;
use super::rdma_channels::remote_range;
use super::rdma_progress::with_reports;
use super::releases::ReleaseOnDrop;
use larder_memory::share::SharedBlock;
use larder_runtime::fail_point;
use larder_wire::{GrantedRange, Request};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Starts to read the granted range. If its caller stops waiting, the read ends when the device is
/// done with the requests that it has.
pub(super) fn read_page(
    connection: &Arc<Connection>,
    grant: GrantedRange,
    into: SharedBlock,
    release: ReleaseOnDrop,
) -> oneshot::Receiver<SharedBlock> {
    let (mut done, read) = oneshot::channel();
    if let Some(channel) = connection.rdma().channel(grant.channel) {
        let (connection, entry) = (connection.clone(), release.entry);
        let release = Some(release).filter(|_| !fail_point!("client.release-before-rdma-read"));
        tokio::spawn(async move {
            let moved = Arc::default();
            let reading = channel.read(into, remote_range(grant), &moved, done.closed());
            let report = |bytes| Request::RdmaProgress { entry, part: None, bytes };
            let ended = with_reports(&connection, &moved, report, reading).await;
            match ended {
                Ok(block) => _ = done.send(block),
                Err(error) => {
                    tracing::debug!(%error, channel = grant.channel, "RDMA read of a page failed; it is a miss")
                }
            }
            drop(release);
        });
    }
    read
}
