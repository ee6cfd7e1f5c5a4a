//! Writing a page.

use crate::shared::{Shared, WriteGuard};
use crate::{L3Error, WRITE_QUEUE_BYTES_MAX};
use larder_core::log::{Append, PlannedWrite};
use larder_core::planted::{Bug, has};
use larder_device::Slot;
use larder_format::PageMeta;
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, record_bytes};
use std::io;
use std::sync::Arc;

/// What a planning step of the log says.
pub(crate) enum Planned<T> {
    Done(T),
    /// No segment has room yet.
    Wait,
}

impl Shared {
    /// Queues the page, writes it, and returns when the device has it.
    pub(crate) async fn write(self: &Arc<Self>, meta: PageMeta, payload: Slot) -> Result<(), L3Error> {
        meta.validate()?;
        if payload.len() != meta.payload_bytes() {
            return Err(DecodeError::Invalid("length of the payload").into());
        }
        let blocks = record_bytes(payload.len()).min(WRITE_QUEUE_BYTES_MAX) / BLOCK_BYTES;
        let queued = self.write_queue.clone().acquire_many_owned(blocks as u32).await;
        let queued = queued.map_err(|_| L3Error::Closed)?;
        let Some(planned) = self.plan_page(&meta).await? else { return Ok(()) };
        let segment = planned.header.place.segment;
        let bytes = payload.len() as u64;
        let answer = self.write_record(WriteGuard::new(self, planned, Some(queued)), Some(payload)).await?;
        if has(Bug::AckBeforeWrite) {
            return Ok(());
        }
        let result = answer.await.map_err(|_| L3Error::Closed)?;
        result.map_err(|error| self.io_error("writing", segment, error))?;
        self.counters.writes.add(1);
        self.counters.written_bytes.add(bytes);
        Ok(())
    }

    /// `None` if this very put is in the log.
    async fn plan_page(self: &Arc<Self>, meta: &PageMeta) -> Result<Option<PlannedWrite>, L3Error> {
        self.plan(|shared| {
            Ok(match shared.change(|log| log.append(meta))? {
                Append::Write(planned) => Planned::Done(Some(planned)),
                Append::AlreadyThere => Planned::Done(None),
                Append::Wait => Planned::Wait,
            })
        })
        .await
    }

    /// Asks the log until it has room. Fails when no segment can be made ready.
    pub(crate) async fn plan<T>(
        self: &Arc<Self>,
        mut ask: impl FnMut(&Shared) -> Result<Planned<T>, L3Error>,
    ) -> Result<T, L3Error> {
        let mut seen = self.prepared.now();
        let failures = seen.failures;
        loop {
            self.open()?;
            if let Planned::Done(planned) = ask(self)? {
                return Ok(planned);
            }
            let turn = seen.turn;
            seen = self.prepared.wait(|now| (now.turn != turn).then(|| now.clone())).await;
            if let Some((kind, message)) = seen.error.as_ref().filter(|_| seen.failures > failures) {
                let source = io::Error::new(*kind, message.clone());
                return Err(L3Error::Io {
                    doing: "making a segment ready in",
                    path: self.device.path().to_path_buf(),
                    source,
                });
            }
        }
    }
}
