//! Tests of a store (a node without its sockets) over real files.

#[path = "store/common.rs"]
mod common;
#[path = "store/devices.rs"]
mod devices;
#[path = "store/policies.rs"]
mod policies;
#[path = "store/reads.rs"]
mod reads;
#[path = "store/time.rs"]
mod time;
