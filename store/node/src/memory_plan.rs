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
//! | token ids | `token_ids`: pages beyond it do without |
//! | L3 index, L3 pins | the log, which reclaims its oldest segment when it has too many pages |
//! | L3 buffers | the write queue of the log |
//! | KV events | `events`: the queue of changes, the kept batches, and the bounds on subscribers |
//! | process | nothing: code, stacks of threads, and free memory that the allocator keeps |
//!
//! The process counts the whole stack of each thread: the workers of the runtime, those for calls
//! that block, and those of L3. A thread touches a small part of its stack.
//!
//! No bound of the allocator's free memory follows from the options. glibc has an arena for each
//! thread, up to eight per processor. One arena cannot use the free memory of another, and keeps
//! the part below a block in use. So each could keep what all requests together once had.
//! The constant part of the process and the rest of the stacks are an allowance for it.
//! `larder bench overload` and `larder bench hostile` compare the plan with the memory of a node.

use crate::event_limits;
use crate::options::NodeOptions;
use crate::tiers::{PAGE_MEMORY_BYTES, SLOT_UNIT};
use crate::token_ids;
use larder_log::L3Options;
use larder_memory::machine::MachineMemory;
use larder_memory::plan::{MemoryPart, MemoryPlan};
use serde_json::{Map, Value};

/// Memory of the process beside all other parts and the stacks: code, tables of a bounded size, and
/// free memory that the allocator keeps. The record of forgets takes 16 MiB of it.
const PROCESS_BYTES: u64 = 56 << 20;
/// Stack of a thread, as the standard library and tokio map it. Touched pages stay in memory until
/// the thread ends.
const STACK_BYTES: u64 = 2 << 20;
/// Threads for calls that block. One each stores the identity, the names of engines, the flushes of
/// Redis databases and the namespaces, and reads the facts of the host. RDMA needs more while
/// connections open.
const BLOCKING_THREADS: u64 = 5;
/// Threads of an L3 device: its executor, the one that glommio starts beside it, and the one that
/// opens and removes files.
const DEVICE_THREADS: u64 = 3;
/// Largest value of `--l3-mean-page` that a refusal proposes: no page is larger.
const MEAN_PAGE_BYTES_MAX: u64 = 16 << 20;
const L3_INDEX: &str = "L3 index";

/// Computes the plan from valid options.
pub fn of(options: &NodeOptions) -> MemoryPlan {
    let slots = |bytes: u64| bytes / SLOT_UNIT as u64;
    let pages = slots(options.arena_bytes());
    let devices = options.l3_devices();
    let logs: Vec<_> = devices.iter().map(|device| options.log_options(device)).collect();
    let sum = |bytes_of: fn(&L3Options) -> u64| logs.iter().map(bytes_of).fold(0, u64::saturating_add);
    let events = options.kv_events_connections().map_or(0, event_limits::memory_bytes);
    let larger_pages = "raise --l3-mean-page if your pages are larger, or lower the size of L3";
    let parts = vec![
        MemoryPart::reserved("L2", options.l2_bytes, "lower --l2"),
        MemoryPart::reserved("transfers", options.in_flight_bytes(), "lower --in-flight"),
        MemoryPart::reserved("requests", options.request_bytes, "lower --request-memory"),
        MemoryPart::reserved("L2 index", pages.saturating_mul(PAGE_MEMORY_BYTES), "lower --l2"),
        MemoryPart::reserved("token ids", token_ids::memory_max(options.arena_bytes()), "lower --l2"),
        MemoryPart::reserved(L3_INDEX, sum(L3Options::index_memory_max), larger_pages),
        MemoryPart::reserved("L3 pins", sum(L3Options::pin_memory_max), larger_pages),
        MemoryPart::reserved("L3 buffers", sum(L3Options::buffer_memory_max), "use fewer L3 devices"),
        MemoryPart::reserved("KV events", events, "leave out --kv-events-listen"),
        MemoryPart::reserved("process", process_bytes(devices.len()), "use a machine with more memory"),
    ];
    MemoryPlan::new("node", parts)
}

/// Checks that the machine has the memory. The message names the largest part and its remedy.
pub(crate) fn check(plan: &MemoryPlan, options: &NodeOptions, machine: Option<MachineMemory>) -> Result<(), String> {
    // All parts are reserved, so there is no warning.
    let Err(refusal) = plan.check(machine) else { return Ok(()) };
    let is_l3_index = plan.largest().is_some_and(|part| part.name == L3_INDEX);
    let fitting = machine.filter(|_| is_l3_index).and_then(|machine| fitting_mean_page(options, machine.bytes));
    let example = fitting.map_or(String::new(), |bytes| format!("; --l3-mean-page {}KiB fits", bytes >> 10));
    Err(format!("{refusal}{example}"))
}

