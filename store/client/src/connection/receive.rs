//! Receiving of responses: payloads go straight into the caller's buffers, and short responses may
//! come between their fragments.
//!
//! Invariants:
//! - The buffer of a request that was given up returns to its caller at once. The rest of the
//!   payload is discarded, and all other requests go on.
//! - Nothing writes to a buffer after its handler was dropped: the future that receives into it is
//!   dropped first.
//! - A payload may take any time while its bytes keep coming. [`STALL_TIMEOUT`] without a byte ends
//!   the connection, as does [`BODY_TIMEOUT`] for the body of a response.

use super::dispatch::{ReceivedPage, apply, apply_page, dispatch, report_corrupt_page, report_corrupt_part};
use super::handlers::{PagesHandler, PartsHandler, PayloadTarget, ResponseHandler};
use super::multiplex::Connection;
use larder_format::codec::DecodeError;
use larder_format::{CHUNK_BYTES, PayloadVerifier};
use larder_runtime::fail_point;
use larder_wire::{
    ByteSource, FrameHead, FrameHeader, FrameReader, MAX_KEYS, PayloadLocation, Piece, Request, Response,
};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Maximum time without a byte of a payload that was announced. A peer that stalls for longer
/// counts as dead.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for the body of a response, beside the time that its received bytes may take at
/// [`BODY_BYTES_PER_SECOND_MIN`].
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Rate at which a body may arrive, in bytes per second: an eighth of a link of 64 KB/s, which
/// carries several connections. The largest body, 1 MiB, then has 158 s.
const BODY_BYTES_PER_SECOND_MIN: f64 = (8 << 10) as f64;

/// Receives responses until the stream ends. Counts them in `responses`.
pub(super) async fn receive<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    responses: &AtomicU64,
) -> io::Result<()> {
    while let Some(head) = reader.head().await? {
        take_body(reader, &head).await?;
        let header = head.header;
        responses.fetch_add(1, Ordering::Relaxed);
        let response = decode(connection, &header, reader)?;
        if header.payload_bytes == 0 {
            dispatch(connection, header.request, response);
        } else {
            let request = header.request;
            PayloadReceiver { connection, reader, request, deferred: Vec::new() }.run(&header, response).await?;
        }
    }
    Ok(())
}

/// Receives the body of a response within [`BODY_TIMEOUT`], and longer while its bytes arrive. Its
/// length is unchecked until it is complete. With a damaged length, later answers would pass for
/// the body, so single bytes do not extend the time for long.
async fn take_body<S: ByteSource>(reader: &mut FrameReader<S>, head: &FrameHead) -> io::Result<()> {
    let counter = reader.received_bytes();
    // Relaxed: the counter orders nothing.
    let before = counter.load(Ordering::Relaxed);
    let began = Instant::now();
    let mut limit = BODY_TIMEOUT;
    let mut body = pin!(reader.take_body(head));
    loop {
        if let Ok(taken) = timeout_at(began + limit, &mut body).await {
            return taken;
        }
        let received = (counter.load(Ordering::Relaxed) - before).min(head.header.body_bytes.into());
        let longer = BODY_TIMEOUT + Duration::from_secs_f64(received as f64 / BODY_BYTES_PER_SECOND_MIN);
        if longer <= limit {
            return Err(io::ErrorKind::TimedOut.into());
        }
        limit = longer;
    }
}

fn decode<S: ByteSource>(
    connection: &Connection,
    header: &FrameHeader,
    reader: &FrameReader<S>,
) -> io::Result<Response> {
    Response::decode(connection.version(), header.kind, reader.body()).map_err(invalid_data)
}

fn invalid_data(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Receives the payload of one response.
struct PayloadReceiver<'a, S> {
    connection: &'a Arc<Connection>,
    reader: &'a mut FrameReader<S>,
    request: u64,
    /// Responses to the same request that came meanwhile. Its handler is not in the table, so they
    /// wait for the end of the payload. At most one per key.
    deferred: Vec<Response>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Received,
    /// The client gave up the request, or the node gave up the payload.
    GivenUp,
}

