//! Radix tree over the pages cached in L1.
//!
//! A page key is chained: it identifies its page and all pages before it. The children of a page
//! are the pages whose keys continue its chain. One hash map from key to node therefore represents
//! the tree.
//!
//! Invariants:
//! - A page is in the tree only if all pages before it in its sequence are, so a match from the
//!   start finds every cached prefix.
//! - A page in use by a running sequence (its `Arc` is shared) is never evicted.
//! - Eviction removes leaves only. The least recently used goes first, but later than the next few
//!   if it waits for another put.
//! - [`RadixTree::remove`] takes a page out with all pages after it, in use or not. The sequences
//!   that use them keep their references.

use larder_format::PageKey;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Weak};

/// Number of leaves among which an eviction looks for a preferred one.
const PREFERENCE_SCAN_MAX: usize = 64;

struct Node<P> {
    page: Arc<P>,
    parent: Option<PageKey>,
    children: BTreeSet<PageKey>,
    used: u64,
}

/// Radix tree of cached pages. `P` is the page type; tests use integers.
pub struct RadixTree<P> {
    /// Ordered by key, so that a scrub can go on after the last page that it has seen.
    nodes: BTreeMap<PageKey, Node<P>>,
    /// Nodes without children, ordered by last use. Only these can be evicted, because an inner
    /// page would leave its children unreachable.
    leaves: BTreeSet<(u64, PageKey)>,
    clock: u64,
}

impl<P> Default for RadixTree<P> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new(), leaves: BTreeSet::new(), clock: 0 }
    }
}

impl<P> RadixTree<P> {
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub fn match_prefix(&mut self, keys: &[PageKey]) -> Vec<Arc<P>> {
        keys.iter().map_while(|key| self.get(key)).collect()
    }

    pub fn get(&mut self, key: &PageKey) -> Option<Arc<P>> {
        // Each use gets its own value, so (use, key) pairs in `leaves` are unique.
        self.clock += 1;
        let node = self.nodes.get_mut(key)?;
        // Only leaves are indexed by use. An inner node is indexed when it becomes a leaf.
        if node.children.is_empty() {
            self.leaves.remove(&(node.used, *key));
            self.leaves.insert((self.clock, *key));
        }
        node.used = self.clock;
        Some(node.page.clone())
    }

    /// Inserts `page` after `parent` (`None` at the start of a sequence) and returns the page to
    /// use from now on. If the key is cached already, that is the tree's own page. A page whose
    /// parent is absent could never be matched, so the tree does not keep it.
    pub fn insert(&mut self, key: PageKey, parent: Option<PageKey>, page: Arc<P>) -> Arc<P> {
        // Keep the first page: running sequences share it already.
        if let Some(present) = self.get(&key) {
            return present;
        }
        if let Some(parent_key) = parent {
            let Some(parent) = self.nodes.get_mut(&parent_key) else {
                return page;
            };
            if parent.children.is_empty() {
                self.leaves.remove(&(parent.used, parent_key));
            }
            parent.children.insert(key);
        }
        self.nodes.insert(key, Node { page: page.clone(), parent, children: BTreeSet::new(), used: self.clock });
        self.leaves.insert((self.clock, key));
        page
    }

    /// Evicts up to `wanted` pages and returns the number evicted. Evicts fewer only if all
    /// remaining pages are in use. Scans past leaves in use, so its cost grows with their number.
    ///
    /// Of the 64 leaves in turn, the first that `is_preferred` goes, or the first of all.
    pub fn evict(&mut self, wanted: usize, is_preferred: impl Fn(&P) -> bool) -> usize {
        let mut evicted = 0;
        while evicted < wanted {
            // A count of 1 means that the tree holds the only reference. Other threads add one only
            // for a moment: a scrub, and the end of a commit.
            let free = |key: &PageKey| self.nodes.get(key).is_some_and(|node| Arc::strong_count(&node.page) == 1);
            let mut in_turn = self.leaves.iter().filter(|(_, key)| free(key)).take(PREFERENCE_SCAN_MAX);
            let first = in_turn.clone().next();
            let preferred = in_turn.find(|(_, key)| self.peek(key).is_some_and(|page| is_preferred(page)));
            let Some(&(used, key)) = preferred.or(first) else {
                break;
            };
            self.leaves.remove(&(used, key));
            self.remove_leaf(&key);
            evicted += 1;
        }
        evicted
    }

