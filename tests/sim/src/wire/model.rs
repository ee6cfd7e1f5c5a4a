//! Which pages clients may be told of, and which bytes they may be given.
//!
//! A put is known by its key and its *content*: the number that its bytes follow from. Bytes may be had, or told of, if a put
//! of that key with that content
//! - asked to be sealed, and was not answered that it was not;
//! - was not forgotten: once forgetting was complete, puts that had ended before it was asked for are dead for good;
//! - is not past its time.
//!
//! A put whose end nobody heard of may still happen until all is at rest. Nothing must be there: nodes go, and L2 is small.

use crate::model::Bytes;
use crate::payload;
use std::collections::BTreeSet;

/// The first words of a payload are its key and its content.
const NAME_BYTES: usize = 16;

#[derive(Debug)]
struct Put {
    number: u64,
    content: u64,
    /// Whether it may be sealed.
    asked: bool,
    ended: Option<u64>,
    dead_since: Option<u64>,
    over_unix_ms: u64,
}

/// A put under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name {
    pub(super) key: u64,
    pub(super) number: u64,
    pub(super) content: u64,
}

/// When somebody asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    tick: u64,
    unix_ms: u64,
}

/// A forgetting under way.
#[derive(Debug)]
pub(super) struct Forgetting {
    keys: Vec<u64>,
    began: u64,
}

/// Everything that was asked.
#[derive(Debug)]
pub(super) struct Model {
    clock: u64,
    puts: u64,
    keys: Vec<Vec<Put>>,
    /// Every content that was ever put.
    contents: Vec<BTreeSet<u64>>,
    /// When forgetting of a key was last asked for.
    forgotten: Vec<u64>,
}

impl Model {
    pub(super) fn new(keys: u64) -> Model {
        let forgotten = vec![0; keys as usize];
        let contents = vec![BTreeSet::new(); keys as usize];
        Model { clock: 0, puts: 0, keys: (0..keys).map(|_| Vec::new()).collect(), contents, forgotten }
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(super) fn asks(&mut self, unix_ms: u64) -> Asked {
        Asked { tick: self.now(), unix_ms }
    }

    /// A put begins, with the bytes of an earlier one if `content` says so.
    pub(super) fn begins(&mut self, key: u64, content: Option<u64>) -> Name {
        self.puts += 1;
        let (number, content) = (self.puts, content.unwrap_or(self.puts));
        let put = Put { number, content, asked: false, ended: None, dead_since: None, over_unix_ms: u64::MAX };
        self.keys[key as usize].push(put);
        self.contents[key as usize].insert(content);
        Name { key, number, content }
    }

    fn put(&mut self, name: Name) -> Option<&mut Put> {
        self.keys[name.key as usize].iter_mut().find(|put| put.number == name.number)
    }

    /// It asks to be sealed.
    pub(super) fn commits(&mut self, name: Name) {
        if let Some(put) = self.put(name) {
            put.asked = true;
        }
    }

    /// It ended: stored, with its end in time, or for certain not.
    pub(super) fn ends(&mut self, name: Name, stored: Option<u64>) {
        let now = self.now();
        if let Some(put) = self.put(name) {
            put.ended = Some(now);
            put.asked &= stored.is_some();
            put.over_unix_ms = stored.unwrap_or(u64::MAX);
        }
    }

    /// The content of the last put of a key.
    pub(super) fn last(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].last().map(|put| put.content)
    }

    pub(super) fn forget_begins(&mut self, keys: Vec<u64>) -> Forgetting {
        let began = self.now();
        keys.iter().for_each(|&key| self.forgotten[key as usize] = u64::MAX);
        Forgetting { keys, began }
    }

    /// It was answered, or given up. One that is not complete may still happen.
    pub(super) fn forget_ends(&mut self, forgetting: Forgetting, complete: bool) {
        let now = self.now();
        for key in forgetting.keys.into_iter().filter(|_| complete) {
            self.forgotten[key as usize] = now;
            for put in &mut self.keys[key as usize] {
                if put.ended.is_some_and(|ended| ended <= forgetting.began) {
                    put.dead_since.get_or_insert(now);
                }
            }
        }
    }

    /// Whether nothing may have taken the page since then: it has no end, and nobody asked to forget it.
    pub(super) fn untouched(&self, key: u64, asked: Asked) -> bool {
        let mortal = self.keys[key as usize].iter().any(|put| put.over_unix_ms != u64::MAX || put.ended.is_none());
        !mortal && self.forgotten[key as usize] < asked.tick
    }