impl<S: ByteSource> PayloadReceiver<'_, S> {
    async fn run(mut self, header: &FrameHeader, response: Response) -> io::Result<()> {
        let payload_bytes = header.payload_bytes as usize;
        let handler = self.connection.pending().lock().begin_response(self.request);
        let (end, handler) = match (ReceivedPage::of(response), handler) {
            (
                Ok(page @ ReceivedPage { location: PayloadLocation::Inline, .. }),
                Some(ResponseHandler::Pages(pages)),
            ) => {
                let (end, pages) = self.receive_page(page, payload_bytes, pages).await?;
                (end, Some(ResponseHandler::Pages(pages)))
            }
            (Err(Response::Part { part, crcs }), Some(ResponseHandler::Parts(parts))) => {
                let (end, parts) = self.receive_part(part, &crcs, payload_bytes, parts).await?;
                (end, Some(ResponseHandler::Parts(parts)))
            }
            // Cancelled, or a response that has no use for a payload. `discard` drops the bytes.
            (Ok(page), handler) => (End::Received, apply_page(self.connection, self.request, page, handler)),
            (Err(response), handler) => (End::Received, apply(self.connection, self.request, response, handler)),
        };
        self.end(end, handler);
        self.discard().await
    }

    /// Returns the handler to the table, or ends it.
    fn end(&mut self, end: End, mut handler: Option<ResponseHandler>) {
        let mut is_cancelled = false;
        if end == End::Received {
            for response in std::mem::take(&mut self.deferred) {
                handler = apply(self.connection, self.request, response, handler);
            }
        } else {
            // Its destructor wakes the caller, so it runs without the lock.
            is_cancelled = handler.take().is_some();
            // Applied without a handler, because the node holds the pages that they announce.
            self.deferred.drain(..).for_each(|response| {
                apply(self.connection, self.request, response, None);
            });
        }
        let cancelled = self.connection.pending().lock().end_response(self.request, handler);
        // A caller that cancels tells the node only if it finds the handler in the table. If the
        // node gave up, it may still send other pages of the request.
        if is_cancelled || cancelled.is_some() {
            self.connection.send_detached(&Request::Cancel(self.request));
        }
    }

    /// Receives a page's bytes into the caller's buffer, and checks them on the way.
    async fn receive_page(
        &mut self,
        page: ReceivedPage,
        payload_bytes: usize,
        mut pages: PagesHandler,
    ) -> io::Result<(End, PagesHandler)> {
        let ReceivedPage { index, tier, meta, range, .. } = page;
        // A response has begun, so hedging must not abandon the request.
        pages.record_response();
        // An answer without the expected grant. Many in a row mean that the channels are dead.
        if pages.expects_grant(index) {
            self.connection.rdma().record_answer(false);
        }
        let mut is_valid = false;
        if let Some(target) = pages.begin_payload(index, &meta, &range, payload_bytes) {
            match self.receive_target(target).await? {
                Some(valid) => is_valid = valid,
                None => return Ok((End::GivenUp, pages)),
            }
            pages.finish_payload(index, tier, meta.generation, is_valid);
            if is_valid {
                pages.keep_meta(index, meta);
            }
        }
        // Also a payload that does not fit the request: `begin_payload` has returned `None`.
        if !is_valid {
            report_corrupt_page(self.connection, &pages, index);
        }
        Ok((End::Received, pages))
    }

    /// Receives a payload. Returns `true` if all checksums match, and `None` if it was given up.
    async fn receive_target(&mut self, target: PayloadTarget<'_>) -> io::Result<Option<bool>> {
        let PayloadTarget { before, memory, after, mut verifier, is_range } = target;
        let mut scratch = vec![0; before.max(after).min(CHUNK_BYTES)];
        let mut end = self.pass(&mut scratch, before, &mut verifier).await?;
        if end == End::Received {
            end = self.fill(memory, &mut verifier).await?;
        }
        if end == End::Received {
            end = self.pass(&mut scratch, after, &mut verifier).await?;
        }
        if end == End::GivenUp {
            return Ok(None);
        }
        let skips_check = if is_range {
            fail_point!("client.range-skips-checksum")
        } else {
            fail_point!("client.get-skips-checksum")
        };
        Ok(Some(verifier.finish().is_ok() || skips_check))
    }

    async fn receive_part(
        &mut self,
        part: u32,
        crcs: &[u32],
        payload_bytes: usize,
        mut parts: PartsHandler,
    ) -> io::Result<(End, PartsHandler)> {
        let mut is_valid = false;
        if let Some(memory) = parts.begin_part(part, payload_bytes) {
            let lengths = [payload_bytes as u32];
            let mut verifier = PayloadVerifier::new(&lengths, crcs);
            if self.fill(memory, &mut verifier).await? == End::GivenUp {
                return Ok((End::GivenUp, parts));
            }
            is_valid = verifier.finish().is_ok();
            parts.finish_part(part, is_valid.then(|| crcs.to_vec()));
        }
        if !is_valid {
            report_corrupt_part(self.connection, &parts, part);
        }
        Ok((End::Received, parts))
    }

    /// Receives `bytes` bytes that are only checked.
    async fn pass(&mut self, scratch: &mut [u8], bytes: usize, verifier: &mut PayloadVerifier<'_>) -> io::Result<End> {
        let mut left = bytes;
        while left > 0 {
            let now = left.min(scratch.len());
            if self.fill(&mut scratch[..now], verifier).await? == End::GivenUp {
                return Ok(End::GivenUp);
            }
            left -= now;
        }
        Ok(End::Received)
    }

    /// Fills `memory` with the next bytes of the payload, unless the request is given up before.
    async fn fill(&mut self, memory: &mut [u8], verifier: &mut PayloadVerifier<'_>) -> io::Result<End> {
        let mut at = 0;
        while at < memory.len() {
            let piece = tokio::select! {
                // First, so that a buffer returns even if bytes keep coming.
                biased;
                () = self.connection.given_up(self.request) => return Ok(End::GivenUp),
                piece = piece(self.reader, &mut memory[at..]) => piece?,
            };
            match piece {
                Piece::Bytes(bytes) => {
                    verifier.take(&memory[at..at + bytes]);
                    at += bytes;
                }
                Piece::Frame(head) => self.receive_between(&head).await?,
                Piece::Abandoned => return Ok(End::GivenUp),
            }
        }
        Ok(End::Received)
    }

    /// Receives a response that came between two fragments.
    async fn receive_between(&mut self, head: &FrameHead) -> io::Result<()> {
        take_body(self.reader, head).await?;
        let response = decode(self.connection, &head.header, self.reader)?;
        // Deferred only while this receiver has the handler: `end` gives it back before `discard`.
        if head.header.request != self.request || !self.connection.pending().lock().is_receiving(self.request) {
            dispatch(self.connection, head.header.request, response);
        } else if self.deferred.len() < MAX_KEYS {
            self.deferred.push(response);
        } else {
            return Err(invalid_data(DecodeError::Invalid("number of responses")));
        }
        Ok(())
    }

    /// Receives the rest of the payload and drops it. Other responses still go on.
    async fn discard(&mut self) -> io::Result<()> {
        let mut scratch = vec![0; self.reader.payload_left().min(CHUNK_BYTES)];
        while self.reader.payload_left() > 0 {
            if let Piece::Frame(head) = piece(self.reader, &mut scratch).await? {
                self.receive_between(&head).await?;
            }
        }
        Ok(())
    }
}

