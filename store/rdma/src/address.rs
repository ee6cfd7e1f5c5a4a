//! What two sides tell each other, as bytes of a fixed length.
//!
//! Always true: what was decoded encodes to the same bytes; no bytes make the decoder panic. All numbers are little-endian.
//!
//! ```text
//!  EndpointAddress, 32 bytes                            RemoteRange, 20 bytes
//!   0  version (1)                                       0  address
//!   1  link layer: 1 InfiniBand, 2 Ethernet              8  length
//!   2  largest packet: 1..=5 for 256 << (n - 1) bytes   16  key
//!   3  port
//!   4  reads it answers at a time
//!   5  zero
//!   6  LID (InfiniBand)
//!   8  queue pair, 24 bits
//!  12  first packet number, 24 bits
//!  16  GID
//! ```

use crate::path::{Gid, LinkLayer, Path};
use thiserror::Error;

const VERSION: u8 = 1;
const BITS_24: u32 = 1 << 24;

/// Bytes that are no address, or one of another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not an RDMA address of this version")]
pub struct AddressError;

/// Where an endpoint is, for the endpoint that connects to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndpointAddress {
    pub(crate) path: Path,
    pub(crate) mtu: u8,
    pub(crate) port: u8,
    pub(crate) reads: u8,
    pub(crate) lid: u16,
    pub(crate) pair: u32,
    pub(crate) packet: u32,
}

impl EndpointAddress {
    /// Bytes of an encoded address.
    pub const BYTES: usize = 32;

    /// The port it is on.
    pub fn path(&self) -> Path {
        self.path
    }

    /// For sending to the peer.
    pub fn encode(&self) -> [u8; EndpointAddress::BYTES] {
        let mut bytes = [0; EndpointAddress::BYTES];
        bytes[..5].copy_from_slice(&[VERSION, self.path.link.code(), self.mtu, self.port, self.reads]);
        bytes[6..8].copy_from_slice(&self.lid.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.pair.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.packet.to_le_bytes());
        bytes[16..].copy_from_slice(&self.path.gid.0);
        bytes
    }

    /// What the peer sent.
    pub fn decode(bytes: &[u8]) -> Result<EndpointAddress, AddressError> {
        let bytes: &[u8; EndpointAddress::BYTES] = bytes.try_into().map_err(|_| AddressError)?;
        let [version, link, mtu, port, reads, zero, lid @ .., _, _, _, _, _, _, _, _] =
            *<&[u8; 16]>::try_from(&bytes[..16]).map_err(|_| AddressError)?;
        let link = LinkLayer::from_code(link).ok_or(AddressError)?;
        let (pair, packet) = (u32_at(bytes, 8), u32_at(bytes, 12));
        if version != VERSION || zero != 0 || !(1..=5).contains(&mtu) || pair >= BITS_24 || packet >= BITS_24 {
            return Err(AddressError);
        }
        let mut gid = Gid::default();
        gid.0.copy_from_slice(&bytes[16..]);
        Ok(EndpointAddress { path: Path { link, gid }, mtu, port, reads, lid: u16::from_le_bytes(lid), pair, packet })
    }
}

/// Bytes of a peer, and the key that opens them: to read, or to write, on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteRange {
    /// Where they lie, in the peer's own terms.
    pub address: u64,
    /// How many.
    pub len: u64,
    /// Their key.
    pub key: u32,
}

impl RemoteRange {
    /// Bytes of an encoded range.
    pub const BYTES: usize = 20;

    /// `len` bytes of it, from `offset`; `None` if it has no such bytes.
    pub fn part(&self, offset: u64, len: u64) -> Option<RemoteRange> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| RemoteRange { address: self.address.wrapping_add(offset), len, key: self.key })
    }

    /// For sending to the peer.
    pub fn encode(&self) -> [u8; RemoteRange::BYTES] {
        let mut bytes = [0; RemoteRange::BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    /// What the peer sent.
    pub fn decode(bytes: &[u8]) -> Result<RemoteRange, AddressError> {
        let bytes: &[u8; RemoteRange::BYTES] = bytes.try_into().map_err(|_| AddressError)?;
        let (address, len) = (u64_at(bytes, 0), u64_at(bytes, 8));
        address.checked_add(len).ok_or(AddressError)?;
        Ok(RemoteRange { address, len, key: u32_at(bytes, 16) })
    }
}

/// The number at `at`, which must lie inside.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn address()(
            ethernet in any::<bool>(),
            gid in any::<[u8; 16]>(),
            mtu in 1..=5u8,
            (port, reads, lid) in any::<(u8, u8, u16)>(),
            (pair, packet) in (0..BITS_24, 0..BITS_24),
        ) -> EndpointAddress {
            let link = if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand };
            EndpointAddress { path: Path { link, gid: Gid(gid) }, mtu, port, reads, lid, pair, packet }
        }
    }

    proptest! {
        #[test]
        fn addresses_survive_the_wire(address in address()) {
            prop_assert_eq!(EndpointAddress::decode(&address.encode()), Ok(address));
        }

        #[test]
        fn ranges_survive_the_wire(address in any::<u64>(), len in any::<u64>(), key in any::<u32>()) {
            let range = RemoteRange { address, len, key };
            let expected = address.checked_add(len).map(|_| range).ok_or(AddressError);
            prop_assert_eq!(RemoteRange::decode(&range.encode()), expected);
        }

        #[test]
        fn no_bytes_break_the_decoders(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..48),
            like in any::<bool>(),
            address in address(),
        ) {
            if like && bytes.len() >= 32 {
                // Near misses: a good address with a few bytes of noise.
                let at = bytes[0] as usize % 32;
                let noise = bytes[1];
                bytes.truncate(32);
                bytes.copy_from_slice(&address.encode());
                bytes[at] = noise;
            }
            if let Ok(address) = EndpointAddress::decode(&bytes) {
                prop_assert_eq!(&address.encode()[..], &bytes[..]);
            }
            if let Ok(range) = RemoteRange::decode(&bytes) {
                prop_assert_eq!(&range.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn a_part_lies_inside(len in 0..100u64, offset in 0..120u64, part in 0..120u64) {
            let whole = RemoteRange { address: 1000, len, key: 7 };
            match whole.part(offset, part) {
                Some(inside) => prop_assert!(inside.address == 1000 + offset && inside.len == part && offset + part <= len),
                None => prop_assert!(offset + part > len),
            }
        }
    }

    #[test]
    fn a_part_does_not_wrap_around() {
        assert_eq!(RemoteRange { address: 0, len: 8, key: 0 }.part(u64::MAX, 2), None);
    }
}
