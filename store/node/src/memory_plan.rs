//! Upper bound of the memory that a node's options let it take.
//!
//! A node computes the plan before it opens anything, logs it, and refuses options that exceed the
//! memory of the machine. The parts that enforce their bound:
//!
//! | part | enforced by |
//! | --- | --- |
//! | L2, transfers | the arena, which the node maps once |
//! | requests | `budget`: connections, requests, and readers that wait |
//! | L2 index | the arena: no page is smaller than its unit |
//! | L3 index | the log, which reclaims its oldest segment when it has too many pages |
//! | L3 buffers | the write queue of the log |
//! | process | nothing: code, threads, and what the allocator keeps |

use crate::options::NodeOptions;
use crate::tiers::{PAGE_MEMORY_BYTES, SLOT_UNIT};
use larder_memory::machine::{MachineMemory, MemorySource};
use serde_json::{Map, Value};
use std::fmt;

/// Memory of the process beside all other parts: code, threads, tables of a bounded size, and free
/// memory that the allocator keeps. The record of forgets takes 16 MiB of it.
const PROCESS_BYTES: u64 = 56 << 20;
/// Largest value of `--l3-mean-page` that a refusal proposes: no page is larger.
const MEAN_PAGE_BYTES_MAX: u64 = 16 << 20;

/// Parts of a node's memory. The names stand in messages, in the status and in a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPart {
    L2,
    Transfers,
    Requests,
    L2Index,
    L3Index,
    L3Buffers,
    Process,
}

impl MemoryPart {
    fn name(self) -> &'static str {
        match self {
            MemoryPart::L2 => "L2",
            MemoryPart::Transfers => "transfers",
            MemoryPart::Requests => "requests",
            MemoryPart::L2Index => "L2 index",
            MemoryPart::L3Index => "L3 index",
            MemoryPart::L3Buffers => "L3 buffers",
            MemoryPart::Process => "process",
        }
    }

    /// Change of the options that lowers this part.
    fn remedy(self) -> &'static str {
        match self {
            MemoryPart::L2 => "lower --l2",
            MemoryPart::Transfers => "lower --in-flight",
            MemoryPart::Requests => "lower --request-memory",
            MemoryPart::L2Index => "lower --l2",
            MemoryPart::L3Index => "raise --l3-mean-page if your pages are larger, or lower the size of L3",
            MemoryPart::L3Buffers => "use fewer L3 devices",
            MemoryPart::Process => "use a machine with more memory",
        }
    }
}

/// Maximum memory of a node by part, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    parts: [(MemoryPart, u64); 7],
}

impl MemoryPlan {
    /// Computes the plan from valid options.
    pub fn of(options: &NodeOptions) -> MemoryPlan {
        let slots = |bytes: u64| bytes / SLOT_UNIT as u64;
        let pages = slots(options.arena_bytes());
        let devices = options.l3_devices();
        let logs = devices.iter().map(|device| options.log_options(device));
        let (l3_index, l3_buffers) = logs.fold((0u64, 0u64), |(index, buffers), log| {
            (index.saturating_add(log.index_memory_max()), buffers + log.buffer_memory_max())
        });
        MemoryPlan {
            parts: [
                (MemoryPart::L2, options.l2_bytes),
                (MemoryPart::Transfers, options.in_flight_bytes()),
                (MemoryPart::Requests, options.request_bytes),
                (MemoryPart::L2Index, pages.saturating_mul(PAGE_MEMORY_BYTES)),
                (MemoryPart::L3Index, l3_index),
                (MemoryPart::L3Buffers, l3_buffers),
                (MemoryPart::Process, PROCESS_BYTES),
            ],
        }
    }

    pub fn total(&self) -> u64 {
        self.parts.iter().fold(0, |total: u64, (_, bytes)| total.saturating_add(*bytes))
    }

    pub fn bytes_of(&self, part: MemoryPart) -> u64 {
        self.parts.iter().filter(|(of, _)| *of == part).map(|(_, bytes)| bytes).sum()
    }

    fn largest(&self) -> MemoryPart {
        let largest = self.parts.iter().max_by_key(|(_, bytes)| *bytes);
        largest.map_or(MemoryPart::L2, |(part, _)| *part)
    }

    /// Checks that the machine has the memory. The message names the largest part and its remedy.
    pub(crate) fn check(&self, options: &NodeOptions, machine: Option<MachineMemory>) -> Result<(), String> {
        // Without a figure there is nothing to compare with. The map of the arena still fails if
        // there is not enough.
        let Some(machine) = machine.filter(|machine| self.total() > machine.bytes) else { return Ok(()) };
        let largest = self.largest();
        let needed = size(self.total());
        let has = size(machine.bytes);
        let fitting = (largest == MemoryPart::L3Index).then(|| fitting_mean_page(options, machine.bytes)).flatten();
        let example = fitting.map_or(String::new(), |bytes| format!("; --l3-mean-page {}KiB fits", bytes >> 10));
        Err(format!(
            "these options let the node take {needed} of memory, but {} {has}: {self}; the largest part is {}: {}{example}",
            source_text(machine.source),
            largest.name(),
            largest.remedy()
        ))
    }

