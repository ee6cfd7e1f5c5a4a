//! Replies that wait to be sent.

use larder_redis::{Protocol, Reply};
use larder_wire::ByteSink;
use std::io::{self, IoSlice};
use std::time::Duration;

/// Bytes of short replies that are sent together, at least. A pipeline then takes few system calls.
const FLUSH_BYTES: usize = 16 << 10;
/// Slices of one system call, at most. Linux accepts 1,024.
const SLICES_MAX: usize = 64;

pub(super) struct Output<W> {
    sink: W,
    /// Maximum time in which the client takes no byte.
    stall_timeout: Duration,
    pub(super) buffer: Vec<u8>,
    pub(super) protocol: Protocol,
}

impl<W: ByteSink> Output<W> {
    pub(super) fn new(sink: W, stall_timeout: Duration) -> Output<W> {
        Output { sink, stall_timeout, buffer: Vec::new(), protocol: Protocol::Resp2 }
    }

    pub(super) fn into_sink(self) -> W {
        self.sink
    }

    /// Queues a reply. Sends the queue if it is long, which waits for the client.
    pub(super) async fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        reply.encode(self.protocol, &mut self.buffer);
        self.flush_if_long().await
    }

    pub(super) async fn flush_if_long(&mut self) -> io::Result<()> {
        if self.buffer.len() >= FLUSH_BYTES { self.flush().await } else { Ok(()) }
    }

    /// Sends the queue.
    pub(super) async fn flush(&mut self) -> io::Result<()> {
        self.send(&[]).await
    }

    /// Sends the queue, and `slices` behind it.
    ///
    /// # Errors
    /// `TimedOut` if the client takes no byte for the stall timeout.
    pub(super) async fn send(&mut self, slices: &[&[u8]]) -> io::Result<()> {
        let mut left: Vec<&[u8]> = std::iter::once(&self.buffer[..]).chain(slices.iter().copied()).collect();
        left.retain(|slice| !slice.is_empty());
        let mut first = 0;
        while first < left.len() {
            let batch: Vec<IoSlice<'_>> =
                left[first..].iter().take(SLICES_MAX).map(|slice| IoSlice::new(slice)).collect();
            let mut sent = tokio::time::timeout(self.stall_timeout, self.sink.send(&batch)).await??;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            while first < left.len() && sent >= left[first].len() {
                sent -= left[first].len();
                first += 1;
            }
            if sent > 0 {
                left[first] = &left[first][sent..];
            }
        }
        self.buffer.clear();
        if self.buffer.capacity() > 2 * FLUSH_BYTES {
            self.buffer = Vec::new();
        }
        Ok(())
    }
}
