//! What was asked of the store, and which answers it may give.
//!
//! A version is one put: a key and a number that no other put has. A read may answer a miss, or a version of that key
//! with exactly its bytes that
//! - was not forgotten: once forgetting was answered, versions whose put had ended before it was asked for are dead for
//!   good (but for keys whose tombstones the device lied about);
//! - is not stale: in one life of the node, no newer version was acknowledged before the read began, if the older one's
//!   put had ended before the newer one's began. Only logs that copy nothing are held to that: a copy counts as a put of
//!   its own, and the first complete writer wins;
//! - is not past its time.
//!
//! In a node, a put is *reserved* and can be found only when it is *sealed*; it is acknowledged when L3 has it. Its bytes may
//! be those of an earlier put, its *content*.
//!
//! Always true: the model's clock is a counter of its own calls, so "before" means before in this run.

mod node;

use crate::payload::{self, page_id, page_key};
use larder_format::{PageKey, PageMeta, is_expired};
use std::collections::BTreeMap;

pub use node::Bytes;

/// Keys in a row that make a sequence.
pub(crate) const CHAIN: u64 = 16;

/// When a put was acknowledged.
#[derive(Debug, Clone, Copy)]
struct Ack {
    clock: u64,
    at_ms: u64,
    life: u64,
}

/// One put.
#[derive(Debug)]
struct Version {
    key: u64,
    parts: Vec<u32>,
    /// The version whose bytes it has.
    content: u64,
    /// Whether it may be found.
    sealed: bool,
    /// In milliseconds since 1970; 0: it has no end.
    expires_unix_ms: u64,
    began: u64,
    /// When nobody worked at it any more, whatever came of it.
    ended: Option<u64>,
    acked: Option<Ack>,
    dead_since: Option<u64>,
}

#[derive(Debug, Default)]
struct Key {
    versions: Vec<u64>,
    /// The put under way in a node.
    open: Option<u64>,
    /// Puts and forgets under way.
    busy: u32,
    /// When the last of them ended that nobody knows the effect of.
    unsure: u64,
    /// When the last forgetting ended, of whatever came meanwhile too.
    forgotten: u64,
}

/// A version that must be there after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Its key.
    pub key: u64,
    /// Its number.
    pub version: u64,
}

/// When somebody asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// The model's clock.
    pub tick: u64,
    /// Time of day in milliseconds.
    pub unix_ms: u64,
}

/// A forgetting under way.
#[derive(Debug)]
pub struct Forgetting {
    keys: Vec<u64>,
    began: u64,
}

/// Everything that was asked.
#[derive(Debug)]
pub struct Model {
    clock: u64,
    life: u64,
    versions: Vec<Version>,
    keys: Vec<Key>,
    /// By key: the last version sealed in this life, if it is not known to be on L3.
    unlanded: BTreeMap<u64, u64>,
    /// Pages are copied, so an older version may come after a newer one.
    copies: bool,
}

impl Model {
    /// Nothing was put under any of the keys. `copies`: the log copies pages.
    pub fn new(keys: u64, copies: bool) -> Model {
        let keys = (0..keys).map(|_| Key::default()).collect();
        Model { clock: 0, life: 0, versions: Vec::new(), keys, unlanded: BTreeMap::new(), copies }
    }

    /// Number of keys.
    pub fn keys(&self) -> u64 {
        self.keys.len() as u64
    }

    /// The next tick.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Somebody asks now.
    pub fn asks(&mut self, unix_ms: u64) -> Asked {
        Asked { tick: self.now(), unix_ms }
    }

    fn version(&self, number: u64) -> Option<&Version> {
        self.versions.get(usize::try_from(number.checked_sub(1)?).ok()?)
    }

    /// Begins to put a new version of a key, which ends at this time of day if it is not 0; its number.
    pub fn put_begins(&mut self, key: u64, parts: Vec<u32>, expires_unix_ms: u64) -> u64 {
        let (began, number) = (self.now(), self.next_version());
        self.versions.push(Version {
            key,
            parts,
            content: number,
            sealed: true,
            expires_unix_ms,
            began,
            ended: None,
            acked: None,
            dead_since: None,
        });
        let entry = &mut self.keys[key as usize];
        entry.versions.push(number);
        entry.busy += 1;
        number
    }

