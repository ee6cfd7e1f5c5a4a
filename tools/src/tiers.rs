//! Settings of a node's tiers, for `larder store` and `larder up`.

use bytesize::ByteSize;
use clap::Args;
use larder_node::{L3Device, NamespaceQuota, NodeOptions, WritePolicy};
use std::str::FromStr;
use std::time::Duration;

/// When pages are written to L3, how much of it a namespace may have, and how much may be under way.
#[derive(Debug, Args)]
pub struct TierArgs {
    /// When a page is written to L3: write-through (when it is stored), write-through-selective (when it was read from L2
    /// --write-after-hits times; one that is evicted before is dropped), write-back (when it leaves L2)
    #[arg(long, default_value_t = WritePolicy::Through, value_name = "POLICY")]
    write_policy: WritePolicy,
    /// Reads of a page in L2 after which write-through-selective writes it
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    write_after_hits: u32,
    /// Most bytes of each namespace in L2 and in L3, e.g. 10GiB; for one namespace NAMESPACE=SIZE, with the start of its
    /// hex name as `larder status` shows it. May be given several times
    #[arg(long, value_name = "[NAMESPACE=]SIZE")]
    quota: Vec<Quota>,
    /// DRAM beside L2 for pages on their way in and out; an eighth of L2 and at least 64 MiB if left out. Half of it is for
    /// puts, half for reads; what does not fit is answered "busy" at once
    #[arg(long, value_name = "SIZE")]
    in_flight: Option<ByteSize>,
    /// Most bytes of one connection's puts that are not sealed; all there is for puts if left out
    #[arg(long, value_name = "SIZE")]
    in_flight_connection: Option<ByteSize>,
    /// Most bytes of pages that are read and sent for one connection at a time; an eighth of --in-flight if left out
    #[arg(long, value_name = "SIZE")]
    in_flight_window: Option<ByteSize>,
    /// Most bytes of pages that one connection waits for, however fast it takes them; more are answered "busy" at once. As
    /// much as L2, and at least 256 MiB, if left out
    #[arg(long, value_name = "SIZE")]
    in_flight_asked: Option<ByteSize>,
    /// Most memory for connections and requests, beside the pages
    #[arg(long, default_value = "64MiB")]
    request_memory: ByteSize,
}

impl TierArgs {
    /// Puts the settings where the node looks for them.
    pub fn apply(&self, options: &mut NodeOptions) {
        options.write_policy = self.write_policy;
        options.write_after_hits = self.write_after_hits;
        let bytes = |size: Option<ByteSize>| size.map(|size| size.as_u64());
        options.in_flight_bytes = bytes(self.in_flight);
        options.connection_bytes = bytes(self.in_flight_connection);
        options.window_bytes = bytes(self.in_flight_window);
        options.asked_bytes = bytes(self.in_flight_asked);
        options.request_bytes = self.request_memory.as_u64();
        for quota in &self.quota {
            match quota {
                Quota::Each(bytes) => options.quota_default = Some(*bytes),
                Quota::One(quota) => options.quotas.push(quota.clone()),
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Quota {
    Each(u64),
    One(NamespaceQuota),
}

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None => Ok(Quota::Each(size(text)?)),
            Some((namespace, bytes)) => {
                Ok(Quota::One(NamespaceQuota { namespace: namespace.parse()?, bytes: size(bytes)? }))
            }
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.as_u64()).map_err(|_| format!("'{text}' is not a size, e.g. 10GiB"))
}

/// `DIRECTORY:SIZE`.
pub fn device(text: &str) -> Result<L3Device, String> {
    let parts = text.rsplit_once(':').filter(|(dir, _)| !dir.is_empty());
    let Some((dir, bytes)) = parts else {
        let hint = "the size of the L3 in the data directory is --l3-bytes";
        return Err(format!("'{text}' is not DIRECTORY:SIZE, e.g. /mnt/nvme0/larder:1TiB; {hint}"));
    };
    Ok(L3Device { dir: dir.into(), bytes: size(bytes)? })
}

/// A time with its unit: `90s`, `30m`, `1h`, `7d`.
pub fn time(text: &str) -> Result<Duration, String> {
    let refused = || format!("'{text}' is not a time: a number with s, m, h or d behind it, e.g. 1h");
    let number = text.get(..text.len().saturating_sub(1)).unwrap_or_default();
    let unit_seconds = match text.as_bytes().last() {
        Some(b's') => 1,
        Some(b'm') => 60,
        Some(b'h') => 3600,
        Some(b'd') => 24 * 3600,
        _ => return Err(refused()),
    };
    let number: u64 = number.parse().map_err(|_| refused())?;
    number.checked_mul(unit_seconds).map(Duration::from_secs).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_devices_and_times_are_read_or_refused_with_a_hint() {
        assert_eq!("10GiB".parse(), Ok(Quota::Each(10 << 30)));
        let Ok(Quota::One(one)) = "00ff=2MiB".parse() else { panic!("a namespace's quota") };
        assert_eq!((one.namespace.to_string(), one.bytes), ("00ff".into(), 2 << 20));
        assert!("xyz=1".parse::<Quota>().is_err() && "00ff=lots".parse::<Quota>().is_err());
        assert_eq!(device("/mnt/a:1TiB"), Ok(L3Device { dir: "/mnt/a".into(), bytes: 1 << 40 }));
        assert!(device("4GiB").unwrap_err().contains("--l3-bytes"));
        assert_eq!(["90s", "30m", "1h", "7d"].map(|text| time(text).unwrap().as_secs()), [90, 1800, 3600, 604_800]);
        for bad in ["", "1", "h", "-1h", "1w", "99999999999999999999s", "9999999999999999999d", "1µ"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }
}
