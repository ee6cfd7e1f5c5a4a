//! Engines in the same process, over a store in memory, nodes and Redis servers. One program has
//! all of these tests, because each program contains an engine, a node and their dependencies.
//!
//! A test must not change the process: no environment, no limits, no current directory. It must not
//! measure the process either. `constraints` does, so it is a program of its own.

#[path = "../common/mod.rs"]
mod common;
mod device;
mod failures;
mod families;
mod l1;
mod l3_reads;
mod paths;
mod real_store;
mod redis_store;
mod sampling;
mod slow_link;
mod untrusted_store;
