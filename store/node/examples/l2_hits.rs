//! Hits in L2 by several threads at once: how they scale, and what one costs.
//!
//! Each thread looks up and takes pages as a connection does, without a socket. With an argument, a
//! further thread puts pages all the time, so that each put evicts one.
//!
//! ```text
//! cargo run --release -p larder-node --example l2_hits [puts]
//! ```
#![allow(clippy::disallowed_methods, reason = "a measurement: it has threads and a clock")]

use futures::FutureExt;
use larder_format::{NamespaceId, PageId, PageKey, chunk_crcs};
use larder_memory::Arena;
use larder_node::NodeOptions;
use larder_node::sim::{Clock, Devices, Store};
use larder_wire::{CommitOutcome, Reserved};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGES: u32 = 200_000;
/// Pages that threads take: the newest ones, which puts do not evict during a measurement.
const TAKEN: u32 = 100_000;
const PAGE_BYTES: usize = 4096;
const TIME: Duration = Duration::from_secs(1);
/// Each count of threads is measured this many times, in turn. The median is printed.
const ROUNDS: usize = 5;

fn id(number: u32) -> PageId {
    PageId { namespace: NamespaceId([1; 32]), key: PageKey::chain(None, &[number]) }
}

fn put(store: &Store, number: u32) {
    let page = Reserved::first(id(number).key, vec![PAGE_BYTES as u32]);
    let put = store.reserve(id(number), page).expect("room");
    let part = put.take_part(0, PAGE_BYTES).expect("the first part");
    let crcs = chunk_crcs(&part).collect();
    assert!(put.land(0, part, crcs), "checksums of the same bytes");
    assert_eq!(store.puts().commit(&put), CommitOutcome::Stored);
}

/// Hits per second of `threads` threads together, and the 99.9th percentile of one hit.
fn measure(store: &Store, ids: &[PageId], threads: usize, puts: bool) -> (f64, Duration) {
    let stop = AtomicBool::new(false);
    let hits = AtomicU64::new(0);
    let mut slow = Vec::new();
    std::thread::scope(|scope| {
        let taker = |thread: usize| {
            let (stop, hits) = (&stop, &hits);
            move || {
                let mut times = Vec::with_capacity(1 << 20);
                let mut own = 0;
                let mut at = thread * 7919;
                while !stop.load(Ordering::Relaxed) {
                    at = (at + 7) % ids.len();
                    let begin = (own % 16 == 0).then(Instant::now);
                    let page = store.tiers().get(&ids[at], Instant::now()).now_or_never().flatten();
                    if let Some(begin) = begin {
                        times.push(begin.elapsed());
                    }
                    own += u64::from(page.is_some());
                }
                hits.fetch_add(own, Ordering::Relaxed);
                times
            }
        };
        let takers: Vec<_> = (0..threads).map(|thread| scope.spawn(taker(thread))).collect();
        if puts {
            scope.spawn(|| {
                let mut number = PAGES;
                while !stop.load(Ordering::Relaxed) {
                    put(store, number);
                    // The same pages again and again: an older put was evicted by then.
                    store.forget(&[id(number)], Instant::now()).now_or_never();
                    number = PAGES + (number + 1) % 1000;
                }
            });
        }
        std::thread::sleep(TIME);
        stop.store(true, Ordering::Relaxed);
        for taker in takers {
            slow.extend(taker.join().expect("a thread"));
        }
    });
    slow.sort_unstable();
    let rank = slow.len() * 999 / 1000;
    (hits.into_inner() as f64 / TIME.as_secs_f64(), slow.get(rank).copied().unwrap_or_default())
}

#[tokio::main(worker_threads = 1)]
async fn main() {
    let puts = std::env::args().nth(1).is_some_and(|argument| argument == "puts");
    let l2_bytes = u64::from(PAGES) * 5 / 4 * PAGE_BYTES as u64;
    let options = NodeOptions { l2_bytes, seed: Some(1), ..NodeOptions::default() };
    let arena = Arena::new(options.arena_bytes() as usize).expect("memory");
    let store = Store::new(&options, arena, Devices::default(), Clock::system(), 1);
    (0..PAGES).for_each(|number| put(&store, number));
    let ids: Vec<PageId> = (PAGES - TAKEN..PAGES).map(id).collect();
    let counts = [1, 2, 4];
    let mut results = vec![Vec::new(); counts.len()];
    for _ in 0..ROUNDS {
        for (threads, results) in counts.into_iter().zip(&mut results) {
            results.push(measure(&store, &ids, threads, puts));
        }
    }
    for (threads, results) in counts.into_iter().zip(&mut results) {
        results.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (rate, slow) = results[ROUNDS / 2];
        println!("{threads} threads: {:.2} M hits/s, p99.9 of a hit {slow:?}", rate / 1e6);
    }
}
