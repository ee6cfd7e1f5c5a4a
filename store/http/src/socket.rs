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
    patience: Patience,
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
            patience: Patience::new(now),
            is_closing: false,
        }
    }

    /// Turns a write into an error if the client has kept its socket full for too long.
    fn limit_write(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = result {
            let bytes = written.as_ref().copied().unwrap_or(0);
            if self.patience.took(bytes, &self.options, Instant::now()) {
                self.phase.send(false);
            }
            return Poll::Ready(written);
        }
        if let Some(deadline) = self.patience.is_full(&self.options, Instant::now()) {
            self.phase.send(true);
            self.write_timer.as_mut().reset(deadline);
        }
        ready!(self.write_timer.as_mut().poll(cx));
        self.reporter.refused(Reason::WriteTimeout, self.peer);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Time for which a client has kept its socket full. The kernel wakes a writer at each byte that
/// it has room for, so a byte alone must not start the time anew.
///
/// [`HttpOptions::write_timeout`] bounds it. It falls by the time in which the socket is not full,
/// and by that in which the bytes taken arrive at the minimum rate.
struct Patience {
    used: Duration,
    /// Start of the present state.
    since: Instant,
    is_full: bool,
}

impl Patience {
    fn new(now: Instant) -> Patience {
        Patience { used: Duration::ZERO, since: now, is_full: false }
    }

    /// Records that the socket took `bytes`. Returns `true` if it was full.
    fn took(&mut self, bytes: usize, options: &HttpOptions, now: Instant) -> bool {
        let was_full = std::mem::take(&mut self.is_full);
        if was_full {
            self.used = (self.used + now.duration_since(self.since)).min(options.write_timeout);
            self.since = now;
        }
        self.used = self.used.saturating_sub(options.time_for(bytes));
        was_full
    }

    /// Records that the socket is full. Returns the end of the client's time if it was not before.
    fn is_full(&mut self, options: &HttpOptions, now: Instant) -> Option<Instant> {
        if std::mem::replace(&mut self.is_full, true) {
            return None;
        }
        // Saturates: after a while the client has all its time again.
        self.used = self.used.saturating_sub(now.duration_since(self.since));
        self.since = now;
        Some(now + options.write_timeout.saturating_sub(self.used))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_taken_now_and_then_buy_the_time_of_the_minimum_rate() {
        let options = HttpOptions { write_timeout: Duration::from_secs(10), ..HttpOptions::default() };
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut patience = Patience::new(start);
        assert_eq!(patience.is_full(&options, at(0)), Some(at(10)));
        assert_eq!(patience.is_full(&options, at(1)), None, "the time goes on");
        assert!(patience.took(1, &options, at(6)));
        let left = patience.is_full(&options, at(6)).unwrap() - at(6);
        assert!((4.0..4.1).contains(&left.as_secs_f64()), "a byte buys nothing: {left:?}");
        assert!(patience.took(2 * (64 << 10), &options, at(7)));
        let left = patience.is_full(&options, at(7)).unwrap() - at(7);
        assert!((5.0..5.1).contains(&left.as_secs_f64()), "128 KiB buy two seconds: {left:?}");
        assert!(patience.took(0, &options, at(9)) && !patience.took(10, &options, at(9)));
        assert_eq!(patience.is_full(&options, at(60)), Some(at(70)), "the socket was not full for long");
    }
}
