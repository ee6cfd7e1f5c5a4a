//! Deterministic simulation of the log, of a node, and of clients and nodes together.
//!
//! The production code runs unchanged on simulated devices, a simulated network and a virtual
//! clock, on one thread. Tasks put, get, look up and forget pages while devices fail and power is
//! lost. A model knows which answers are allowed and reports every other answer as a violation.
//! `cargo xtask sim --seed N --verbose` replays a seed.
//!
//! Invariants:
//! - A seed produces the same events in the same order on every machine and at any load.
//! - The simulation draws all randomness from the seed.
//! - A panic in any task is a violation.
//!
//! Layout:
//! - [`run`]: runs seeds; [`incarnation`]: one start of a system, its work and its end; [`setup`]:
//!   parameters of a seed;
//! - [`log`]: the log alone; [`node`]: a whole node without its sockets; [`wire`]: clients and
//!   nodes over a fake transport; [`rdma`]: RDMA devices;
//! - [`workload`]: choices that all workers share; [`model`]: the oracle; [`payload`]: page
//!   contents that identify their put;
//! - [`device`]: the simulated device and its fault model; [`disk`]: stored and durable bytes, in
//!   `sparse` blocks;
//!   [`faults`]: fault profiles; `identity`: names and epochs of nodes;
//! - [`world`]: clock, trace and violations; [`trace`]: history; [`random`]: random streams;
//!   [`panics`]: panic capture.

pub mod device;
pub mod disk;
pub mod faults;
pub mod forgiveness;
mod identity;
pub mod incarnation;
pub mod log;
pub mod model;
pub mod node;
pub mod panics;
pub mod payload;
mod quiescence;
pub mod random;
pub mod rdma;
pub mod run;
pub mod setup;
mod sparse;
pub mod trace;
pub mod wire;
pub mod workload;
pub mod world;
