//! Options of an endpoint, and their check against the limits of a device.

use crate::error::Error;
use crate::nic::Nic;
use std::time::Duration;

/// Maximum length of one request on a link that was not yet fast enough for longer ones. At 64 KB/s
/// it takes a quarter of a second.
pub const SLOW_CHUNK_BYTES: u32 = 16 << 10;

#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// Maximum number of transfer requests with the device at a time.
    pub transfers: u32,
    pub grants: u32,
    /// Maximum length of one request in bytes. Longer transfers are split. The port's own limit
    /// applies as well, and [`SLOW_CHUNK_BYTES`] on a slow link.
    pub chunk_bytes: u32,
    /// Maximum time without a completed request while there are some. A connection that exceeds it
    /// is dead. It also limits the time to open or to revoke a grant. A transfer has no other time
    /// limit: its caller stops it.
    pub stall_timeout: Duration,
    pub connect_deadline: Duration,
    /// Time to poll for completions before sleeping until one is announced. Costs a core and saves
    /// some microseconds.
    pub spin: Duration,
    /// Time the device waits for an acknowledgement before it retransmits: 4.096 µs × 2^n, n in
    /// 1..=31. It must exceed the peer's longest delay. A needless retransmission may arrive after
    /// its grant was revoked, and kills the connection.
    pub retry_exponent: u8,
    /// Number of retransmissions before the device gives up, 0..=7. Some devices treat 7 as
    /// unlimited; the deadline then ends the transfer.
    pub retries: u8,
}

impl Default for EndpointOptions {
    fn default() -> EndpointOptions {
        EndpointOptions {
            transfers: 64,
            grants: 256,
            chunk_bytes: 32 << 10,
            stall_timeout: Duration::from_secs(5),
            connect_deadline: Duration::from_secs(5),
            spin: Duration::ZERO,
            retry_exponent: 16,
            retries: 6,
        }
    }
}

impl EndpointOptions {
    /// Returns the number of requests the queue pair must hold. A grant uses up to two: its bind
    /// and its revocation, which may be posted before the bind completes.
    pub(crate) fn requests(&self) -> u32 {
        self.transfers.saturating_add(self.grants.saturating_mul(2))
    }

    pub(crate) fn check(&self, nic: &Nic) -> Result<(), Error> {
        if self.transfers == 0 || self.chunk_bytes == 0 {
            return Err(Error::Invalid("transfers and chunk_bytes must be at least 1"));
        }
        if self.requests() > nic.requests_max {
            return Err(Error::Invalid("the device's queue pairs cannot hold that many transfers and grants"));
        }
        if !(1..=31).contains(&self.retry_exponent) {
            return Err(Error::Invalid("retry_exponent must be 1 to 31"));
        }
        if self.retries > 7 {
            return Err(Error::Invalid("retries must be at most 7"));
        }
        Ok(())
    }
}
