//! Settings of a store node. The doc comments are the manual; `larder store --help` has the flags.
//!
//! [`crate::memory_plan`] tells how much memory they can take.

use crate::event_limits::{REPLAYS_MAX, SUBSCRIBERS_MAX, TOPIC_BYTES_MAX};
use crate::places::PlaceLimits;
use crate::policy::{NamespacePrefix, NamespaceQuota, WritePolicy};
use crate::rdma::RdmaOptions;
use larder_http::HttpOptions;
use larder_io::Executor;
use larder_log::{L3Options, QUEUE_DEPTH_DEFAULT};
use larder_memory::ArenaSharing;
use larder_runtime::Clock;
use larder_wire::MAX_PIN_MS;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Settings of a node, fixed at its start. [`NodeOptions::validate`] checks them.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Address of the data port. Port 0 picks a free port. Default: `127.0.0.1:7700`.
    pub listen: SocketAddr,
    /// Address of the HTTP endpoints `/healthz`, `/metrics`, `/status` and `/scrub`. Default: off.
    pub admin_listen: Option<SocketAddr>,
    /// Address of the Redis port, for clients that speak RESP2 or RESP3. Default: off.
    pub redis_listen: Option<SocketAddr>,
    /// Address of the stream of KV events, for ZeroMQ subscribers. Default: off.
    pub kv_events_listen: Option<SocketAddr>,
    /// Address at which ZeroMQ clients ask for older batches of KV events. Needs
    /// [`NodeOptions::kv_events_listen`]. Default: off.
    pub kv_events_replay_listen: Option<SocketAddr>,
    /// Topic of the stream of KV events, at most 255 bytes. Default: `kv@NODE@`, with the name of
    /// the node.
    pub kv_events_topic: Option<String>,
    /// Namespaces with KV events. Default: all.
    pub kv_events_namespace: Option<NamespacePrefix>,
    /// KV events also of the pages that L3 stores and removes. They cost 24 bytes of memory per
    /// page on L3. Default: false.
    pub kv_events_l3: bool,
    /// Limits of the HTTP server behind [`NodeOptions::admin_listen`]. Default: those of
    /// [`HttpOptions`], but 128 connections and bodies of 4 KiB.
    pub http: HttpOptions,
    /// Directory of the node's identity and, unless [`NodeOptions::l3`] is set, of its L3. Default:
    /// none. Without it and without `l3` the node has no L3 and loses all pages when it stops.
    pub data_dir: Option<PathBuf>,
    /// DRAM for cached pages, in bytes. Default: 1 GiB. At least 32 MiB.
    pub l2_bytes: u64,
    /// DRAM for pages in transfer, in bytes, in addition to L2. Half is for puts and for writes to
    /// L3, half for reads. Above it, the node answers "busy". Default: an eighth of L2, at least
    /// 64 MiB.
    pub in_flight_bytes: Option<u64>,
    /// Maximum size of one connection's uncommitted puts, in bytes. Above it, reservations are
    /// answered "busy". Default: the whole half for puts, so that one writer can use it alone.
    pub connection_put_bytes: Option<u64>,
    /// Maximum size of the pages and ranges that are sent to one connection at a time, in bytes.
    /// Two pages are always allowed. A smaller window limits the throughput of one reader, a larger
    /// one lets slow readers hold more memory. Default: an eighth of `in_flight_bytes`.
    pub connection_read_window_bytes: Option<u64>,
    /// Maximum size of the pages that one connection has requested and not received, in bytes. They
    /// take no memory. Above it, further pages are answered "busy". Default: the size of L2, at
    /// least 256 MiB.
    pub connection_outstanding_bytes: Option<u64>,
    /// Memory outside the arena for connections (48 KiB each) and for requests in progress, in
    /// bytes. Above it, connections are refused and requests answered "busy". Default: 64 MiB. At
    /// least 1 MiB.
    pub request_bytes: u64,
    /// Part of `request_bytes` for the requests of one connection, in bytes. A request counts 1 KiB
    /// plus four times its body. Default: a quarter.
    pub connection_request_bytes: Option<u64>,
    /// Maximum size of the L3 log in the data directory, in bytes. Ignored if [`NodeOptions::l3`]
    /// is set. Default: 4 GiB. 0 disables that log.
    pub l3_bytes: u64,
    /// L3 devices. Each has a log of its own, and a failed device costs only its own pages. Without
    /// a data directory, the identity is stored beside the first log that can be written. Default:
    /// none, which puts one log into the directory `l3` of the data directory. At most 64.
    pub l3: Vec<L3Device>,
    /// Smallest mean size of pages, in bytes, for which L3 uses its whole size. It bounds the
    /// memory of the index: a device keeps at most as many pages as it has room for pages of this
    /// size, or [`L3_PAGES_MIN`]. Default: 64 KiB. At least 4 KiB.
    pub l3_mean_page_bytes: u64,
    /// Time at which pages are written to L3. Default: write-through.
    pub write_policy: WritePolicy,
    /// Number of reads from L2 after which write-through-selective writes a page. Default: 2. At
    /// least 1.
    pub write_after_hits: u32,
    /// Bytes per day that may be written to L3, without the copies that the log makes itself. While
    /// less than half of an hour's share is left, only pages with a second use are written.
    /// Default: unlimited. At least 24 KiB.
    pub l3_write_bytes_per_day: Option<u64>,
    /// Maximum size of a namespace that has no quota of its own, in bytes: in L2, and again in L3.
    /// Default: unlimited.
    pub quota_default: Option<u64>,
    /// Quotas of single namespaces. The first match applies.
    pub quotas: Vec<NamespaceQuota>,
    /// Maximum time to live of a pin. Requests for a longer one are refused. Pins take room that no
    /// other namespace can have until they expire. Default: 24 hours. From a second to 30 days.
    pub pin_time_max: Duration,
    /// Rate of the background verification of L2, in bytes per second. Default: 64 MiB/s. 0
    /// disables it, and damage is then found only by readers.
    pub scrub_bytes_per_second: u64,
    /// Maximum rate of the daily verification of each L3 device, in bytes per second. The node uses
    /// what a day and the bytes of the log ask for, and reports if the maximum is lower. Default:
    /// 256 MiB/s. With 0 it runs only on request.
    pub l3_scrub_bytes_per_second: u64,
    /// Maximum number of requests with each L3 device at a time. Default:
    /// [`QUEUE_DEPTH_DEFAULT`]. 1 to 1,024.
    pub l3_queue_depth: u32,
    /// Executor of L3 I/O. Default: glommio.
    pub l3_executor: Executor,
    /// Lets processes of the same machine and user map the arena and read pages in place. Default:
    /// only if that costs no huge pages, or if there is no L3. Devices move 4 KiB pages more slowly
    /// than huge ones.
    pub share_memory: Option<bool>,
    pub rdma: RdmaOptions,
    /// Maximum time to flush pages to L3 on shutdown. Pages not flushed by then are lost. Default:
    /// 60 s.
    pub drain_timeout: Duration,
    /// Maximum number of connections over TCP and local sockets together. Further ones are answered
    /// "busy" and closed. Each takes 48 KiB of memory, see [`NodeOptions::request_bytes`]. Default:
    /// 1024. At most [`CONNECTIONS_MAX`].
    pub connections_max: usize,
    /// Maximum number of connections from one IP address, and of those over local sockets. Of an
    /// IPv6 address the network of 64 bits counts. Default: three quarters of `connections_max`.
    /// Programs behind one address share it, so a lower value can keep out engines of one machine.
    pub connections_per_peer_max: Option<usize>,
    /// Time without a request after which a connection with nothing in flight is closed. Default:
    /// 60 s. At least 10 s: clients of Larder send a request every 2 s.
    pub idle_timeout: Duration,
    /// Maximum time from a connection over TCP or a local socket to the end of its first message.
    /// Default: 5 s. From 1 s to 60 s.
    pub handshake_timeout: Duration,
    /// Maximum time without a byte while a client sends or receives a frame, a reply or a value,
    /// and maximum time of a header and of a body. Default: 30 s, in which the longest body arrives
    /// at 64 KB/s. At most 600 s.
    pub stall_timeout: Duration,
    /// Maximum time for which the node keeps records of L3 in place for a client that reads them by
    /// itself, from the first hold of a request on. Writers may wait for it when the log is full.
    /// Default: 5 s, in which 256 pages arrive from a slow drive. The command has no option for it.
    pub extent_hold_time: Duration,
    /// Maximum time that a TCP connection polls for the next request before its thread sleeps. It
    /// polls only while requests arrive that fast and no other thread needs the processor. Default:
    /// 200 µs, which is one round trip between two sleeping peers. Zero disables polling.
    pub busy_poll: Duration,
    /// Seed of the random source, for tests. Default: another one at each start.
    pub seed: Option<u64>,
    /// Newest protocol version that the node accepts, for tests. Default: that of this build.
    #[doc(hidden)]
    pub protocol_max: u16,
    /// Clock of times to live and of the eviction policy, for replays. Default: that of the system.
    #[doc(hidden)]
    pub clock: Option<Clock>,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7700)),
            admin_listen: None,
            redis_listen: None,
            kv_events_listen: None,
            kv_events_replay_listen: None,
            kv_events_topic: None,
            kv_events_namespace: None,
            kv_events_l3: false,
            // Scrapers and operators need few connections, and no endpoint reads its body.
            http: HttpOptions { connections_max: 128, body_bytes_max: 4 << 10, ..HttpOptions::default() },
            data_dir: None,
            l2_bytes: 1 << 30,
            in_flight_bytes: None,
            connection_put_bytes: None,
            connection_read_window_bytes: None,
            connection_outstanding_bytes: None,
            request_bytes: 64 << 20,
            connection_request_bytes: None,
            l3_bytes: 4 << 30,
            l3: Vec::new(),
            l3_mean_page_bytes: 64 << 10,
            write_policy: WritePolicy::Through,
            write_after_hits: 2,
            l3_write_bytes_per_day: None,
            quota_default: None,
            quotas: Vec::new(),
            pin_time_max: Duration::from_secs(24 * 3600),
            scrub_bytes_per_second: 64 << 20,
            l3_scrub_bytes_per_second: 256 << 20,
            l3_queue_depth: QUEUE_DEPTH_DEFAULT,
            l3_executor: Executor::default(),
            share_memory: None,
            rdma: RdmaOptions::default(),
            drain_timeout: Duration::from_secs(60),
            connections_max: 1024,
            connections_per_peer_max: None,
            idle_timeout: Duration::from_secs(60),
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: STALL_TIMEOUT_MIN,
            extent_hold_time: Duration::from_secs(5),
            busy_poll: larder_wire::DEFAULT_BUSY_POLL,
            seed: None,
            protocol_max: larder_wire::PROTOCOL_VERSION,
            clock: None,
        }
    }
}

