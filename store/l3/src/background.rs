//! What happens without anybody waiting for it: segments are made ready, seals written, and data synced.

use crate::directory::Directory;
use crate::shared::{PrepareFailure, Shared, WriteGuard};
use larder_core::log::{Intent, Prepare};
use larder_device::{Block, DeviceFile, Lane, Operation, Request};
use larder_format::disk::SegmentHeader;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// At least this often, what was written is made durable.
const SYNC_EVERY: Duration = Duration::from_millis(500);

/// Carries out what the log wants done, until it is aborted. It holds the directory, and so its lock, only while it works
/// on files: a store that was closed can be opened anew at once, but never under a file that is still being made.
pub(crate) async fn carry_out_intents(shared: Arc<Shared>, dir: Weak<Directory>) {
    loop {
        while let Some(intent) = shared.change(|log| log.next_intent()) {
            match intent {
                Intent::Prepare(prepare) => {
                    let result = make_ready(&shared, &dir, &prepare).await;
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

/// Syncs what was written, until it is aborted.
pub(crate) async fn sync_regularly(shared: Arc<Shared>) {
    let mut clock = tokio::time::interval(SYNC_EVERY);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        clock.tick().await;
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
async fn make_ready(shared: &Shared, dir: &Weak<Directory>, prepare: &Prepare) -> Result<(), PrepareFailure> {
    match try_make_ready(shared, dir, prepare).await {
        Ok(()) => Ok(()),
        Err(error) => {
            shared.counters.io_errors.add(1);
            let file = shared.files.write().remove(&prepare.segment);
            if let Some(file) = file {
                shared.ring.detach(file).await;
            }
            let removed = remove(dir, prepare.segment).await;
            Err(PrepareFailure { error, removed })
        }
    }
}

async fn try_make_ready(shared: &Shared, dir: &Weak<Directory>, prepare: &Prepare) -> io::Result<()> {
    let Prepare { segment, life, fresh } = *prepare;
    if fresh {
        let made = create(dir, segment, shared.segment_bytes).await?;
        shared.note_direct(made.direct());
        let file = shared.ring.attach(made).await?;
        shared.files.write().insert(segment, file);
    }
    let file = shared.file(segment).map_err(io::Error::other)?;
    let header = SegmentHeader { log_id: shared.log_id, segment, life };
    let write = Operation::write(0, Block::of(&header.encode()), None);
    shared.ring.run(Request { file, lane: Lane::Demand, operation: write }).await?.result?;
    shared.ring.run(Request { file, lane: Lane::Demand, operation: Operation::Sync }).await?.result
}

async fn create(dir: &Weak<Directory>, segment: u32, bytes: u64) -> io::Result<DeviceFile> {
    let dir = dir.upgrade().ok_or(io::ErrorKind::BrokenPipe)?;
    tokio::task::spawn_blocking(move || dir.create_segment(segment, bytes)).await.map_err(io::Error::other)?
}

/// Whether the file is gone for good.
async fn remove(dir: &Weak<Directory>, segment: u32) -> bool {
    let Some(dir) = dir.upgrade() else { return false };
    matches!(tokio::task::spawn_blocking(move || dir.remove_segment(segment)).await, Ok(Ok(())))
}
