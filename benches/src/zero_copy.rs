//! Zero-copy sends (`IORING_OP_SEND_ZC`, Linux 6.0). The kernel reports in each notification
//! whether it copied the bytes after all. Over loopback it always does.

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, cqueue, opcode, types};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// `IORING_SEND_ZC_REPORT_USAGE`: requests that report in notifications.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED`: the kernel copied the bytes.
const COPIED: u32 = 1 << 31;

#[derive(Debug, Default, Clone, Copy)]
pub struct Sends {
    pub all: u64,
    pub copied: u64,
}

/// Sends `chunks` in order. Returns once the kernel holds no reference to their memory, or with an
/// error of the ring.
///
/// # Errors
/// If the kernel lacks the operation, refuses the ring, or sends only part of a chunk.
pub fn send_all(stream: &TcpStream, chunks: &[&[u8]]) -> Result<Sends> {
    let mut ring = IoUring::new(8)?;
    let mut sends = Sends::default();
    let mut notices = 0;
    for chunk in chunks {
        // MSG_WAITALL: one completion for the whole chunk, so that short sends need no handling.
        let send = opcode::SendZc::new(types::Fd(stream.as_raw_fd()), chunk.as_ptr(), chunk.len() as u32)
            .flags(libc::MSG_WAITALL)
            .zc_flags(REPORT_USAGE)
            .build();
        // SAFETY: the kernel only reads the chunk. Unless the ring fails, this function returns
        // after the notification that the kernel has released it.
        unsafe { ring.submission().push(&send) }.context("the submission queue is full")?;
        let mut sent = false;
        while !sent {
            sent = reap(&mut ring, chunk.len(), &mut sends, &mut notices)?;
        }
    }
    // A completion alone does not release the memory: its notification does.
    while notices > 0 {
        reap(&mut ring, 0, &mut sends, &mut notices)?;
    }
    Ok(sends)
}

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
        sends.all += 1;
        sent = true;
        // MORE: a notification will follow this completion.
        *notices += u64::from(cqueue::more(entry.flags()));
    }
    Ok(sent)
}
