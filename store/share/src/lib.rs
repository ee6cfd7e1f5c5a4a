//! A store node's memory in the processes of its own machine.
//!
//! A node that can share its arena opens a [`Door`]: a UNIX socket without a place in the file system. Who comes through it
//! and belongs to the same user gets the arena's file, read-only, and one end of a socket pair that carries nothing: its
//! *tenure*. Bytes of the arena are read in place for as long as the node holds them for the reader ([`Held`]). In return, the
//! node gets the file of that process's own [`Memory`], if it has one, and copies from there what it is told to ([`Lent`]).
//!
//! Always true:
//! - both ends are processes of one user, or root: each looks before it hands over, or maps, anything;
//! - a process that came through a door has the arena for reading. That is against mistakes, not against malice: one user's
//!   processes can do worse to each other;
//! - the tenure's far end is closed when nobody in that process can look at the arena any more, and not before: mapping and
//!   descriptor have one owner, and the kernel closes both when the process dies. So the node knows, instead of guessing by a
//!   clock, when memory that it held for a reader may be used again;
//! - neither writes to memory of the other, and a node never looks at a client's memory where it lies.
//!
//! Who maps a node's arena trusts that node.

mod copy;
mod door;
mod greeting;
mod lent;
mod memory;
mod window;

pub use copy::copy_out;
pub use door::{Door, Tenure, read_only};
pub use lent::{Lender, Lent};
pub use memory::{Block, Memory};
pub use window::{Held, Window, attach};

use std::io;
use tokio::net::UnixStream;

/// Names the machine, and this run of it: what two processes that could share memory have in common. `None` if the kernel
/// does not say.
pub fn machine() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_string()).filter(|id| !id.is_empty())
}

/// Fails unless the other end of a socket belongs to this process's user, or to root.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if theirs == ours || theirs == 0 {
        return Ok(());
    }
    let problem = format!("memory is not shared between user {theirs} and user {ours}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

#[cfg(test)]
mod tests;