/// One L3 device: a directory on it, with one log. The directory's name decides which pages the
/// device gets. After a change of name, old pages stay readable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct L3Device {
    pub dir: PathBuf,
    /// Maximum size of the log's files, in bytes. Also the device's weight in the placement of
    /// pages.
    pub bytes: u64,
}

/// Minimum size of L2, in bytes. Smaller ones hold only a few pages of a large model.
pub const L2_BYTES_MIN: u64 = 32 << 20;
/// Number of pages that an L3 device may always have. A device of 4 GiB then holds pages of any
/// size.
pub const L3_PAGES_MIN: u64 = 1 << 19;
/// Minimum of [`NodeOptions::l3_mean_page_bytes`]. The log has no smaller unit.
pub const L3_MEAN_PAGE_BYTES_MIN: u64 = 4096;
/// Minimum of [`NodeOptions::l3_write_bytes_per_day`]: 1 KiB per hour.
pub const L3_WRITE_BYTES_PER_DAY_MIN: u64 = 24 << 10;
/// Minimum memory for requests, in bytes. It admits about a dozen connections with small requests.
pub const REQUEST_BYTES_MIN: u64 = 1 << 20;
/// Maximum of [`NodeOptions::connections_max`]. Each connection is an open file.
pub const CONNECTIONS_MAX: usize = 1 << 20;
/// Minimum of [`NodeOptions::idle_timeout`]. A client whose probe was lost has time for another
/// one.
pub const IDLE_TIMEOUT_MIN: Duration = Duration::from_secs(10);
const HANDSHAKE_TIMEOUT_MIN: Duration = Duration::from_secs(1);
const HANDSHAKE_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Minimum of [`NodeOptions::stall_timeout`]. At the rate that requests are promised to pass at
/// (64 KB/s), the longest body arrives well within it.
pub const STALL_TIMEOUT_MIN: Duration = Duration::from_secs(30);
const _: () = assert!(larder_wire::MAX_BODY_BYTES as u64 / 64_000 <= STALL_TIMEOUT_MIN.as_secs() * 3 / 5);
const STALL_TIMEOUT_MAX: Duration = Duration::from_secs(600);
/// Minimum of [`NodeOptions::pin_time_max`]. A node looks for expired pins once a second.
pub const PIN_TIME_MIN: Duration = Duration::from_secs(1);
/// Maximum number of L3 devices. Each has its own executor thread.
pub const L3_DEVICES_MAX: usize = 64;

