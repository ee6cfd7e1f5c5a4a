//! Options of a node's tiers, shared by `larder store` and `larder up`, and parsers of option
//! values.

use bytesize::ByteSize;
use clap::Args;
use larder_node::{L3Device, NamespaceQuota, NodeOptions, WritePolicy};
use std::str::FromStr;
use std::time::Duration;

#[derive(Debug, Args)]
pub struct TierArgs {
    /// Moment at which a page is written to L3: `write-through` (as soon as it is stored),
    /// `write-through-selective` (after --write-after-hits reads from L2; pages evicted before are
    /// dropped), or `write-back` (when it leaves L2)
    #[arg(long, default_value_t = WritePolicy::Through, value_name = "POLICY")]
    write_policy: WritePolicy,
    /// Number of reads from L2 after which `write-through-selective` writes a page
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    write_after_hits: u32,
    /// Bytes per day that may be written to L3, without the copies that the log makes itself. While
    /// less than half of an hour's share is left, only pages with a second use are written.
    /// Unlimited by default
    #[arg(long, value_name = "SIZE")]
    l3_write_budget: Option<ByteSize>,
    /// Maximum size of each namespace, in L2 and again in L3, e.g. `10GiB`. NAMESPACE=SIZE sets it
    /// for one namespace, given by the hex digits that `larder status --wide` shows. Unlimited by
    /// default
    #[arg(long, value_name = "[NAMESPACE=]SIZE")]
    quota: Vec<Quota>,
    /// Maximum duration of a pin: a number followed by s, m, h or d, at most 30d. Pins take room
    /// that other namespaces cannot have until they expire
    #[arg(long, default_value = "24h", value_name = "DURATION", value_parser = duration)]
    max_pin_time: Duration,
    /// Smallest mean size of pages for which L3 uses its whole size. It bounds the memory of the
    /// index: with smaller pages, L3 evicts early. Each device may always have 524,288 pages
    #[arg(long, default_value = "64KiB", value_name = "SIZE")]
    l3_mean_page: ByteSize,
    /// DRAM for pages in transfer, in addition to L2: half for puts, half for reads. Puts beyond it
    /// are answered "busy". Default: an eighth of L2, at least 64 MiB
    #[arg(long, value_name = "SIZE")]
    in_flight: Option<ByteSize>,
    /// Maximum size of uncommitted puts per connection. Default: the put half of --in-flight
    #[arg(long, value_name = "SIZE")]
    connection_put_limit: Option<ByteSize>,
    /// Maximum size of pages being read and sent per connection. Default: an eighth of --in-flight
    #[arg(long, value_name = "SIZE")]
    connection_read_window: Option<ByteSize>,
    /// Maximum size of pages requested but not yet sent per connection. Further requests are
    /// answered "busy". Default: the size of L2, at least 256 MiB
    #[arg(long, value_name = "SIZE")]
    connection_outstanding_limit: Option<ByteSize>,
    /// Maximum memory for connections and requests, excluding pages
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    request_memory: ByteSize,
    /// Maximum number of connections. Further ones are answered "busy". Each takes 48 KiB, and
    /// together they may take three quarters of --request-memory
    #[arg(long, default_value_t = 1024, value_name = "CONNECTIONS")]
    max_connections: usize,
    /// Maximum number of connections from one IP address (of IPv6: one /64 network), and of those
    /// over local sockets. All programs behind one address share it. Default: three quarters of
    /// --max-connections
    #[arg(long, value_name = "CONNECTIONS")]
    max_connections_per_peer: Option<usize>,
    /// Time without a request after which a connection with nothing in flight is closed, in
    /// seconds, at least 10. Clients of Larder send a request every 2 s
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    idle_timeout: u64,
    /// Maximum time from a connection to the end of its first message, in seconds, from 1 to 60
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    handshake_timeout: u64,
    /// Maximum time without a byte while a client sends or receives a message, and maximum time of
    /// a request's header and of its body, in seconds, from 30 to 600
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    stall_timeout: u64,
}

