//! Oracle of the log and of a node: all requests so far, and the answers they allow.
//!
//! A version is one put: a key and a unique number, which is also the generation of the page. A
//! read may return a miss, or the exact bytes of a version of that key that is:
//! - not forgotten: after an acknowledged forget, versions whose put ended before the forget began
//!   are dead, except for suspect keys (defined in `disk`);
//! - not stale: no newer version was acknowledged in this incarnation before the read began, if the
//!   older put was acknowledged too and had ended before the newer one began. Only logs without
//!   copy-forward are held to that: a copy counts as a put of its own, and the first complete
//!   writer wins;
//! - not expired.
//!
//! An incarnation is one run of the system, from a start to a crash or stop.
//!
//! In a node, a put is first *reserved*, and is visible once it is *sealed*. The model counts it as
//! acknowledged when L3 has it. A put may repeat the bytes of an earlier version: `content` is the
//! number of the version whose bytes it has.
//!
//! Invariant: the clock of the model counts its calls in *ticks*, so "before" refers to the order
//! of events in this run.

mod node;

use crate::payload::{self, NAMESPACES, number_of, page_id, page_key};
use larder_format::{PageKey, PageMeta, is_expired};
use std::collections::BTreeMap;

pub use node::ContentMatch;

/// Length of a sequence: each key is the parent of the next one of its namespace, within a group of
/// this many keys.
pub(crate) const CHAIN: u64 = 16;

#[derive(Debug, Clone, Copy)]
struct Ack {
    /// Tick.
    clock: u64,
    at_ms: u64,
    incarnation: u64,
}

#[derive(Debug)]
struct Version {
    key: u64,
    parts: Vec<u32>,
    content: u64,
    sealed: bool,
    expires_unix_ms: u64,
    began: u64,
    /// Tick at which no writer worked on it any more, whatever the outcome.
    ended: Option<u64>,
    acked: Option<Ack>,
    dead_since: Option<u64>,
    /// `Some` after the first power loss or clean end. `false` if the loss may have torn it: the
    /// log may name it all the same, because recovery reads no payloads.
    survived: Option<bool>,
}

#[derive(Debug, Default)]
struct Key {
    versions: Vec<u64>,
    /// Version that is reserved and not sealed.
    open: Option<u64>,
    /// Number of puts and forgets that have begun and not ended.
    busy: u32,
    /// Tick of the last put or forget with unknown outcome. Nothing is expected of versions that
    /// began before it.
    uncertain_since: u64,
    /// Tick of the last forget, which may have removed concurrent puts as well.
    forgotten: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    pub key: u64,
    pub version: u64,
}

#[derive(Debug, Clone, Copy)]
pub struct RequestTime {
    pub tick: u64,
    pub unix_ms: u64,
}

#[derive(Debug)]
pub struct ForgetRequest {
    keys: Vec<u64>,
    began: u64,
}

/// Oracle for one seed. It records all requests with their outcomes, and derives from them the
/// answers that are allowed.
#[derive(Debug)]
pub struct Model {
    clock: u64,
    incarnation: u64,
    versions: Vec<Version>,
    keys: Vec<Key>,
    /// By key: the version sealed last in this incarnation, until L3 has it.
    awaiting_l3: BTreeMap<u64, u64>,
    /// Version of each generation that a node assigned. Without a node they are equal.
    generations: BTreeMap<u64, u64>,
    /// The log copies pages forward, so an older version may replace a newer one.
    copies: bool,
}

impl Model {
    pub fn new(keys: u64, copies: bool) -> Model {
        let keys = (0..keys).map(|_| Key::default()).collect();
        Model {
            clock: 0,
            incarnation: 0,
            versions: Vec::new(),
            keys,
            awaiting_l3: BTreeMap::new(),
            generations: BTreeMap::new(),
            copies,
        }
    }

    pub fn keys(&self) -> u64 {
        self.keys.len() as u64
    }

    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub fn request_time(&mut self, unix_ms: u64) -> RequestTime {
        RequestTime { tick: self.now(), unix_ms }
    }

    fn version(&self, number: u64) -> Option<&Version> {
        self.versions.get(usize::try_from(number.checked_sub(1)?).ok()?)
    }