impl NodeOptions {
    /// Checks all values before anything is opened. The error names the flag of `larder store`.
    pub fn validate(&self) -> Result<(), String> {
        if self.l2_bytes < L2_BYTES_MIN {
            return Err(format!("--l2 is {} bytes; the minimum is {L2_BYTES_MIN} (32MiB)", self.l2_bytes));
        }
        if self.request_bytes < REQUEST_BYTES_MIN {
            let given = self.request_bytes;
            return Err(format!("--request-memory is {given} bytes; the minimum is {REQUEST_BYTES_MIN} (1MiB)"));
        }
        if self.l3_mean_page_bytes < L3_MEAN_PAGE_BYTES_MIN {
            let given = self.l3_mean_page_bytes;
            return Err(format!("--l3-mean-page is {given} bytes; the minimum is {L3_MEAN_PAGE_BYTES_MIN} (4KiB)"));
        }
        if !(1..=CONNECTIONS_MAX).contains(&self.connections_max) {
            let given = self.connections_max;
            return Err(format!("--max-connections is {given}; it must be in 1..={CONNECTIONS_MAX}"));
        }
        if let Some(given) = self.connections_per_peer_max.filter(|max| !(1..=self.connections_max).contains(max)) {
            let max = self.connections_max;
            return Err(format!("--max-connections-per-peer is {given}; it must be in 1..={max} (--max-connections)"));
        }
        if self.idle_timeout < IDLE_TIMEOUT_MIN {
            let given = self.idle_timeout.as_secs();
            return Err(format!("--idle-timeout is {given} s; the minimum is {} s", IDLE_TIMEOUT_MIN.as_secs()));
        }
        let bounds = [
            ("--handshake-timeout", self.handshake_timeout, HANDSHAKE_TIMEOUT_MIN..=HANDSHAKE_TIMEOUT_MAX),
            ("--stall-timeout", self.stall_timeout, STALL_TIMEOUT_MIN..=STALL_TIMEOUT_MAX),
        ];
        if let Some((name, given, range)) = bounds.iter().find(|(_, given, range)| !range.contains(given)) {
            let (given, min, max) = (given.as_secs(), range.start().as_secs(), range.end().as_secs());
            return Err(format!("{name} is {given} s; it must be from {min} s to {max} s"));
        }
        // A connection without a handshake is idle.
        if self.handshake_timeout > self.idle_timeout {
            let (given, max) = (self.handshake_timeout.as_secs(), self.idle_timeout.as_secs());
            return Err(format!("--handshake-timeout is {given} s; the maximum is {max} s (--idle-timeout)"));
        }
        if !(PIN_TIME_MIN..=Duration::from_millis(MAX_PIN_MS)).contains(&self.pin_time_max) {
            let given = self.pin_time_max.as_secs();
            return Err(format!("--max-pin-time is {given} s; it must be from 1 s to 30 days"));
        }
        if self.write_after_hits == 0 {
            return Err("--write-after-hits is 0; it must be at least 1, or use --write-policy write-through".into());
        }
        if let Some(given) = self.l3_write_bytes_per_day.filter(|bytes| *bytes < L3_WRITE_BYTES_PER_DAY_MIN) {
            return Err(format!("--l3-write-budget is {given} bytes; the minimum is 24KiB per day"));
        }
        if self.write_policy != WritePolicy::Through && self.l3_devices().is_empty() {
            return Err(format!("--write-policy {} needs an L3: set --data-dir or --l3", self.write_policy));
        }
        self.http.validate().map_err(|error| error.to_string())?;
        self.validate_events()?;
        self.validate_devices()
    }