    /// All is at rest: nothing that was begun can still happen.
    pub(super) fn rests(&mut self) {
        let now = self.now();
        for key in &mut self.keys {
            key.retain(|put| put.asked && put.dead_since.is_none());
            key.iter_mut().for_each(|put| put.ended = put.ended.or(Some(now)));
        }
        self.forgotten.iter_mut().for_each(|forgotten| *forgotten = now);
    }

    /// Whether somebody who asked then may hear of a page with these bytes.
    pub(super) fn may_be(&self, key: u64, bytes: Bytes, asked: Asked) -> bool {
        self.keys[key as usize].iter().any(|put| {
            let fits = match bytes {
                Bytes::Same(content) => put.content == content,
                Bytes::Other(content) => put.content != content,
                Bytes::Any => true,
            };
            let alive = put.dead_since.is_none_or(|dead| dead > asked.tick);
            fits && put.asked && alive && put.over_unix_ms > asked.unix_ms
        })
    }

    /// Whether these are bytes that somebody who asked then may be given; their content. `suspect`: forgotten ones may come
    /// back.
    pub(super) fn check(&self, key: u64, bytes: &[u8], asked: Asked, suspect: bool) -> Result<u64, String> {
        let word = bytes.get(8..NAME_BYTES).ok_or("a page without a name")?;
        let content = u64::from_le_bytes(word.try_into().unwrap_or_default());
        payload::check(key, content, bytes)?;
        if self.may_be(key, Bytes::Same(content), asked) || suspect {
            return Ok(content);
        }
        let known: Vec<&Put> = self.keys[key as usize].iter().filter(|put| put.content == content).collect();
        Err(format!("key {key}: bytes of put {content}, which was forgotten, is over, or was never sealed: {known:?}"))
    }
}

impl Model {
    /// Like [`Model::check`], for bytes from byte `at` of a page on: whose they may be.
    pub(super) fn check_range(
        &self,
        key: u64,
        at: usize,
        bytes: &[u8],
        asked: Asked,
        suspect: bool,
    ) -> Result<u64, String> {
        // A few bytes may be those of several puts.
        let contents = self.contents[key as usize].iter().copied();
        let had: Vec<u64> = contents.filter(|&content| payload::is_at(key, content, at, bytes)).collect();
        let may_be = |content: &u64| suspect || self.may_be(key, Bytes::Same(*content), asked);
        let what = || format!("key {key}: {} bytes at {at} are of puts {had:?}, none of which may be", bytes.len());
        had.iter().copied().find(may_be).ok_or_else(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sealed_and_not_forgotten_may_be_had() {
        let mut model = Model::new(4);
        let (put, other) = (model.begins(1, None), model.begins(1, None));
        let mut bytes = [0; 40];
        payload::fill(1, put.content, &mut bytes);
        let early = model.asks(5);
        assert!(model.check(1, &bytes, early, false).is_err(), "it has not asked to be sealed");
        model.commits(put);
        assert_eq!(model.check(1, &bytes, early, false), Ok(put.content));
        assert!(model.may_be(1, Bytes::Any, early) && !model.may_be(1, Bytes::Other(put.content), early));
        model.commits(other);
        let forgetting = model.forget_begins(vec![1]);
        model.ends(put, Some(9));
        model.forget_ends(forgetting, true);
        let asked = model.asks(8);
        assert!(model.check(1, &bytes, asked, false).is_ok(), "it ended while it was forgotten");
        let over = model.asks(9);
        assert!(model.check(1, &bytes, over, false).is_err(), "it is over");
        let forgetting = model.forget_begins(vec![1]);
        model.forget_ends(forgetting, true);
        let late = model.asks(8);
        assert!(model.check(1, &bytes, late, false).is_err() && model.check(1, &bytes, asked, false).is_ok());
        assert!(model.check(1, &bytes, late, true).is_ok(), "a device lied");
        assert!(model.may_be(1, Bytes::Same(other.content), late), "nobody heard of its end");
        bytes[39] ^= 1;
        assert!(model.check(1, &bytes, asked, false).is_err());
        model.ends(other, None);
        assert!(!model.may_be(1, Bytes::Any, late), "it was answered that it is not stored");
    }

    #[test]
    fn at_rest_everything_has_ended() {
        let mut model = Model::new(1);
        let put = model.begins(0, None);
        model.commits(put);
        model.rests();
        let forgetting = model.forget_begins(vec![0]);
        model.forget_ends(forgetting, true);
        let asked = model.asks(0);
        assert!(!model.may_be(0, Bytes::Any, asked));
    }
}