    /// The put ended: acknowledged at this virtual time, or not, or nobody knows.
    pub fn put_ends(&mut self, number: u64, acked_at_ms: Option<u64>) {
        let (clock, life) = (self.now(), self.life);
        let version = &mut self.versions[number as usize - 1];
        version.ended = Some(clock);
        version.acked = acked_at_ms.map(|at_ms| Ack { clock, at_ms, life });
        let entry = &mut self.keys[version.key as usize];
        entry.busy -= 1;
        if acked_at_ms.is_none() {
            entry.unsure = clock;
        }
    }

    /// Begins to forget keys. Puts of them that are open in a node are given up.
    pub fn forget_begins(&mut self, keys: Vec<u64>) -> Forgetting {
        let began = self.now();
        for &key in &keys {
            if let Some(open) = self.keys[key as usize].open {
                self.given_up(open);
            }
            self.keys[key as usize].busy += 1;
        }
        Forgetting { keys, began }
    }

    /// The forgetting ended; `durable` if it was answered so.
    pub fn forget_ends(&mut self, forgetting: Forgetting, durable: bool) {
        let clock = self.now();
        for key in forgetting.keys {
            let entry = &mut self.keys[key as usize];
            entry.busy -= 1;
            entry.forgotten = clock;
            if !durable {
                entry.unsure = clock;
            }
            for &number in entry.versions.iter().filter(|_| durable) {
                let version = &mut self.versions[number as usize - 1];
                if version.ended.is_some_and(|ended| ended <= forgetting.began) {
                    version.dead_since.get_or_insert(clock);
                }
            }
        }
    }

    /// The node is gone: nobody works at anything.
    pub fn life_ends(&mut self) {
        let clock = self.now();
        self.life += 1;
        self.unlanded.clear();
        self.versions.iter_mut().for_each(|version| version.ended = version.ended.or(Some(clock)));
        for key in &mut self.keys {
            key.open = None;
            if key.busy > 0 {
                (key.busy, key.unsure) = (0, clock);
            }
        }
    }

    /// The metadata that a version must have, but for its checksums.
    pub fn describe(&self, key: u64, version: u64, payload: &[u8]) -> PageMeta {
        let known = self.version(version);
        let parts = known.map_or_else(Vec::new, |version| version.parts.clone());
        let position = (key % CHAIN) as u32;
        let mut meta = PageMeta::describe(page_id(key), parent(key), position, parts, payload);
        meta.generation = version;
        meta.expires_unix_ms = self.expires_unix_ms(version);
        meta
    }

    /// When a version ends, in milliseconds since 1970; 0: never.
    pub fn expires_unix_ms(&self, number: u64) -> u64 {
        self.version(number).map_or(0, |version| version.expires_unix_ms)
    }

    /// Whether somebody who asked then may find this version of the key.
    pub fn check_found(&self, key: u64, number: u64, asked: Asked, suspect: bool) -> Result<(), String> {
        let began = asked.tick;
        let version = self.version(number).filter(|version| version.key == key);
        let version = version.ok_or_else(|| format!("key {key}: version {number} was never put under it"))?;
        if let Some(dead) = version.dead_since.filter(|&dead| dead <= began && !suspect) {
            return Err(format!("key {key}: version {number} came back; it was forgotten at tick {dead}"));
        }
        if !version.sealed {
            return Err(format!("key {key}: version {number} is found and was never sealed"));
        }
        if is_expired(version.expires_unix_ms, asked.unix_ms) {
            return Err(format!("key {key}: version {number} is served after its time"));
        }
        if self.copies {
            return Ok(());
        }
        let newer = self.keys[key as usize].versions.iter().rev().take_while(|&&other| other > number);
        let replaces = |&&other: &&u64| {
            let other = &self.versions[other as usize - 1];
            let known = other.acked.is_some_and(|ack| ack.life == self.life && ack.clock <= began);
            // A put that nobody saw the end of may come late, when the newer page was dropped as unreadable.
            known && version.acked.is_some() && version.ended.is_some_and(|ended| ended <= other.began)
        };
        match newer.copied().filter(|number| replaces(&number)).last() {
            Some(other) => Err(format!("key {key}: version {number} is stale; {other} was acknowledged")),
            None => Ok(()),
        }
    }