pub(crate) fn json(plan: &MemoryPlan) -> Value {
    let parts = plan.parts().map(|(part, bytes)| (part.to_string(), Value::from(bytes)));
    let mut json: Map<String, Value> = Map::new();
    json.insert("bytes".into(), plan.total().into());
    json.insert("parts".into(), Value::Object(parts.collect()));
    json.into()
}

/// Memory of the process, with the stacks of its threads.
fn process_bytes(devices: usize) -> u64 {
    // The plan of a node is computed in the runtime that runs it.
    let workers = tokio::runtime::Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
    let threads = workers as u64 + BLOCKING_THREADS + devices as u64 * DEVICE_THREADS;
    PROCESS_BYTES + threads * STACK_BYTES
}

/// Smallest power of two for [`NodeOptions::l3_mean_page_bytes`] with which the plan fits.
fn fitting_mean_page(options: &NodeOptions, bytes_max: u64) -> Option<u64> {
    let first = options.l3_mean_page_bytes.next_power_of_two();
    let larger = std::iter::successors(Some(first), |bytes| bytes.checked_mul(2));
    let mut larger = larger.take_while(|bytes| *bytes <= MEAN_PAGE_BYTES_MAX);
    larger.find(|&l3_mean_page_bytes| of(&NodeOptions { l3_mean_page_bytes, ..options.clone() }).total() <= bytes_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::L3Device;
    use larder_memory::machine::MemorySource;

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
        let plan = of(&options);
        assert_eq!(plan.total(), plan.parts().map(|(_, bytes)| bytes).sum::<u64>());
        let pages = 65 * GIB / 4096;
        assert_eq!(plan.bytes_of("L2 index"), pages * PAGE_MEMORY_BYTES);
        assert_eq!(plan.bytes_of("token ids"), 65 * GIB / 256);
        let pages = TIB / (64 << 10);
        assert_eq!(plan.bytes_of(L3_INDEX), pages * larder_log::PAGE_MEMORY_BYTES);
        assert_eq!(plan.bytes_of("L3 pins"), pages * larder_log::PIN_MEMORY_BYTES);
        let two = NodeOptions {
            l3: ["a", "b"].map(|dir| L3Device { dir: dir.into(), bytes: TIB }).into(),
            ..options.clone()
        };
        assert_eq!(of(&two).bytes_of(L3_INDEX), 2 * pages * larder_log::PAGE_MEMORY_BYTES);
        let none = of(&NodeOptions::default());
        assert_eq!([L3_INDEX, "L3 pins", "L3 buffers", "KV events"].map(|part| none.bytes_of(part)), [0; 4]);
        let events = NodeOptions { kv_events_listen: Some(([127, 0, 0, 1], 0).into()), ..options };
        assert!(of(&events).bytes_of("KV events") > 16 << 20);
    }

    #[test]
    fn small_tiers_are_planned_for_the_smallest_pages() {
        let plan = of(&with_l3(4 * GIB));
        assert_eq!(plan.bytes_of(L3_INDEX), 4 * GIB / 8192 * larder_log::PAGE_MEMORY_BYTES);
        let slots = (GIB + GIB / 8) / 4096;
        assert_eq!(plan.bytes_of("L2 index"), slots * PAGE_MEMORY_BYTES);
    }

    #[test]
    fn process_has_a_stack_for_each_thread() {
        let process = |workers: usize, options: &NodeOptions| {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).build().unwrap();
            let _entered = runtime.enter();
            of(options).bytes_of("process")
        };
        let (no_device, one_device) = (NodeOptions::default(), with_l3(GIB));
        assert_eq!(process(16, &no_device) - process(2, &no_device), 14 * STACK_BYTES);
        assert_eq!(process(2, &one_device) - process(2, &no_device), DEVICE_THREADS * STACK_BYTES);
    }

    #[test]
    fn plan_beyond_the_machine_is_refused_with_a_remedy() {
        let options = with_l3(16 * TIB);
        let plan = of(&options);
        assert_eq!(check(&plan, &options, machine(plan.total())), Ok(()));
        assert_eq!(check(&plan, &options, None), Ok(()));
        let refusal = check(&plan, &options, machine(24 * GIB)).unwrap_err();
        for text in [
            "the machine has 24.0 GiB",
            "the largest part is L3 index",
            "raise --l3-mean-page",
            "--l3-mean-page 128KiB fits",
        ] {
            assert!(refusal.contains(text), "{refusal}");
        }
        let options = NodeOptions { l2_bytes: 64 * GIB, ..NodeOptions::default() };
        let refusal = check(&of(&options), &options, machine(64 * GIB)).unwrap_err();
        assert!(refusal.contains("lower --l2") && !refusal.contains("fits"), "{refusal}");
    }
}
