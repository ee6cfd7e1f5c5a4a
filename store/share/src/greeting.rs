//! What is said first at a door, by either side: a word, a number of bytes, and descriptors.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv,
    recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

const WORD: [u8; 8] = *b"LRDRMEM1";
const GREETING_BYTES: usize = WORD.len() + size_of::<u64>();

/// Says `number`, with at most two descriptors.
pub(crate) async fn say(stream: &UnixStream, number: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let number = number.to_le_bytes();
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let message = [IoSlice::new(&WORD), IoSlice::new(&number)];
        Ok(sendmsg(stream, &message, &mut ancillary, SendFlags::NOSIGNAL)?)
    };
    match stream.async_io(Interest::WRITABLE, send).await? {
        GREETING_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Whether the other side is going to say something of this kind: it has said the word. Takes nothing. Waits for what it says
/// as long as it takes.
pub(crate) async fn is_greeting(stream: &UnixStream) -> io::Result<bool> {
    let peek = || {
        let mut word = [0; WORD.len()];
        let (peeked, _) = recv(stream, &mut word, RecvFlags::PEEK)?;
        Ok(peeked == WORD.len() && word == WORD)
    };
    stream.async_io(Interest::READABLE, peek).await
}

/// Hears a number, and the descriptors that come with it (two of them, if there are more). Waits for it as long
/// as it takes.
pub(crate) async fn hear(stream: &UnixStream) -> io::Result<(u64, Vec<OwnedFd>)> {
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let (mut word, mut number) = ([0; WORD.len()], [0; 8]);
        let into = &mut [IoSliceMut::new(&mut word), IoSliceMut::new(&mut number)];
        let received = recvmsg(stream, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
        if received != GREETING_BYTES || word != WORD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not how a Larder process greets at a door"));
        }
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        Ok((u64::from_le_bytes(number), rights.flatten().collect()))
    };
    stream.async_io(Interest::READABLE, receive).await
}
