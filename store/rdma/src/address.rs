//! Addresses and ranges that two sides exchange, encoded in a fixed length.
//!
//! Invariants:
//! - A decoded value encodes to the same bytes.
//! - No input makes a decoder panic.
//!
//! All numbers are little-endian.
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

use crate::error::AddressError;
use crate::path::{Gid, LinkLayer, Path};

const VERSION: u8 = 1;
/// Queue pair and packet numbers have 24 bits on the wire.
const BITS_24: u32 = 1 << 24;

/// Location of an endpoint, sent to the peer that connects to it.
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
    pub const BYTES: usize = 32;

    pub fn path(&self) -> Path {
        self.path
    }

    pub fn encode(&self) -> [u8; EndpointAddress::BYTES] {
        let mut bytes = [0; EndpointAddress::BYTES];
        bytes[..5].copy_from_slice(&[VERSION, self.path.link.code(), self.mtu, self.port, self.reads]);
        bytes[6..8].copy_from_slice(&self.lid.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.pair.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.packet.to_le_bytes());
        bytes[16..].copy_from_slice(&self.path.gid.0);
        bytes
    }

    /// Decodes an address from a peer. The values are in range, but a peer can still name any queue
    /// pair.
    pub fn decode(bytes: &[u8]) -> Result<EndpointAddress, AddressError> {
        let bytes: &[u8; EndpointAddress::BYTES] = bytes.try_into().map_err(|_| AddressError)?;
        let [version, link, mtu, port, reads, zero, lid @ .., _, _, _, _, _, _, _, _] =
            *<&[u8; 16]>::try_from(&bytes[..16]).map_err(|_| AddressError)?;
        let link = LinkLayer::from_code(link).ok_or(AddressError)?;
        let pair = u32_at(bytes, 8);
        let packet = u32_at(bytes, 12);
        if version != VERSION || zero != 0 || !(1..=5).contains(&mtu) || pair >= BITS_24 || packet >= BITS_24 {
            return Err(AddressError);
        }
        let mut gid = Gid::default();
        gid.0.copy_from_slice(&bytes[16..]);
        Ok(EndpointAddress { path: Path { link, gid }, mtu, port, reads, lid: u16::from_le_bytes(lid), pair, packet })
    }
}

/// Bytes of a peer and the key that grants access to them, to read or to write. The peer's device
/// checks every access against the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteRange {
    pub address: u64,
    pub len: u64,
    /// The remote key (rkey) of the grant.
    pub key: u32,
}

impl RemoteRange {
    pub const BYTES: usize = 20;

    pub fn part(&self, offset: u64, len: u64) -> Option<RemoteRange> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| RemoteRange { address: self.address.wrapping_add(offset), len, key: self.key })
    }

    pub fn encode(&self) -> [u8; RemoteRange::BYTES] {
        let mut bytes = [0; RemoteRange::BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    /// Decodes a range from a peer. Its end does not overflow; the device checks everything else.
    pub fn decode(bytes: &[u8]) -> Result<RemoteRange, AddressError> {
        let bytes: &[u8; RemoteRange::BYTES] = bytes.try_into().map_err(|_| AddressError)?;
        let address = u64_at(bytes, 0);
        let len = u64_at(bytes, 8);
        address.checked_add(len).ok_or(AddressError)?;
        Ok(RemoteRange { address, len, key: u32_at(bytes, 16) })
    }
}

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
        fn encoded_addresses_decode_to_themselves(address in address()) {
            prop_assert_eq!(EndpointAddress::decode(&address.encode()), Ok(address));
        }

        #[test]
        fn encoded_ranges_decode_to_themselves(address in any::<u64>(), len in any::<u64>(), key in any::<u32>()) {
            let range = RemoteRange { address, len, key };
            let expected = address.checked_add(len).map(|_| range).ok_or(AddressError);
            prop_assert_eq!(RemoteRange::decode(&range.encode()), expected);
        }

        #[test]
        fn decoders_survive_arbitrary_bytes(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..48),
            like in any::<bool>(),
            address in address(),
        ) {
            if like && bytes.len() >= 32 {
                // Near misses: a valid address with one byte of noise.
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
        fn part_lies_inside_the_range(len in 0..100u64, offset in 0..120u64, part in 0..120u64) {
            let whole = RemoteRange { address: 1000, len, key: 7 };
            match whole.part(offset, part) {
                Some(inside) => prop_assert!(inside.address == 1000 + offset && inside.len == part && offset + part <= len),
                None => prop_assert!(offset + part > len),
            }
        }
    }

    #[test]
    fn part_does_not_wrap_around() {
        assert_eq!(RemoteRange { address: 0, len: 8, key: 0 }.part(u64::MAX, 2), None);
    }
}
