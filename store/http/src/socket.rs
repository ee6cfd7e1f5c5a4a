//! Socket of a connection, with the deadlines of its phases.

use crate::options::HttpOptions;
use crate::phase::{Phase, PhaseCell};
use crate::refusal::{Reason, Reporter};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Maximum time that the server discards the rest of a refused body, so that its client can read
/// the answer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct Socket {
    stream: TcpStream,
    options: Arc<HttpOptions>,
    phase: Arc<PhaseCell>,
    reporter: Arc<Reporter>,
    peer: IpAddr,
    read_timer: Pin<Box<Sleep>>,
    write_timer: Pin<Box<Sleep>>,
    is_write_blocked: bool,
    /// `true` once the write half is closed.
    is_closing: bool,
}

impl Socket {
    pub(crate) fn new(
        (stream, peer): (TcpStream, IpAddr),
        options: Arc<HttpOptions>,
        phase: Arc<PhaseCell>,
        reporter: Arc<Reporter>,
    ) -> Self {
        let now = Instant::now();
        Self {
            stream,
            options,
            phase,
            reporter,
            peer,
            read_timer: Box::pin(sleep_until(now)),
            write_timer: Box::pin(sleep_until(now)),
            is_write_blocked: false,
            is_closing: false,
        }
    }

    /// Turns a write that has been pending for too long into an error. Each write that accepts
    /// bytes starts the time anew; the kernel wakes writers only when much of the buffer is free.
    fn limit_write<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            if std::mem::take(&mut self.is_write_blocked) {
                self.phase.send(false);
            }
            return result;
        }
        if !self.is_write_blocked {
            self.is_write_blocked = true;
            self.phase.send(true);
            self.write_timer.as_mut().reset(Instant::now() + self.options.write_timeout);
        }
        ready!(self.write_timer.as_mut().poll(cx));
        self.reporter.refused(Reason::WriteTimeout, self.peer);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        if let Poll::Ready(result) = Pin::new(&mut this.stream).poll_read(cx, buf) {
            if buf.filled().len() > before {
                this.phase.bytes_arrived();
            }
            return Poll::Ready(result);
        }
        let Some((phase, deadline)) = this.phase.read_deadline(&this.options, cx.waker()) else { return Poll::Pending };
        if this.read_timer.deadline() != deadline {
            this.read_timer.as_mut().reset(deadline);
        }
        ready!(this.read_timer.as_mut().poll(cx));
        // An idle connection that ends is no refusal.
        if phase == Phase::Header {
            this.reporter.refused(Reason::HeaderTimeout, this.peer);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.limit_write(cx, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.limit_write(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    /// Closes the write half. After a refused body it also discards what the client still sends:
    /// unread bytes would make the kernel reset the connection and drop the answer.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.is_closing {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.is_closing = true;
            this.write_timer.as_mut().reset(Instant::now() + DRAIN_TIMEOUT);
        }
        if !this.phase.is_draining() {
            return Poll::Ready(Ok(()));
        }
        let mut discarded = [0; 8 << 10];
        loop {
            if this.write_timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buf = ReadBuf::new(&mut discarded);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}
