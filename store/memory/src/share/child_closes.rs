//! Descriptors that a forked child must close.
//!
//! A child inherits the descriptors of its parent. While it has them, a node takes the parent for
//! alive, and keeps what it holds for it. Rust code that forks always executes another program,
//! which closes them. An interpreter such as Python's may run on in the child.
//!
//! Invariants:
//! - Descriptors are opened and listed under one lock, and a fork happens under it. So a child
//!   knows every descriptor of a node that it has inherited.
//! - The thread that forks has the lock. It is the only thread of the child, so it can release the
//!   child's copy.
//! - No thread waits under the lock, except the thread that forks, for the other hooks of that
//!   fork.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Device and inode of an open file.
type Identity = (u64, u64);

/// Descriptors to nodes. A closed one stays listed until another descriptor to a node gets its
/// number, so the list is no longer than the table of descriptors.
#[derive(Debug)]
pub struct Descriptors(BTreeMap<RawFd, Identity>);

/// Uses a lock of the standard library. Its whole state is in this place, so the child can release
/// it: docs/decisions/0067-locks-and-forks.md.
static DESCRIPTORS: Mutex<Descriptors> = Mutex::new(Descriptors(BTreeMap::new()));

thread_local! {
    /// The lock, while this thread forks. Without a destructor, so that it exists until the end of
    /// the thread.
    static FORKING: RefCell<Option<ManuallyDrop<MutexGuard<'static, Descriptors>>>> = const { RefCell::new(None) };
}

impl Descriptors {
    /// Lists an open descriptor.
    pub fn list(&mut self, descriptor: impl AsFd) -> io::Result<()> {
        let number = descriptor.as_fd().as_raw_fd();
        self.0.insert(number, identity(number)?);
        Ok(())
    }

    /// Takes the listed descriptors that are still open.
    fn take_open(&mut self) -> impl Iterator<Item = RawFd> {
        let is_open = |&(number, listed): &(RawFd, Identity)| identity(number).is_ok_and(|found| found == listed);
        std::mem::take(&mut self.0).into_iter().filter(is_open).map(|(number, _)| number)
    }
}

fn identity(descriptor: RawFd) -> io::Result<Identity> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call fills a structure of the size that it expects. It fails for a number without
    // a file.
    if unsafe { libc::fstat(descriptor, stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.st_dev, stat.st_ino))
}

fn lock() -> MutexGuard<'static, Descriptors> {
    DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` while no thread forks. It opens descriptors to nodes and lists them. It MUST NOT
/// wait.
pub fn between_forks<T>(work: impl FnOnce(&mut Descriptors) -> T) -> T {
    FORKING.with_borrow_mut(|forking| match forking {
        Some(descriptors) => work(descriptors),
        None => work(&mut lock()),
    })
}

/// Runs in the thread that forks, just before. Waits for threads that open descriptors, and for
/// other threads that fork.
pub fn before_fork() {
    FORKING.with_borrow_mut(|forking| {
        forking.get_or_insert_with(|| ManuallyDrop::new(lock()));
    });
}

/// Runs in the thread that has forked, in the parent. Also runs after a fork that failed.
pub fn after_fork_in_parent() {
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}

/// Runs in the child. Closes the parent's descriptors to nodes.
///
/// # Safety
/// The process is a forked child in which no client exists yet, and it does not use the clients of
/// its parent.
pub unsafe fn after_fork_in_child() {
    let open: Vec<RawFd> = between_forks(|descriptors| descriptors.take_open().collect());
    for descriptor in open {
        // SAFETY: the descriptor is a copy of one of the parent, whose owner is not used here.
        unsafe { libc::close(descriptor) };
    }
    after_fork_in_parent();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::attach;
    use rustix::net::{SocketAddrUnix, getpeername};
    use std::os::fd::BorrowedFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    use std::time::Duration;

    /// Listed descriptors that are still open, and stay listed.
    fn open_descriptors() -> Vec<RawFd> {
        between_forks(|descriptors| {
            let listed = descriptors.0.clone();
            let open = descriptors.take_open().collect();
            descriptors.0 = listed;
            open
        })
    }

    #[test]
    fn descriptor_is_listed_while_it_is_open() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let number = socket.as_raw_fd();
        between_forks(|descriptors| descriptors.list(&socket)).unwrap();
        assert!(open_descriptors().contains(&number));
        let (after, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        // Another file gets the number.
        rustix::io::dup2(&after, &mut std::mem::ManuallyDrop::new(std::os::fd::OwnedFd::from(socket))).unwrap();
        assert!(!open_descriptors().contains(&number));
    }

    #[tokio::test]
    async fn socket_is_listed_while_its_node_does_not_answer() {
        let name = format!("larder-test-{}-silent", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let attaching = tokio::spawn(async move { attach(&name, None).await.map(|_| ()) });
        let expected = SocketAddrUnix::new_abstract_name(address.as_abstract_name().unwrap()).unwrap();
        let is_ours = |&number: &RawFd| {
            // SAFETY: a plain system call, which fails if another test has closed its socket.
            let peer = getpeername(unsafe { BorrowedFd::borrow_raw(number) }).ok().flatten();
            peer.and_then(|peer| SocketAddrUnix::try_from(peer).ok()).is_some_and(|peer| peer == expected)
        };
        let patience = std::time::Instant::now() + Duration::from_secs(60);
        while !open_descriptors().iter().any(is_ours) {
            assert!(std::time::Instant::now() < patience, "the socket is never listed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!attaching.is_finished());
        attaching.abort();
    }

    #[test]
    fn thread_that_forks_may_open_descriptors_and_others_wait() {
        before_fork();
        before_fork();
        let other = std::thread::spawn(|| between_forks(|_| ()));
        between_forks(|_| ());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!other.is_finished());
        after_fork_in_parent();
        other.join().unwrap();
        after_fork_in_parent();
    }
}
