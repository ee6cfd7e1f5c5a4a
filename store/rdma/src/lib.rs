//! One-sided RDMA: bytes move from registered memory to registered memory of another machine, and no CPU there takes part.
//!
//! Always true:
//! - memory is owned by this crate from the moment a device may touch it until the device provably no longer does: its
//!   completion came, or the queue pair was destroyed, or the registration was ended. Dropping a future, a deadline, a dead peer:
//!   none of them is a proof, and none gives memory back. Memory that a device does not let go of is never given back;
//! - a key that is given to a peer is *narrow*: one range of bytes, for reading or for writing, by one connection (see
//!   [`Window`]). The key of a whole region does not leave this crate, and would allow a peer nothing;
//! - every wait has a deadline, every queue a bound. After any error a connection is dead and stays so: whoever needs one makes a
//!   fresh pair of endpoints;
//! - a machine without RDMA, or without libibverbs, answers [`Unavailable`].
//!
//! There are no messages here: what the two sides tell each other (addresses of endpoints, ranges and keys) travels on a connection
//! they have already. The sequence is
//!
//! 1. [`devices`] on both sides; [`pairs`] says which device should talk to which.
//! 2. [`Nic::open`], [`Region::register`], once.
//! 3. [`Endpoint::new`] on both sides; exchange of [`Endpoint::local`]; [`Endpoint::connect`] on both sides.
//! 4. One side opens a window ([`Endpoint::readable`], [`Endpoint::writable`]) and sends its [`RemoteRange`]; the other one
//!    [reads](Endpoint::read) or [writes](Endpoint::write); then the first side [withdraws](Window::withdraw) it.
//!
//! [`Fabric`] does the first three for all devices of a machine.
//!
//! Memory comes in as values that own it, see [`memory`]; a call takes such a value and gives it back. All calls need a tokio
//! runtime that drives I/O and time. What is `unsafe` here lies in `verbs`, and where `link` and `region` hand addresses to a device.
//!
//! Proven with the kernel's soft-RoCE in a virtual machine (`tests/rdma`). It has never run on a real network card.

mod address;
#[cfg(feature = "arena")]
mod arena;
mod counters;
mod device;
mod driver;
mod endpoint;
mod error;
mod fabric;
mod link;
pub mod memory;
mod nic;
mod path;
mod probe;
mod region;
#[cfg(feature = "share")]
mod share;
mod verbs;
mod window;

pub use address::{AddressError, EndpointAddress, RemoteRange};
#[cfg(feature = "arena")]
pub use arena::SlotSlice;
pub use counters::NicStats;
pub use device::{DeviceInfo, GidInfo, GidKind, PortInfo, devices};
pub use endpoint::{Endpoint, EndpointOptions};
pub use error::{Death, Error, Unavailable};
pub use fabric::{Credit, Fabric, FabricOptions, Line};
pub use memory::{Bytes, BytesMut, Kept, Memory, Span};
pub use nic::{Nic, NicOptions, WindowKind};
pub use path::{Gid, LinkLayer, Path, pairs};
pub use region::Region;
pub use window::Window;

/// Makes calls into the kernel where they hold nobody up. What stands in for the library makes none, and is called at once: so a
/// simulation is the same each time.
pub(crate) async fn apart<T: Send + 'static>(
    calls: impl FnOnce() -> T + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    match ibverbs_sys::has_stand_in() {
        true => Ok(calls()),
        false => tokio::task::spawn_blocking(calls).await,
    }
}
