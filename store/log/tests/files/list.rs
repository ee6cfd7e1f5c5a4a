//! The pages of one namespace are listed, each at least once, over all segments.

use crate::common::*;
use larder_format::{NamespaceId, PageId};
use std::collections::BTreeSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_one_namespace_are_listed_over_all_segments() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 12, &arena).await;
    let listed = NamespaceId([0xee; 32]);
    let mut expected = BTreeSet::new();
    for n in 0..300 {
        if n % 3 > 0 {
            put(&l3, &arena, n, 1, 20_000).await;
            continue;
        }
        let (mut meta, slot) = page(&arena, n, 1, 20_000);
        meta.id = PageId { namespace: listed, key: meta.id.key };
        expected.insert(meta.id.key);
        l3.write(meta, slot, deadline()).await.unwrap();
    }
    assert!(segments(dir.path()).len() > 2, "the test needs several segments");
    assert_eq!(l3.pages_of(&listed), 100);
    let forgotten = PageId { namespace: listed, key: *expected.first().unwrap() };
    l3.forget(&[forgotten], deadline()).await.unwrap();
    expected.remove(&forgotten.key);
    assert_eq!(l3.pages_of(&listed), 99);
    let (mut found, mut after, mut steps) = (BTreeSet::new(), (0, 0), 0);
    loop {
        let step = l3.list(&listed, after, 7).await.unwrap();
        assert!(step.pages.len() <= 7);
        for (meta, payload) in step.pages {
            assert_eq!((meta.id.namespace, payload.len()), (listed, 20_000));
            found.insert(meta.id.key);
        }
        steps += 1;
        match step.next {
            Some(next) => after = next,
            None => break,
        }
    }
    assert!(found == expected && steps >= 15, "{} of {} pages in {steps} steps", found.len(), expected.len());
    assert_eq!(l3.pages_of(&NamespaceId([0xdd; 32])), 0);
}
