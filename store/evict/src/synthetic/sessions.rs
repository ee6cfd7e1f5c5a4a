//! Sessions: sources of several related requests.
//!
//! The session that is due sends the next request. If none is due, a new session begins. The
//! requests of a session share a prefix, which may grow. Each adds a tail of its own.

use super::{Traffic, document};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionKind {
    Tools,
    Paces,
    Agents,
    Bursts,
    Coders,
    Answers,
}

#[derive(Debug)]
struct Session {
    kept: Vec<u64>,
    left: u64,
    /// Requests of all sessions between two of its own, about.
    pace: u64,
}

#[derive(Debug, Default)]
pub(super) struct Sessions {
    waiting: BTreeMap<(u64, u64), Session>,
    begun: u64,
    /// Time of the latest answer, in requests of all sessions.
    pub(super) answer_requests: u64,
}

/// Maximum number of blocks in a prompt. A session that reaches it ends.
const PROMPT_BLOCKS_MAX: usize = 240;
const CODER_BLOCKS_MAX: usize = 600;
/// Longest answer, in requests of all sessions.
const ANSWER_REQUESTS_MAX: u64 = 600;
/// Requests of all sessions in which a coder's pause is about a minute, and their share in percent.
const PAUSE_REQUESTS: u64 = 250;
const PAUSE_PERCENT: u64 = 15;

impl Traffic {
    pub(super) fn ask(&mut self, kind_of_session: SessionKind) -> Vec<u64> {
        let now = self.made as u64;
        let due = self.sessions.waiting.first_entry().filter(|first| first.key().0 <= now);
        let (number, mut session) = match due {
            Some(first) => (first.key().1, first.remove()),
            None => {
                self.sessions.begun += 1;
                (self.sessions.begun, self.begin(kind_of_session))
            }
        };
        let blocks = self.request(kind_of_session, &mut session);
        let coder = matches!(kind_of_session, SessionKind::Coders | SessionKind::Answers);
        if session.left > 0 && blocks.len() < if coder { CODER_BLOCKS_MAX } else { PROMPT_BLOCKS_MAX } {
            session.left -= 1;
            let pauses = kind_of_session == SessionKind::Coders && self.random.below(100) < PAUSE_PERCENT;
            let pace = if pauses { PAUSE_REQUESTS } else { session.pace };
            let mut wait = pace / 2 + self.random.below(pace) + 1;
            if kind_of_session == SessionKind::Answers {
                self.sessions.answer_requests = 3 + self.random.zipf(ANSWER_REQUESTS_MAX);
                wait += self.sessions.answer_requests;
            }
            self.sessions.waiting.insert((now + wait, number), session);
        }
        blocks
    }

    fn begin(&mut self, kind_of_session: SessionKind) -> Session {
        match kind_of_session {
            SessionKind::Tools => {
                let left = u64::from(self.random.below(10) < 3);
                Session { kept: document(self.random.zipf(100)), left, pace: 20 }
            }
            SessionKind::Paces => {
                Session { kept: vec![0], left: self.random.zipf(20), pace: 8 << self.random.below(9) }
            }
            SessionKind::Agents => {
                let mut kept = document(self.random.below(5));
                let task_blocks = 2 + self.random.below(20);
                kept.extend(self.new_blocks(task_blocks));
                Session { kept, left: self.random.zipf(60), pace: 10 + self.random.below(60) }
            }
            SessionKind::Bursts => {
                let blocks = 2 + self.random.zipf(120);
                let left = if self.random.below(10) < 6 { 0 } else { 1 + self.random.below(10) };
                Session { kept: self.new_blocks(blocks), left, pace: 16 << self.random.below(7) }
            }
            SessionKind::Coders | SessionKind::Answers => {
                let blocks = 40 + self.random.below(120);
                Session { kept: self.new_blocks(blocks), left: 10 + self.random.zipf(200), pace: 20 }
            }
        }
    }

    /// The blocks of the next request. The session adds the part it keeps to its prefix.
    fn request(&mut self, kind_of_session: SessionKind, session: &mut Session) -> Vec<u64> {
        let (grows, tail) = match kind_of_session {
            SessionKind::Tools => (self.random.zipf(8), 1),
            SessionKind::Paces => (1 + self.random.zipf(20), 1),
            SessionKind::Agents => (1 + self.random.below(3), 0),
            SessionKind::Bursts => (0, 1),
            SessionKind::Coders | SessionKind::Answers => (self.random.zipf(12), 0),
        };
        session.kept.extend(self.new_blocks(grows));
        let mut blocks = session.kept.clone();
        blocks.extend(self.new_blocks(tail));
        blocks
    }
}
