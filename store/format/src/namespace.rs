//! Namespaces: which model's pages may be shared, and the layout of a page of that model.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::page::{MAX_PAGE_BYTES, MAX_PARTS};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;

/// The element type of stored keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    fn code(self) -> u8 {
        match self {
            KvDtype::F32 => 1,
            KvDtype::F16 => 2,
            KvDtype::Bf16 => 3,
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        match code {
            1 => Ok(KvDtype::F32),
            2 => Ok(KvDtype::F16),
            3 => Ok(KvDtype::Bf16),
            _ => Err(DecodeError::Invalid("dtype")),
        }
    }
}

/// The shape of a page: KV of `page_tokens` tokens in all layers, cut into parts.
///
/// Part `i` holds the layers `[g·layers_per_part, …)` of KV-head group `h`, where `i = g·head_groups + h`. Inside a part,
/// layer by layer, first K then V, each `[page_tokens][heads of the group][head_dim]` in little-endian `dtype`. Parts
/// follow each other without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PageGeometry {
    /// Element type.
    pub dtype: KvDtype,
    /// Transformer layers.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Layers per part; the last part of a head group may hold fewer.
    pub layers_per_part: u32,
    /// KV-head groups; divides `kv_heads`.
    pub head_groups: u32,
}

/// Version of the payload layout described at [`PageGeometry`]; part of the namespace id.
pub const LAYOUT_VERSION: u32 = 1;

/// Most tokens in a page.
pub const MAX_PAGE_TOKENS: u32 = 4096;

impl PageGeometry {
    /// Checks that every number is in range and that a page stays within [`MAX_PAGE_BYTES`] and [`MAX_PARTS`].
    pub fn validate(&self) -> Result<()> {
        let in_range = |value: u32, max: u32, what| match value {
            0 => Err(DecodeError::Invalid(what)),
            v if v > max => Err(DecodeError::TooLarge { what, value: u64::from(v), max: u64::from(max) }),
            _ => Ok(()),
        };
        in_range(self.layers, 1024, "layers")?;
        in_range(self.kv_heads, 1024, "kv_heads")?;
        in_range(self.head_dim, 4096, "head_dim")?;
        in_range(self.page_tokens, MAX_PAGE_TOKENS, "page_tokens")?;
        in_range(self.layers_per_part, self.layers, "layers_per_part")?;
        in_range(self.head_groups, self.kv_heads, "head_groups")?;
        if !self.kv_heads.is_multiple_of(self.head_groups) {
            return Err(DecodeError::Invalid("head_groups"));
        }
        let bytes = self.token_bytes() as u64 * u64::from(self.page_tokens);
        if bytes > MAX_PAGE_BYTES as u64 {
            return Err(DecodeError::TooLarge { what: "page bytes", value: bytes, max: MAX_PAGE_BYTES as u64 });
        }
        if self.part_count() > MAX_PARTS {
            return Err(DecodeError::TooLarge {
                what: "parts",
                value: self.part_count() as u64,
                max: MAX_PARTS as u64,
            });
        }
        Ok(())
    }

    /// Bytes of K and V of one token in all layers.
    pub fn token_bytes(&self) -> usize {
        2 * self.layers as usize * self.kv_heads as usize * self.head_dim as usize * self.dtype.bytes()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.token_bytes() * self.page_tokens as usize
    }

    /// Layer groups.
    pub fn layer_groups(&self) -> usize {
        self.layers.div_ceil(self.layers_per_part) as usize
    }

    /// Parts of a page.
    pub fn part_count(&self) -> usize {
        self.layer_groups() * self.head_groups as usize
    }

    /// Layers in part `part`.
    pub fn part_layers(&self, part: usize) -> Range<usize> {
        let per = self.layers_per_part as usize;
        let group = part / self.head_groups as usize;
        group * per..((group + 1) * per).min(self.layers as usize)
    }

    /// KV heads in part `part`.
    pub fn part_heads(&self, part: usize) -> Range<usize> {
        let per = (self.kv_heads / self.head_groups) as usize;
        let group = part % self.head_groups as usize;
        group * per..(group + 1) * per
    }

    /// Bytes of part `part`.
    pub fn part_bytes(&self, part: usize) -> usize {
        2 * self.part_layers(part).len()
            * self.part_heads(part).len()
            * self.page_tokens as usize
            * self.head_dim as usize
            * self.dtype.bytes()
    }

    /// Where part `part` lies in a page; `None` if there is no such part.
    pub fn part_range(&self, part: usize) -> Option<Range<u32>> {
        if part >= self.part_count() {
            return None;
        }
        let start: usize = (0..part).map(|before| self.part_bytes(before)).sum();
        Some(start as u32..(start + self.part_bytes(part)) as u32)
    }