impl TierArgs {
    pub fn apply(&self, options: &mut NodeOptions) {
        options.write_policy = self.write_policy;
        options.write_after_hits = self.write_after_hits;
        let bytes = |size: Option<ByteSize>| size.map(|size| size.as_u64());
        options.l3_write_bytes_per_day = bytes(self.l3_write_budget);
        options.in_flight_bytes = bytes(self.in_flight);
        options.connection_put_bytes = bytes(self.connection_put_limit);
        options.connection_read_window_bytes = bytes(self.connection_read_window);
        options.connection_outstanding_bytes = bytes(self.connection_outstanding_limit);
        options.l3_mean_page_bytes = self.l3_mean_page.as_u64();
        options.request_bytes = self.request_memory.as_u64();
        options.pin_time_max = self.max_pin_time;
        options.connections_max = self.max_connections;
        options.connections_per_peer_max = self.max_connections_per_peer;
        options.idle_timeout = Duration::from_secs(self.idle_timeout);
        options.handshake_timeout = Duration::from_secs(self.handshake_timeout);
        options.stall_timeout = Duration::from_secs(self.stall_timeout);
        for quota in &self.quota {
            match quota {
                Quota::Default(bytes) => options.quota_default = Some(*bytes),
                Quota::Namespace(quota) => options.quotas.push(quota.clone()),
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Quota {
    Default(u64),
    Namespace(NamespaceQuota),
}

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None => Ok(Quota::Default(size(text)?)),
            Some((namespace, bytes)) => {
                Ok(Quota::Namespace(NamespaceQuota { namespace: namespace.parse()?, bytes: size(bytes)? }))
            }
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.as_u64()).map_err(|_| format!("'{text}' is not a size, e.g. 10GiB"))
}

pub fn device(text: &str) -> Result<L3Device, String> {
    let parts = text.rsplit_once(':').filter(|(dir, _)| !dir.is_empty());
    let Some((dir, bytes)) = parts else {
        let hint = "to set the size of the L3 in the data directory, use --l3-bytes";
        return Err(format!("'{text}' is not DIRECTORY:SIZE, e.g. /mnt/nvme0/larder:1TiB; {hint}"));
    };
    Ok(L3Device { dir: dir.into(), bytes: size(bytes)? })
}

/// Parses a duration with its unit: `90s`, `30m`, `1h`, `7d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("'{text}' is not a duration: a number followed by s, m, h or d, e.g. 1h");
    let number = text.get(..text.len().saturating_sub(1)).unwrap_or_default();
    let unit_seconds = match text.as_bytes().last() {
        Some(b's') => 1,
        Some(b'm') => 60,
        Some(b'h') => 3600,
        Some(b'd') => 24 * 3600,
        _ => return Err(invalid()),
    };
    let number: u64 = number.parse().map_err(|_| invalid())?;
    number.checked_mul(unit_seconds).map(Duration::from_secs).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_devices_and_durations_parse_or_fail_with_a_hint() {
        assert_eq!("10GiB".parse(), Ok(Quota::Default(10 << 30)));
        let Ok(Quota::Namespace(one)) = "00ff=2MiB".parse() else { panic!("a namespace's quota") };
        assert_eq!((one.namespace.to_string(), one.bytes), ("00ff".into(), 2 << 20));
        assert!("xyz=1".parse::<Quota>().is_err() && "00ff=lots".parse::<Quota>().is_err());
        assert_eq!(device("/mnt/a:1TiB"), Ok(L3Device { dir: "/mnt/a".into(), bytes: 1 << 40 }));
        assert!(device("4GiB").unwrap_err().contains("--l3-bytes"));
        assert_eq!(["90s", "30m", "1h", "7d"].map(|text| duration(text).unwrap().as_secs()), [90, 1800, 3600, 604_800]);
        for bad in ["", "1", "h", "-1h", "1w", "99999999999999999999s", "9999999999999999999d", "1µ"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
