//! Phase of a connection, shared by its socket, its requests and the table of connections.

use crate::options::HttpOptions;
use larder_runtime::lock::Mutex;
use std::task::Waker;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Between two requests.
    Idle,
    Header,
    Body,
    /// The whole request has arrived, and its answer has not ended.
    Answering,
}

#[derive(Debug)]
pub(crate) struct PhaseCell(Mutex<PhaseState>);

#[derive(Debug)]
struct PhaseState {
    phase: Phase,
    since: Instant,
    /// The client may still be sending a body that the server refused. Closing at once would reset
    /// the connection, and the client could lose the answer.
    is_draining: bool,
    /// The client's socket is full. The server has handed over all of a short answer by then, so
    /// the phase may be idle already.
    is_sending: bool,
    /// Task that reads in a phase without a read deadline. It must learn of the next one.
    reader: Option<Waker>,
}

impl PhaseState {
    /// Has the reader ask for its deadline again.
    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl Default for PhaseCell {
    /// A new connection owes a header. Only later ones may be idle.
    fn default() -> Self {
        Self(Mutex::new(PhaseState {
            phase: Phase::Header,
            since: Instant::now(),
            is_draining: false,
            is_sending: false,
            reader: None,
        }))
    }
}

impl PhaseCell {
    pub(crate) fn enter(&self, phase: Phase) {
        let mut state = self.0.lock();
        state.phase = phase;
        state.since = Instant::now();
        state.wake_reader();
    }

    /// Records that bytes arrived. They begin the next request if the connection was idle.
    pub(crate) fn bytes_arrived(&self) {
        let mut state = self.0.lock();
        if state.phase == Phase::Idle {
            state.phase = Phase::Header;
            state.since = Instant::now();
        }
    }

    pub(crate) fn drain(&self) {
        self.0.lock().is_draining = true;
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.0.lock().is_draining
    }

    /// Records that the client's socket is full, or is so no more.
    pub(crate) fn send(&self, is_sending: bool) {
        let mut state = self.0.lock();
        state.is_sending = is_sending;
        // The client could not know before that its answer is complete.
        if state.phase == Phase::Idle {
            state.since = Instant::now();
        }
        state.wake_reader();
    }

    pub(crate) fn is_answering(&self) -> bool {
        self.waiting_since().is_none()
    }

    /// Start of a phase in which the server owes the client nothing. `None` while it answers.
    pub(crate) fn waiting_since(&self) -> Option<Instant> {
        let state = self.0.lock();
        (state.phase != Phase::Answering && !state.is_sending).then_some(state.since)
    }

    /// Phase and time at which the socket stops waiting for bytes. `None` in phases without such a
    /// limit: bodies have one of their own. The next change of the phase then wakes `reader`.
    pub(crate) fn read_deadline(&self, options: &HttpOptions, reader: &Waker) -> Option<(Phase, Instant)> {
        let mut state = self.0.lock();
        let limit = match state.phase {
            Phase::Idle if !state.is_sending => Some(options.idle_timeout),
            Phase::Header if !state.is_sending => Some(options.header_timeout),
            _ => None,
        };
        if limit.is_none() {
            state.reader = Some(reader.clone());
        }
        Some((state.phase, state.since + limit?))
    }
}
