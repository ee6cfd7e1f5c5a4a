//! Preparation of segments on the device.

use crate::machine::{Prepare, PrepareOutcome};
use crate::shared::LogShared;
use larder_format::disk::SegmentHeader;
use larder_io::{Block, Operation, Priority};
use larder_runtime::fail_point;
use std::io;
use std::sync::Arc;

struct PrepareFailure {
    error: io::Error,
    /// The segment's file is durably gone.
    removed: bool,
}

impl PrepareFailure {
    fn outcome(&self) -> PrepareOutcome {
        if !self.removed {
            return PrepareOutcome::Undetermined;
        }
        match self.error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => PrepareOutcome::Full,
            _ => PrepareOutcome::Removed,
        }
    }
}

impl LogShared {
    pub(crate) async fn prepare_segment(&self, prepare: &Prepare) {
        let result = self.try_prepare_or_remove(prepare).await;
        if let Err(PrepareFailure { error, removed }) = &result {
            let file = self.segment_path(prepare.segment);
            let file = file.display();
            match removed {
                true => tracing::warn!(%file, %error, "L3: cannot prepare a segment; the next writer retries"),
                false => tracing::error!(
                    %file, %error,
                    "L3: cannot prepare or remove a segment, so the log takes no more writes; check the file system and \
                     restart the node"
                ),
            }
        }
        let outcome = result.as_ref().map_or_else(PrepareFailure::outcome, |()| PrepareOutcome::Ready);
        self.update_log(|log| log.prepared(prepare, outcome));
        // After the log knows: a writer that wakes finds the new segment.
        self.preparations.update(|preparations| {
            preparations.next_turn();
            if let Err(PrepareFailure { error, .. }) = result {
                preparations.failures += 1;
                preparations.error = Some(Arc::new(error));
            }
        });
    }

    async fn try_prepare_or_remove(&self, prepare: &Prepare) -> Result<(), PrepareFailure> {
        let Err(error) = self.write_segment_header(prepare).await else { return Ok(()) };
        self.counters.io_errors.add(1);
        // A header of unknown content is worse than no file: recovery could not tell the epoch.
        let removed = self.device.remove(prepare.segment).await.is_ok();
        Err(PrepareFailure { error, removed })
    }

    /// Creates the file of a fresh segment, or writes the header of another one, durably.
    async fn write_segment_header(&self, prepare: &Prepare) -> io::Result<()> {
        let Prepare { segment, epoch, fresh } = *prepare;
        let header = SegmentHeader { log_id: self.log_id, segment, epoch }.encode();
        if fresh {
            return self.device.create(segment, self.segment_bytes, header).await;
        }
        let write = Operation::write(0, Block::of(&header), None);
        self.run(segment, Priority::Demand, write).await?.result?;
        if fail_point!("log.record-before-durable-header") {
            return Ok(());
        }
        self.run(segment, Priority::Demand, Operation::Sync).await?.result
    }
}