    pub(crate) fn json(&self) -> Value {
        let parts = self.parts.iter().map(|(part, bytes)| (part.name().to_string(), Value::from(*bytes)));
        let mut plan: Map<String, Value> = Map::new();
        plan.insert("bytes".into(), self.total().into());
        plan.insert("parts".into(), Value::Object(parts.collect()));
        plan.into()
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.parts.iter().map(|(part, bytes)| (part.name(), *bytes))
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (part, bytes)) in self.parts.iter().filter(|(_, bytes)| *bytes > 0).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            write!(f, "{comma}{} {}", part.name(), size(*bytes))?;
        }
        Ok(())
    }
}

/// Smallest power of two for [`NodeOptions::l3_mean_page_bytes`] with which the plan fits.
fn fitting_mean_page(options: &NodeOptions, bytes_max: u64) -> Option<u64> {
    let first = options.l3_mean_page_bytes.next_power_of_two();
    let larger = std::iter::successors(Some(first), |bytes| bytes.checked_mul(2));
    let mut larger = larger.take_while(|bytes| *bytes <= MEAN_PAGE_BYTES_MAX);
    larger.find(|&l3_mean_page_bytes| {
        MemoryPlan::of(&NodeOptions { l3_mean_page_bytes, ..options.clone() }).total() <= bytes_max
    })
}

fn source_text(source: MemorySource) -> &'static str {
    match source {
        MemorySource::Machine => "the machine has",
        MemorySource::Cgroup => "its control group (memory.max) allows",
    }
}

/// Bytes with their unit, rounded to a tenth.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::L3Device;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    fn machine(bytes: u64) -> Option<MachineMemory> {
        Some(MachineMemory { bytes, source: MemorySource::Machine })
    }

    fn with_l3(bytes: u64) -> NodeOptions {
        NodeOptions { l3: vec![L3Device { dir: "a".into(), bytes }], ..NodeOptions::default() }
    }

    #[test]
    fn plan_is_the_sum_of_its_parts() {
        let options = NodeOptions { l2_bytes: 64 * GIB, in_flight_bytes: Some(GIB), ..with_l3(TIB) };
        let plan = MemoryPlan::of(&options);
        assert_eq!(plan.total(), plan.parts().map(|(_, bytes)| bytes).sum::<u64>());
        let pages = 65 * GIB / 4096;
        assert_eq!(plan.bytes_of(MemoryPart::L2Index), pages * PAGE_MEMORY_BYTES);
        let pages = TIB / (64 << 10);
        assert_eq!(plan.bytes_of(MemoryPart::L3Index), pages * larder_log::PAGE_MEMORY_BYTES);
        let two = NodeOptions {
            l3: ["a", "b"].map(|dir| L3Device { dir: dir.into(), bytes: TIB }).into(),
            ..options.clone()
        };
        assert_eq!(MemoryPlan::of(&two).bytes_of(MemoryPart::L3Index), 2 * pages * larder_log::PAGE_MEMORY_BYTES);
        let none = MemoryPlan::of(&NodeOptions::default());
        assert_eq!((none.bytes_of(MemoryPart::L3Index), none.bytes_of(MemoryPart::L3Buffers)), (0, 0));
    }

    #[test]
    fn small_tiers_are_planned_for_the_smallest_pages() {
        let plan = MemoryPlan::of(&with_l3(4 * GIB));
        assert_eq!(plan.bytes_of(MemoryPart::L3Index), 4 * GIB / 8192 * larder_log::PAGE_MEMORY_BYTES);
        let slots = (GIB + GIB / 8) / 4096;
        assert_eq!(plan.bytes_of(MemoryPart::L2Index), slots * PAGE_MEMORY_BYTES);
    }

    #[test]
    fn plan_beyond_the_machine_is_refused_with_a_remedy() {
        let options = with_l3(16 * TIB);
        let plan = MemoryPlan::of(&options);
        assert_eq!(plan.check(&options, machine(plan.total())), Ok(()));
        assert_eq!(plan.check(&options, None), Ok(()));
        let refusal = plan.check(&options, machine(24 * GIB)).unwrap_err();
        for text in [
            "the machine has 24.0 GiB",
            "the largest part is L3 index",
            "raise --l3-mean-page",
            "--l3-mean-page 128KiB fits",
        ] {
            assert!(refusal.contains(text), "{refusal}");
        }
        let options = NodeOptions { l2_bytes: 64 * GIB, ..NodeOptions::default() };
        let refusal = MemoryPlan::of(&options).check(&options, machine(64 * GIB)).unwrap_err();
        assert!(refusal.contains("lower --l2") && !refusal.contains("fits"), "{refusal}");
    }
}
