//! One connection to a Redis server.
//!
//! Invariants:
//! - The server cannot make the engine keep more bytes than the replies to the present request may
//!   have. The `redis` crate itself has no limit.
//! - Dropping a connection closes its socket. An abandoned request leaves nothing behind.

use super::url::RedisUrl;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, RedisError, Value};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

/// Maximum bytes of the replies to AUTH and SELECT.
const SETUP_BYTES_MAX: u32 = 4 << 10;
/// Room for a reply without a value: a number, a status or an error.
pub(super) const SHORT_REPLY_BYTES: usize = 512;

/// Commands that are sent together.
pub(super) struct Question {
    pub(super) commands: Pipeline,
    /// Maximum bytes of each reply.
    pub(super) reply_bytes_max: usize,
}

impl Question {
    /// Commands that have no values as replies.
    pub(super) fn short(commands: Pipeline) -> Self {
        Self { commands, reply_bytes_max: SHORT_REPLY_BYTES }
    }
}

pub(super) struct Connection {
    redis: MultiplexedConnection,
    allowance: Arc<AtomicI64>,
    _driver: AbortOnDropHandle<()>,
}

impl Connection {
    /// Connects and logs in. The caller limits the time.
    pub(super) async fn open(url: &RedisUrl) -> Result<Self, RedisError> {
        let stream = TcpStream::connect(url.address()).await?;
        stream.set_nodelay(true)?;
        let allowance = Arc::new(AtomicI64::new(SETUP_BYTES_MAX.into()));
        let metered = Metered { stream, allowance: allowance.clone() };
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let (redis, driver) = MultiplexedConnection::new_with_config(url.settings(), metered, config).await?;
        allowance.store(0, Ordering::Relaxed);
        Ok(Self { redis, allowance, _driver: AbortOnDropHandle::new(tokio::spawn(driver)) })
    }

    /// Sends commands and returns the reply to each, in order. The caller limits the time, and must
    /// drop the connection if it does not wait for the end.
    pub(super) async fn ask(&mut self, question: &Question) -> Result<Vec<Value>, RedisError> {
        let count = question.commands.len();
        let bytes_max = i64::try_from(count.saturating_mul(question.reply_bytes_max)).unwrap_or(i64::MAX);
        // Relaxed: the channel to the driver orders it before the request.
        self.allowance.store(bytes_max, Ordering::Relaxed);
        let replies = self.redis.send_packed_commands(&question.commands, 0, count).await?;
        self.allowance.store(0, Ordering::Relaxed);
        if replies.len() != count {
            return Err(io::Error::other("the numbers of commands and replies differ").into());
        }
        Ok(replies)
    }
}

/// Socket that fails when more bytes arrive than are allowed.
struct Metered {
    stream: TcpStream,
    /// Bytes that may still arrive.
    allowance: Arc<AtomicI64>,
}

impl AsyncRead for Metered {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let read = (buffer.filled().len() - before) as i64;
        let left = self.allowance.fetch_sub(read, Ordering::Relaxed) - read;
        if left < 0 {
            let message = "the server sends more than it was asked for";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, message)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
