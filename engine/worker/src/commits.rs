//! Puts whose commit is on its way to the store.
//!
//! Invariant: a key counts from before its commit is sent until its outcome is known. A forget
//! waits for the keys that it names, because a commit in flight could store a page after it.

use larder_format::PageKey;
use larder_runtime::lock::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::Notify;

#[derive(Default)]
pub(crate) struct Commits {
    running: Mutex<HashMap<PageKey, usize>>,
    ended: Notify,
}

/// A commit in flight. Dropping it ends the commit.
pub(crate) struct RunningCommit {
    commits: Arc<Commits>,
    key: PageKey,
}

impl Commits {
    pub(crate) fn begin(self: &Arc<Self>, key: PageKey) -> RunningCommit {
        *self.running.lock().entry(key).or_default() += 1;
        RunningCommit { commits: self.clone(), key }
    }

    /// Waits until no commit of these pages is in flight. The time limit of a put bounds the wait
    /// if no new commit of them begins.
    pub(crate) async fn wait_for(&self, keys: &HashSet<PageKey>) {
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            // Registered before the look, or an end in between would go unnoticed.
            ended.as_mut().enable();
            if !self.running.lock().keys().any(|key| keys.contains(key)) {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for RunningCommit {
    fn drop(&mut self) {
        let mut running = self.commits.running.lock();
        if let Some(count) = running.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.key);
            }
        }
        drop(running);
        self.commits.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn wait_ends_with_the_last_commit_of_the_named_pages() {
        let commits = Arc::<Commits>::default();
        let keys = HashSet::from([PageKey([1; 32])]);
        let _other = commits.begin(PageKey([2; 32]));
        commits.wait_for(&keys).await;
        let first = commits.begin(PageKey([1; 32]));
        let second = commits.begin(PageKey([1; 32]));
        drop(first);
        let wait = commits.wait_for(&keys);
        tokio::pin!(wait);
        let early = tokio::time::timeout(Duration::from_millis(20), &mut wait).await;
        assert!(early.is_err(), "a commit is still in flight");
        drop(second);
        wait.await;
    }
}
