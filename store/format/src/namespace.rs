//! Namespaces: the model whose pages may be shared, and the layout of its pages.

use crate::codec::{DecodeError, Put, Reader, Result};
use crate::limits::{MAX_PAGE_BYTES, MAX_PARTS};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Element type of stored keys and values. It is part of the namespace id, so engines with
/// different types share no pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    Bf16,
    /// Bytes whose meaning only the engine knows. See [`PageGeometry::opaque`].
    Opaque,
}

impl KvDtype {
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::Opaque => 1,
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    fn code(self) -> u8 {
        match self {
            KvDtype::F32 => 1,
            KvDtype::F16 => 2,
            KvDtype::Bf16 => 3,
            KvDtype::Opaque => 4,
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        match code {
            1 => Ok(KvDtype::F32),
            2 => Ok(KvDtype::F16),
            3 => Ok(KvDtype::Bf16),
            4 => Ok(KvDtype::Opaque),
            _ => Err(DecodeError::Invalid("dtype")),
        }
    }
}

/// Shape of a page: the KV entries of `page_tokens` tokens in all layers, cut into parts.
///
/// Part `i` holds the layers `[g·layers_per_part, …)` of KV-head group `h`, where `i =
/// g·head_groups + h`. Inside a part the layers follow each other, first K then V, each
/// `[page_tokens][heads of the group][head_dim]` in little-endian `dtype`. Parts follow each other
/// without gaps.
///
/// A page of a foreign engine is opaque instead: see [`PageGeometry::opaque`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PageGeometry {
    pub dtype: KvDtype,
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Number of tokens per page, at most [`MAX_PAGE_TOKENS`].
    pub page_tokens: u32,
    /// Layers per part. The last part of a head group may hold fewer.
    pub layers_per_part: u32,
    /// Number of KV-head groups. It divides `kv_heads`.
    pub head_groups: u32,
}

/// Version of the payload layout that [`PageGeometry`] describes. It is part of the namespace id,
/// so layouts never mix.
pub const LAYOUT_VERSION: u32 = 1;

/// Maximum number of tokens in a page. It bounds the tokens that a client hashes for one key.
pub const MAX_PAGE_TOKENS: u32 = 4096;

impl PageGeometry {
    /// Shape of a page whose layout only the engine knows: `parts` parts of `part_bytes` bytes
    /// each, one after the other. Whatever distinguishes the layouts of two engines belongs to
    /// [`NamespaceDescriptor::weights`].
    pub fn opaque(part_bytes: u32, parts: u32) -> PageGeometry {
        PageGeometry {
            dtype: KvDtype::Opaque,
            layers: parts,
            kv_heads: 1,
            head_dim: part_bytes,
            page_tokens: 1,
            layers_per_part: 1,
            head_groups: 1,
        }
    }

    /// Tensors of a layer: keys and values, or the bytes of an opaque page.
    fn tensors(&self) -> usize {
        if self.dtype == KvDtype::Opaque { 1 } else { 2 }
    }

    /// Checks that every field is in range and that a page stays within [`MAX_PAGE_BYTES`] and
    /// [`MAX_PARTS`].
    pub fn validate(&self) -> Result<()> {
        let in_range = |value: u32, max: u32, what| match value {
            0 => Err(DecodeError::Invalid(what)),
            v if v > max => Err(DecodeError::TooLarge { what, value: u64::from(v), max: u64::from(max) }),
            _ => Ok(()),
        };
        in_range(self.layers, 1024, "layers")?;
        in_range(self.kv_heads, 1024, "kv_heads")?;
        let head_dim_max = if self.dtype == KvDtype::Opaque { MAX_PAGE_BYTES as u32 } else { 4096 };
        in_range(self.head_dim, head_dim_max, "head_dim")?;
        in_range(self.page_tokens, MAX_PAGE_TOKENS, "page_tokens")?;
        in_range(self.layers_per_part, self.layers, "layers_per_part")?;
        in_range(self.head_groups, self.kv_heads, "head_groups")?;
        if !self.kv_heads.is_multiple_of(self.head_groups) {
            return Err(DecodeError::Invalid("head_groups"));
        }
        // One descriptor per shape: a second one would be another namespace.
        if self.dtype == KvDtype::Opaque && *self != Self::opaque(self.head_dim, self.layers) {
            return Err(DecodeError::Invalid("opaque page"));
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

    pub fn token_bytes(&self) -> usize {
        self.tensors() * self.layers as usize * self.kv_heads as usize * self.head_dim as usize * self.dtype.bytes()
    }

    /// Length of a page in bytes. At most [`MAX_PAGE_BYTES`] if [`validate`](Self::validate)
    /// accepts the shape.
    pub fn page_bytes(&self) -> usize {
        self.token_bytes() * self.page_tokens as usize
    }

    pub fn layer_groups(&self) -> usize {
        self.layers.div_ceil(self.layers_per_part) as usize
    }

    pub fn part_count(&self) -> usize {
        self.layer_groups() * self.head_groups as usize
    }

    pub fn part_layers(&self, part: usize) -> Range<usize> {
        let per = self.layers_per_part as usize;
        let group = part / self.head_groups as usize;
        group * per..((group + 1) * per).min(self.layers as usize)
    }

    pub fn part_heads(&self, part: usize) -> Range<usize> {
        let per = (self.kv_heads / self.head_groups) as usize;
        let group = part % self.head_groups as usize;
        group * per..(group + 1) * per
    }

    pub fn part_bytes(&self, part: usize) -> usize {
        self.tensors()
            * self.part_layers(part).len()
            * self.part_heads(part).len()
            * self.page_tokens as usize
            * self.head_dim as usize
            * self.dtype.bytes()
    }

    /// Range of part `part` in the page, in bytes. `None` if there is no such part. Costs a pass
    /// over the earlier parts.
    pub fn part_range(&self, part: usize) -> Option<Range<u32>> {
        if part >= self.part_count() {
            return None;
        }
        let start: usize = (0..part).map(|before| self.part_bytes(before)).sum();
        Some(start as u32..(start + self.part_bytes(part)) as u32)
    }

    /// Length of every part in bytes, in order.
    pub fn part_table(&self) -> Vec<u32> {
        (0..self.part_count()).map(|part| self.part_bytes(part) as u32).collect()
    }
}

/// The properties that two engines must share in order to share pages. All but the model name enter
/// the namespace id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDescriptor {
    /// Model name for people. It is not part of the identity.
    pub model: String,
    /// SHA-256 of the weights in the form that the engine computes with, and of the engine's
    /// numerics. Engines that round differently thus share no pages.
    pub weights: [u8; 32],
    pub geometry: PageGeometry,
    /// Tenant that owns the pages. The node replaces it with the authenticated tenant, so a client
    /// cannot read another tenant's pages by stating its name.
    pub tenant: String,
}

pub const MAX_NAME_BYTES: usize = 256;

impl NamespaceDescriptor {
    /// Identity of the namespace: SHA-256 of all fields except the model name. The hash also covers
    /// [`LAYOUT_VERSION`].
    pub fn id(&self) -> NamespaceId {
        let mut bytes = b"larder-namespace".to_vec();
        bytes.put_u32(LAYOUT_VERSION);
        bytes.put(&self.weights);
        put_geometry(&mut bytes, &self.geometry);
        bytes.put_string(&self.tenant);
        NamespaceId(Sha256::digest(&bytes).into())
    }

