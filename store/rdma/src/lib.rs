//! One-sided RDMA between registered memory of two machines. The remote CPU takes no part in a
//! transfer.
//!
//! Invariants:
//! - This crate owns memory from the moment a device may access it until the device provably no
//!   longer can. The proof is a completion, a destroyed queue pair or an ended registration. A
//!   dropped future, a deadline or a dead peer proves nothing and returns no memory. Memory that a
//!   device does not release is leaked, never reused.
//! - A key given to a peer is restricted to one range of bytes, to reading or to writing, and to
//!   one connection (see [`RemoteGrant`] and [`GrantKind`] for the exception). The key of a whole
//!   region never leaves this crate and would give a peer no access.
//! - Every wait has a deadline and every queue a bound. After any error, a connection is dead. The
//!   caller connects a fresh pair of endpoints.
//! - A machine without RDMA or without libibverbs returns [`Unavailable`].
//!
//! There are no messages in this crate. Both sides exchange addresses, ranges and keys over a
//! connection that they already have:
//!
//! 1. Both sides list [`devices`]; [`pairs`] assigns local to remote devices.
//! 2. Both sides call [`Nic::open`] and [`Region::register`] once.
//! 3. Both sides call [`Endpoint::new`], exchange [`Endpoint::local`] and call
//!    [`Endpoint::connect`].
//! 4. One side grants access ([`Endpoint::grant_read`], [`Endpoint::grant_write`]) and sends the
//!    [`RemoteRange`]. The other side [reads](Endpoint::read) or [writes](Endpoint::write). The
//!    first side then [revokes](RemoteGrant::revoke) the grant.
//!
//! [`Fabric`] does steps 1 to 3 for all devices of a machine.
//!
//! Layout:
//! - `verbs`: objects of libibverbs, each owned by one value.
//! - `device`, `path`, `address`: discovery, pairing with a peer's devices, address encoding.
//! - `nic`, `region`: an open device, registered memory.
//! - `connection`, `driver`: shared state of a connection, and the task that drives it.
//! - `options`, `endpoint`, `grant`, `fabric`: the API.
//! - `probe`: [`Nic::open`], which checks memory windows between two endpoints of the device.
//!
//! Memory is passed in as values that own it, see [`larder_memory::span`]; a call takes such a
//! value and returns it. All calls need a tokio runtime with I/O and time. The `unsafe` code is in
//! `verbs`, and where `connection` and `region` hand addresses to a device.
//!
//! Tested with the kernel's soft-RoCE in a virtual machine (`tests/rdma`), never on a hardware NIC.

mod address;
mod connection;
mod counters;
mod device;
mod driver;
mod endpoint;
mod error;
mod fabric;
mod grant;
mod nic;
mod options;
mod path;
mod probe;
mod region;
mod verbs;

pub use address::{EndpointAddress, RemoteRange};
pub use counters::NicStats;
pub use device::{DeviceInfo, GidInfo, GidKind, PortInfo, devices};
pub use endpoint::Endpoint;
pub use error::{AddressError, DisconnectReason, Error, Unavailable};
pub use fabric::{Fabric, FabricOptions, GrantCredit, RdmaChannel};
pub use grant::RemoteGrant;
pub use larder_memory::SlotSlice;
pub use larder_memory::span::{DmaBuf, DmaBufMut, DmaMemory, Guarded, Span};
pub use nic::{GrantKind, Nic, NicOptions};
pub use options::{EndpointOptions, SLOW_CHUNK_BYTES};
pub use path::{Gid, LinkLayer, Path, pairs};
pub use region::Region;

/// Runs system calls on a thread that may block. A replaced library makes none and is called in
/// place, so that a simulation is deterministic.
pub(crate) async fn blocking<T: Send + 'static>(
    calls: impl FnOnce() -> T + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    match ibverbs_sys::is_replaced() {
        true => Ok(calls()),
        false => tokio::task::spawn_blocking(calls).await,
    }
}