    /// Evicts all pages that no one uses and that `may_go`, and returns their number. Pages before
    /// one that stays, stay too.
    pub fn evict_all(&mut self, may_go: impl Fn(&P) -> bool) -> usize {
        let mut evicted = 0;
        let mut candidates: Vec<PageKey> = self.leaves.iter().map(|(_, key)| *key).collect();
        while let Some(key) = candidates.pop() {
            let Some(node) = self.nodes.get(&key).filter(|node| node.children.is_empty()) else { continue };
            if Arc::strong_count(&node.page) > 1 || !may_go(&node.page) {
                continue;
            }
            // It is a leaf once its last child has gone.
            candidates.extend(node.parent);
            self.leaves.remove(&(node.used, key));
            self.remove_leaf(&key);
            evicted += 1;
        }
        evicted
    }

    /// Page of `key`. Unlike [`get`](Self::get), this is no use of the page.
    pub fn peek(&self, key: &PageKey) -> Option<&Arc<P>> {
        self.nodes.get(key).map(|node| &node.page)
    }

    /// Up to `count` pages in order of their keys, after `last`, or from the start. The weak
    /// references keep no page from eviction.
    pub fn pages_after(&self, last: Option<PageKey>, count: usize) -> Vec<(PageKey, Weak<P>)> {
        let start = last.map_or(Bound::Unbounded, Bound::Excluded);
        let nodes = self.nodes.range((start, Bound::Unbounded)).take(count);
        nodes.map(|(key, node)| (*key, Arc::downgrade(&node.page))).collect()
    }

    /// Removes a page and all pages after it, which no match could reach any more. Returns the
    /// number of removed pages, 0 if the key is not cached.
    pub fn remove(&mut self, key: &PageKey) -> usize {
        let mut subtree = vec![*key];
        let mut inspected = 0;
        while let Some(node) = subtree.get(inspected).and_then(|key| self.nodes.get(key)) {
            subtree.extend(&node.children);
            inspected += 1;
        }
        // From the leaves up: each page is a leaf when its turn comes.
        for key in subtree[..inspected].iter().rev() {
            if let Some(node) = self.nodes.get(key) {
                self.leaves.remove(&(node.used, *key));
            }
            self.remove_leaf(key);
        }
        inspected
    }

