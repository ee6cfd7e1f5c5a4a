//! What happens without anybody waiting for it: segments are made ready, seals written, and data synced.

use crate::clean::{Ended, clean};
use crate::shared::{PrepareFailure, Shared};
use larder_core::log::{Intent, PlannedFooter, Prepare, WriteOutcome};
use larder_core::planted::{Bug, has};
use larder_device::{Block, Lane, Operation, Share};
use larder_format::disk::SegmentHeader;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// At least this often, what was written is made durable.
const SYNC_EVERY: Duration = Duration::from_millis(500);
/// Pages that go by their time between two looks at what else there is to do.
const EXPIRE_PAGES: usize = 512;

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
                Intent::Footer(planned) => write_footer(&shared, planned).await,
                Intent::Clean(wanted) => {
                    let ended = Ended::of(&shared, &wanted);
                    shared.device.spawn(Share::Background, Box::pin(clean(shared.clone(), wanted, ended)));
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
        if !has(Bug::NeverSync) {
            sync_all(&shared).await;
        }
        let now = shared.clock.now_unix_ms();
        while shared.change(|log| log.expire(now, EXPIRE_PAGES)) {
            tokio::task::yield_now().await;
        }
    }
}

/// Syncs every segment with unsynced data. Errors are counted and logged where they happen.
pub(crate) async fn sync_all(shared: &Arc<Shared>) {
    for ticket in shared.look(|log| log.sync_plan()) {
        let _ = shared.sync_segment(ticket).await;
    }
}

/// The last that is done: all is durable, and every segment has its footer, so that the next start need not hop.
pub(crate) async fn finish(shared: &Arc<Shared>) {
    sync_all(shared).await;
    shared.change(|log| log.seal_open());
    while let Some(intent) = shared.change(|log| log.next_intent()) {
        // Nothing else is begun any more: the next start finds segments as they are.
        if let Intent::Footer(planned) = intent {
            write_footer(shared, planned).await;
        }
    }
    sync_all(shared).await;
}

/// A footer only speeds up the next start: what fails here is scanned record by record.
async fn write_footer(shared: &Shared, planned: PlannedFooter) {
    let outcome = match try_write_footer(shared, &planned).await {
        Ok(()) => WriteOutcome::Written,
        // It was closed meanwhile, which is no fault of the device.
        Err(_) if shared.open().is_err() => WriteOutcome::Failed,
        Err(error) => {
            shared.counters.io_errors.add(1);
            let path = shared.segment_path(planned.footer.segment);
            tracing::warn!(segment = %path.display(), %error, "footer not written");
            WriteOutcome::Failed
        }
    };
    shared.change(|log| log.footer_done(planned, outcome));
}

async fn try_write_footer(shared: &Shared, planned: &PlannedFooter) -> io::Result<()> {
    let bytes = planned.footer.encode(&shared.log_id);
    let mut slot = shared.arena.allocate(bytes.len()).ok_or(io::ErrorKind::OutOfMemory)?;
    slot.copy_from_slice(&bytes);
    let slot = slot.freeze();
    let range = 0..slot.capacity();
    let write = Operation::Write { offset: planned.offset, block: None, payload: Some((slot, range)) };
    shared.run(planned.footer.segment, Lane::Background, write).await?.result
}

/// Makes the file if it is fresh, or writes the segment's header, durably.
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
    let header = SegmentHeader { log_id: shared.log_id, segment, life }.encode();
    if fresh {
        return shared.device.create(segment, shared.segment_bytes, header).await;
    }
    let write = Operation::write(0, Block::of(&header), None);
    shared.run(segment, Lane::Demand, write).await?.result?;
    if has(Bug::HeaderNotSynced) {
        return Ok(());
    }
    shared.run(segment, Lane::Demand, Operation::Sync).await?.result
}
