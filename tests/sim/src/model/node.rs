//! Puts as a node knows them: reserved, sealed or given up, and on L3 some time later.
//!
//! Always true: a key has at most one open put, and a put that was given up is never sealed.

use super::{Ack, Asked, Model, Version};
use larder_format::is_expired;

/// An answer is allowed if some version may be found that has these bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    /// Those of this content.
    Same(u64),
    /// Others than those.
    Other(u64),
    /// Whatever they are.
    Any,
}

impl Model {
    /// The number of the next put.
    pub fn next_version(&self) -> u64 {
        self.versions.len() as u64 + 1
    }

    /// Room was given for a page; the number of its put. Its bytes are those of `content`, if not its own.
    pub fn reserved(&mut self, key: u64, parts: Vec<u32>, content: Option<u64>) -> u64 {
        let number = self.put_begins(key, parts, 0);
        let version = &mut self.versions[number as usize - 1];
        (version.content, version.sealed) = (content.unwrap_or(number), false);
        self.keys[key as usize].open = Some(number);
        number
    }

    /// Whether the put can still be sealed.
    pub fn is_open(&self, number: u64) -> bool {
        self.version(number).is_some_and(|version| self.keys[version.key as usize].open == Some(number))
    }

    /// The open put of a key.
    pub fn open_put(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].open
    }

    /// Puts that are open.
    pub fn open_puts(&self) -> usize {
        self.keys.iter().filter(|key| key.open.is_some()).count()
    }

    /// A put was sealed, with this end.
    pub fn sealed(&mut self, number: u64, expires_unix_ms: u64) {
        let version = &mut self.versions[number as usize - 1];
        (version.sealed, version.expires_unix_ms) = (true, expires_unix_ms);
        self.unlanded.insert(version.key, number);
        self.close(number);
    }

    /// A put was given up.
    pub fn given_up(&mut self, number: u64) {
        if self.is_open(number) {
            self.close(number);
        }
    }

    fn close(&mut self, number: u64) {
        let clock = self.now();
        let version = &mut self.versions[number as usize - 1];
        version.ended = Some(clock);
        let key = &mut self.keys[version.key as usize];
        key.open = None;
        key.busy -= 1;
    }

    /// Notes which sealed versions L3 has by now: `on_l3` says which version of a key it has. Pages are served as soon as
    /// they are sealed, so an acknowledgement says only when they began to be durable.
    pub fn landed(&mut self, at_ms: u64, on_l3: impl Fn(u64) -> Option<u64>) {
        let (clock, life) = (self.clock, self.life);
        let versions = &mut self.versions;
        self.unlanded.retain(|&key, &mut number| {
            let version = &mut versions[number as usize - 1];
            let landed = on_l3(key) == Some(number);
            if landed {
                version.acked = Some(Ack { clock, at_ms, life });
            }
            !landed && version.dead_since.is_none()
        });
    }

    /// The version whose bytes a version has, and its parts.
    pub fn content(&self, number: u64) -> Option<(u64, Vec<u32>)> {
        self.version(number).map(|version| (version.content, version.parts.clone()))
    }

    /// The last put of a key.
    pub fn last_version(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].versions.last().copied()
    }

    /// Whether somebody who asked then may be told that a page with these bytes is there.
    pub fn may_be_there(&self, key: u64, bytes: Bytes, asked: Asked) -> bool {
        let fits = |version: &Version| match bytes {
            Bytes::Same(content) => version.content == content,
            Bytes::Other(content) => version.content != content,
            Bytes::Any => true,
        };
        let mut versions = self.keys[key as usize].versions.iter().filter_map(|&number| self.version(number));
        versions.any(|version| {
            let alive = version.sealed && version.dead_since.is_none_or(|dead| dead > asked.tick);
            alive && fits(version) && !is_expired(version.expires_unix_ms, asked.unix_ms)
        })
    }

    /// The version of a key that must be there, if nothing made room for others: the last one, sealed in this life, with an
    /// end not before `unix_ms`, and nothing that may have forgotten it.
    pub fn must_be_there(&self, key: u64, life_began: u64, unix_ms: u64) -> Option<u64> {
        let entry = &self.keys[key as usize];
        let number = *entry.versions.iter().rfind(|&&number| self.version(number).is_some_and(|v| v.sealed))?;
        let version = self.version(number)?;
        let sure = entry.busy == 0 && version.began > entry.unsure.max(entry.forgotten).max(life_began);
        let alive = version.dead_since.is_none() && !is_expired(version.expires_unix_ms, unix_ms);
        (sure && alive).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_sealed_may_not_be_found_and_what_was_given_up_never() {
        let mut model = Model::new(4, true);
        let (first, other) = (model.reserved(1, vec![10], None), model.reserved(2, vec![10], None));
        let asked = model.asks(1);
        assert!(model.check_found(1, first, asked, false).unwrap_err().contains("never sealed"));
        assert!(!model.may_be_there(1, Bytes::Any, asked) && model.open_put(1) == Some(first));
        model.sealed(first, 0);
        assert!(model.check_found(1, first, asked, false).is_ok() && model.may_be_there(1, Bytes::Same(first), asked));
        assert!(!model.may_be_there(1, Bytes::Other(first), asked));
        let forgetting = model.forget_begins(vec![1, 2]);
        assert!(!model.is_open(other), "forgetting gives puts up");
        model.forget_ends(forgetting, true);
        let asked = model.asks(1);
        assert!(!model.may_be_there(1, Bytes::Any, asked) && model.open_puts() == 0);
    }

    #[test]
    fn what_must_be_there_is_the_last_version_unless_something_may_have_taken_it() {
        let mut model = Model::new(4, true);
        let began = model.now();
        let version = model.reserved(1, vec![10], None);
        assert_eq!(model.must_be_there(1, began, 0), None);
        model.sealed(version, 1000);
        assert_eq!(model.must_be_there(1, began, 999), Some(version));
        assert_eq!(model.must_be_there(1, began, 1000), None, "it is over");
        let next = model.now();
        assert_eq!(model.must_be_there(1, next, 0), None, "of an earlier life");
        let forgetting = model.forget_begins(vec![1]);
        assert_eq!(model.must_be_there(1, began, 0), None);
        model.forget_ends(forgetting, false);
        assert_eq!(model.must_be_there(1, began, 0), None, "nobody knows");
    }
}
