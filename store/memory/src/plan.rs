//! Upper bound of the memory of a process, as the sum of its parts.
//!
//! Nodes, engines and routers compute their plans from their options. Each states its plan before
//! it serves, and compares it with the memory of the machine.

use crate::machine::{MachineMemory, MemorySource};
use std::fmt;

/// Condition under which a process takes the memory of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Normal work fills it, as the options say.
    Reserved,
    /// Only clients that use their limits to the full fill it.
    Limit,
    /// As [`Limit`](Self::Limit), in child processes.
    ChildLimit,
}

/// Part of a [`MemoryPlan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPart {
    /// Name in messages, in the status and in a metric.
    pub name: &'static str,
    pub bytes: u64,
    pub kind: PartKind,
    /// Change that lowers the part, for messages.
    pub remedy: &'static str,
}

impl MemoryPart {
    pub fn reserved(name: &'static str, bytes: u64, remedy: &'static str) -> MemoryPart {
        MemoryPart { name, bytes, kind: PartKind::Reserved, remedy }
    }

    pub fn limit(name: &'static str, bytes: u64, remedy: &'static str) -> MemoryPart {
        MemoryPart { name, bytes, kind: PartKind::Limit, remedy }
    }

    pub fn child_limit(name: &'static str, bytes: u64, remedy: &'static str) -> MemoryPart {
        MemoryPart { name, bytes, kind: PartKind::ChildLimit, remedy }
    }
}

/// Maximum memory of a process by part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Kind of process, for messages, e.g. `node`.
    owner: &'static str,
    parts: Vec<MemoryPart>,
}

impl MemoryPlan {
    pub fn new(owner: &'static str, parts: Vec<MemoryPart>) -> MemoryPlan {
        MemoryPlan { owner, parts }
    }

    /// Plan of a process that runs all of these. Parts of one name and kind add up.
    pub fn of_all(owner: &'static str, plans: impl IntoIterator<Item = MemoryPlan>) -> MemoryPlan {
        let mut parts: Vec<MemoryPart> = Vec::new();
        for part in plans.into_iter().flat_map(|plan| plan.parts) {
            match parts.iter_mut().find(|known| known.name == part.name && known.kind == part.kind) {
                Some(known) => known.bytes = known.bytes.saturating_add(part.bytes),
                None => parts.push(part),
            }
        }
        MemoryPlan { owner, parts }
    }

    /// The plan without one part, which another plan of the same process has too.
    pub fn without(mut self, name: &str) -> MemoryPlan {
        self.parts.retain(|part| part.name != name);
        self
    }

    /// Maximum memory of the process itself in bytes, without its children.
    pub fn total(&self) -> u64 {
        self.sum(|kind| kind != PartKind::ChildLimit)
    }

