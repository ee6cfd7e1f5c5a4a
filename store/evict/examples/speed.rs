//! Time per access with a million resident pages, and memory per page, for each policy.
//!
//! Pages come in sequences of eight. Four accesses in five choose a sequence by a skewed rank, so
//! most of them hit. The fifth goes to a sequence that never returns.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a tool: it reads clocks")]

mod heap;

use heap::held_bytes;
use larder_evict::{Evictor, HitDensity, Lru, NamespaceIndex, NewPage, PageHandle, Policy, S3Fifo, Sieve};
use std::time::Instant;

const PAGES: usize = 1_000_000;
const SEQUENCE: usize = 8;
const SEQUENCES: usize = 2 * PAGES / SEQUENCE;
const ACCESSES: usize = 10_000_000;

fn main() {
    println!("{PAGES} pages, {ACCESSES} accesses after as many");
    println!("| policy | hits % | ns per hit | ns per miss, with its eviction | bytes a page | of these the policy |");
    println!("|---|---|---|---|---|---|");
    measure("lru", Lru::new);
    measure("s3-fifo", S3Fifo::new);
    measure("sieve", Sieve::new);
    measure("larder", || HitDensity::new(1));
}

fn measure<P: Policy>(name: &str, policy: fn() -> P) {
    // Where each page of the world is, outside of what is counted.
    let mut handles: Vec<Option<PageHandle>> = vec![None; SEQUENCES * SEQUENCE];
    let mut evicted = Vec::with_capacity(64);
    let before = held_bytes();
    let mut evictor: Evictor<u32, P> = Evictor::new(PAGES as u64, policy());
    let mut chance = 1u64;
    let mut next = || {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) as f64 / f64::from(1u32 << 31)
    };
    let (mut hits, mut hit_ns, mut misses, mut miss_ns, mut stranger) = (0u64, 0u128, 0u64, 0u128, 0u64);
    for turn in 0..2 * ACCESSES / SEQUENCE {
        let measured = turn >= ACCESSES / SEQUENCE;
        let known = (turn % 5 != 0).then(|| (next().powi(3) * SEQUENCES as f64) as usize);
        stranger += u64::from(known.is_none());
        let resident = known.map_or(0, |known| {
            let pages = &handles[known * SEQUENCE..][..SEQUENCE];
            pages.iter().take_while(|page| page.is_some_and(|handle| evictor.contains(handle, 0))).count()
        });
        // A million accesses per second: as many as the ticks resolve.
        let now_ms = (turn * SEQUENCE / 1000) as u64;
        let began = Instant::now();
        let mut parent = None;
        for position in 0..resident {
            parent = known.and_then(|known| handles[known * SEQUENCE + position]);
            parent.map(|handle| evictor.touch(handle, now_ms));
        }
        let between = Instant::now();
        for position in resident..SEQUENCE {
            let name = known.map_or(u32::MAX, |known| (known * SEQUENCE + position) as u32);
            let fingerprint = match known {
                Some(_) => u64::from(name),
                None => 1 << 40 | (stranger * SEQUENCE as u64 + position as u64),
            };
            let page = NewPage {
                name,
                fingerprint: fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                parent_fingerprint: if position > 0 {
                    (fingerprint - 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                } else {
                    0
                },
                namespace: NamespaceIndex(0),
                parent,
                position: position as u32,
                bytes: 1,
                deadline_ms: None,
                may_refuse: true,
            };
            parent = evictor.insert(page, now_ms, &mut evicted).ok();
            if let (Some(known), Some(_)) = (known, parent) {
                handles[known * SEQUENCE + position] = parent;
            }
            evicted.clear();
        }
        if measured {
            hits += resident as u64;
            hit_ns += (between - began).as_nanos();
            misses += (SEQUENCE - resident) as u64;
            miss_ns += between.elapsed().as_nanos();
        }
    }
    let bytes = (held_bytes() - before) as f64 / evictor.len() as f64;
    let policy = evictor.policy().memory_bytes() as f64 / evictor.len() as f64;
    let rate = hits as f64 / (hits + misses) as f64 * 100.0;
    let (hit, miss) = (hit_ns as f64 / hits as f64, miss_ns as f64 / misses as f64);
    println!("| {name} | {rate:.1} | {hit:.0} | {miss:.0} | {bytes:.0} | {policy:.0} |");
}