    /// Whether this is the page, whole and unchanged.
    pub fn check_page(&self, key: u64, meta: &PageMeta, payload: &[u8]) -> Result<(), String> {
        if meta.id != page_id(key) {
            return Err(format!("key {key}: the answer is of {:?}", meta.id));
        }
        let version = self.version(meta.generation).ok_or("no such version")?;
        if meta.part_bytes != version.parts
            || meta.expires_unix_ms != version.expires_unix_ms
            || meta.payload_bytes() != payload.len()
        {
            return Err(format!("key {key} version {}: parts {:?}", meta.generation, meta.part_bytes));
        }
        if meta.parent != parent(key) || u64::from(meta.position) != key % CHAIN {
            return Err(format!("key {key} version {}: another place in the sequence", meta.generation));
        }
        payload::check(key, version.content, payload)
    }

    /// Versions that a crash now must not lose, of those that `found` says can be found: acknowledged before `acked_ms`
    /// in this life, or earlier if this life has lasted long enough to make `earlier` durable,
    /// with nothing under way since then that may or may not have changed it.
    pub fn expected(&self, acked_ms: u64, earlier: bool, found: impl Fn(u64) -> Option<u64>) -> Vec<Expected> {
        let idle = (0..self.keys()).filter(|&key| self.keys[key as usize].busy == 0);
        idle.filter_map(|key| {
            let number = found(key)?;
            let version = self.version(number)?;
            let sure = version.began > self.keys[key as usize].unsure;
            // Of two puts at the same time, quotas and pins decide which is served, and do not outlive the node.
            let mut others = self.keys[key as usize].versions.iter().filter(|&&other| other != number);
            let before = |&other: &u64| self.versions[other as usize - 1].ended.is_some_and(|end| end <= version.began);
            let sure = sure && others.all(before);
            let ack = version.acked?;
            let durable = if ack.life == self.life { ack.at_ms < acked_ms } else { earlier };
            (sure && durable).then_some(Expected { key, version: number })
        })
        .collect()
    }
}

pub(crate) fn parent(key: u64) -> PageKey {
    match key % CHAIN {
        0 => PageKey::NONE,
        _ => page_key(key - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(model: &mut Model, key: u64) -> u64 {
        let version = model.put_begins(key, vec![10], 0);
        model.put_ends(version, Some(0));
        version
    }

    #[test]
    fn what_was_forgotten_may_not_be_found() {
        let mut model = Model::new(4, false);
        let before = put(&mut model, 1);
        let during = model.put_begins(1, vec![10], 0);
        let early = model.asks(1);
        let forgetting = model.forget_begins(vec![1]);
        model.put_ends(during, None);
        model.forget_ends(forgetting, true);
        let now = model.asks(1);
        assert!(model.check_found(1, before, early, false).is_ok(), "asked before");
        assert!(model.check_found(1, before, now, false).unwrap_err().contains("came back"));
        assert!(model.check_found(1, before, now, true).is_ok(), "the device lied");
        assert!(model.check_found(1, during, now, false).is_ok(), "it was being put");
        assert!(model.check_found(2, before, now, false).is_err(), "another key");
        assert!(model.check_found(1, 99, now, false).is_err());
    }

    #[test]
    fn what_was_replaced_is_stale_until_the_next_life() {
        let mut model = Model::new(4, false);
        let old = put(&mut model, 1);
        let new = put(&mut model, 1);
        let now = model.asks(1);
        assert!(model.check_found(1, old, now, false).unwrap_err().contains("stale"));
        assert!(model.check_found(1, new, now, false).is_ok());
        model.life_ends();
        let now = model.asks(1);
        assert!(model.check_found(1, old, now, false).is_ok(), "the newer one may have been lost");
    }

    #[test]
    fn what_is_past_its_time_may_not_be_found() {
        let mut model = Model::new(4, true);
        let version = model.put_begins(1, vec![10], 1000);
        model.put_ends(version, Some(0));
        let (early, late) = (model.asks(999), model.asks(1000));
        assert!(model.check_found(1, version, early, false).is_ok());
        assert!(model.check_found(1, version, late, false).unwrap_err().contains("after its time"));
    }

    #[test]
    fn other_bytes_are_refused() {
        let mut model = Model::new(40, false);
        let version = model.put_begins(17, vec![10, 20], 0);
        let mut bytes = [0; 30];
        payload::fill(17, version, &mut bytes);
        let meta = model.describe(17, version, &bytes);
        assert_eq!(model.check_page(17, &meta, &bytes), Ok(()));
        assert!(model.check_page(18, &meta, &bytes).is_err());
        bytes[29] ^= 1;
        assert!(model.check_page(17, &meta, &bytes).is_err());
    }
}
