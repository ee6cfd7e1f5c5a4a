//! Buffer of bytes that have arrived.

use larder_wire::ByteSource;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size of the buffer of a stranger in bytes. A first command fits, such as HELLO with AUTH.
///
/// Together with the connection's task and account it must stay below 16 KiB, which a connection
/// may cost before it has said anything valid.
const FIRST_BUFFER_BYTES: usize = 2 << 10;
/// Size of the buffer of a client in bytes. A request without a long value fits, and so does a
/// short pipeline.
const BUFFER_BYTES: usize = 16 << 10;

pub(super) struct Input<S> {
    source: S,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that have arrived and were not taken.
    start: usize,
    end: usize,
    received: Arc<AtomicU64>,
}

impl<S: ByteSource> Input<S> {
    pub(super) fn new(source: S) -> Input<S> {
        Input { source, buffer: vec![0; FIRST_BUFFER_BYTES].into(), start: 0, end: 0, received: Arc::default() }
    }

    /// Gives the buffer the size for a client. Keeps its bytes.
    pub(super) fn grow(&mut self) {
        if self.buffer.len() < BUFFER_BYTES {
            let mut buffer = vec![0; BUFFER_BYTES];
            buffer[..self.end].copy_from_slice(&self.buffer[..self.end]);
            self.buffer = buffer.into();
        }
    }

    /// Bytes that have arrived and were not taken.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Takes bytes off the buffer.
    pub(super) fn take(&mut self, bytes: usize) {
        self.start += bytes;
        assert!(self.start <= self.end, "more bytes taken than arrived");
    }

    /// Counter of the bytes that have arrived.
    pub(super) fn received(&self) -> Arc<AtomicU64> {
        self.received.clone()
    }

    /// Waits for bytes behind those that were taken. The buffer must be empty. Returns `false` at
    /// the end of the stream. Cancel safe. `is_next` at the start of a request.
    pub(super) async fn fill(&mut self, is_next: bool) -> io::Result<bool> {
        assert!(self.start == self.end, "bytes would be lost");
        (self.start, self.end) = (0, 0);
        let mut into = [IoSliceMut::new(&mut self.buffer)];
        let received = match is_next {
            true => self.source.receive_next(&mut into).await?,
            false => self.source.receive(&mut into).await?,
        };
        self.end = received;
        self.record(received);
        Ok(received > 0)
    }

    /// Waits for bytes of a value, and returns how many came: first those of the buffer. Bytes
    /// behind `into` go to the buffer, so that the next request needs no further system call.
    /// Cancel safe.
    pub(super) async fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.start < self.end {
            let bytes = into.len().min(self.end - self.start);
            into[..bytes].copy_from_slice(&self.buffer[self.start..self.start + bytes]);
            self.start += bytes;
            return Ok(bytes);
        }
        (self.start, self.end) = (0, 0);
        let length = into.len();
        let received = self.source.receive(&mut [IoSliceMut::new(into), IoSliceMut::new(&mut self.buffer)]).await?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.end = received.saturating_sub(length);
        self.record(received);
        Ok(received.min(length))
    }

    fn record(&self, bytes: usize) {
        // Relaxed: the counter orders nothing.
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
