//! Parameters of a seed: sizes, mix of operations, rates.
//!
//! Invariant: a setup is constant for the whole seed. Only the number of segments changes between
//! incarnations.

use crate::faults::Profile;
use crate::random::RandomSource;
use larder_node::WritePolicy;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const LARGE_KEYS: u64 = 1_500_000;
/// Segments of a large log: room for 1.2 million records of two blocks.
const LARGE_SEGMENTS: u64 = 150;

/// Weights of the operations on the keys of a log. Only their ratios count. The workload of a node
/// takes `forget` alone from here: its other weights are constant.
#[derive(Debug, Clone, Copy)]
pub struct OperationMix {
    pub put: u64,
    pub get: u64,
    pub find: u64,
    pub forget: u64,
}

/// Parameters that all incarnations of a seed share. Each is drawn from a few distant values, so
/// that extreme combinations are common.
#[derive(Debug, Clone)]
pub struct Setup {
    pub profile: Profile,
    /// Number of distinct keys. Few keys make operations collide.
    pub keys: u64,
    pub segments: u64,
    pub segment_bytes: u64,
    pub arena_bytes: u64,
    pub workers: u64,
    /// Longest pause of a worker between two operations, in virtual milliseconds.
    pub pause_ms_max: u64,
    /// Largest payload in bytes, except for a few large pages.
    pub payload_max: u64,
    pub mix: OperationMix,
    pub incarnation_operations: u64,
    /// Size of every page in bytes, if all pages have one size as in a deployment with one model.
    pub uniform_bytes: Option<u32>,
    pub keep_percent: u8,
    pub ttl_rate: u32,
    /// Forgets of all pages of a namespace, per million forgets.
    pub forget_namespace_rate: u32,
    pub admin_rate: u32,
    /// Steps of the wall clock, per million incarnations.
    pub clock_step_rate: u32,
    pub scrub_bytes_per_second: u64,
    pub scrub_interval_ms: u64,
    /// Incarnations with the smallest bound of pages that the log accepts, per million.
    pub page_bound_rate: u32,
    /// True for [`Setup::draw_large`].
    pub is_large: bool,
    pub node: Option<NodeSetup>,
}

#[derive(Debug, Clone)]
pub struct NodeSetup {
    pub devices: usize,
    pub l2_bytes: u64,
    pub in_flight_bytes: u64,
    pub write_policy: WritePolicy,
    pub quota: Option<u64>,
    pub scrub_bytes_per_second: u64,
}

impl Setup {
    /// Draws the parameters of a log. One seed in eight has more small pages than its index may
    /// have.
    pub fn draw(profile: Profile, operations: u64, random: &mut RandomSource) -> Setup {
        let mut setup = Setup::draw_base(profile, operations, random);
        if random.chance(125_000) {
            setup.page_bound_rate = 700_000;
            setup.keys = 2_000;
            setup.payload_max = 2_000;
            setup.uniform_bytes = None;
            setup.segments = random.between(12, 20);
        }
        setup
    }

    fn draw_base(profile: Profile, operations: u64, random: &mut RandomSource) -> Setup {
        let mixes = [
            OperationMix { put: 30, get: 50, find: 15, forget: 5 },
            OperationMix { put: 10, get: 70, find: 18, forget: 2 },
            OperationMix { put: 45, get: 35, find: 10, forget: 10 },
            OperationMix { put: 20, get: 55, find: 5, forget: 20 },
            // Forgetting syncs the log. Without it, only the background timer does.
            OperationMix { put: 40, get: 50, find: 10, forget: 0 },
        ];
        Setup {
            profile,
            keys: [40, 150, 400, 1000][random.below(4) as usize],
            segments: random.between(3, 10),
            segment_bytes: MIB,
            arena_bytes: random.between(4, 10) * MIB,
            workers: random.between(4, 16),
            pause_ms_max: [5, 30, 100][random.below(3) as usize],
            payload_max: [2_000, 8_000, 24_000][random.below(3) as usize],
            mix: mixes[random.below(5) as usize],
            incarnation_operations: (operations / random.between(3, 12)).max(50),
            uniform_bytes: random.chance(300_000).then(|| random.between(500, 9_000) as u32),
            keep_percent: [0, 0, 30, 50, 75][random.below(5) as usize],
            ttl_rate: [0, 50_000, 300_000][random.below(3) as usize],
            forget_namespace_rate: [0, 2_000, 20_000][random.below(3) as usize],
            clock_step_rate: [0, 200_000, 500_000][random.below(3) as usize],
            admin_rate: [0, 5_000, 30_000][random.below(3) as usize],
            scrub_bytes_per_second: [0, MIB, 32 * MIB][random.below(3) as usize],
            scrub_interval_ms: [2_000, 30_000, 24 * 3_600_000][random.below(3) as usize],
            page_bound_rate: 0,
            is_large: false,
            node: None,
        }
    }

    /// Draws the parameters of a log as large as in production: more than a million small pages in
    /// segments of 64 MiB. Its index grows while requests run.
    pub fn draw_large(profile: Profile, operations: u64, random: &mut RandomSource) -> Setup {
        let mut setup = Setup::draw_base(profile, operations, random);
        setup.is_large = true;
        setup.keys = LARGE_KEYS;
        setup.segment_bytes = 64 * MIB;
        setup.segments = LARGE_SEGMENTS;
        setup.arena_bytes = 64 * MIB;
        setup.workers = 16;
        setup.pause_ms_max = 5;
        setup.payload_max = 300;
        setup.uniform_bytes = None;
        // Most operations put pages: the index has to grow.
        setup.mix = OperationMix { put: 70, get: 20, find: 6, forget: 4 };
        setup.ttl_rate = setup.ttl_rate.min(50_000);
        // A forget of a third of all pages takes as long as many other operations.
        setup.forget_namespace_rate = 0;
        setup.admin_rate = 500;
        setup.incarnation_operations = operations / 4;
        setup
    }

    /// Draws the segments of an incarnation whose capacity changes. Between half and all of the
    /// usual number for large logs and for those with a bound of pages, 3 to 10 for all others.
    pub fn draw_segments(&self, random: &mut RandomSource) -> u64 {
        match self.is_large || self.page_bound_rate > 0 {
            true => random.between(self.segments / 2, self.segments),
            false => random.between(3, 10),
        }
    }

    /// Draws the parameters of a node simulation. Keys are few, so that operations collide in L2.
    /// L2 is small, so that it evicts.
    pub fn draw_node(profile: Profile, operations: u64, random: &mut RandomSource) -> Setup {
        let mut setup = Setup::draw_base(profile, operations, random);
        let l2_bytes = [128, 256, 512][random.below(3) as usize] * KIB;
        let policies = [WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back];
        let node = NodeSetup {
            devices: random.between(1, 2) as usize,
            l2_bytes,
            in_flight_bytes: [128, 256, 512][random.below(3) as usize] * KIB,
            write_policy: policies[random.below(3) as usize],
            quota: random.chance(300_000).then(|| l2_bytes / random.between(2, 6)),
            scrub_bytes_per_second: [0, MIB, 64 * MIB][random.below(3) as usize],
        };
        setup.keys = [24, 60, 150][random.below(3) as usize];
        setup.arena_bytes = node.l2_bytes + node.in_flight_bytes;
        setup.node = Some(node);
        setup
    }
}
