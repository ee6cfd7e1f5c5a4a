//! Settings of a node. The comments are the manual.

use crate::rdma::RdmaOptions;
use larder_device::{Executor, Sharing};
use larder_format::NamespaceId;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Everything a node needs to know at start.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Address of the data port; port 0 takes a free one. Default `127.0.0.1:7700`.
    pub listen: SocketAddr,
    /// Address of `/healthz`, `/metrics` and `/status`; none by default.
    pub admin_listen: Option<SocketAddr>,
    /// Directory of identity and L3. Without one, and without [`NodeOptions::l3`], the node has no L3 and forgets everything
    /// when it stops.
    pub data_dir: Option<PathBuf>,
    /// Bytes of pages kept in DRAM. Default 1 GiB, at least 32 MiB.
    pub l2_bytes: u64,
    /// Bytes of the arena beyond L2, for pages on their way in and out. Default: an eighth of L2, at least 64 MiB.
    pub in_flight_bytes: Option<u64>,
    /// Most bytes of one connection's puts that are not sealed. Default: half of the room for pages on their way, which is all
    /// that there is for puts.
    pub connection_bytes: Option<u64>,
    /// Most bytes of pages that are read and sent for one connection at a time; two pages are always allowed. Default: an
    /// eighth of the room for pages on their way.
    pub window_bytes: Option<u64>,
    /// Most bytes of pages that one connection asked for and that have not left yet. They take no memory, but time. Default: as
    /// much as L2, at least 256 MiB.
    pub asked_bytes: Option<u64>,
    /// Most bytes of memory beside the arena for connections, of which each counts 48 KiB, and for requests that are being
    /// worked on. Default 64 MiB, at least 1 MiB.
    pub request_bytes: u64,
    /// Most of these for the requests of one connection, of which each counts 1 KiB and 4 times its body. Default a quarter.
    pub connection_request_bytes: Option<u64>,
    /// Most bytes of the L3 in the data directory. Default 4 GiB; 0 means none there. Of no effect if [`NodeOptions::l3`] is
    /// given.
    pub l3_bytes: u64,
    /// Devices of L3, each with a log of its own. Default none: the log is kept in the data directory, in `l3`. Without a
    /// data directory, the node's identity is kept beside the first of these that can be written.
    pub l3: Vec<L3Device>,
    /// When pages are written to L3. Default write-through.
    pub write_policy: WritePolicy,
    /// Reads of a page in L2 after which write-through-selective writes it. Default 2, at least 1.
    pub write_after_hits: u32,
    /// Most bytes of a namespace that has no quota of its own, in L2 and in L3. Default none: no limit.
    pub quota_default: Option<u64>,
    /// Quotas of namespaces; the first that fits counts.
    pub quotas: Vec<NamespaceQuota>,
    /// Bytes of L2 that are verified per second in the background. Default 64 MiB; 0 means none.
    pub scrub_bytes_per_second: u64,
    /// Bytes per second that the scrub of each L3 device reads at most. Default 32 MiB; 0 means only when asked.
    pub l3_scrub_bytes_per_second: u64,
    /// What runs the devices of L3. Default glommio.
    pub l3_executor: Executor,
    /// Whether processes of this machine and user may read pages in place. By default if that costs no huge pages, or
    /// there is no L3: devices move small pages more slowly.
    pub share_memory: Option<bool>,
    /// Whether clients that can read and write pages by RDMA, and by which devices.
    pub rdma: RdmaOptions,
    /// Most time that a stop waits for pages on their way to L3. Default one minute.
    pub drain: Duration,
    /// Most connections. Default 1024.
    pub connections_max: usize,
    /// Most time for which a thread that waits for a client's next message looks for it again and again before it sleeps, where
    /// the last ones came as soon and no other thread wants the processor (over TCP); zero: it sleeps at once. Default 200 µs.
    pub spin: Duration,
    /// Where all chance comes from; by default another one at every start.
    pub seed: Option<u64>,
    /// Newest version of the protocol that is spoken; for tests. Default: this build's.
    #[doc(hidden)]
    pub protocol_max: u16,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7700)),
            admin_listen: None,
            data_dir: None,
            l2_bytes: 1 << 30,
            in_flight_bytes: None,
            connection_bytes: None,
            window_bytes: None,
            asked_bytes: None,
            request_bytes: 64 << 20,
            connection_request_bytes: None,
            l3_bytes: 4 << 30,
            l3: Vec::new(),
            write_policy: WritePolicy::Through,
            write_after_hits: 2,
            quota_default: None,
            quotas: Vec::new(),
            scrub_bytes_per_second: 64 << 20,
            l3_scrub_bytes_per_second: 32 << 20,
            l3_executor: Executor::default(),
            share_memory: None,
            rdma: RdmaOptions::default(),
            drain: Duration::from_secs(60),
            connections_max: 1024,
            spin: larder_wire::SPIN,
            seed: None,
            protocol_max: larder_wire::PROTOCOL_VERSION,
        }
    }
}

