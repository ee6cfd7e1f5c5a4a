//! Oracle for clients: pages that a node may report, and bytes that a client may receive.
//!
//! A put is identified by its key and its *content*, the number from which its bytes follow. A
//! client may receive these bytes, or learn of the page, if a put of that key with that content is:
//! - committed: its writer requested the commit, and no answer said that it failed;
//! - not forgotten: after a complete forget, puts that ended before the forget began are dead, and
//!   so are all puts of copies that clients had then, even those that begin later;
//! - not expired.
//!
//! A put with unknown outcome may take effect until the cluster is idle. The model never requires a
//! page to be present: nodes come and go, and L2 is small.

use crate::model::ContentMatch;
use crate::payload;
use std::collections::BTreeSet;

/// A payload begins with its key and its content, one word each.
const HEADER_BYTES: usize = 16;

#[derive(Debug)]
struct Put {
    number: u64,
    content: u64,
    commit_requested: bool,
    /// Tick at which the client had the bytes, if the put is one of a copy.
    copied: Option<u64>,
    ended: Option<u64>,
    dead_since: Option<u64>,
    expires_unix_ms: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct PutId {
    pub(super) key: u64,
    pub(super) number: u64,
    pub(super) content: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTime {
    tick: u64,
    unix_ms: u64,
}

#[derive(Debug)]
pub(super) struct ForgetRequest {
    keys: Vec<u64>,
    began: u64,
}

#[derive(Debug)]
pub(super) struct Model {
    clock: u64,
    puts: u64,
    keys: Vec<Vec<Put>>,
    contents: Vec<BTreeSet<u64>>,
    /// Tick of the last forget, by key. `u64::MAX` while one is in flight.
    forgotten: Vec<u64>,
    /// Begin and end of the complete forget that began last, by key.
    complete: Vec<(u64, u64)>,
}

impl Model {
    pub(super) fn new(keys: u64) -> Model {
        let forgotten = vec![0; keys as usize];
        let complete = vec![(0, 0); keys as usize];
        let contents = vec![BTreeSet::new(); keys as usize];
        Model { clock: 0, puts: 0, keys: (0..keys).map(|_| Vec::new()).collect(), contents, forgotten, complete }
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Tick of this moment: requests that begin later have a later one.
    pub(super) fn tick(&mut self) -> u64 {
        self.now()
    }

    pub(super) fn request_time(&mut self, unix_ms: u64) -> RequestTime {
        RequestTime { tick: self.now(), unix_ms }
    }

    pub(super) fn put_begins(&mut self, key: u64, content: Option<u64>) -> PutId {
        self.puts += 1;
        let content = content.unwrap_or(self.puts);
        self.add_put(key, content, None)
    }

    /// Begins a put of bytes that the client has had since tick `copied`. It is dead from the start
    /// if a complete forget began after that.
    pub(super) fn copy_begins(&mut self, key: u64, content: u64, copied: u64) -> PutId {
        self.puts += 1;
        self.add_put(key, content, Some(copied))
    }

    fn add_put(&mut self, key: u64, content: u64, copied: Option<u64>) -> PutId {
        let number = self.puts;
        let (began, over) = self.complete[key as usize];
        let dead_since = copied.is_some_and(|copied| copied <= began).then_some(over);
        self.keys[key as usize].push(Put {
            number,
            content,
            commit_requested: false,
            copied,
            ended: None,
            dead_since,
            expires_unix_ms: u64::MAX,
        });
        self.contents[key as usize].insert(content);
        PutId { key, number, content }
    }

    fn put(&mut self, put_id: PutId) -> Option<&mut Put> {
        self.keys[put_id.key as usize].iter_mut().find(|put| put.number == put_id.number)
    }

    pub(super) fn commit_requested(&mut self, put_id: PutId) {
        if let Some(put) = self.put(put_id) {
            put.commit_requested = true;
        }
    }

    /// Ends a put. `stored` is its expiry, or `None` if it certainly failed.
    pub(super) fn put_ends(&mut self, put_id: PutId, stored: Option<u64>) {
        let now = self.now();
        if let Some(put) = self.put(put_id) {
            put.ended = Some(now);
            put.commit_requested &= stored.is_some();
            put.expires_unix_ms = stored.unwrap_or(u64::MAX);
        }
    }

    pub(super) fn last_content(&self, key: u64) -> Option<u64> {
        self.keys[key as usize].last().map(|put| put.content)
    }

    pub(super) fn forget_begins(&mut self, keys: Vec<u64>) -> ForgetRequest {
        let began = self.now();
        keys.iter().for_each(|&key| self.forgotten[key as usize] = u64::MAX);
        ForgetRequest { keys, began }
    }

    /// Ends a forget. An incomplete one may still take effect: puts before it are neither dead nor
    /// certain to be readable.
    pub(super) fn forget_ends(&mut self, forgetting: ForgetRequest, complete: bool) {
        let now = self.now();
        for key in forgetting.keys.into_iter().filter(|_| complete) {
            self.forgotten[key as usize] = now;
            let complete = &mut self.complete[key as usize];
            *complete = (*complete).max((forgetting.began, now));
            for put in &mut self.keys[key as usize] {
                // A copy is as old as its bytes, whenever it is put.
                if put.copied.or(put.ended).is_some_and(|since| since <= forgetting.began) {
                    put.dead_since.get_or_insert(now);
                }
            }
        }
    }

    /// Returns `true` if nothing can have removed the page since then: it does not expire, and no
    /// client has forgotten it.
    pub(super) fn is_untouched(&self, key: u64, started: RequestTime) -> bool {
        let may_vanish =
            self.keys[key as usize].iter().any(|put| put.expires_unix_ms != u64::MAX || put.ended.is_none());
        !may_vanish && self.forgotten[key as usize] < started.tick
    }

    /// The cluster is idle: nothing that began earlier can take effect any more.
    pub(super) fn quiesced(&mut self) {
        let now = self.now();
        for key in &mut self.keys {
            key.retain(|put| put.commit_requested && put.dead_since.is_none());
            key.iter_mut().for_each(|put| put.ended = put.ended.or(Some(now)));
        }
        self.forgotten.iter_mut().for_each(|forgotten| *forgotten = now);
    }

    /// Returns `true` if a request that started at `started` may learn of a page with these bytes.
    pub(super) fn may_exist(&self, key: u64, bytes: ContentMatch, started: RequestTime) -> bool {
        self.keys[key as usize].iter().any(|put| {
            let fits = match bytes {
                ContentMatch::Same(content) => put.content == content,
                ContentMatch::Other(content) => put.content != content,
                ContentMatch::Any => true,
            };
            let alive = put.dead_since.is_none_or(|dead| dead > started.tick);
            fits && put.commit_requested && alive && put.expires_unix_ms > started.unix_ms
        })
    }

    /// Checks bytes that a client received, and returns their content. The bytes of a `suspect` key
    /// may have been forgotten.
    pub(super) fn check(&self, key: u64, bytes: &[u8], started: RequestTime, suspect: bool) -> Result<u64, String> {
        let word = bytes.get(8..HEADER_BYTES).ok_or("the page is too short to name its put")?;
        let content = u64::from_le_bytes(word.try_into().unwrap_or_default());
        payload::check(key, content, bytes)?;
        if self.may_exist(key, ContentMatch::Same(content), started) || suspect {
            return Ok(content);
        }
        let known: Vec<&Put> = self.keys[key as usize].iter().filter(|put| put.content == content).collect();
        Err(format!(
            "key {key}: bytes of content {content}, which was forgotten, has expired, or was never committed: {known:?}"
        ))
    }
}

impl Model {
    pub(super) fn check_range(
        &self,
        key: u64,
        at: usize,
        bytes: &[u8],
        started: RequestTime,
        suspect: bool,
    ) -> Result<u64, String> {
        // A short range may match several puts.
        let contents = self.contents[key as usize].iter().copied();
        let had: Vec<u64> = contents.filter(|&content| payload::is_at(key, content, at, bytes)).collect();
        let may_exist = |content: &u64| suspect || self.may_exist(key, ContentMatch::Same(*content), started);
        let problem = || {
            format!(
                "key {key}: {} bytes at offset {at} belong to contents {had:?}, none of which is allowed",
                bytes.len()
            )
        };
        had.iter().copied().find(may_exist).ok_or_else(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_committed_and_unforgotten_bytes_are_allowed() {
        let mut model = Model::new(4);
        let put = model.put_begins(1, None);
        let other = model.put_begins(1, None);
        let mut bytes = [0; 40];
        payload::fill(1, put.content, &mut bytes);
        let early = model.request_time(5);
        assert!(model.check(1, &bytes, early, false).is_err(), "the commit was not requested");
        model.commit_requested(put);
        assert_eq!(model.check(1, &bytes, early, false), Ok(put.content));
        assert!(
            model.may_exist(1, ContentMatch::Any, early)
                && !model.may_exist(1, ContentMatch::Other(put.content), early)
        );
        model.commit_requested(other);
        let forgetting = model.forget_begins(vec![1]);
        model.put_ends(put, Some(9));
        model.forget_ends(forgetting, true);
        let started = model.request_time(8);
        assert!(model.check(1, &bytes, started, false).is_ok(), "the put was concurrent with the forget");
        let over = model.request_time(9);
        assert!(model.check(1, &bytes, over, false).is_err(), "it has expired");
        let forgetting = model.forget_begins(vec![1]);
        model.forget_ends(forgetting, true);
        let late = model.request_time(8);
        assert!(model.check(1, &bytes, late, false).is_err() && model.check(1, &bytes, started, false).is_ok());
        assert!(model.check(1, &bytes, late, true).is_ok(), "a tombstone was silently damaged");
        assert!(model.may_exist(1, ContentMatch::Same(other.content), late), "the outcome is unknown");
        bytes[39] ^= 1;
        assert!(model.check(1, &bytes, started, false).is_err());
        model.put_ends(other, None);
        assert!(!model.may_exist(1, ContentMatch::Any, late), "the answer said that it is not stored");
    }

    #[test]
    fn copy_from_before_a_forget_is_never_allowed() {
        let mut model = Model::new(1);
        let put = model.put_begins(0, None);
        model.commit_requested(put);
        model.put_ends(put, Some(u64::MAX));
        let copied = model.tick();
        let open = model.copy_begins(0, put.content, copied);
        model.commit_requested(open);
        let forgetting = model.forget_begins(vec![0]);
        model.forget_ends(forgetting, true);
        let late = model.copy_begins(0, put.content, copied);
        model.commit_requested(late);
        let started = model.request_time(0);
        assert!(!model.may_exist(0, ContentMatch::Any, started));
        let copied = model.tick();
        let newer = model.copy_begins(0, put.content, copied);
        model.commit_requested(newer);
        assert!(model.may_exist(0, ContentMatch::Same(put.content), started));
    }

    #[test]
    fn idle_cluster_has_no_put_of_unknown_outcome() {
        let mut model = Model::new(1);
        let put = model.put_begins(0, None);
        model.commit_requested(put);
        model.quiesced();
        let forgetting = model.forget_begins(vec![0]);
        model.forget_ends(forgetting, true);
        let started = model.request_time(0);
        assert!(!model.may_exist(0, ContentMatch::Any, started));
    }
}
