//! Memory that the indices of L2 take per page, by the growth of the process's resident set.
//!
//! Decision record 0016 quotes its output. Run it with
//! `cargo run --release -p larder-node --example l2_memory`.
#![allow(clippy::disallowed_methods, reason = "a measurement: it reads /proc")]

use foyer::{Cache, CacheBuilder, FifoConfig};
use larder_evict::{Evictor, HitDensity, NamespaceIndex, NewPage};
use larder_format::{NamespaceId, PageId, PageKey};
use larder_node::WritePolicy;
use larder_node::sim::{L2Policy, PageInfo, PolicyActions, PolicyOptions};
use std::sync::Arc;

const PAGES: u32 = 1_000_000;
/// Pages of a sequence: each but the first has a parent.
const SEQUENCE: u32 = 15;
const PAGE_BYTES: u32 = 64 << 10;

fn id(number: u32) -> PageId {
    PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
}

fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4096.0
}

fn measure<T>(name: &str, fill: impl FnOnce() -> T) -> T {
    let before = resident_bytes();
    let kept = fill();
    println!("{name}: {:.0} bytes per page", (resident_bytes() - before) / f64::from(PAGES));
    kept
}

fn main() {
    let capacity = u64::from(PAGES) * u64::from(PAGE_BYTES);
    let page = Arc::new(());
    let foyer = measure("foyer (id to page)", || {
        let cache: Cache<PageId, Arc<()>> =
            CacheBuilder::new(PAGES as usize * 8).with_shards(8).with_eviction_config(FifoConfig::default()).build();
        (0..PAGES).for_each(|number| drop(cache.insert(id(number), page.clone())));
        cache
    });
    let evictor = measure("evictor (order of eviction)", || {
        let mut evictor = Evictor::new(capacity, HitDensity::new(1));
        let mut parent = None;
        for number in 0..PAGES {
            let position = number % SEQUENCE;
            let new = NewPage {
                name: id(number),
                fingerprint: u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                namespace: NamespaceIndex(0),
                parent: parent.filter(|_| position > 0),
                position,
                bytes: PAGE_BYTES,
                deadline_ms: None,
            };
            parent = evictor.insert(new, 0, &mut Vec::new()).ok();
        }
        evictor
    });
    let policy = measure("policy (facts and write state), evictor included", || {
        let mut policy = L2Policy::new(PolicyOptions {
            capacity_bytes: capacity,
            dirty_bytes_max: capacity,
            has_l3: true,
            write_policy: WritePolicy::Through,
            write_after_hits: 2,
            quota_default: None,
            quotas: Vec::new(),
            seed: 1,
        });
        for number in 0..PAGES {
            let position = number % SEQUENCE;
            let parent = if position == 0 { PageKey::NONE } else { id(number - 1).key };
            let info =
                PageInfo { id: id(number), parent, position, generation: 1, bytes: PAGE_BYTES, expires_unix_ms: 0 };
            policy.loaded(info, 0, &mut PolicyActions::default());
        }
        policy
    });
    assert_eq!((foyer.entries(), evictor.len(), policy.len()), (PAGES as usize, PAGES as usize, PAGES as usize));
}