    /// The namespace of a version of these weights, for engines that change weights in place, as
    /// reinforcement learning does. The version enters the fingerprint, so versions share no pages.
    /// It also stands behind the model name, for people. An empty version changes nothing.
    #[must_use]
    pub fn with_weights_version(self, version: &str) -> Self {
        if version.is_empty() {
            return self;
        }
        let hash = Sha256::new_with_prefix(b"larder-weights-version");
        let weights = hash.chain_update(self.weights).chain_update(version).finalize().into();
        NamespaceDescriptor { model: format!("{}@{version}", self.model), weights, ..self }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_string(&self.model);
        out.put(&self.weights);
        put_geometry(out, &self.geometry);
        out.put_string(&self.tenant);
    }

    /// Decodes the wire encoding and validates the geometry. Both names are at most
    /// [`MAX_NAME_BYTES`] long.
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

/// Identity of a namespace. A page of one namespace is never a hit in another, because every lookup
/// uses the namespace together with the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamespaceId(pub [u8; 32]);

/// Error of a text that is not the 64 hexadecimal digits of a [`NamespaceId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a namespace is 64 hexadecimal digits")]
pub struct NotANamespace;

impl FromStr for NamespaceId {
    type Err = NotANamespace;

    fn from_str(text: &str) -> std::result::Result<NamespaceId, NotANamespace> {
        let mut id = [0; 32];
        hex::decode_to_slice(text, &mut id).map_err(|_| NotANamespace)?;
        Ok(NamespaceId(id))
    }
}

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
    fn identity_ignores_only_the_model_name() {
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
    fn weights_version_is_part_of_the_identity() {
        let versions = ["", "step-1", "step-2"].map(|version| descriptor().with_weights_version(version));
        assert_eq!(versions[0], descriptor());
        assert_eq!((versions[1].model.as_str(), versions[2].model.as_str()), ("m@step-1", "m@step-2"));
        assert!(versions[0].id() != versions[1].id() && versions[1].id() != versions[2].id());
        assert_eq!(versions[1].id(), descriptor().with_weights_version("step-1").id());
    }

    #[test]
    fn namespace_is_parsed_as_it_is_printed() {
        let id = descriptor().id();
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in [&id.to_string()[1..], "", "zz"] {
            assert_eq!(wrong.parse::<NamespaceId>(), Err(NotANamespace));
        }
    }

    #[test]
    fn opaque_page_has_any_length_up_to_the_limit() {
        for (part_bytes, parts) in [(1, 1), (4097, 2), (7919, 13), (MAX_PAGE_BYTES as u32, 1), (131_072, 128)] {
            let geometry = PageGeometry::opaque(part_bytes, parts);
            geometry.validate().unwrap();
            assert_eq!(geometry.part_table(), vec![part_bytes; parts as usize]);
            assert_eq!(geometry.page_bytes(), part_bytes as usize * parts as usize);
        }
        for (part_bytes, parts) in [(0, 1), (1, 0), (MAX_PAGE_BYTES as u32 + 1, 1), (131_073, 128), (1, 129)] {
            assert!(PageGeometry::opaque(part_bytes, parts).validate().is_err(), "{part_bytes} × {parts}");
        }
        let second_name = PageGeometry { page_tokens: 2, ..PageGeometry::opaque(8, 1) };
        assert_eq!(second_name.validate(), Err(DecodeError::Invalid("opaque page")));
    }

    #[test]
    fn descriptor_round_trips_and_invalid_geometry_is_refused() {
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