    fn validate_events(&self) -> Result<(), String> {
        let others = [
            ("--kv-events-replay-listen", self.kv_events_replay_listen.is_some()),
            ("--kv-events-topic", self.kv_events_topic.is_some()),
            ("--kv-events-namespace", self.kv_events_namespace.is_some()),
            ("--kv-events-l3", self.kv_events_l3),
        ];
        if let Some((name, _)) = others.iter().find(|(_, is_given)| *is_given && self.kv_events_listen.is_none()) {
            return Err(format!("{name} is given without --kv-events-listen, which turns KV events on"));
        }
        if let Some(bytes) = self.kv_events_topic.as_ref().map(String::len).filter(|bytes| *bytes > TOPIC_BYTES_MAX) {
            return Err(format!("--kv-events-topic has {bytes} bytes; the maximum is {TOPIC_BYTES_MAX}"));
        }
        Ok(())
    }

    fn validate_devices(&self) -> Result<(), String> {
        if self.l3.len() > L3_DEVICES_MAX {
            return Err(format!("--l3 is given {} times; the maximum is {L3_DEVICES_MAX} devices", self.l3.len()));
        }
        for (index, device) in self.l3.iter().enumerate() {
            if self.l3[..index].iter().any(|before| before.dir == device.dir) {
                return Err(format!(
                    "--l3 {} is given twice; each device needs its own directory",
                    device.dir.display()
                ));
            }
        }
        Ok(())
    }