    /// Names and bytes of all parts, those of children included.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.parts.iter().map(|part| (part.name, part.bytes))
    }

    pub fn bytes_of(&self, name: &str) -> u64 {
        self.parts().filter(|(of, _)| *of == name).map(|(_, bytes)| bytes).sum()
    }

    pub fn largest(&self) -> Option<&MemoryPart> {
        self.parts.iter().max_by_key(|part| part.bytes)
    }

    /// Compares the plan with the memory of the machine. Returns a warning if all parts together
    /// exceed it, those of children included.
    ///
    /// # Errors
    /// A refusal if the reserved parts alone exceed it. Both messages name the largest part and its
    /// remedy.
    pub fn check(&self, machine: Option<MachineMemory>) -> Result<Option<String>, String> {
        // Without a figure there is nothing to compare with. A large allocation still fails if
        // there is not enough.
        let Some(machine) = machine else { return Ok(None) };
        match self.excess(machine, |kind| kind == PartKind::Reserved) {
            Some(refusal) => Err(refusal),
            None => Ok(self.excess(machine, |_| true)),
        }
    }

    /// Message if the counted parts exceed the machine.
    fn excess(&self, machine: MachineMemory, is_counted: fn(PartKind) -> bool) -> Option<String> {
        let needed = self.sum(is_counted);
        if needed <= machine.bytes {
            return None;
        }
        let owner = self.owner;
        let (source, needed, has) = (source_text(machine.source), size(needed), size(machine.bytes));
        let largest = self.parts.iter().filter(|part| is_counted(part.kind)).max_by_key(|part| part.bytes);
        let remedy =
            largest.map_or(String::new(), |part| format!("; the largest part is {}: {}", part.name, part.remedy));
        Some(format!("these options let the {owner} take {needed} of memory, but {source} {has}: {self}{remedy}"))
    }

    fn sum(&self, is_counted: impl Fn(PartKind) -> bool) -> u64 {
        let counted = self.parts.iter().filter(|part| is_counted(part.kind));
        counted.fold(0, |sum: u64, part| sum.saturating_add(part.bytes))
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, part) in self.parts.iter().filter(|part| part.bytes > 0).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            let place = if part.kind == PartKind::ChildLimit { " in processes of their own" } else { "" };
            write!(f, "{comma}{} {}{place}", part.name, size(part.bytes))?;
        }
        Ok(())
    }
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

    const MIB: u64 = 1 << 20;

    fn machine(mib: u64) -> Option<MachineMemory> {
        Some(MachineMemory { bytes: mib * MIB, source: MemorySource::Machine })
    }

    fn plan() -> MemoryPlan {
        let parts = vec![
            MemoryPart::reserved("L1", 40 * MIB, "lower --l1"),
            MemoryPart::limit("bodies", 50 * MIB, "lower --http-body-memory"),
            MemoryPart::limit("nothing", 0, "none"),
            MemoryPart::child_limit("workers", 60 * MIB, "none"),
        ];
        MemoryPlan::new("engine", parts)
    }

    #[test]
    fn plan_is_the_sum_of_the_parts_of_the_process() {
        assert_eq!((plan().total(), plan().bytes_of("workers")), (90 * MIB, 60 * MIB));
        assert_eq!(plan().largest().map(|part| part.name), Some("workers"));
        assert_eq!(plan().to_string(), "L1 40.0 MiB, bodies 50.0 MiB, workers 60.0 MiB in processes of their own");
        let endless = MemoryPart::limit("endless", u64::MAX, "none");
        assert_eq!(MemoryPlan::new("engine", vec![endless, endless]).total(), u64::MAX);
    }

    #[test]
    fn reserved_parts_beyond_the_machine_are_refused_and_limits_warned_of() {
        assert_eq!((plan().check(None), plan().check(machine(150))), (Ok(None), Ok(None)));
        let warning = plan().check(machine(149)).unwrap().unwrap();
        for text in ["let the engine take 150.0 MiB", "the machine has 149.0 MiB: L1 40.0 MiB", "part is workers: none"]
        {
            assert!(warning.contains(text), "{warning}");
        }
        assert!(plan().check(machine(40)).unwrap().is_some());
        let refusal = plan().check(machine(39)).unwrap_err();
        assert!(refusal.contains("take 40.0 MiB") && refusal.ends_with("part is L1: lower --l1"), "{refusal}");
        let group = MachineMemory { bytes: 0, source: MemorySource::Cgroup };
        assert!(plan().check(Some(group)).unwrap_err().contains("its control group (memory.max) allows 0.0 MiB"));
    }

    #[test]
    fn plans_of_one_process_add_up() {
        let all = MemoryPlan::of_all("process", [plan(), plan().without("L1"), plan().without("bodies")]);
        assert_eq!(
            (all.bytes_of("L1"), all.bytes_of("bodies"), all.bytes_of("workers")),
            (80 * MIB, 100 * MIB, 180 * MIB)
        );
        assert_eq!(all.total(), 180 * MIB);
    }
}