    pub fn put_begins(&mut self, key: u64, parts: Vec<u32>, expires_unix_ms: u64) -> u64 {
        let began = self.now();
        let number = self.next_version();
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
            survived: None,
        });
        let entry = &mut self.keys[key as usize];
        entry.versions.push(number);
        entry.busy += 1;
        number
    }

    /// Ends a put. `acked_at_ms` is `None` if it failed or its outcome is unknown.
    pub fn put_ends(&mut self, number: u64, acked_at_ms: Option<u64>) {
        let clock = self.now();
        let incarnation = self.incarnation;
        let version = &mut self.versions[number as usize - 1];
        version.ended = Some(clock);
        version.acked = acked_at_ms.map(|at_ms| Ack { clock, at_ms, incarnation });
        let entry = &mut self.keys[version.key as usize];
        entry.busy -= 1;
        if acked_at_ms.is_none() {
            entry.uncertain_since = clock;
        }
    }

    pub fn forget_begins(&mut self, keys: Vec<u64>) -> ForgetRequest {
        let began = self.now();
        for &key in &keys {
            if let Some(open) = self.keys[key as usize].open {
                self.aborted(open);
            }
            self.keys[key as usize].busy += 1;
        }
        ForgetRequest { keys, began }
    }

    pub fn forget_ends(&mut self, forgetting: ForgetRequest, durable: bool) {
        let clock = self.now();
        for key in forgetting.keys {
            let entry = &mut self.keys[key as usize];
            entry.busy -= 1;
            entry.forgotten = clock;
            if !durable {
                entry.uncertain_since = clock;
            }
            for &number in entry.versions.iter().filter(|_| durable) {
                let version = &mut self.versions[number as usize - 1];
                if version.ended.is_some_and(|ended| ended <= forgetting.began) {
                    version.dead_since.get_or_insert(clock);
                }
            }
        }
    }

    pub fn incarnation_ends(&mut self) {
        let clock = self.now();
        self.incarnation += 1;
        self.awaiting_l3.clear();
        self.versions.iter_mut().for_each(|version| version.ended = version.ended.or(Some(clock)));
        for key in &mut self.keys {
            key.open = None;
            if key.busy > 0 {
                (key.busy, key.uncertain_since) = (0, clock);
            }
        }
    }

    /// Records a power loss or a clean end. Versions survive it that were acknowledged before
    /// `acked_ms` in this incarnation, or in an earlier one if `earlier`.
    pub fn power_lost(&mut self, acked_ms: u64, earlier: bool) {
        let incarnation = self.incarnation;
        for version in self.versions.iter_mut().filter(|version| version.survived.is_none()) {
            let survives = |ack: &Ack| if ack.incarnation == incarnation { ack.at_ms < acked_ms } else { earlier };
            version.survived = Some(version.acked.as_ref().is_some_and(survives));
        }
    }

    pub fn may_be_torn(&self, number: u64) -> bool {
        self.version(number).is_some_and(|version| version.survived == Some(false))
    }

    pub fn describe(&self, key: u64, version: u64, payload: &[u8]) -> PageMeta {
        let known = self.version(version);
        let parts = known.map_or_else(Vec::new, |version| version.parts.clone());
        let mut meta = PageMeta::describe(page_id(key), parent(key), position(key), parts, payload);
        meta.generation = version;
        meta.expires_unix_ms = self.expires_unix_ms(version);
        meta.token_ids = token_ids(key);
        meta
    }

    pub fn expires_unix_ms(&self, number: u64) -> u64 {
        self.version(number).map_or(0, |version| version.expires_unix_ms)
    }

    /// Checks that a read started at `started` may return this version. Forgotten versions of a
    /// `suspect` key are allowed.
    pub fn check_found(&self, key: u64, number: u64, started: RequestTime, suspect: bool) -> Result<(), String> {
        let began = started.tick;
        let version = self.version(number).filter(|version| version.key == key);
        let version = version.ok_or_else(|| format!("key {key}: version {number} was never put"))?;
        if let Some(dead) = version.dead_since.filter(|&dead| dead <= began && !suspect) {
            return Err(format!(
                "key {key}: version {number} was returned; a forget of it was acknowledged at tick {dead}"
            ));
        }
        if !version.sealed {
            return Err(format!("key {key}: version {number} was returned and was never sealed"));
        }
        if is_expired(version.expires_unix_ms, started.unix_ms) {
            return Err(format!("key {key}: version {number} was returned after its expiry"));
        }
        if self.copies {
            return Ok(());
        }
        let newer = self.keys[key as usize].versions.iter().rev().take_while(|&&other| other > number);
        let replaces = |&&other: &&u64| {
            let other = &self.versions[other as usize - 1];
            let known = other.acked.is_some_and(|ack| ack.incarnation == self.incarnation && ack.clock <= began);
            // A put with unknown outcome may take effect late, after the newer page was dropped as
            // unreadable.
            known && version.acked.is_some() && version.ended.is_some_and(|ended| ended <= other.began)
        };
        match newer.copied().filter(|number| replaces(&number)).last() {
            Some(other) => Err(format!("key {key}: version {number} is stale: version {other} was acknowledged")),
            None => Ok(()),
        }
    }

    pub fn check_page(&self, key: u64, meta: &PageMeta, payload: &[u8]) -> Result<(), String> {
        if meta.id != page_id(key) {
            return Err(format!("key {key}: the answer is page {:?}", meta.id));
        }
        let version = self.version(self.version_of(meta.generation)).ok_or("the version was never put")?;
        if meta.part_bytes != version.parts
            || meta.expires_unix_ms != version.expires_unix_ms
            || meta.payload_bytes() != payload.len()
        {
            return Err(format!("key {key} version {}: parts {:?}", meta.generation, meta.part_bytes));
        }
        if meta.parent != parent(key) || meta.position != position(key) {
            return Err(format!("key {key} version {}: wrong parent or position", meta.generation));
        }
        payload::check(key, version.content, payload)
    }

    /// Versions that a crash at this moment must not lose, whose generations `found` reports. They
    /// were acknowledged before `acked_ms` in this incarnation, or in an earlier one if `earlier`.
    /// Keys with a request of unknown outcome since then are left out.
    pub fn expected(&self, acked_ms: u64, earlier: bool, found: impl Fn(u64) -> Option<u64>) -> Vec<Expected> {
        let idle = (0..self.keys()).filter(|&key| self.keys[key as usize].busy == 0);
        idle.filter_map(|key| {
            let number = self.version_of(found(key)?);
            let version = self.version(number)?;
            let sure = version.began > self.keys[key as usize].uncertain_since;
            // Of two concurrent puts, quotas and pins decide which one is served. They do not
            // outlive the node.
            let mut others = self.keys[key as usize].versions.iter().filter(|&&other| other != number);
            let before = |&other: &u64| self.versions[other as usize - 1].ended.is_some_and(|end| end <= version.began);
            let sure = sure && others.all(before);
            let ack = version.acked?;
            let durable = if ack.incarnation == self.incarnation { ack.at_ms < acked_ms } else { earlier };
            (sure && durable).then_some(Expected { key, version: number })
        })
        .collect()
    }
}

