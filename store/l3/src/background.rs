//! What happens without anybody waiting for it: segments are made ready, seals written, and data synced.

use crate::shared::{PrepareFailure, Shared, WriteGuard};
use larder_core::log::{Intent, Prepare};
use larder_device::{Block, Lane, Operation};
use larder_format::disk::SegmentHeader;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// At least this often, what was written is made durable.
const SYNC_EVERY: Duration = Duration::from_millis(500);

/// Carries out what the log wants done, until the device is closed.
pub(crate) async fn carry_out_intents(shared: Arc<Shared>) {
    while shared.open().is_ok() {
        while let Some(intent) = shared.change(|log| log.next_intent()) {
            match intent {
                Intent::Prepare(prepare) => {
                    let result = make_ready(&shared, &prepare).await;
                    if let Err(PrepareFailure { error, removed }) = &result {
                        let path = shared.segment_path(prepare.segment);
                        tracing::warn!(segment = %path.display(), %error, removed, "segment could not be made ready");
                    }
                    shared.report_prepared(&prepare, result);
                }
                Intent::Write(planned) => {
                    // A seal only speeds up the next start; an error of the device is counted by its next user.
                    let _ = shared.write_record(WriteGuard::new(&shared, planned, None), None).await;
                }
            }
        }
        shared.intents.notified().await;
    }
}

/// Syncs what was written, until the device is closed.
pub(crate) async fn sync_regularly(shared: Arc<Shared>) {
    while shared.open().is_ok() {
        shared.device.sleep(SYNC_EVERY).await;
        sync_all(&shared).await;
    }
}

/// Syncs every segment with unsynced data. Errors are counted and logged where they happen.
pub(crate) async fn sync_all(shared: &Shared) {
    for ticket in shared.look(|log| log.sync_plan()) {
        let _ = shared.sync_segment(ticket).await;
    }
}

/// Makes the file if it is fresh, writes the segment's header, and makes both durable.
async fn make_ready(shared: &Shared, prepare: &Prepare) -> Result<(), PrepareFailure> {
    match try_make_ready(shared, prepare).await {
        Ok(()) => Ok(()),
        Err(error) => {
            shared.counters.io_errors.add(1);
            let removed = shared.device.remove(prepare.segment).await.is_ok();
            Err(PrepareFailure { error, removed })
        }
    }
}

async fn try_make_ready(shared: &Shared, prepare: &Prepare) -> io::Result<()> {
    let Prepare { segment, life, fresh } = *prepare;
    if fresh {
        shared.device.create(segment, shared.segment_bytes).await?;
    }
    let header = SegmentHeader { log_id: shared.log_id, segment, life };
    let write = Operation::write(0, Block::of(&header.encode()), None);
    shared.run(segment, Lane::Demand, write).await?.result?;
    shared.run(segment, Lane::Demand, Operation::Sync).await?.result
}
