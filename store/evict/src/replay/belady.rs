//! The offline optimum of Belady.

use super::{Outcome, Trace};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

const NEVER: u32 = u32::MAX;

/// Hits of a cache that knows the future. It evicts the block whose next request is the latest, and
/// of one request's blocks the last. It does not keep a block that is never requested again.
pub fn belady(trace: &Trace, capacity_blocks: u64) -> Outcome {
    let next_uses = next_uses(trace);
    let mut resident: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>> = HashMap::default();
    let mut by_use: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut positions = vec![0u32; trace.blocks_distinct()];
    let mut outcome = Outcome::default();
    for (request, next_uses) in trace.requests().iter().zip(&next_uses) {
        let hits = request.blocks.iter().take_while(|block| resident.contains_key(block)).count();
        outcome.count(request.blocks.len(), hits, trace.block_tokens());
        for (position, (block, next_use)) in request.blocks.iter().zip(next_uses).enumerate() {
            let before = resident.remove(block);
            if let Some(before) = before {
                by_use.remove(&(before, positions[*block as usize], *block));
            }
            if *next_use == NEVER {
                continue;
            }
            positions[*block as usize] = position as u32;
            resident.insert(*block, *next_use);
            by_use.insert((*next_use, position as u32, *block));
            let evicts = resident.len() as u64 > capacity_blocks;
            let last = if evicts { by_use.pop_last().map(|(_, _, last)| last) } else { None };
            last.map(|last| resident.remove(&last));
            outcome.written += u64::from(before.is_none() && last != Some(*block));
            outcome.resident_max = outcome.resident_max.max(resident.len() as u64);
        }
    }
    outcome
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
