//! Sends that leave the bytes where they are (`IORING_OP_SEND_ZC`, Linux 6.0), and what the kernel says it did: over loopback it
//! copies all the same.

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, cqueue, opcode, types};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// `IORING_SEND_ZC_REPORT_USAGE`: notifications say whether the bytes were copied after all.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED`: they were.
const COPIED: u32 = 1 << 31;

/// Sends that ended.
#[derive(Debug, Default, Clone, Copy)]
pub struct Sends {
    /// All.
    pub all: u64,
    /// Those whose bytes the kernel copied.
    pub copied: u64,
}

/// Sends `chunks` one after the other, and waits until the kernel needs none of them any more.
pub fn send_all(stream: &TcpStream, chunks: &[&[u8]]) -> Result<Sends> {
    let mut ring = IoUring::new(8)?;
    let (mut sends, mut notices) = (Sends::default(), 0);
    for chunk in chunks {
        // The kernel sends all of it before it says so.
        let send = opcode::SendZc::new(types::Fd(stream.as_raw_fd()), chunk.as_ptr(), chunk.len() as u32)
            .flags(libc::MSG_WAITALL)
            .zc_flags(REPORT_USAGE)
            .build();
        // SAFETY: the kernel only reads the chunk, and this returns, unless the ring fails, when it has no use for it any more.
        unsafe { ring.submission().push(&send) }.context("one request at a time fits")?;
        let mut sent = false;
        while !sent {
            sent = reap(&mut ring, chunk.len(), &mut sends, &mut notices)?;
        }
    }
    while notices > 0 {
        reap(&mut ring, 0, &mut sends, &mut notices)?;
    }
    Ok(sends)
}

/// Waits for completions; whether one of them was that of a send.
fn reap(ring: &mut IoUring, bytes: usize, sends: &mut Sends, notices: &mut u64) -> Result<bool> {
    ring.submit_and_wait(1)?;
    let mut sent = false;
    for entry in ring.completion() {
        if cqueue::notif(entry.flags()) {
            sends.copied += u64::from(entry.result() as u32 & COPIED != 0);
            *notices -= 1;
            continue;
        }
        ensure!(entry.result() == bytes as i32, "sent {} of {bytes} bytes", entry.result());
        (sends.all, sent) = (sends.all + 1, true);
        *notices += u64::from(cqueue::more(entry.flags()));
    }
    Ok(sent)
}