    /// Returns the L3 devices: those given, or else the log in the data directory.
    pub fn l3_devices(&self) -> Vec<L3Device> {
        // Named devices replace the log in the data directory, even if that exists from before.
        match (&self.data_dir, self.l3.is_empty()) {
            (_, false) => self.l3.clone(),
            (Some(dir), true) if self.l3_bytes > 0 => {
                vec![L3Device { dir: dir.join("l3"), bytes: self.l3_bytes }]
            }
            _ => Vec::new(),
        }
    }

    /// Options of the log of a device, without those that depend on other devices.
    pub(crate) fn log_options(&self, device: &L3Device) -> L3Options {
        L3Options {
            pages_max: (device.bytes / self.l3_mean_page_bytes).max(L3_PAGES_MIN),
            scrub_bytes_per_second: self.l3_scrub_bytes_per_second,
            queue_depth: self.l3_queue_depth,
            executor: self.l3_executor,
            keep_names: self.kv_events_l3,
            ..L3Options::new(&device.dir, device.bytes)
        }
    }

    /// Limits of connections, with so many descriptors for all of them.
    pub(crate) fn place_limits(&self, descriptors: usize) -> PlaceLimits {
        PlaceLimits {
            connections: self.connections_max,
            per_peer: self.connections_per_peer(),
            descriptors,
            idle_timeout: self.idle_timeout,
        }
    }

    pub fn connections_per_peer(&self) -> usize {
        self.connections_per_peer_max.unwrap_or(self.connections_max - self.connections_max / 4)
    }

    pub fn arena_bytes(&self) -> u64 {
        self.l2_bytes + self.in_flight_bytes()
    }

