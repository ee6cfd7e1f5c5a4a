//! The pages an engine keeps in L1, as a tree over whole pages.
//!
//! What always holds:
//! - a page is in the tree only if every page before it in its sequence is; so a prefix can be matched from the start;
//! - a page that a running sequence holds (its `Arc` is shared) is never given up;
//! - pages are given up leaf first, the least recently used leaf before others.
//!
//! Page keys are chained: a key names its page and all pages before it. The children of a page are therefore the pages
//! whose keys continue its chain, and one map from key to node is the tree.

use larder_format::PageKey;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

struct Node<P> {
    page: Arc<P>,
    parent: Option<PageKey>,
    children: u32,
    used: u64,
}

/// The tree; `P` is what a page is.
pub struct Radix<P> {
    nodes: HashMap<PageKey, Node<P>>,
    /// Nodes without children, the least recently used first.
    leaves: BTreeSet<(u64, PageKey)>,
    /// Counts uses; its values are the order of use.
    clock: u64,
}

impl<P> Default for Radix<P> {
    fn default() -> Self {
        Self { nodes: HashMap::new(), leaves: BTreeSet::new(), clock: 0 }
    }
}

impl<P> Radix<P> {
    /// Pages in the tree.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the tree holds nothing.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The pages of the longest prefix of `keys` in the tree; they count as used now.
    pub fn match_prefix(&mut self, keys: &[PageKey]) -> Vec<Arc<P>> {
        keys.iter().map_while(|key| self.get(key)).collect()
    }

    /// One page, which counts as used now.
    pub fn get(&mut self, key: &PageKey) -> Option<Arc<P>> {
        self.clock += 1;
        let node = self.nodes.get_mut(key)?;
        if node.children == 0 {
            self.leaves.remove(&(node.used, *key));
            self.leaves.insert((self.clock, *key));
        }
        node.used = self.clock;
        Some(node.page.clone())
    }

    /// Adds `page` after `parent` (`None` at the start of a sequence) and returns the page to use from now on: the tree's
    /// own if it has this key already. A page whose parent is not in the tree could never be matched and is not added.
    pub fn insert(&mut self, key: PageKey, parent: Option<PageKey>, page: Arc<P>) -> Arc<P> {
        if let Some(present) = self.get(&key) {
            return present;
        }
        if let Some(parent_key) = parent {
            let Some(parent) = self.nodes.get_mut(&parent_key) else {
                return page;
            };
            if parent.children == 0 {
                self.leaves.remove(&(parent.used, parent_key));
            }
            parent.children += 1;
        }
        self.nodes.insert(key, Node { page: page.clone(), parent, children: 0, used: self.clock });
        self.leaves.insert((self.clock, key));
        page
    }

    /// Gives up to `wanted` pages back; the number given. Less than asked only if all the rest is in use.
    pub fn evict(&mut self, wanted: usize) -> usize {
        let mut evicted = 0;
        while evicted < wanted {
            let free = |key: &PageKey| self.nodes.get(key).is_some_and(|node| Arc::strong_count(&node.page) == 1);
            let Some(&(used, key)) = self.leaves.iter().find(|(_, key)| free(key)) else {
                break;
            };
            self.leaves.remove(&(used, key));
            self.remove(&key);
            evicted += 1;
        }
        evicted
    }

    fn remove(&mut self, key: &PageKey) {
        let Some(node) = self.nodes.remove(key) else { return };
        let Some(parent_key) = node.parent else { return };
        if let Some(parent) = self.nodes.get_mut(&parent_key) {
            parent.children -= 1;
            if parent.children == 0 {
                self.leaves.insert((parent.used, parent_key));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::page_keys;

    /// Adds the pages of `tokens` (two tokens each) and returns their keys.
    fn add(tree: &mut Radix<u32>, tokens: &[u32]) -> Vec<PageKey> {
        let keys = page_keys(tokens, 2);
        for (i, key) in keys.iter().enumerate() {
            tree.insert(*key, i.checked_sub(1).map(|p| keys[p]), Arc::new(tokens[2 * i]));
        }
        keys
    }

    #[test]
    fn matches_the_longest_common_prefix() {
        let mut tree = Radix::default();
        add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        let other = page_keys(&[1, 2, 3, 4, 9, 9], 2);
        assert_eq!(tree.match_prefix(&other).iter().map(|p| **p).collect::<Vec<_>>(), [1, 3]);
        assert!(tree.match_prefix(&page_keys(&[3, 4], 2)).is_empty(), "a page is not a prefix elsewhere");
    }

    #[test]
    fn the_first_page_under_a_key_stays() {
        let mut tree = Radix::default();
        let keys = add(&mut tree, &[1, 2]);
        assert_eq!(*tree.insert(keys[0], None, Arc::new(77)), 1);
        assert_eq!(tree.len(), 1);
    }

    #[test]
    fn a_page_without_its_parent_is_not_added() {
        let mut tree = Radix::default();
        let keys = page_keys(&[1, 2, 3, 4], 2);
        assert_eq!(*tree.insert(keys[1], Some(keys[0]), Arc::new(3)), 3);
        assert!(tree.is_empty());
    }

    #[test]
    fn gives_up_leaves_first_and_the_least_recently_used_of_them() {
        let mut tree = Radix::default();
        let a = add(&mut tree, &[1, 2, 3, 4]);
        let b = add(&mut tree, &[1, 2, 5, 6]);
        tree.get(&a[1]);
        assert_eq!(tree.evict(1), 1);
        assert_eq!(tree.match_prefix(&b).len(), 1, "the older leaf went");
        assert_eq!(tree.match_prefix(&a).len(), 2);
        assert_eq!(tree.evict(10), 2, "then the rest, the root last");
        assert!(tree.is_empty() && tree.leaves.is_empty());
    }

    #[test]
    fn what_is_in_use_stays_with_all_before_it() {
        let mut tree = Radix::default();
        let keys = add(&mut tree, &[1, 2, 3, 4, 5, 6]);
        let held = tree.match_prefix(&keys[..2]);
        assert_eq!(tree.evict(10), 1);
        assert_eq!(tree.match_prefix(&keys).len(), 2);
        drop(held);
        assert_eq!(tree.evict(10), 2);
    }
}