/// A directory on a device, for one log of L3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct L3Device {
    /// Directory of the log.
    pub dir: PathBuf,
    /// Most bytes of its files.
    pub bytes: u64,
}

/// When a page is written to L3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// When it is sealed.
    Through,
    /// When it was read from L2 so often that it is likely to be asked for again; one that is evicted before is dropped.
    Selective,
    /// When it leaves L2.
    Back,
}

impl WritePolicy {
    const NAMES: [(WritePolicy, &str); 3] = [
        (WritePolicy::Through, "write-through"),
        (WritePolicy::Selective, "write-through-selective"),
        (WritePolicy::Back, "write-back"),
    ];
}

impl fmt::Display for WritePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WritePolicy::NAMES.iter().find(|(policy, _)| policy == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for WritePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = WritePolicy::NAMES.iter().find(|(_, name)| *name == text);
        known.map(|(policy, _)| *policy).ok_or_else(|| {
            let names: Vec<&str> = WritePolicy::NAMES.iter().map(|(_, name)| *name).collect();
            format!("'{text}' is not one of {}", names.join(", "))
        })
    }
}

/// The start of a namespace's hex name, or all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespacePrefix(String);

impl NamespacePrefix {
    /// Whether it is the start of this one's name.
    pub fn matches(&self, namespace: &NamespaceId) -> bool {
        namespace.to_string().starts_with(&self.0)
    }
}

impl fmt::Display for NamespacePrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Shortest start of a namespace's name that is taken for it.
const PREFIX_MIN: usize = 4;

impl FromStr for NamespacePrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if hex && (PREFIX_MIN..=64).contains(&text.len()) {
            return Ok(Self(text.to_ascii_lowercase()));
        }
        Err(format!("'{text}' is not a namespace: {PREFIX_MIN} to 64 hex digits, as `larder status` shows them"))
    }
}

/// Most bytes of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceQuota {
    /// Whose.
    pub namespace: NamespacePrefix,
    /// Most bytes in L2, and in L3.
    pub bytes: u64,
}

/// Smallest L2.
pub const L2_BYTES_MIN: u64 = 32 << 20;
/// Least memory for requests: some dozen of them, whatever they say.
pub const REQUEST_BYTES_MIN: u64 = 1 << 20;
/// Most devices.
pub const L3_DEVICES_MAX: usize = 64;

impl NodeOptions {
    /// Checks what can be checked before anything is opened.
    pub fn validate(&self) -> Result<(), String> {
        if self.l2_bytes < L2_BYTES_MIN {
            return Err(format!("L2 of {} bytes is too small, the minimum is {L2_BYTES_MIN}", self.l2_bytes));
        }
        if self.request_bytes < REQUEST_BYTES_MIN {
            let given = self.request_bytes;
            return Err(format!("{given} bytes for requests are too few, the minimum is {REQUEST_BYTES_MIN}"));
        }
        if self.connections_max == 0 {
            return Err("a node needs at least one connection".into());
        }
        if self.write_after_hits == 0 {
            return Err("pages can be written after 1 hit or more; write-through writes them before".into());
        }
        if self.write_policy != WritePolicy::Through && self.l3_devices().is_empty() {
            return Err(format!("{} needs an L3: a data directory, or a device", self.write_policy));
        }
        self.validate_devices()
    }

    fn validate_devices(&self) -> Result<(), String> {
        if self.l3.len() > L3_DEVICES_MAX {
            return Err(format!("{} devices are too many, the maximum is {L3_DEVICES_MAX}", self.l3.len()));
        }
        for (index, device) in self.l3.iter().enumerate() {
            if self.l3[..index].iter().any(|before| before.dir == device.dir) {
                return Err(format!("the L3 device {} is given twice", device.dir.display()));
            }
        }
        Ok(())
    }

