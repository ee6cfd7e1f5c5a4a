//! The offline optimum of Belady.

use super::{HitRate, Trace};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

const NEVER: u32 = u32::MAX;

/// Hits of a cache that knows the future. It evicts the block whose next request is the latest, and
/// of one request's blocks the last. It does not keep a block that is never requested again.
pub fn belady(trace: &Trace, capacity_blocks: u64) -> HitRate {
    let next_uses = next_uses(trace);
    let mut resident: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>> = HashMap::default();
    let mut by_use: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut positions = vec![0u32; trace.blocks_distinct()];
    let mut rate = HitRate::default();
    for (request, next_uses) in trace.requests().iter().zip(&next_uses) {
        rate.blocks += request.blocks.len() as u64;
        rate.hits += request.blocks.iter().take_while(|block| resident.contains_key(block)).count() as u64;
        for (position, (block, next_use)) in request.blocks.iter().zip(next_uses).enumerate() {
            if let Some(before) = resident.remove(block) {
                by_use.remove(&(before, positions[*block as usize], *block));
            }
            if *next_use == NEVER {
                continue;
            }
            positions[*block as usize] = position as u32;
            resident.insert(*block, *next_use);
            by_use.insert((*next_use, position as u32, *block));
            if resident.len() as u64 > capacity_blocks
                && let Some((_, _, last)) = by_use.pop_last()
            {
                resident.remove(&last);
            }
        }
    }
    rate
}

fn next_uses(trace: &Trace) -> Vec<Vec<u32>> {
    let mut next = vec![NEVER; trace.blocks_distinct()];
    let mut uses: Vec<Vec<u32>> = Vec::with_capacity(trace.requests().len());
    for (number, request) in trace.requests().iter().enumerate().rev() {
        uses.push(request.blocks.iter().map(|block| next[*block as usize]).collect());
        request.blocks.iter().for_each(|block| next[*block as usize] = number as u32);
    }
    uses.reverse();
    uses
}
