//! A device in plain memory of the host. It copies and fills, on threads of its own, and runs no
//! kernels: a launch is an error. Engines on the CPU call [`crate::cpu`] instead.

use super::software::Software;
use super::{Device, DeviceInfo};
use std::sync::Arc;
use std::thread::available_parallelism;

/// Opens a device of at most `memory_limit` bytes.
pub fn open(memory_limit: usize) -> Arc<dyn Device> {
    let info = DeviceInfo {
        kind: "host",
        ordinal: 0,
        name: "memory of the host".to_string(),
        memory_bytes: memory_limit,
        compute_capability: (0, 0),
        multiprocessors: available_parallelism().map_or(1, |threads| threads.get() as u32),
    };
    Arc::new(Software::new(info, memory_limit, None))
}
