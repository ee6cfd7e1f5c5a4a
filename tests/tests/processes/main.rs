//! Tests with real processes. One program has all of these tests, because each program contains the
//! client and its dependencies.
//!
//! A test must not change its own process, and opens few descriptors: the tests that run at the
//! same time share one limit. Crowds of strangers and heavy load are programs of their own.

mod bad_input;
mod bench;
mod cache_paths;
mod doctor;
mod hostile_clients;
mod kv_events;
mod namespaces;
mod process_failures;
mod redis;
mod stops;
mod up;
mod verify;
