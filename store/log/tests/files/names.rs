//! Names of pages, and the listener for pages that enter and leave a log.

use crate::common::*;
use larder_format::NamespaceId;
use larder_format::footer::PageSummary;
use larder_log::{L3, L3Options, PageListener, PageName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const PAGES: u32 = 400;

fn name(n: u32) -> PageName {
    let mut name = PageName::default();
    name.copy_from_slice(&id(n).key.0[..8]);
    name
}

/// Pages that the log has announced, with their token ids.
#[derive(Default)]
struct Follower {
    pages: Mutex<BTreeMap<PageName, Vec<u32>>>,
    /// Pages that came twice, or left without having come.
    contradictions: AtomicUsize,
}

impl PageListener for Follower {
    fn stored(&self, page: &PageSummary, token_ids: &[u32]) {
        let mut name = PageName::default();
        name.copy_from_slice(&page.id.key.0[..8]);
        let before = self.pages.lock().unwrap().insert(name, token_ids.to_vec());
        self.contradictions.fetch_add(usize::from(before.is_some()), Ordering::Relaxed);
    }

    fn removed(&self, namespace: &NamespaceId, name: PageName) {
        let known = self.pages.lock().unwrap().remove(&name).is_some() && *namespace == id(0).namespace;
        self.contradictions.fetch_add(usize::from(!known), Ordering::Relaxed);
    }

    fn all_changed(&self) {
        self.pages.lock().unwrap().clear();
    }
}

/// Names from a walk over all pages.
fn walk(l3: &L3) -> BTreeSet<PageName> {
    let (mut names, mut place) = (BTreeSet::new(), Some(0));
    while let Some(from) = place {
        let (pages, next) = l3.names_from(from, 7);
        names.extend(pages.iter().map(|page| page.name));
        place = next;
    }
    names
}

fn found(l3: &L3) -> BTreeSet<PageName> {
    (0..PAGES).filter(|&n| l3.find(&id(n)).is_some()).map(name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listener_hears_of_all_pages_that_come_and_go() {
    let dir = temp();
    let arena = arena();
    let options = L3Options { keep_names: true, ..options(dir.path(), 12) };
    let (l3, _) = open_with(options.clone(), &arena).await;
    let follower = Arc::new(Follower::default());
    l3.listen(follower.clone());
    for n in 0..PAGES {
        let (mut meta, slot) = page(&arena, n, 1, 60_000);
        meta.token_ids = vec![n; 3];
        l3.write(meta, slot, deadline()).await.unwrap();
    }
    put(&l3, &arena, PAGES - 1, 2, 60_000).await;
    assert_eq!(l3.forget(&[id(PAGES - 2)], deadline()).await.unwrap(), 1);
    // The log may still evict pages.
    let announced = || follower.pages.lock().unwrap().keys().copied().collect::<BTreeSet<_>>();
    eventually("the listener knows the pages of the log", || announced() == found(&l3)).await;
    eventually("a walk meets the pages of the log", || walk(&l3) == found(&l3)).await;
    let pages = follower.pages.lock().unwrap().clone();
    assert!((50..PAGES as usize - 50).contains(&pages.len()), "{} pages", pages.len());
    assert_eq!(pages.get(&name(PAGES - 3)), Some(&vec![PAGES - 3; 3]));
    assert_eq!((pages.get(&name(PAGES - 2)), pages.get(&name(PAGES - 1))), (None, Some(&Vec::new())));
    assert_eq!(follower.contradictions.load(Ordering::Relaxed), 0);
    l3.close().await;
    drop(l3);

    let (l3, _) = open_with(options, &arena).await;
    assert!(!found(&l3).is_empty());
    assert_eq!(walk(&l3), found(&l3), "a recovered log has names");
    l3.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_without_names_announces_nothing() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    let follower = Arc::new(Follower::default());
    l3.listen(follower.clone());
    put(&l3, &arena, 1, 1, 5000).await;
    assert!(follower.pages.lock().unwrap().is_empty() && walk(&l3).is_empty());
    l3.close().await;
}