async fn piece<S: ByteSource>(reader: &mut FrameReader<S>, memory: &mut [u8]) -> io::Result<Piece> {
    let piece = tokio::time::timeout(STALL_TIMEOUT, reader.piece(memory));
    piece.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

#[cfg(test)]
mod tests {
    use super::super::multiplex::NodeIdentity;
    use super::*;
    use larder_wire::{HEADER_BYTES, PROTOCOL_VERSION};
    use std::io::IoSliceMut;

    /// Delivers its bytes, and then some more every 5 s. One is as much as a node sends that
    /// answers probes.
    struct TricklingSource {
        left: Vec<u8>,
        more: usize,
    }

    impl ByteSource for TricklingSource {
        async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            if self.left.is_empty() {
                tokio::time::sleep(Duration::from_secs(5)).await;
                self.left.resize(self.more, 0);
            }
            let into = &mut into[0];
            let bytes = self.left.len().min(into.len());
            into[..bytes].copy_from_slice(&self.left[..bytes]);
            self.left.drain(..bytes);
            Ok(bytes)
        }
    }

    /// Receives a body of 1 MiB, of which `more` bytes arrive every 5 s. Returns the error and the
    /// time until it.
    async fn receive_slowly(more: usize) -> (io::ErrorKind, Duration) {
        let mut left = vec![0; HEADER_BYTES];
        left[..4].copy_from_slice(b"LRDR");
        left[16..20].copy_from_slice(&(1u32 << 20).to_le_bytes());
        let node = NodeIdentity { node_id: "node".into(), epoch: 1, version: PROTOCOL_VERSION };
        let (connection, _queue) = Connection::new(node, None, 0);
        let begin = Instant::now();
        let mut reader = FrameReader::new(TricklingSource { left, more });
        let ended = receive(&connection, &mut reader, &AtomicU64::new(0)).await;
        (ended.expect_err("the body is no message").kind(), begin.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn damaged_length_of_a_body_ends_the_connection_although_bytes_arrive() {
        let (error, time) = receive_slowly(1).await;
        assert_eq!(error, io::ErrorKind::TimedOut);
        assert!((BODY_TIMEOUT..BODY_TIMEOUT + Duration::from_secs(1)).contains(&time), "{time:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn body_over_a_slow_link_is_received_to_its_end() {
        // 8 connections share 64 KB/s: the body takes 131 s, and is invalid once it is complete.
        let (error, time) = receive_slowly(40_000).await;
        assert_eq!(error, io::ErrorKind::InvalidData);
        assert!(time > Duration::from_secs(120), "{time:?}");
        let (error, time) = receive_slowly(4_000).await;
        assert_eq!(error, io::ErrorKind::TimedOut);
        assert!(time < Duration::from_secs(40), "too slow for the promise: {time:?}");
    }
}
