//! The client against nodes in the same process. One program has all of these tests, because each
//! program contains a node and its dependencies.
//!
//! A test must not change the process: no environment, no limits, no current directory.

// `local` has the tests of `node`, with pages in shared memory.
#![allow(clippy::duplicate_mod)]

mod fairness;
#[path = "node.rs"]
mod local;
mod node;
mod overload;
mod slow_link;
mod stalls;

use larder_format::{NamespaceDescriptor, PageKey};
use larder_wire::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Request};
use std::time::{Duration, Instant};

/// Deadline of every step. A step that takes longer hangs, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn key(number: u32) -> PageKey {
    PageKey::chain(None, &[number])
}

/// Handshake of a client without the checks of [`larder_client::Client`].
fn hello(namespace: NamespaceDescriptor) -> Request {
    let (name, namespace) = ("raw".into(), Some(namespace));
    Request::Hello { version_min: PROTOCOL_VERSION_MIN, version_max: PROTOCOL_VERSION, name, namespace }
}
