//! Hit rates on generated traffic. The public traces are not part of the project:
//! `larder bench trace` replays them.

use larder_evict::replay::{PolicyKind, Trace, run};
use larder_evict::synthetic::Kind;

const REQUESTS: usize = 6000;
const MILLION_TOKENS: [f64; 5] = [0.1, 0.3, 1.0, 3.0, 10.0];
/// Tolerated loss against LRU, as a share of all requested blocks.
const LOSS_MAX: f64 = 0.005;

fn hits(trace: &Trace, policy: PolicyKind, million_tokens: f64) -> f64 {
    run(trace, policy, (million_tokens * 1e6) as u64).hits as f64
}

/// Compares hit density with LRU and with the optimum on traces of one seed.
fn is_between_lru_and_the_optimum(seed: u64) {
    for kind in Kind::ALL {
        let trace = kind.trace(REQUESTS, seed);
        for capacity in MILLION_TOKENS {
            let rate = |policy| run(&trace, policy, (capacity * 1e6) as u64).rate();
            let [lru, optimum] = [PolicyKind::Lru, PolicyKind::Belady].map(rate);
            // Without answers, reports change little.
            let with_ends = matches!(kind, Kind::Answers | Kind::Conversations);
            for policy in [PolicyKind::HitDensity, PolicyKind::HitDensityWithEnds] {
                if policy == PolicyKind::HitDensityWithEnds && !with_ends {
                    continue;
                }
                let learnt = rate(policy);
                assert!(learnt >= lru - LOSS_MAX, "{policy} {kind:?} {seed} {capacity}: {learnt} against {lru}");
                assert!(learnt <= optimum && lru <= optimum, "{policy} {kind:?} {seed} {capacity}");
            }
        }
    }
}

// One test for each seed, so that both processors work.
#[test]
fn hit_density_is_never_below_lru_nor_above_the_optimum() {
    is_between_lru_and_the_optimum(0);
}

#[test]
fn hit_density_is_never_below_lru_nor_above_the_optimum_with_another_seed() {
    is_between_lru_and_the_optimum(1);
}

#[test]
fn hit_density_beats_lru_on_learnable_traffic() {
    let gains = [
        (Kind::Conversations, 1.0, 2.0),
        (Kind::Documents, 0.3, 1.3),
        (Kind::Scans, 1.0, 1.3),
        (Kind::Tools, 0.1, 1.4),
        (Kind::Paces, 0.1, 2.0),
        (Kind::Floods, 0.1, 2.0),
        (Kind::Agents, 0.3, 1.2),
        (Kind::Bursts, 0.3, 1.3),
        (Kind::Coders, 1.0, 2.0),
    ];
    for (kind, capacity, gain) in gains {
        let trace = kind.trace(2 * REQUESTS, 3);
        let lru = hits(&trace, PolicyKind::Lru, capacity);
        let hit_density = hits(&trace, PolicyKind::HitDensity, capacity);
        assert!(hit_density >= gain * lru, "{kind:?}: {hit_density} against {lru}");
    }
}

#[test]
fn reported_ends_of_generations_add_hits() {
    let trace = Kind::Answers.trace(2 * REQUESTS, 3);
    let [without, with] =
        [PolicyKind::HitDensity, PolicyKind::HitDensityWithEnds].map(|policy| hits(&trace, policy, 1.0));
    assert!(with >= 1.5 * without, "{with} against {without}");
}

#[test]
fn part_of_a_loop_larger_than_the_cache_is_kept() {
    let trace = Kind::Loop.trace(REQUESTS, 0);
    assert_eq!(hits(&trace, PolicyKind::Lru, 3.0), 0.0);
    assert!(hits(&trace, PolicyKind::HitDensity, 3.0) > 0.8 * hits(&trace, PolicyKind::Belady, 3.0));
}

#[test]
fn every_returning_block_hits_with_unlimited_capacity() {
    for kind in Kind::ALL {
        let trace = kind.trace(500, 0);
        let blocks: u64 = trace.requests().iter().map(|request| request.blocks.len() as u64).sum();
        for policy in PolicyKind::ALL {
            let hits = run(&trace, policy, u64::MAX).hits;
            assert_eq!(hits, blocks - trace.blocks_distinct() as u64, "{kind:?} {policy}");
        }
    }
}

#[test]
fn hits_of_a_request_end_at_the_first_miss() {
    let mut trace = Trace::default();
    for ids in [&[1, 2, 3][..], &[9, 2, 3], &[1, 2, 3]] {
        trace.push(0, ids);
    }
    let whole = run(&trace, PolicyKind::Lru, u64::MAX);
    assert_eq!((whole.hits, whole.blocks, whole.written), (3, 9, 4));
    assert_eq!(run(&trace, PolicyKind::Lru, 0).hits, 0);
}

#[test]
fn same_trace_gives_same_hits() {
    let trace = Kind::Phases.trace(1500, 5);
    for policy in PolicyKind::ALL {
        assert_eq!(run(&trace, policy, 1_000_000), run(&trace, policy, 1_000_000));
    }
}

#[test]
fn work_of_a_block_grows_with_its_position() {
    let mut trace = Trace::default();
    trace.set_block_tokens(larder_evict::replay::ATTENTION_TOKENS);
    for ids in [&[1, 2, 3][..], &[1, 2, 9]] {
        trace.push(0, ids);
    }
    let outcome = run(&trace, PolicyKind::Lru, u64::MAX);
    // The blocks of a request weigh 1, 2 and 3.
    assert_eq!((outcome.work_saved, outcome.work), (3.0, 12.0));
    assert_eq!(outcome.work_rate(), 0.25);
}

#[test]
fn refusals_spare_writes() {
    let trace = Kind::Coders.trace(REQUESTS, 1);
    let [lru, learnt] = [PolicyKind::Lru, PolicyKind::HitDensity].map(|policy| run(&trace, policy, 1_000_000));
    assert_eq!(lru.written, lru.blocks - lru.hits);
    assert!(2 * learnt.written < lru.written, "{} against {}", learnt.written, lru.written);
}
