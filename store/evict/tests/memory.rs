//! Memory per resident page, measured at the allocator: at most 105 bytes from half a million pages
//! on. That includes the estimator's fixed tables and a name of four bytes per page. A deadline
//! takes 9 bytes more.

#[path = "../examples/heap/mod.rs"]
mod heap;

use heap::held_bytes;
use larder_evict::{Evictor, HitDensity, NamespaceIndex, NewPage, PageHandle, Policy};

const PAGE_BYTES_MAX: usize = 105;
const DEADLINE_BYTES_MAX: usize = 9;
const POLICY_PAGE_BYTES_MAX: usize = 64;
const FIXED_BYTES_MAX: usize = 8 << 20;

/// Fills to `pages` in sequences of `sequence`, then that much again. Returns the bytes of the
/// evictor, and the policy's estimate of its own. If pages expire, each has a deadline of its own.
fn bytes_of(pages: usize, sequence: usize, expires: bool) -> (usize, usize) {
    let before = held_bytes();
    let mut evictor = Evictor::new(pages as u64, HitDensity::new(0));
    let mut evicted = Vec::new();
    let mut parent: Option<PageHandle> = None;
    for number in 0..2 * pages {
        let position = (number % sequence) as u32;
        let page = NewPage {
            name: number as u32,
            fingerprint: number as u64 + 1,
            parent_fingerprint: if position > 0 { number as u64 } else { 0 },
            namespace: NamespaceIndex(0),
            parent: parent.filter(|_| position > 0),
            position,
            bytes: 1,
            deadline_ms: expires.then_some(1 + (number as u64).wrapping_mul(0x9e37_79b9) % 3_600_000),
            may_refuse: false,
        };
        parent = Some(evictor.insert(page, 0, &mut evicted).unwrap());
        evicted.clear();
    }
    assert_eq!(evictor.len(), pages);
    (held_bytes() - before, evictor.policy().memory_bytes())
}

#[test]
fn page_takes_at_most_105_bytes() {
    let (fixed, _) = bytes_of(64, 16, false);
    println!("fixed: {fixed} bytes");
    assert!(fixed <= FIXED_BYTES_MAX);
    for (pages, sequence) in [(1 << 20, 1), (1 << 20, 20), (700_000, 20), (530_000, 1)] {
        let (held, policy) = bytes_of(pages, sequence, false);
        println!("{pages} pages in sequences of {sequence}: {:.1} bytes a page", held as f64 / pages as f64);
        assert!(held <= PAGE_BYTES_MAX * pages);
        // The rest is the evictor's table, with its spare capacity and the list of empty slots.
        let rest = (held - policy) / pages;
        assert!(policy <= POLICY_PAGE_BYTES_MAX * pages && (36..=51).contains(&rest), "{policy}, {rest} for the table");
        let (expiring, _) = bytes_of(pages, sequence, true);
        println!("with deadlines {:.1} bytes more", (expiring - held) as f64 / pages as f64);
        assert!(expiring - held <= DEADLINE_BYTES_MAX * pages);
    }
}