    /// The devices of L3: those given, or the one in the data directory.
    pub fn l3_devices(&self) -> Vec<L3Device> {
        match (&self.data_dir, self.l3.is_empty()) {
            (_, false) => self.l3.clone(),
            (Some(dir), true) if self.l3_bytes > 0 => {
                vec![L3Device { dir: dir.join("l3"), bytes: self.l3_bytes }]
            }
            _ => Vec::new(),
        }
    }

    /// Bytes of the arena: L2 and room for pages on their way.
    pub fn arena_bytes(&self) -> u64 {
        self.l2_bytes + self.in_flight_bytes()
    }

    /// Room for pages on their way in and out, in bytes.
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.unwrap_or_else(|| (self.l2_bytes / 8).max(64 << 20))
    }

    /// Most bytes of one connection's open puts.
    pub fn connection_bytes(&self) -> u64 {
        self.connection_bytes.unwrap_or_else(|| self.dirty_bytes_max())
    }

    /// Most bytes that are read and sent for one connection at a time, of pages of `page_bytes`.
    pub fn window_bytes(&self, page_bytes: u64) -> u64 {
        self.window_bytes.unwrap_or_else(|| self.in_flight_bytes() / 8).max(2 * page_bytes)
    }

    /// Most bytes that one connection may wait for, however fast it takes them.
    pub fn asked_bytes(&self) -> u64 {
        self.asked_bytes.unwrap_or_else(|| self.l2_bytes.max(256 << 20))
    }

    /// Most readers that wait for pages nobody has begun to write. Each is a request meanwhile; a quarter is theirs.
    pub(crate) fn waiters_max(&self) -> usize {
        usize::try_from(self.request_bytes >> 12).unwrap_or(usize::MAX)
    }

    /// Most bytes of pages that are held for readers: what a lookup promised, and what is read in place.
    pub fn held_bytes_max(&self) -> u64 {
        self.l2_bytes / 8
    }

    /// Whether other processes shall be able to map the arena.
    pub fn sharing(&self) -> Sharing {
        match self.share_memory {
            Some(true) => Sharing::Always,
            Some(false) => Sharing::Never,
            None if self.l3_devices().is_empty() => Sharing::Always,
            None => Sharing::IfHuge,
        }
    }

    /// Most bytes of pages that are being put or written to L3. The other half of the room is for reads.
    pub fn dirty_bytes_max(&self) -> u64 {
        self.in_flight_bytes() / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for policy in [WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("write-around".parse::<WritePolicy>().unwrap_err().contains("write-back"));
        let prefix: NamespacePrefix = "ABcd01".parse().unwrap();
        let mut id = [0u8; 32];
        id[..3].copy_from_slice(&[0xab, 0xcd, 0x01]);
        assert!(prefix.matches(&NamespaceId(id)) && !prefix.matches(&NamespaceId([0xab; 32])));
        assert!("abc".parse::<NamespacePrefix>().is_err() && "wxyz".parse::<NamespacePrefix>().is_err());
    }

    #[test]
    fn what_cannot_work_is_refused_with_a_reason() {
        let device = |dir: &str| L3Device { dir: dir.into(), bytes: 1 << 30 };
        let good = NodeOptions { data_dir: Some("d".into()), ..NodeOptions::default() };
        assert_eq!(good.validate(), Ok(()));
        assert_eq!(good.l3_devices(), [L3Device { dir: "d/l3".into(), bytes: 4 << 30 }]);
        let two = NodeOptions { l3: vec![device("a"), device("b")], ..good.clone() };
        assert_eq!((two.validate(), two.l3_devices().len()), (Ok(()), 2));
        let twice = NodeOptions { l3: vec![device("a"), device("a")], ..good.clone() };
        assert!(twice.validate().unwrap_err().contains("twice"));
        let nowhere = NodeOptions { write_policy: WritePolicy::Back, ..NodeOptions::default() };
        assert!(nowhere.validate().unwrap_err().contains("write-back needs"));
        assert!(NodeOptions { write_after_hits: 0, ..good.clone() }.validate().is_err());
        assert!(NodeOptions { request_bytes: 1000, ..good }.validate().unwrap_err().contains("minimum"));
    }
}