/// Position of a key in its sequence.
pub(crate) fn position(key: u64) -> u32 {
    (number_of(key) % CHAIN) as u32
}

pub(crate) fn parent(key: u64) -> PageKey {
    match position(key) {
        0 => PageKey::NONE,
        _ => page_key(key - NAMESPACES),
    }
}

/// Token ids of a key's page: none to three.
pub(crate) fn token_ids(key: u64) -> Vec<u32> {
    (0..key % 4).map(|token| (key + token) as u32).collect()
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
    fn forgotten_version_is_rejected() {
        let mut model = Model::new(4, false);
        let before = put(&mut model, 1);
        let during = model.put_begins(1, vec![10], 0);
        let early = model.request_time(1);
        let forgetting = model.forget_begins(vec![1]);
        model.put_ends(during, None);
        model.forget_ends(forgetting, true);
        let now = model.request_time(1);
        assert!(model.check_found(1, before, early, false).is_ok(), "it began before the forget");
        assert!(model.check_found(1, before, now, false).unwrap_err().contains("was acknowledged at"));
        assert!(model.check_found(1, before, now, true).is_ok(), "a tombstone was silently damaged");
        assert!(model.check_found(1, during, now, false).is_ok(), "the put was concurrent");
        assert!(model.check_found(2, before, now, false).is_err(), "another key");
        assert!(model.check_found(1, 99, now, false).is_err());
    }

    #[test]
    fn replaced_version_is_stale_until_the_next_incarnation() {
        let mut model = Model::new(4, false);
        let old = put(&mut model, 1);
        let new = put(&mut model, 1);
        let now = model.request_time(1);
        assert!(model.check_found(1, old, now, false).unwrap_err().contains("stale"));
        assert!(model.check_found(1, new, now, false).is_ok());
        model.incarnation_ends();
        let now = model.request_time(1);
        assert!(model.check_found(1, old, now, false).is_ok(), "the newer one may have been lost");
    }

    #[test]
    fn expired_version_is_rejected() {
        let mut model = Model::new(4, true);
        let version = model.put_begins(1, vec![10], 1000);
        model.put_ends(version, Some(0));
        let early = model.request_time(999);
        let late = model.request_time(1000);
        assert!(model.check_found(1, version, early, false).is_ok());
        assert!(model.check_found(1, version, late, false).unwrap_err().contains("after its expiry"));
    }

    #[test]
    fn wrong_bytes_are_rejected() {
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
