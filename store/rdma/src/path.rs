//! Assignment of local devices to a peer's devices.
//!
//! Invariant: both sides compute the same pairs from the same addresses, so they need not
//! negotiate.

use crate::error::AddressError;
use std::fmt;
use std::net::Ipv6Addr;

/// Address of a port: an IPv6 address, or an IPv4 address mapped into one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

/// Address family, which limits from where a GID can be reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Ipv4,
    LinkLocal,
    Ipv6,
}

impl Gid {
    pub fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }

    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }

    fn family(&self) -> Family {
        if self.is_ipv4() {
            Family::Ipv4
        } else if self.is_link_local() {
            Family::LinkLocal
        } else {
            Family::Ipv6
        }
    }

    fn common_bits(&self, other: &Gid) -> u32 {
        (u128::from_be_bytes(self.0) ^ u128::from_be_bytes(other.0)).leading_zeros()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    InfiniBand,
    Ethernet,
}

impl LinkLayer {
    pub(crate) fn code(self) -> u8 {
        match self {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<LinkLayer> {
        [LinkLayer::InfiniBand, LinkLayer::Ethernet].into_iter().find(|layer| layer.code() == code)
    }
}

/// A port as a peer sees it when it chooses its partner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Path {
    pub link: LinkLayer,
    pub gid: Gid,
}

impl Path {
    pub const BYTES: usize = 17;

    pub fn encode(&self) -> [u8; Path::BYTES] {
        let mut bytes = [0; Path::BYTES];
        bytes[0] = self.link.code();
        bytes[1..].copy_from_slice(&self.gid.0);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Path, AddressError> {
        let (link, gid) = bytes.split_first().ok_or(AddressError)?;
        let link = LinkLayer::from_code(*link).ok_or(AddressError)?;
        Ok(Path { link, gid: Gid(gid.try_into().map_err(|_| AddressError)?) })
    }

    /// Returns the common prefix length of two paths that can reach each other. InfiniBand paths
    /// must share a subnet. RoCE v2 is routed, but neither from link-local addresses nor between
    /// IPv4 and IPv6.
    fn proximity(&self, other: &Path) -> Option<u32> {
        let common = self.gid.common_bits(&other.gid);
        let reachable = match self.link {
            LinkLayer::InfiniBand => common >= 64,
            LinkLayer::Ethernet => self.gid.family() == other.gid.family(),
        };
        (self.link == other.link && reachable).then_some(common)
    }
}

/// Pairs local with remote paths, as indices. Nearest addresses pair first, and each path is used
/// once before any is used twice. Unreachable paths are in no pair. The peer computes the same
/// pairs, mirrored.
pub fn pairs(local: &[Path], remote: &[Path]) -> Vec<(usize, usize)> {
    let mut candidates: Vec<(u32, usize, usize)> = Vec::new();
    for (l, here) in local.iter().enumerate() {
        for (r, there) in remote.iter().enumerate() {
            candidates.extend(here.proximity(there).map(|near| (near, l, r)));
        }
    }
    // Ties are broken by address, not by index: each side lists its paths in its own order.
    let ends = |l: usize, r: usize| {
        let (a, b) = (local[l].gid.0, remote[r].gid.0);
        if a < b { (a, b) } else { (b, a) }
    };
    candidates.sort_by(|&(near, l, r), &(other, m, s)| other.cmp(&near).then_with(|| ends(l, r).cmp(&ends(m, s))));
    let mut chosen = Vec::new();
    let (mut used_here, mut used_there) = (vec![false; local.len()], vec![false; remote.len()]);
    // The first pass pairs unused paths with each other. The second gives the rest of the longer
    // side a partner that is used already.
    for both_fresh in [true, false] {
        for &(_, l, r) in &candidates {
            let (here, there) = (used_here[l], used_there[r]);
            if (both_fresh && !here && !there) || (!both_fresh && here != there) {
                (used_here[l], used_there[r]) = (true, true);
                chosen.push((l, r));
            }
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v4(a: u8, b: u8, c: u8, d: u8) -> Path {
        let gid = Gid(std::net::Ipv4Addr::new(a, b, c, d).to_ipv6_mapped().octets());
        Path { link: LinkLayer::Ethernet, gid }
    }

    #[test]
    fn paths_of_one_subnet_pair_up() {
        let here = [v4(10, 0, 1, 1), v4(10, 0, 2, 1)];
        let there = [v4(10, 0, 2, 9), v4(10, 0, 1, 9)];
        assert_eq!(pairs(&here, &there), [(0, 1), (1, 0)]);
    }

    #[test]
    fn every_path_of_the_longer_side_has_a_partner() {
        let here = [v4(10, 0, 1, 1)];
        let there = [v4(10, 0, 2, 9), v4(10, 0, 1, 9)];
        assert_eq!(pairs(&here, &there), [(0, 1), (0, 0)]);
    }

    #[test]
    fn unreachable_paths_are_in_no_pair() {
        let infiniband = |subnet: u8| {
            let mut gid = [0xfe; 16];
            gid[7] = subnet;
            Path { link: LinkLayer::InfiniBand, gid: Gid(gid) }
        };
        let local_only =
            Path { link: LinkLayer::Ethernet, gid: Gid(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1).octets()) };
        let v6 = Path { link: LinkLayer::Ethernet, gid: Gid(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).octets()) };
        assert_eq!(pairs(&[v4(10, 0, 0, 1), local_only], &[infiniband(1), v6]), []);
        assert_eq!(pairs(&[infiniband(1)], &[infiniband(2), infiniband(1)]), [(0, 1)]);
    }

    fn path() -> impl Strategy<Value = Path> {
        (
            any::<bool>(),
            prop_oneof![Just([0u8; 12]), Just([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])],
            any::<[u8; 4]>(),
        )
            .prop_map(|(infiniband, head, tail)| {
                let link = if infiniband { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
                let mut gid = [0; 16];
                gid[..12].copy_from_slice(&head);
                gid[12..].copy_from_slice(&tail);
                Path { link, gid: Gid(gid) }
            })
    }

    proptest! {
        #[test]
        fn both_sides_compute_the_same_pairs(
            here in proptest::collection::vec(path(), 0..5),
            there in proptest::collection::vec(path(), 0..5),
        ) {
            let mut all: Vec<Path> = here.iter().chain(&there).copied().collect();
            all.sort_by_key(|path| path.gid.0);
            all.dedup_by_key(|path| path.gid.0);
            prop_assume!(all.len() == here.len() + there.len());
            let ours = pairs(&here, &there);
            let theirs: Vec<(usize, usize)> = pairs(&there, &here).into_iter().map(|(t, h)| (h, t)).collect();
            prop_assert_eq!(&ours, &theirs);
            for (l, path) in here.iter().enumerate() {
                let reaches = there.iter().any(|other| path.proximity(other).is_some());
                prop_assert_eq!(ours.iter().any(|pair| pair.0 == l), reaches, "in a pair if it reaches anything");
            }
        }

        #[test]
        fn encoded_paths_decode_to_themselves(path in path()) {
            prop_assert_eq!(Path::decode(&path.encode()), Ok(path));
        }

        #[test]
        fn decoder_survives_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(path) = Path::decode(&bytes) {
                prop_assert_eq!(&path.encode()[..], &bytes[..]);
            }
        }
    }
}
