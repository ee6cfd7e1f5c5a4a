//! Memory that a page in L2 takes beside its payload, by the growth of the process's resident set.
//!
//! Fills a store without L3 as clients do: reserve, receive, commit. The arena is faulted in
//! before, so the growth is everything else: the page's description, its indices and its order of
//! eviction. Decision record 0016 quotes the output. Run it with
//! `cargo run --release -p larder-node --example l2_memory`.
#![allow(clippy::disallowed_methods, reason = "a measurement: it reads /proc")]

use larder_format::{NamespaceId, PageId, PageKey, chunk_crcs};
use larder_memory::Arena;
use larder_node::NodeOptions;
use larder_node::sim::{Clock, Devices, Store};
use larder_wire::{CommitOutcome, Reserved};

/// Pages of a sequence: each but the first has a parent.
const SEQUENCE: u32 = 15;
const PAGE_BYTES: usize = 4096;

fn key(number: u32) -> PageKey {
    PageKey::chain(None, &[number])
}

fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4096.0
}

fn put(store: &Store, number: u32) {
    let position = number % SEQUENCE;
    let parent = if position == 0 { PageKey::NONE } else { key(number - 1) };
    let id = PageId { namespace: NamespaceId([1; 32]), key: key(number) };
    let page = Reserved { parent, position, ..Reserved::first(id.key, vec![PAGE_BYTES as u32]) };
    let put = store.reserve(id, page).expect("room");
    let part = put.take_part(0, PAGE_BYTES).expect("the first part");
    let crcs = chunk_crcs(&part).collect();
    assert!(put.land(0, part, crcs), "checksums of the same bytes");
    assert_eq!(store.puts().commit(&put), CommitOutcome::Stored);
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let pages: u32 = 1 << 20;
    let l2_bytes = u64::from(pages) * PAGE_BYTES as u64;
    let options = NodeOptions { l2_bytes, seed: Some(1), ..NodeOptions::default() };
    let arena = Arena::new(options.arena_bytes() as usize).expect("memory");
    let store = Store::new(&options, arena, Devices::default(), Clock::system(), 1);
    // The first pages fault in code and fixed tables.
    (0..1000).for_each(|number| put(&store, number));
    let before = resident_bytes();
    // At each step, because tables grow in steps: the figure right after a step is the largest.
    let mut last = 1000;
    for pages in [pages / 4, pages / 2, pages * 9 / 16, pages * 3 / 4, pages] {
        (last..pages).for_each(|number| put(&store, number));
        last = pages;
        let grown = resident_bytes() - before;
        println!("{pages} pages of 4 KiB: {:.0} bytes per page beside the payload", grown / f64::from(pages - 1000));
    }
    // Full: each put now evicts a page.
    (last..2 * last).for_each(|number| put(&store, number));
    let grown = resident_bytes() - before;
    println!("after as many evictions: {:.0} bytes per page", grown / f64::from(pages - 1000));
    println!("{}", store.status()["tiers"]["l2"]["pages"]);
}
