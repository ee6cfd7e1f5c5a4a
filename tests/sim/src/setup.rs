//! How a seed is set up: sizes, mix of operations, faults.

use crate::dice::Dice;
use crate::faults::Profile;
use larder_node::WritePolicy;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Shares of the operations.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Puts.
    pub put: u64,
    /// Gets.
    pub get: u64,
    /// Look-ups without reading.
    pub find: u64,
    /// Forgettings.
    pub forget: u64,
}

/// Everything about a seed that does not change from life to life.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Which kinds of faults.
    pub profile: Profile,
    /// Keys that are used.
    pub keys: u64,
    /// Most segments at first.
    pub segments: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Bytes of memory.
    pub arena_bytes: u64,
    /// Tasks that work at the same time.
    pub workers: u64,
    /// Most virtual milliseconds a worker pauses between operations.
    pub pause_ms_max: u64,
    /// Most bytes of most payloads.
    pub payload_max: u64,
    /// Operations.
    pub mix: Mix,
    /// Operations of a life, about.
    pub life_operations: u64,
    /// Bytes of every page, if all are of the same size, as those of one model are.
    pub uniform_bytes: Option<u32>,
    /// Percent of the log that is kept for pages that will be asked for again.
    pub keep_percent: u8,
    /// How many of a million puts have an end.
    pub mortal: u32,
    /// How many of a million operations pin pages, set quotas or ask for a scrub.
    pub admin: u32,
    /// Bytes per second that the scrub reads.
    pub scrub_bytes_per_second: u64,
    /// Milliseconds between two passes of it.
    pub scrub_interval_ms: u64,
    /// What a node has beside, if there is one.
    pub node: Option<NodeSetup>,
}

/// What a node has beside its L3.
#[derive(Debug, Clone)]
pub struct NodeSetup {
    /// Devices.
    pub devices: usize,
    /// Bytes of L2.
    pub l2_bytes: u64,
    /// Bytes of memory beside that.
    pub in_flight_bytes: u64,
    /// When pages are written to L3.
    pub write_policy: WritePolicy,
    /// Most bytes of the first namespace, if it has a quota.
    pub quota: Option<u64>,
    /// Bytes per second of L2 that are verified.
    pub scrub_bytes_per_second: u64,
}

impl Setup {
    /// Draws one.
    pub fn draw(profile: Profile, operations: u64, dice: &mut Dice) -> Setup {
        let mixes = [
            Mix { put: 30, get: 50, find: 15, forget: 5 },
            Mix { put: 10, get: 70, find: 18, forget: 2 },
            Mix { put: 45, get: 35, find: 10, forget: 10 },
            Mix { put: 20, get: 55, find: 5, forget: 20 },
            // Forgetting syncs: without it, only the clock does.
            Mix { put: 40, get: 50, find: 10, forget: 0 },
        ];
        Setup {
            profile,
            keys: [40, 150, 400, 1000][dice.below(4) as usize],
            segments: dice.between(3, 10),
            segment_bytes: MIB,
            arena_bytes: dice.between(4, 10) * MIB,
            workers: dice.between(4, 16),
            pause_ms_max: [5, 30, 100][dice.below(3) as usize],
            payload_max: [2_000, 8_000, 24_000][dice.below(3) as usize],
            mix: mixes[dice.below(5) as usize],
            life_operations: (operations / dice.between(3, 12)).max(50),
            uniform_bytes: dice.chance(300_000).then(|| dice.between(500, 9_000) as u32),
            keep_percent: [0, 0, 30, 50, 75][dice.below(5) as usize],
            mortal: [0, 50_000, 300_000][dice.below(3) as usize],
            admin: [0, 5_000, 30_000][dice.below(3) as usize],
            scrub_bytes_per_second: [0, MIB, 32 * MIB][dice.below(3) as usize],
            scrub_interval_ms: [2_000, 30_000, 24 * 3_600_000][dice.below(3) as usize],
            node: None,
        }
    }

    /// Draws one of a node: few pages, so that they meet.
    pub fn draw_node(profile: Profile, operations: u64, dice: &mut Dice) -> Setup {
        let mut setup = Setup::draw(profile, operations, dice);
        let l2_bytes = [128, 256, 512][dice.below(3) as usize] * KIB;
        let policies = [WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back];
        let node = NodeSetup {
            devices: dice.between(1, 2) as usize,
            l2_bytes,
            in_flight_bytes: [128, 256, 512][dice.below(3) as usize] * KIB,
            write_policy: policies[dice.below(3) as usize],
            quota: dice.chance(300_000).then(|| l2_bytes / dice.between(2, 6)),
            scrub_bytes_per_second: [0, MIB, 64 * MIB][dice.below(3) as usize],
        };
        setup.keys = [24, 60, 150][dice.below(3) as usize];
        setup.arena_bytes = node.l2_bytes + node.in_flight_bytes;
        setup.node = Some(node);
        setup
    }
}
