//! The write path: queue, plan, device.

use crate::guards::WriteGuard;
use crate::machine::{Append, PlannedWrite, WriteOutcome};
use crate::shared::LogShared;
use crate::{L3Error, WRITE_QUEUE_BYTES_MAX};
use larder_format::PageMeta;
use larder_format::codec::DecodeError;
use larder_format::disk::{BLOCK_BYTES, record_bytes};
use larder_io::{Block, Done, Operation, Priority};
use larder_memory::Slot;
use larder_runtime::fail_point;
use std::io;
use std::sync::Arc;
use tokio::sync::oneshot;

pub(crate) enum PlanAttempt<T> {
    Done(T),
    Wait,
}

impl LogShared {
    /// Writes a page, and returns when the device has it. Waits for room in the write queue first,
    /// then for room in the log.
    pub(crate) async fn write_page(self: &Arc<Self>, meta: PageMeta, payload: Slot) -> Result<(), L3Error> {
        meta.validate()?;
        if payload.len() != meta.payload_bytes() {
            return Err(DecodeError::Invalid("length of the payload").into());
        }
        // A record larger than the queue takes all of it, instead of waiting for ever.
        let blocks = record_bytes(payload.len()).min(WRITE_QUEUE_BYTES_MAX) / BLOCK_BYTES;
        let permit = self.write_queue.clone().acquire_many_owned(blocks as u32).await;
        let permit = permit.map_err(|_| L3Error::Closed)?;
        let Some(planned) = self.plan_page(&meta).await? else { return Ok(()) };
        let segment = planned.header.place.segment;
        let bytes = payload.len() as u64;
        let answer = self.submit_record(WriteGuard::new(self, planned, Some(permit)), Some(payload)).await?;
        if fail_point!("log.acknowledge-before-write") {
            return Ok(());
        }
        let result = answer.await.map_err(|_| L3Error::Closed)?;
        result.map_err(|error| self.io_error("write", segment, error))?;
        self.counters.writes.add(1);
        self.counters.written_bytes.add(bytes);
        Ok(())
    }

    /// Plans the record of a page. Returns `None` if the log already has this put.
    async fn plan_page(self: &Arc<Self>, meta: &PageMeta) -> Result<Option<PlannedWrite>, L3Error> {
        self.plan_when_room(|shared| {
            Ok(match shared.update_log(|log| log.append(meta))? {
                Append::Write(planned) => PlanAttempt::Done(Some(planned)),
                Append::AlreadyThere => PlanAttempt::Done(None),
                Append::Wait => PlanAttempt::Wait,
            })
        })
        .await
    }

    /// Submits a planned record to the device. The receiver gets the result after the log did, so a
    /// caller that sees success also finds the page.
    pub(crate) async fn submit_record(
        self: &Arc<Self>,
        write: WriteGuard,
        payload: Option<Slot>,
    ) -> Result<oneshot::Receiver<io::Result<()>>, L3Error> {
        let header = write.header();
        let block = Block::of(&header.encode(&self.log_id));
        let operation = Operation::write(header.place.offset, block, payload);
        let segment = header.place.segment;
        let (reply, answer) = oneshot::channel();
        let on_done = move |done: Done| {
            write.finish(if done.result.is_ok() { WriteOutcome::Written } else { WriteOutcome::Failed });
            // The writer may have passed its deadline and dropped the receiver. The log knows the
            // result anyway.
            let _ = reply.send(done.result);
        };
        // If this future is dropped before the device accepts the request, the guard in `on_done`
        // reports the write as not sent.
        self.device.submit(segment, Priority::Background, operation, Box::new(on_done)).await?;
        Ok(answer)
    }

    /// Repeats `attempt` until the log has room. Fails when a segment cannot be prepared meanwhile.
    pub(crate) async fn plan_when_room<T>(
        self: &Arc<Self>,
        mut attempt: impl FnMut(&LogShared) -> Result<PlanAttempt<T>, L3Error>,
    ) -> Result<T, L3Error> {
        // Read before the first attempt: a segment that becomes ready in between changes the turn.
        let mut seen = self.preparations.get();
        let failures = seen.failures;
        loop {
            self.ensure_open()?;
            if let PlanAttempt::Done(planned) = attempt(self)? {
                return Ok(planned);
            }
            let turn = seen.turn;
            seen = self.preparations.wait_for(|now| (now.turn != turn).then(|| now.clone())).await;
            if let Some(error) = seen.error.as_ref().filter(|_| seen.failures > failures) {
                // Several writers get the one error. Its number must survive: callers tell a lack
                // of descriptors from a broken device by it.
                let copied = || io::Error::new(error.kind(), error.to_string());
                let source = error.raw_os_error().map_or_else(copied, io::Error::from_raw_os_error);
                let path = self.device.path().to_path_buf();
                return Err(L3Error::Io { action: "prepare a segment in", path, source });
            }
        }
    }
}