    /// Bytes of every part, in order.
    pub fn part_table(&self) -> Vec<u32> {
        (0..self.part_count()).map(|part| self.part_bytes(part) as u32).collect()
    }
}

/// What two engines must agree on to share pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDescriptor {
    /// A name for people; not part of the identity.
    pub model: String,
    /// SHA-256 over the weights as they are computed with.
    pub weights: [u8; 32],
    /// Shape of a page.
    pub geometry: PageGeometry,
    /// The tenant whose pages these are; the node overrides it with the authenticated one.
    pub tenant: String,
}

/// Most bytes of a model or tenant name.
pub const MAX_NAME_BYTES: usize = 256;

impl NamespaceDescriptor {
    /// The namespace's identity: SHA-256 over everything but the name for people.
    pub fn id(&self) -> NamespaceId {
        let mut bytes = b"larder-namespace".to_vec();
        bytes.put_u32(LAYOUT_VERSION);
        bytes.put(&self.weights);
        put_geometry(&mut bytes, &self.geometry);
        bytes.put_string(&self.tenant);
        NamespaceId(Sha256::digest(&bytes).into())
    }

    /// Appends the wire form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_string(&self.model);
        out.put(&self.weights);
        put_geometry(out, &self.geometry);
        out.put_string(&self.tenant);
    }

    /// Reads the wire form and validates it.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let model = reader.string(MAX_NAME_BYTES, "model name")?;
        let weights = reader.array("weights fingerprint")?;
        let geometry = PageGeometry {
            dtype: KvDtype::from_code(reader.u8("dtype")?)?,
            layers: reader.u32("layers")?,
            kv_heads: reader.u32("kv_heads")?,
            head_dim: reader.u32("head_dim")?,
            page_tokens: reader.u32("page_tokens")?,
            layers_per_part: reader.u32("layers_per_part")?,
            head_groups: reader.u32("head_groups")?,
        };
        geometry.validate()?;
        let tenant = reader.string(MAX_NAME_BYTES, "tenant")?;
        Ok(Self { model, weights, geometry, tenant })
    }
}

fn put_geometry(out: &mut Vec<u8>, geometry: &PageGeometry) {
    out.put_u8(geometry.dtype.code());
    for value in [
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.page_tokens,
        geometry.layers_per_part,
        geometry.head_groups,
    ] {
        out.put_u32(value);
    }
}

/// Identity of a namespace. Two namespaces never hit each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamespaceId(pub [u8; 32]);

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamespaceId({})", hex::encode(&self.0[..8]))
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> NamespaceDescriptor {
        NamespaceDescriptor {
            model: "m".into(),
            weights: [7; 32],
            geometry: PageGeometry {
                dtype: KvDtype::F32,
                layers: 5,
                kv_heads: 4,
                head_dim: 8,
                page_tokens: 16,
                layers_per_part: 2,
                head_groups: 2,
            },
            tenant: "t".into(),
        }
    }

    #[test]
    fn parts_tile_the_page() {
        let g = descriptor().geometry;
        assert_eq!(g.part_count(), 6);
        assert_eq!(g.part_layers(5), 4..5);
        assert_eq!(g.part_heads(5), 2..4);
        assert_eq!(g.part_table().iter().map(|&b| b as usize).sum::<usize>(), g.page_bytes());
    }

    #[test]
    fn identity_ignores_the_label_and_nothing_else() {
        let base = descriptor();
        let mut renamed = base.clone();
        renamed.model = "other".into();
        assert_eq!(base.id(), renamed.id());
        let mut tenant = base.clone();
        tenant.tenant = "u".into();
        let mut weights = base.clone();
        weights.weights[31] ^= 1;
        let mut geometry = base.clone();
        geometry.geometry.page_tokens = 32;
        for other in [tenant, weights, geometry] {
            assert_ne!(base.id(), other.id());
        }
    }

    #[test]
    fn wire_form_round_trips_and_refuses_nonsense() {
        let base = descriptor();
        let mut bytes = Vec::new();
        base.encode(&mut bytes);
        let mut reader = Reader::new(&bytes);
        assert_eq!(NamespaceDescriptor::decode(&mut reader).unwrap(), base);
        let mut wrong = base;
        wrong.geometry.head_groups = 3;
        let mut bytes = Vec::new();
        wrong.encode(&mut bytes);
        assert!(NamespaceDescriptor::decode(&mut Reader::new(&bytes)).is_err());
    }
}
