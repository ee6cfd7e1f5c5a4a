//! Sessions: what asks more than once.
//!
//! A session whose time has come asks; while there is none a new one begins. What it keeps is the beginning that its
//! requests share, which may grow; what it asks for is that and a tail.

use super::{Traffic, document};
use std::collections::BTreeMap;

/// What the sessions are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    Tools,
    Paces,
    Agents,
    Bursts,
}

#[derive(Debug)]
struct Session {
    /// The beginning of all its requests.
    kept: Vec<u64>,
    /// Requests still to come.
    left: u64,
    /// Requests of all sessions between two of its own, about.
    pace: u64,
}

/// Those that will ask again, by when and by their number.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    waiting: BTreeMap<(u64, u64), Session>,
    begun: u64,
}

/// Most blocks of a prompt: a session that comes to it ends.
const PROMPT_BLOCKS_MAX: usize = 240;

impl Traffic {
    pub(super) fn ask(&mut self, habit: Habit) -> Vec<u64> {
        let now = self.made as u64;
        let due = self.sessions.waiting.first_entry().filter(|first| first.key().0 <= now);
        let (number, mut session) = match due {
            Some(first) => (first.key().1, first.remove()),
            None => {
                self.sessions.begun += 1;
                (self.sessions.begun, self.begin(habit))
            }
        };
        let blocks = self.request(habit, &mut session);
        if session.left > 0 && blocks.len() < PROMPT_BLOCKS_MAX {
            session.left -= 1;
            let wait = session.pace / 2 + self.dice.below(session.pace) + 1;
            self.sessions.waiting.insert((now + wait, number), session);
        }
        blocks
    }

    fn begin(&mut self, habit: Habit) -> Session {
        match habit {
            Habit::Tools => {
                let left = u64::from(self.dice.below(10) < 3);
                Session { kept: document(self.dice.zipf(100)), left, pace: 20 }
            }
            Habit::Paces => Session { kept: vec![0], left: self.dice.zipf(20), pace: 8 << self.dice.below(9) },
            Habit::Agents => {
                let mut kept = document(self.dice.below(5));
                let task_blocks = 2 + self.dice.below(20);
                kept.extend(self.new_blocks(task_blocks));
                Session { kept, left: self.dice.zipf(60), pace: 10 + self.dice.below(60) }
            }
            Habit::Bursts => {
                let blocks = 2 + self.dice.zipf(120);
                let left = if self.dice.below(10) < 6 { 0 } else { 1 + self.dice.below(10) };
                Session { kept: self.new_blocks(blocks), left, pace: 16 << self.dice.below(7) }
            }
        }
    }

    /// What it asks for now; what it keeps of that is added to it.
    fn request(&mut self, habit: Habit, session: &mut Session) -> Vec<u64> {
        let (grows, tail) = match habit {
            Habit::Tools => (self.dice.zipf(8), 1),
            Habit::Paces => (1 + self.dice.zipf(20), 1),
            Habit::Agents => (1 + self.dice.below(3), 0),
            Habit::Bursts => (0, 1),
        };
        session.kept.extend(self.new_blocks(grows));
        let mut blocks = session.kept.clone();
        blocks.extend(self.new_blocks(tail));
        blocks
    }
}