    /// Removes a page without children that is not in `leaves` any more.
    fn remove_leaf(&mut self, key: &PageKey) {
        let Some(node) = self.nodes.remove(key) else { return };
        debug_assert!(node.children.is_empty(), "a page is removed before the pages after it");
        let Some(parent_key) = node.parent else { return };
        if let Some(parent) = self.nodes.get_mut(&parent_key) {
            parent.children.remove(key);
            if parent.children.is_empty() {
                self.leaves.insert((parent.used, parent_key));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::page_keys;

    fn add(tree: &mut RadixTree<u32>, tokens: &[u32]) -> Vec<PageKey> {
        let keys = page_keys(tokens, 2);
        for (i, key) in keys.iter().enumerate() {
            tree.insert(*key, i.checked_sub(1).map(|p| keys[p]), Arc::new(tokens[2 * i]));
        }
        keys
    }

    #[test]
    fn match_prefix_returns_longest_common_prefix() {
        let mut tree = RadixTree::default();
        add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        let other = page_keys(&[1, 2, 3, 4, 9, 9], 2);
        assert_eq!(tree.match_prefix(&other).iter().map(|p| **p).collect::<Vec<_>>(), [1, 3]);
        assert!(tree.match_prefix(&page_keys(&[3, 4], 2)).is_empty(), "a page is not a prefix elsewhere");
    }

    #[test]
    fn insert_keeps_the_first_page_of_a_key() {
        let mut tree = RadixTree::default();
        let keys = add(&mut tree, &[1, 2]);
        assert_eq!(*tree.insert(keys[0], None, Arc::new(77)), 1);
        assert_eq!(tree.len(), 1);
    }

    #[test]
    fn insert_skips_a_page_without_its_parent() {
        let mut tree = RadixTree::default();
        let keys = page_keys(&[1, 2, 3, 4], 2);
        assert_eq!(*tree.insert(keys[1], Some(keys[0]), Arc::new(3)), 3);
        assert!(tree.is_empty());
    }

    #[test]
    fn evict_removes_least_recently_used_leaves_first() {
        let mut tree = RadixTree::default();
        let a = add(&mut tree, &[1, 2, 3, 4]);
        let b = add(&mut tree, &[1, 2, 5, 6]);
        tree.get(&a[1]);
        assert_eq!(tree.evict(1, |_| true), 1);
        assert_eq!(tree.match_prefix(&b).len(), 1, "the older leaf went");
        assert_eq!(tree.match_prefix(&a).len(), 2);
        assert_eq!(tree.evict(10, |_| true), 2, "then the rest, the root last");
        assert!(tree.is_empty() && tree.leaves.is_empty());
    }

    #[test]
    fn evict_all_spares_pages_and_those_before_them() {
        let mut tree = RadixTree::default();
        let a = add(&mut tree, &[1, 2, 3, 4]);
        let b = add(&mut tree, &[1, 2, 5, 6, 7, 8]);
        let spared = **tree.peek(&a[1]).unwrap();
        assert_eq!(tree.evict_all(|page| *page != spared), 2);
        assert_eq!((tree.match_prefix(&a).len(), tree.match_prefix(&b).len()), (2, 1));
        let held = tree.match_prefix(&a);
        assert_eq!(tree.evict_all(|_| true), 0, "pages in use stay");
        drop(held);
        assert_eq!(tree.evict_all(|_| true), 2);
        assert!(tree.is_empty() && tree.leaves.is_empty());
    }

    #[test]
    fn remove_takes_the_page_and_all_pages_after_it() {
        let mut tree = RadixTree::default();
        let a = add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        let b = add(&mut tree, &[1, 2, 3, 4, 7, 8]);
        let c = add(&mut tree, &[1, 2, 9, 9]);
        let held = tree.match_prefix(&a);
        assert_eq!((tree.remove(&a[1]), tree.remove(&a[1])), (3, 0));
        assert_eq!((tree.match_prefix(&a).len(), tree.match_prefix(&b).len(), tree.match_prefix(&c).len()), (1, 1, 2));
        assert_eq!((tree.len(), tree.leaves.len(), held.len()), (2, 1, 3));
        assert_eq!(tree.remove(&c[1]), 1);
        assert_eq!(tree.leaves.len(), 1, "the parent is a leaf again");
        drop(held);
        assert_eq!(tree.evict(10, |_| true), 1);
    }

    #[test]
    fn pages_after_visits_each_page_once() {
        let mut tree = RadixTree::default();
        let mut keys = add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        keys.sort();
        let mut seen = Vec::new();
        for _ in 0..3 {
            seen.extend(tree.pages_after(seen.last().copied(), 2).into_iter().map(|(key, _)| key));
        }
        assert_eq!(seen, keys);
    }

    #[test]
    fn evict_keeps_pages_in_use_and_their_ancestors() {
        let mut tree = RadixTree::default();
        let keys = add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        let held = tree.match_prefix(&keys[..2]);
        assert_eq!(tree.evict(10, |_| true), 1);
        assert_eq!(tree.match_prefix(&keys).len(), 2);
        drop(held);
        assert_eq!(tree.evict(10, |_| true), 2);
    }

    #[test]
    fn evict_prefers_pages_that_the_store_has() {
        let mut tree = RadixTree::default();
        for tokens in [[1, 2], [3, 4], [5, 6]] {
            add(&mut tree, &tokens);
        }
        let stored = |page: &u32| *page == 3;
        assert_eq!(tree.evict(1, stored), 1);
        assert!(tree.match_prefix(&page_keys(&[3, 4], 2)).is_empty(), "not the least recently used one");
        assert_eq!(tree.evict(1, stored), 1);
        assert!(tree.match_prefix(&page_keys(&[1, 2], 2)).is_empty(), "without a stored one, the oldest");
        assert_eq!(tree.len(), 1);
    }
}
