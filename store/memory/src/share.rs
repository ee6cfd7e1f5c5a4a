//! Memory shared between a store node and the processes of its machine.
//!
//! A node that can share its arena opens an [`ArenaListener`], a UNIX socket in the abstract
//! namespace. A process of the same user that connects receives the arena's file, read-only, and
//! one end of a socket pair: its *session*. It reads arena bytes in place for as long as the node
//! holds them for it ([`HeldBytes`]). In return, the process may hand over the file of its own
//! [`SharedMemory`], from which the node copies ([`PeerMemoryFile`]).
//!
//! Invariants:
//! - Both ends are processes of one user, or root. Each checks this before it hands over or maps
//!   anything.
//! - A connected process can only read the arena. This protects against mistakes, not against
//!   malice: processes of one user can do worse to each other.
//! - The session ends when its process can no longer access the arena, and not before. Mapping and
//!   descriptor have one owner, and the kernel closes both when the process dies. The node thus
//!   knows, without a clock, when memory held for a reader can be reused.
//! - Neither side writes to the other's memory. A node never maps a client's memory.
//!
//! A process that maps a node's arena trusts that node.

mod arena_map;
mod child_closes;
mod copy;
mod handshake;
mod listener;
mod peer_memory;
mod session_files;
mod shared_memory;
mod span;

pub use arena_map::{ArenaMap, HeldBytes, attach};
pub use child_closes::{Descriptors, after_fork_in_child, after_fork_in_parent, before_fork, between_forks};
pub use copy::copy_out;
pub use listener::{ArenaListener, ArenaSession, read_only};
pub use peer_memory::{PeerMemory, PeerMemoryFile};
pub use session_files::ExpectedFiles;
pub use shared_memory::{SharedBlock, SharedMemory};

use std::io;
use tokio::net::UnixStream;

/// Returns an identifier of the running host, shared by all its containers: the kernel's boot id.
/// Processes with equal ids may be able to share memory. Returns `None` if the kernel does not
/// tell.
pub fn host_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_string()).filter(|id| !id.is_empty())
}

/// Fails unless the other end of the socket belongs to this process's user or to root.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let theirs = stream.peer_cred()?.uid();
    let ours = rustix::process::geteuid().as_raw();
    if theirs == ours || theirs == 0 {
        return Ok(());
    }
    let problem = format!("memory is not shared between users {theirs} and {ours}; run both processes as one user");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

#[cfg(test)]
mod tests;
