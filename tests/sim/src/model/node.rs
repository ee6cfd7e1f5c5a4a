//! Puts of a node: reserved, then sealed or aborted, and written to L3 later.
//!
//! Invariants:
//! - A key has at most one open put.
//! - An aborted put is never sealed.

use super::{Ack, Model, RequestTime, Version};
use larder_format::is_expired;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentMatch {
    Same(u64),
    Other(u64),
    Any,
}

impl Model {
    pub fn next_version(&self) -> u64 {
        self.versions.len() as u64 + 1
    }

    /// Records a reservation and returns its version number. `content` names an earlier version
    /// with the same bytes.
    pub fn reserved(&mut self, key: u64, parts: Vec<u32>, content: Option<u64>) -> u64 {
        let number = self.put_begins(key, parts, 0);
        let version = &mut self.versions[number as usize - 1];
        (version.content, version.sealed) = (content.unwrap_or(number), false);
        self.keys[key as usize].open = Some(number);
        number
    }

    /// Records the generation of a version. Returns `false` if an earlier put had it.
    pub fn record_generation(&mut self, number: u64, generation: u64) -> bool {
        self.generations.insert(generation, number).is_none()
    }

    /// Version with a generation. An unknown generation stands for itself, which is no version.
    pub fn version_of(&self, generation: u64) -> u64 {
        self.generations.get(&generation).copied().unwrap_or(generation)
    }

    pub fn is_open(&self, number: u64) -> bool {
        self.version(number).is_some_and(|version| self.keys[version.key as usize].open == Some(number))
    }

    pub fn open_put(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].open
    }

    pub fn open_puts(&self) -> usize {
        self.keys.iter().filter(|key| key.open.is_some()).count()
    }

    pub fn sealed(&mut self, number: u64, expires_unix_ms: u64) {
        let version = &mut self.versions[number as usize - 1];
        (version.sealed, version.expires_unix_ms) = (true, expires_unix_ms);
        self.awaiting_l3.insert(version.key, number);
        self.close(number);
    }

    /// Records that a put was aborted. Does nothing if it has already ended.
    pub fn aborted(&mut self, number: u64) {
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

    /// Marks sealed versions that L3 has by now as acknowledged. `on_l3` returns the generation of
    /// a key on L3. Pages are visible once sealed, so this only determines when their durability
    /// began.
    pub fn note_on_l3(&mut self, at_ms: u64, on_l3: impl Fn(u64) -> Option<u64>) {
        let clock = self.clock;
        let incarnation = self.incarnation;
        let generations = &self.generations;
        let versions = &mut self.versions;
        self.awaiting_l3.retain(|&key, &mut number| {
            let version = &mut versions[number as usize - 1];
            let is_on_l3 = on_l3(key).and_then(|generation| generations.get(&generation)) == Some(&number);
            if is_on_l3 {
                version.acked = Some(Ack { clock, at_ms, incarnation });
            }
            !is_on_l3 && version.dead_since.is_none()
        });
    }

    pub fn content(&self, number: u64) -> Option<(u64, Vec<u32>)> {
        self.version(number).map(|version| (version.content, version.parts.clone()))
    }

    pub fn last_version(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].versions.last().copied()
    }

    /// Returns `true` if the node may report a page with these bytes to a request that started at
    /// `started`.
    pub fn may_exist(&self, key: u64, bytes: ContentMatch, started: RequestTime) -> bool {
        let fits = |version: &Version| match bytes {
            ContentMatch::Same(content) => version.content == content,
            ContentMatch::Other(content) => version.content != content,
            ContentMatch::Any => true,
        };
        let mut versions = self.keys[key as usize].versions.iter().filter_map(|&number| self.version(number));
        versions.any(|version| {
            let alive = version.sealed && version.dead_since.is_none_or(|dead| dead > started.tick);
            alive && fits(version) && !is_expired(version.expires_unix_ms, started.unix_ms)
        })
    }

    /// Version of a key that must be present unless it was evicted. It is the last version sealed
    /// in this incarnation, it has not expired at `unix_ms`, and no forget may have removed it.
    pub fn must_exist(&self, key: u64, incarnation_began: u64, unix_ms: u64) -> Option<u64> {
        let entry = &self.keys[key as usize];
        let number = *entry.versions.iter().rfind(|&&number| self.version(number).is_some_and(|v| v.sealed))?;
        let version = self.version(number)?;
        let sure = entry.busy == 0 && version.began > entry.uncertain_since.max(entry.forgotten).max(incarnation_began);
        let alive = version.dead_since.is_none() && !is_expired(version.expires_unix_ms, unix_ms);
        (sure && alive).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsealed_or_aborted_put_is_rejected() {
        let mut model = Model::new(4, true);
        let first = model.reserved(1, vec![10], None);
        let other = model.reserved(2, vec![10], None);
        let started = model.request_time(1);
        assert!(model.check_found(1, first, started, false).unwrap_err().contains("never sealed"));
        assert!(!model.may_exist(1, ContentMatch::Any, started) && model.open_put(1) == Some(first));
        model.sealed(first, 0);
        assert!(
            model.check_found(1, first, started, false).is_ok()
                && model.may_exist(1, ContentMatch::Same(first), started)
        );
        assert!(!model.may_exist(1, ContentMatch::Other(first), started));
        let forgetting = model.forget_begins(vec![1, 2]);
        assert!(!model.is_open(other), "a forget aborts open puts");
        model.forget_ends(forgetting, true);
        let started = model.request_time(1);
        assert!(!model.may_exist(1, ContentMatch::Any, started) && model.open_puts() == 0);
    }

    #[test]
    fn last_sealed_version_must_exist_unless_it_may_have_been_removed() {
        let mut model = Model::new(4, true);
        let began = model.now();
        let version = model.reserved(1, vec![10], None);
        assert_eq!(model.must_exist(1, began, 0), None);
        model.sealed(version, 1000);
        assert_eq!(model.must_exist(1, began, 999), Some(version));
        assert_eq!(model.must_exist(1, began, 1000), None, "it has expired");
        let next = model.now();
        assert_eq!(model.must_exist(1, next, 0), None, "of an earlier incarnation");
        let forgetting = model.forget_begins(vec![1]);
        assert_eq!(model.must_exist(1, began, 0), None);
        model.forget_ends(forgetting, false);
        assert_eq!(model.must_exist(1, began, 0), None, "the outcome is unknown");
    }
}
