//! Messages with file descriptors: the handshake of a connection that shares memory, and the files
//! that a node sends over a session. Either has a magic number, a number and the descriptors.

use super::between_forks;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv,
    recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Magic number with the version of the handshake. No frame of the protocol starts with these
/// bytes.
const MAGIC: [u8; 8] = *b"LRDRMEM1";
const HANDSHAKE_BYTES: usize = MAGIC.len() + size_of::<u64>();
/// Maximum number of descriptors in one message. The room for them lies on the stack.
pub(super) const DESCRIPTORS_MAX: usize = 16;

/// Sends `number` and at most [`DESCRIPTORS_MAX`] descriptors in one message.
pub(crate) async fn send(stream: &UnixStream, number: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    stream.async_io(Interest::WRITABLE, || try_send(stream.as_fd(), number, descriptors)).await
}

/// Like [`send`], without waiting. Fails with `WouldBlock` if the peer has not received enough of
/// the earlier messages.
pub(super) fn try_send(socket: BorrowedFd<'_>, number: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let number = number.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let message = [IoSlice::new(&MAGIC), IoSlice::new(&number)];
    match sendmsg(socket, &message, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)? {
        HANDSHAKE_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Returns `true` if the next bytes are a handshake. Consumes nothing. Waits for the bytes without
/// a limit.
pub(crate) async fn is_handshake(stream: &UnixStream) -> io::Result<bool> {
    let peek = || {
        let mut magic = [0; MAGIC.len()];
        let (peeked, _) = recv(stream, &mut magic, RecvFlags::PEEK)?;
        Ok(peeked == MAGIC.len() && magic == MAGIC)
    };
    stream.async_io(Interest::READABLE, peek).await
}

/// Receives a number and the descriptors that come with it, at most [`DESCRIPTORS_MAX`]. Waits for
/// them without a limit.
pub(crate) async fn receive(stream: &UnixStream) -> io::Result<(u64, Vec<OwnedFd>)> {
    stream.async_io(Interest::READABLE, || try_receive(stream.as_fd())).await
}

/// Like [`receive`], and lists the descriptors for a fork. The peer is trusted: its files answer at
/// once.
pub(crate) async fn receive_listed(stream: &UnixStream) -> io::Result<(u64, Vec<OwnedFd>)> {
    let attempt = || {
        between_forks(|descriptors| {
            let received = try_receive(stream.as_fd())?;
            received.1.iter().try_for_each(|descriptor| descriptors.list(descriptor))?;
            Ok(received)
        })
    };
    stream.async_io(Interest::READABLE, attempt).await
}

/// Like [`receive`], without waiting. Fails with `WouldBlock` if there is no message.
pub(super) fn try_receive(socket: BorrowedFd<'_>) -> io::Result<(u64, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let (mut magic, mut number) = ([0; MAGIC.len()], [0; 8]);
    let into = &mut [IoSliceMut::new(&mut magic), IoSliceMut::new(&mut number)];
    let received = recvmsg(socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?.bytes;
    if received != HANDSHAKE_BYTES || magic != MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer did not send a Larder memory handshake"));
    }
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((u64::from_le_bytes(number), rights.flatten().collect()))
}
