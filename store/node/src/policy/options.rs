//! Settings of the policy of L2.

use larder_format::NamespaceId;
use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone)]
pub struct PolicyOptions {
    pub capacity_bytes: u64,
    /// Budget in bytes for open puts and for pages being written to L3, together.
    pub dirty_bytes_max: u64,
    pub has_l3: bool,
    pub write_policy: WritePolicy,
    /// Number of hits after which write-through-selective writes a page.
    pub write_after_hits: u32,
    /// Bytes per day that may be written to L3. `None` is no limit.
    pub l3_write_bytes_per_day: Option<u64>,
    /// Quota in bytes of a namespace that has none of its own. `None` is no limit.
    pub quota_default: Option<u64>,
    pub quotas: Vec<NamespaceQuota>,
    /// Seed of the eviction policy's sampling, so that clients cannot predict which pages it
    /// samples.
    pub seed: u64,
}

/// Time at which a page is written to L3. An early write costs device bandwidth and wear. A late
/// one costs pages when the node crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// At its commit. A crash loses at most the last second.
    Through,
    /// After enough reads from L2, which make further reads likely. A page evicted before is lost.
    /// Saves device writes when most pages are read once.
    Selective,
    /// At its eviction from L2. Saves most writes. A crash loses the whole of L2.
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

/// First hex digits of a namespace's name, at least 4, or all 64. Upper case is accepted and stored
/// as lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespacePrefix(String);

impl NamespacePrefix {
    /// Returns `true` if the namespace's name begins with these digits. Allocates nothing.
    pub fn matches(&self, namespace: &NamespaceId) -> bool {
        let digits = namespace.0.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        self.0.chars().zip(digits).all(|(own, digit)| own.to_digit(16) == Some(digit.into()))
    }

    /// Hex digits of the prefix, in lower case.
    pub(crate) fn digits(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NamespacePrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Minimum number of digits. Fewer would match several namespaces of a busy node.
const PREFIX_MIN: usize = 4;

impl FromStr for NamespacePrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if hex && (PREFIX_MIN..=64).contains(&text.len()) {
            return Ok(Self(text.to_ascii_lowercase()));
        }
        Err(format!(
            "'{text}' is not a namespace: give {PREFIX_MIN} to 64 hex digits, as `larder status --wide` shows them"
        ))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceQuota {
    pub namespace: NamespacePrefix,
    /// Maximum size of each matching namespace, in bytes: in L2, and again in L3.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_policies_and_prefixes_parse_their_own_names() {
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
}
