//! Limits of a server. The comments of the fields are the manual.

use std::net::IpAddr;
use std::time::Duration;
use thiserror::Error;

/// Bytes of each body that do not count against [`HttpOptions::body_memory_bytes`]. Requests of
/// this size work even while others fill that memory.
pub(crate) const BODY_BYTES_FREE: usize = 64 << 10;
/// Minimum rate of a client that sends a body or receives an answer, in bytes per second.
pub(crate) const BYTES_PER_SECOND_MIN: u64 = 64 << 10;
/// Maximum number of refused connections that get an answer at a time. Further ones are closed.
pub(crate) const REFUSED_MAX: usize = 32;
/// Size of the buffers of one connection, in bytes. A header must fit.
pub(crate) const BUFFER_BYTES: usize = 32 << 10;
/// Memory of a connection: buffers for both directions, its task, and the state of its request.
/// Bodies and answers take more.
const CONNECTION_BYTES: usize = 2 * BUFFER_BYTES + (32 << 10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpOptions {
    /// Maximum number of connections. A quarter is reserved for addresses that were served within
    /// the last ten minutes. Default 1024, minimum 4.
    pub connections_max: usize,
    /// Maximum number of connections of one address, or of one /64 network with IPv6. Clients
    /// behind one address translation or proxy share it. Default: three quarters of
    /// `connections_max`.
    pub connections_per_address: Option<usize>,
    /// Maximum time from the first byte of a request, or from the connect, to the end of its
    /// header. Default 10 s, minimum 1 ms.
    pub header_timeout: Duration,
    /// Time in which a body must end, or bring 64 KiB per second of it. The time then starts anew.
    /// Default 10 s, minimum 1 ms.
    pub body_timeout: Duration,
    /// Maximum time that a connection stays open between two requests. Clients give up a connection
    /// after at most 90 s in most cases, and should do so first. Default 120 s, minimum 1 ms.
    pub idle_timeout: Duration,
    /// Maximum time that a client may leave its socket full before the connection is closed. It may
    /// take a second more for each 64 KiB that it receives. The time comes back while the socket
    /// is not full, so streams that wait for tokens do not count. Default 30 s, minimum 1 ms.
    pub write_timeout: Duration,
    /// Maximum size of one body, in bytes. Default 64 KiB.
    pub body_bytes_max: usize,
    /// Maximum bytes of all bodies that are arriving or not yet parsed, without the first 64 KiB
    /// of each. One address holds at most three quarters, and less while others hold the rest.
    /// Default 64 MiB.
    pub body_memory_bytes: usize,
    /// Host names under which browsers and programs may reach ports that trust every client,
    /// besides IP addresses and `localhost`. The OpenAI API accepts every name. Default: none.
    pub allowed_hosts: Vec<String>,
    /// Reverse proxies whose header `X-Forwarded-For` is true. Their clients have shares of their
    /// own of memory and of places for requests. All others share those of their connection's
    /// address. Default: none.
    pub trusted_proxies: Vec<IpAddr>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            connections_per_address: None,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(30),
            body_bytes_max: 64 << 10,
            body_memory_bytes: 64 << 20,
            allowed_hosts: Vec::new(),
            trusted_proxies: Vec::new(),
        }
    }
}

/// Setting out of range. The message names the option and its limits.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("--{flag} {requirement}")]
pub struct OptionsError {
    /// Name of the command-line option, without dashes.
    pub flag: &'static str,
    pub requirement: String,
}

impl HttpOptions {
    /// Checks every setting against its limits. The error names the first one that is out of range.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let wrong = |flag, requirement: &str| Err(OptionsError { flag, requirement: requirement.into() });
        if !(4..=1 << 20).contains(&self.connections_max) {
            return wrong("http-connections", "must be within 4 to 1048576");
        }
        if !(1..=self.connections_max).contains(&self.per_address()) {
            return wrong("http-connections-per-address", "must be at least 1 and at most --http-connections");
        }
        for (flag, value) in [
            ("http-header-timeout", self.header_timeout),
            ("http-body-timeout", self.body_timeout),
            ("http-idle-timeout", self.idle_timeout),
            ("http-write-timeout", self.write_timeout),
        ] {
            if value < Duration::from_millis(1) {
                return wrong(flag, "must be at least 1 ms");
            }
        }
        Ok(())
    }

    /// Maximum memory of the connections in bytes, without bodies and answers.
    pub fn connection_memory_max(&self) -> u64 {
        self.connections_max.saturating_add(REFUSED_MAX).saturating_mul(CONNECTION_BYTES) as u64
    }

    /// Maximum memory of the bodies that are arriving or not yet parsed, in bytes.
    pub fn body_memory_max(&self) -> u64 {
        let free = self.connections_max.saturating_mul(BODY_BYTES_FREE.min(self.body_bytes_max));
        (self.body_memory_bytes as u64).saturating_add(free as u64)
    }

    pub(crate) fn per_address(&self) -> usize {
        self.connections_per_address.unwrap_or(self.connections_max - self.reserved())
    }

    /// Number of places that only known addresses may take.
    pub(crate) fn reserved(&self) -> usize {
        self.connections_max / 4
    }

    /// Time in which a client takes `bytes` at the minimum rate.
    pub(crate) fn time_for(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND_MIN as f64)
    }

    /// Bytes that a client sends in `time` at the minimum rate.
    pub(crate) fn step_bytes(&self, time: Duration) -> u64 {
        (BYTES_PER_SECOND_MIN as f64 * time.as_secs_f64()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_follows_from_connections_and_bodies() {
        let options = HttpOptions { connections_max: 100, body_memory_bytes: 1 << 20, ..HttpOptions::default() };
        assert_eq!(options.connection_memory_max(), 132 * (96 << 10));
        assert_eq!(options.body_memory_max(), (1 << 20) + 100 * (64 << 10));
        let small = HttpOptions { body_bytes_max: 4 << 10, ..options.clone() };
        assert_eq!(small.body_memory_max(), (1 << 20) + 100 * (4 << 10));
        let endless = HttpOptions { body_memory_bytes: usize::MAX, ..options };
        assert_eq!(endless.body_memory_max(), u64::MAX);
    }

    #[test]
    fn defaults_are_valid_and_errors_name_the_flag() {
        assert_eq!(HttpOptions::default().validate(), Ok(()));
        let wrong = HttpOptions { connections_per_address: Some(5), connections_max: 4, ..HttpOptions::default() };
        assert_eq!(wrong.validate().unwrap_err().flag, "http-connections-per-address");
        let wrong = HttpOptions { idle_timeout: Duration::ZERO, ..HttpOptions::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("--http-idle-timeout must"));
    }
}