    /// DRAM for pages in transfer, in bytes: the option, or else an eighth of L2. The minimum of 64
    /// MiB holds a few of the largest pages.
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.unwrap_or_else(|| (self.l2_bytes / 8).max(64 << 20))
    }

    /// Maximum number of connections for KV events. `None` if these are off.
    pub(crate) fn kv_events_connections(&self) -> Option<usize> {
        let replays = self.kv_events_replay_listen.map_or(0, |_| REPLAYS_MAX);
        self.kv_events_listen.map(|_| SUBSCRIBERS_MAX + replays)
    }

    pub fn connection_put_bytes(&self) -> u64 {
        self.connection_put_bytes.unwrap_or_else(|| self.dirty_bytes_max())
    }

    /// Read window of one connection in bytes. Two pages of `page_bytes` always fit: one is sent
    /// while the next one is read.
    pub fn connection_read_window_bytes(&self, page_bytes: u64) -> u64 {
        self.connection_read_window_bytes.unwrap_or_else(|| self.in_flight_bytes() / 8).max(2 * page_bytes)
    }

    pub fn connection_outstanding_bytes(&self) -> u64 {
        self.connection_outstanding_bytes.unwrap_or_else(|| self.l2_bytes.max(256 << 20))
    }

    /// Maximum number of readers that wait for absent pages. It bounds their table. Each is also
    /// charged about 5 KiB of the request memory.
    pub(crate) fn waiters_max(&self) -> usize {
        usize::try_from(self.request_bytes >> 12).unwrap_or(usize::MAX)
    }

    /// Maximum size of held pages, in bytes: those leased by lookups, and those read in place. L2
    /// cannot evict them, so more than an eighth would weaken its policy.
    pub fn held_bytes_max(&self) -> u64 {
        self.l2_bytes / 8
    }

    pub fn sharing(&self) -> ArenaSharing {
        match self.share_memory {
            Some(true) => ArenaSharing::Always,
            Some(false) => ArenaSharing::Never,
            None if self.l3_devices().is_empty() => ArenaSharing::Always,
            None => ArenaSharing::IfHuge,
        }
    }

    /// Maximum size of pages that are being put or written to L3, in bytes. The other half of
    /// `in_flight_bytes` is for reads, so that a slow device cannot block readers.
    pub fn dirty_bytes_max(&self) -> u64 {
        self.in_flight_bytes() / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_refused_with_the_flag_to_change() {
        let device = |dir: &str| L3Device { dir: dir.into(), bytes: 1 << 30 };
        let good = NodeOptions { data_dir: Some("d".into()), ..NodeOptions::default() };
        assert_eq!(good.validate(), Ok(()));
        assert_eq!(good.l3_devices(), [L3Device { dir: "d/l3".into(), bytes: 4 << 30 }]);
        let two = NodeOptions { l3: vec![device("a"), device("b")], ..good.clone() };
        assert_eq!((two.validate(), two.l3_devices().len()), (Ok(()), 2));
        let twice = NodeOptions { l3: vec![device("a"), device("a")], ..good.clone() };
        assert!(twice.validate().unwrap_err().contains("twice"));
        let nowhere = NodeOptions { write_policy: WritePolicy::Back, ..NodeOptions::default() };
        assert!(nowhere.validate().unwrap_err().contains("--write-policy write-back needs"));
        assert!(
            NodeOptions { l3_mean_page_bytes: 1, ..good.clone() }
                .validate()
                .unwrap_err()
                .contains("--l3-mean-page is 1")
        );
        assert!(NodeOptions { write_after_hits: 0, ..good.clone() }.validate().is_err());
        let budget = |bytes| NodeOptions { l3_write_bytes_per_day: Some(bytes), ..good.clone() }.validate();
        assert!(budget(24 << 10).is_ok() && budget(1000).unwrap_err().contains("--l3-write-budget is 1000"));
        let connections = |connections_max| NodeOptions { connections_max, ..good.clone() }.validate();
        assert!(connections(0).unwrap_err().contains("--max-connections is 0") && connections(usize::MAX).is_err());
        let idle_timeout = Duration::from_secs(9);
        assert!(NodeOptions { idle_timeout, ..good.clone() }.validate().unwrap_err().contains("--idle-timeout is 9 s"));
        let handshake_timeout = Duration::from_secs(61);
        let error = NodeOptions { handshake_timeout, ..good.clone() }.validate().unwrap_err();
        assert!(error.contains("--handshake-timeout is 61 s"), "{error}");
        let (handshake_timeout, idle_timeout) = (Duration::from_secs(20), Duration::from_secs(10));
        let error = NodeOptions { handshake_timeout, idle_timeout, ..good.clone() }.validate().unwrap_err();
        assert!(error.contains("the maximum is 10 s (--idle-timeout)"), "{error}");
        let stall = |seconds| NodeOptions { stall_timeout: Duration::from_secs(seconds), ..good.clone() }.validate();
        assert!(stall(600).is_ok() && stall(601).is_err() && stall(29).unwrap_err().contains("from 30 s to 600 s"));
        let pins = |seconds| NodeOptions { pin_time_max: Duration::from_secs(seconds), ..good.clone() }.validate();
        assert!(pins(1).is_ok() && pins(0).unwrap_err().contains("--max-pin-time") && pins(31 * 86_400).is_err());
        let per_peer = |max| NodeOptions { connections_per_peer_max: Some(max), ..good.clone() }.validate();
        assert!(per_peer(0).is_err() && per_peer(1024).is_ok() && per_peer(1025).unwrap_err().contains("per-peer"));
        let topic = |topic: &str, listen| NodeOptions {
            kv_events_topic: Some(topic.into()),
            kv_events_listen: listen,
            ..good.clone()
        };
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        assert_eq!(topic("kv@node@model", listen).validate(), Ok(()));
        assert!(topic("kv", None).validate().unwrap_err().contains("--kv-events-topic is given without"));
        assert!(topic(&"k".repeat(256), listen).validate().unwrap_err().contains("--kv-events-topic has 256 bytes"));
        assert!(NodeOptions { request_bytes: 1000, ..good }.validate().unwrap_err().contains("minimum"));
    }
}
