//! Which faults happen, and how often.
//!
//! Every kind has a rate of its own, per million chances, drawn from the seed; 0 switches it off. A profile says which
//! kinds a seed has:
//!
//! | profile | what happens | what is asked of the store beside the promise |
//! | --- | --- | --- |
//! | calm | clean ends, no faults | every page that was put and not evicted is there; no damage is seen |
//! | crash | loss of power, kills, torn and lost unsynced writes; segments that somebody copies between two lives | what was acknowledged a second before is there |
//! | errors | the same, EIO, ENOSPC, short reads, stalls; headers that rot, and segments that are renamed or written over, between two lives | forgotten stays forgotten |
//! | lies | the same without errors: flipped bits, lost and misdirected requests | only what is there right |
//! | memory | crashes, and bits that flip in slots | forgotten stays forgotten |
//! | all | everything at once | |

use crate::dice::Dice;
use std::str::FromStr;

/// Which kinds of faults a seed has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// None, and every end is a clean one.
    Calm,
    /// Losses of power and kills.
    Crash,
    /// And what a device owns up to: errors, full disks, stalls.
    Errors,
    /// And what it does not: flipped bits, lost and misdirected requests.
    Lies,
    /// And bits that flip in memory.
    Memory,
    /// All of them.
    All,
}

impl Profile {
    /// All of them, in the order in which seeds take turns.
    pub const EVERY: [Profile; 6] =
        [Profile::Crash, Profile::Errors, Profile::Lies, Profile::Memory, Profile::All, Profile::Calm];

    /// The profile whose turn it is.
    pub fn of_seed(seed: u64) -> Profile {
        Profile::EVERY[(seed % Profile::EVERY.len() as u64) as usize]
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Calm => "calm",
            Profile::Crash => "crash",
            Profile::Errors => "errors",
            Profile::Lies => "lies",
            Profile::Memory => "memory",
            Profile::All => "all",
        }
    }

    /// Whether the device and memory do what they should between crashes, and in time. Then what was acknowledged a second
    /// before a crash must be there.
    pub fn honest(self) -> bool {
        matches!(self, Profile::Calm | Profile::Crash)
    }

    /// Whether devices own up to failures.
    pub fn has_errors(self) -> bool {
        matches!(self, Profile::Errors | Profile::All)
    }

    /// Whether bits flip in memory.
    pub fn memory_fails(self) -> bool {
        matches!(self, Profile::Memory | Profile::All)
    }

    /// Whether devices and lines do other things than they say.
    pub fn lies(self) -> bool {
        matches!(self, Profile::Lies | Profile::All)
    }

    /// Whether lives may end without a word.
    pub fn crashes(self) -> bool {
        self != Profile::Calm
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        let found = Profile::EVERY.into_iter().find(|profile| profile.name() == text);
        found.ok_or_else(|| "one of calm, crash, errors, lies, memory, all".into())
    }
}

/// How often each kind of fault happens, per million requests of its kind, and how slow the device is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read fails, having filled any part of its slot.
    pub read_error: u32,
    /// A read ends early.
    pub short_read: u32,
    /// While the node starts, one place cannot be read, however often it tries.
    pub bad_place: u32,
    /// A read gets the bytes of another place.
    pub misdirected_read: u32,
    /// A bit of the slot flips after a read filled it.
    pub read_flip: u32,
    /// A write fails, having written any part.
    pub write_error: u32,
    /// A write is answered and never done.
    pub lost_write: u32,
    /// A write lands elsewhere.
    pub misdirected_write: u32,
    /// A bit of the slot flips before a write takes it.
    pub write_flip: u32,
    /// A sync fails, and what it should have kept may never become durable.
    pub sync_error: u32,
    /// A sync is answered and nothing is made durable. No profile has it: it is the control that must be noticed.
    pub sync_lie: u32,
    /// After a write, a stored bit flips somewhere.
    pub disk_flip: u32,
    /// Between two lives the header of a segment, or of a record that a later one calls durable, is destroyed.
    pub rot: u32,
    /// Between two lives somebody copies a segment's file …
    pub copied: u32,
    /// … or renames it …
    pub renamed: u32,
    /// … to where another one is.
    pub written_over: u32,
    /// There is no room for another segment.
    pub no_space: u32,
    /// Listing, opening, making, removing, loading or saving a file fails.
    pub file_error: u32,
    /// A request takes one to three seconds.
    pub slow: u32,
    /// A request takes ten seconds.
    pub stall: u32,
    /// Most milliseconds of any other request.
    pub latency_ms_max: u64,
}

impl Faults {
    /// None of them.
    pub fn none(latency_ms_max: u64) -> Faults {
        Faults { latency_ms_max, ..Faults::default() }
    }

    /// The rates of a seed.
    pub fn draw(profile: Profile, dice: &mut Dice) -> Faults {
        let mut faults = Faults::none([1, 3, 10, 25][dice.below(4) as usize]);
        // Some seeds have a kind not at all, some rarely, some often.
        let mut rate = |most: u32| match dice.below(4) {
            0 => 0,
            1 => most / 20,
            2 => most / 4,
            _ => most,
        };
        if profile.crashes() {
            faults.copied = rate(200_000);
        }
        if profile.has_errors() {
            faults.renamed = rate(200_000);
            faults.read_error = rate(20_000);
            faults.short_read = rate(10_000);
            faults.bad_place = rate(600_000);
            faults.write_error = rate(10_000);
            faults.sync_error = rate(50_000);
            faults.no_space = rate(200_000);
            faults.rot = rate(500_000);
            faults.file_error = rate(20_000);
            faults.slow = rate(2_000);
            faults.stall = rate(500);
        }
        if profile.lies() {
            faults.misdirected_read = rate(20_000);
            faults.lost_write = rate(10_000);
            faults.misdirected_write = rate(10_000);
            faults.disk_flip = rate(50_000);
        }
        if profile.memory_fails() {
            faults.read_flip = rate(30_000);
            faults.write_flip = rate(30_000);
        }
        if profile.has_errors() {
            faults.written_over = rate(500_000);
        }
        faults
    }
}
