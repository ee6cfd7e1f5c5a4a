//! Reports of long RDMA transfers. The node sees no byte of them, and would take the client for
//! silent.

use super::multiplex::Connection;
use larder_wire::{Request, VERSION_RDMA_PROGRESS};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// Time between two reports of a transfer. A writer counts as silent after a second.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// Runs a transfer to its end. Meanwhile it sends `report` of the bytes that have moved, whenever
/// there are more.
pub(super) async fn with_reports<T>(
    connection: &Connection,
    moved: &AtomicU64,
    report: impl Fn(u32) -> Request,
    transfer: impl Future<Output = T>,
) -> T {
    let mut transfer = pin!(transfer);
    let mut reported = 0;
    loop {
        if let Ok(ended) = timeout(REPORT_INTERVAL, &mut transfer).await {
            return ended;
        }
        // Relaxed: the number orders nothing.
        let bytes = moved.load(Ordering::Relaxed);
        let is_new = bytes > reported && connection.version() >= VERSION_RDMA_PROGRESS;
        // With a full queue the next report tells the same.
        if is_new && connection.outbox().try_send(&report(u32::try_from(bytes).unwrap_or(u32::MAX))) {
            reported = bytes;
        }
    }
}
