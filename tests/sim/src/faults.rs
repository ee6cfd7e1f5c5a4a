//! Fault kinds, their rates, and the profiles that combine them.
//!
//! Invariants:
//! - Every kind has its own rate per million, drawn from the seed. A rate of 0 disables it.
//! - A profile never enables a kind outside its row of the table.
//!
//! Profiles, with their faults and the promise that they check in addition to "no wrong byte":
//!
//! - calm: no faults, and every end is a clean close. Every page that was put and not evicted is
//!   present, and no damage is found.
//! - crash: power loss, process kill, torn and lost unsynced writes, and segment files copied
//!   between incarnations. A page acknowledged one second before the crash survives it.
//! - errors: crash, and EIO, ENOSPC, short reads, stalls. Between incarnations, headers and single
//!   superblocks are destroyed, and segment files renamed or overwritten. A forgotten page stays
//!   forgotten.
//! - corruption: crash, and bit flips, lost and misdirected requests.
//! - memory: crash, and bit flips in arena memory. A forgotten page stays forgotten.
//! - all: everything at once.

use crate::random::RandomSource;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    Calm,
    Crash,
    Errors,
    /// Crashes, and failures that a device does not report: bit flips, lost and misdirected
    /// requests.
    Corruption,
    Memory,
    All,
}

impl Profile {
    pub const EVERY: [Profile; 6] =
        [Profile::Crash, Profile::Errors, Profile::Corruption, Profile::Memory, Profile::All, Profile::Calm];

    /// Profile of a seed in a run without a chosen one. Six consecutive seeds have all six
    /// profiles.
    pub fn of_seed(seed: u64) -> Profile {
        Profile::EVERY[(seed % Profile::EVERY.len() as u64) as usize]
    }

    pub fn name(self) -> &'static str {
        match self {
            Profile::Calm => "calm",
            Profile::Crash => "crash",
            Profile::Errors => "errors",
            Profile::Corruption => "corruption",
            Profile::Memory => "memory",
            Profile::All => "all",
        }
    }

    /// Returns `true` if devices and memory work correctly, and in time, between crashes. Pages
    /// acknowledged one second before a crash must then survive it.
    pub fn is_reliable(self) -> bool {
        matches!(self, Profile::Calm | Profile::Crash)
    }

    pub fn has_errors(self) -> bool {
        matches!(self, Profile::Errors | Profile::All)
    }

    pub fn memory_fails(self) -> bool {
        matches!(self, Profile::Memory | Profile::All)
    }

    /// Returns `true` if devices and networks corrupt, lose or misdirect data without reporting it.
    /// Only checksums can find such faults.
    pub fn has_silent_faults(self) -> bool {
        matches!(self, Profile::Corruption | Profile::All)
    }

    pub fn crashes(self) -> bool {
        self != Profile::Calm
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        let found = Profile::EVERY.into_iter().find(|profile| profile.name() == text);
        found.ok_or_else(|| "one of calm, crash, errors, corruption, memory, all".into())
    }
}

/// Rates of all fault kinds, per million requests of the affected kind, and the latency of the
/// device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read fails after it has filled any part of its slot.
    pub read_error: u32,
    pub short_read: u32,
    /// Latent sector error: one location cannot be read while the node starts, however often it
    /// retries.
    pub bad_sector: u32,
    pub misdirected_read: u32,
    pub read_flip: u32,
    /// A write fails after it has written any part.
    pub write_error: u32,
    /// The device acknowledges a write and never performs it. Later reads return the bytes from
    /// before the write, without an error.
    pub lost_write: u32,
    pub misdirected_write: u32,
    pub write_flip: u32,
    /// A sync fails. The writes it covers may never become durable, even if a later sync of the
    /// same segment succeeds.
    pub sync_error: u32,
    /// The device acknowledges a sync and makes nothing durable. No profile enables it: it is the
    /// negative control.
    pub sync_ignored: u32,
    pub disk_flip: u32,
    /// Between incarnations, one copy of the superblock is destroyed, or the header of a segment or
    /// of a durable record. No forgotten page may return because of it.
    pub header_rot: u32,
    pub segment_copied: u32,
    /// At the start of a node, the identity beside a log is gone.
    pub identity_lost: u32,
    pub segment_renamed: u32,
    /// Share of copied and renamed files that replace another segment.
    pub segment_overwritten: u32,
    pub no_space: u32,
    /// A file operation fails: list, open, create, remove, load or save.
    pub file_error: u32,
    /// A request takes one to three seconds.
    pub slow: u32,
    pub stall: u32,
    pub latency_ms_max: u64,
}

impl Faults {
    pub fn none(latency_ms_max: u64) -> Faults {
        Faults { latency_ms_max, ..Faults::default() }
    }

    /// Draws the rates of a seed, within the limits of its profile. The rate of a fault outside the
    /// profile stays 0. Each drawn rate is 0, 5 %, 25 % or 100 % of its maximum, with equal
    /// probability.
    pub fn draw(profile: Profile, random: &mut RandomSource) -> Faults {
        let mut faults = Faults::none([1, 3, 10, 25][random.below(4) as usize]);
        // A kind is absent from some seeds, rare in others and frequent in the rest.
        let mut rate = |most: u32| match random.below(4) {
            0 => 0,
            1 => most / 20,
            2 => most / 4,
            _ => most,
        };
        if profile.crashes() {
            faults.segment_copied = rate(200_000);
            faults.identity_lost = faults.segment_copied / 2;
        }
        if profile.has_errors() {
            faults.segment_renamed = rate(200_000);
            faults.read_error = rate(20_000);
            faults.short_read = rate(10_000);
            faults.bad_sector = rate(600_000);
            faults.write_error = rate(10_000);
            faults.sync_error = rate(50_000);
            faults.no_space = rate(200_000);
            faults.header_rot = rate(500_000);
            faults.file_error = rate(20_000);
            faults.slow = rate(2_000);
            faults.stall = rate(500);
        }
        if profile.has_silent_faults() {
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
            faults.segment_overwritten = rate(500_000);
        }
        faults
    }
}
