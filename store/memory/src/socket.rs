//! Facts about sockets that tokio and rustix do not offer.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Returns the bytes in the send queue of a stream socket that the peer has not acknowledged. For a
/// UNIX socket these are the bytes that the peer has not read. Source: `SIOCOUTQ` in tcp(7) and
/// unix(7).
///
/// # Errors
/// The error of the system call, for example for a descriptor that is no socket.
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open while `socket` is borrowed. TIOCOUTQ, which equals SIOCOUTQ,
    // writes one int.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    u64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn read_bytes_are_acknowledged() {
        let (mut sender, mut receiver) = UnixStream::pair().unwrap();
        assert_eq!(unacknowledged_bytes(&sender).unwrap(), 0);
        sender.write_all(&[0; 4096]).unwrap();
        assert!(unacknowledged_bytes(&sender).unwrap() >= 4096);
        receiver.read_exact(&mut [0; 4096]).unwrap();
        assert_eq!(unacknowledged_bytes(&sender).unwrap(), 0);
        assert!(unacknowledged_bytes(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
