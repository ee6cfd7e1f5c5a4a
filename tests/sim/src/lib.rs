//! Deterministic simulation of the storage core, of a node's whole storage, and of clients and nodes together.
//!
//! The real code (L3, its log, the arena; in a node L2, puts and write policies too) runs on a simulated device, on virtual time, on one thread; everything that is
//! random follows from a seed. Tasks put, get, look up and forget pages at the same time while the device fails and power
//! goes; a model knows which answers are allowed. A seed that fails is replayed with
//! `cargo run --release -p larder-sim -- --seed N --verbose`.
//!
//! Always true: a seed gives the same events in the same order whenever, wherever and beside whatever it runs.
//!
//! - [`run`]: seeds from begin to end; [`life`]: one start of the node, and its end; [`setup`]: sizes and mix of a seed;
//! - [`node`]: the same for a whole node without its sockets;
//! - [`wire`]: clients and nodes together, over a fake transport;
//! - [`workload`]: what the tasks do; [`model`]: what may be answered; [`payload`]: bytes that can be attributed;
//! - [`device`]: the fault model; [`faults`]: which faults, how often; [`disk`]: what is stored and what is durable;
//! - [`world`]: time, trace and violations; [`trace`]; [`dice`]; [`panics`].

pub mod device;
pub mod dice;
pub mod disk;
pub mod faults;
pub mod life;
pub mod model;
pub mod node;
pub mod panics;
pub mod payload;
pub mod rdma;
mod rest;
pub mod run;
pub mod setup;
pub mod trace;
pub mod wire;
pub mod workload;
pub mod world;
