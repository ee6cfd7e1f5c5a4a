//! Fields by which namespaces differ.

use crate::codec::{DecodeError, Result};
use crate::namespace::NamespaceDescriptor;
use std::ops::BitOr;

/// Set of fields of a [`NamespaceDescriptor`]. Namespaces that differ in one of them share no
/// pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NamespaceFields(u8);

impl NamespaceFields {
    /// The fingerprint of weights, weights version and numerics.
    pub const WEIGHTS: NamespaceFields = NamespaceFields(1);
    /// The element type.
    pub const DTYPE: NamespaceFields = NamespaceFields(1 << 1);
    /// Number of layers and KV heads, and the head dimension.
    pub const SHAPE: NamespaceFields = NamespaceFields(1 << 2);
    /// Number of tokens per page.
    pub const PAGE_TOKENS: NamespaceFields = NamespaceFields(1 << 3);
    /// Layers per part, and the number of head groups.
    pub const LAYOUT: NamespaceFields = NamespaceFields(1 << 4);
    pub const TENANT: NamespaceFields = NamespaceFields(1 << 5);

    const NAMED: [(NamespaceFields, &'static str); 6] = [
        (Self::WEIGHTS, "weights"),
        (Self::DTYPE, "dtype"),
        (Self::SHAPE, "shape"),
        (Self::PAGE_TOKENS, "page tokens"),
        (Self::LAYOUT, "layout"),
        (Self::TENANT, "tenant"),
    ];

    /// Fields in which two descriptors differ. Empty exactly if they are of one namespace.
    pub fn differing(a: &NamespaceDescriptor, b: &NamespaceDescriptor) -> NamespaceFields {
        let (x, y) = (&a.geometry, &b.geometry);
        let shape = (x.layers, x.kv_heads, x.head_dim) != (y.layers, y.kv_heads, y.head_dim);
        let layout = (x.layers_per_part, x.head_groups) != (y.layers_per_part, y.head_groups);
        let fields = [
            (Self::WEIGHTS, a.weights != b.weights),
            (Self::DTYPE, x.dtype != y.dtype),
            (Self::SHAPE, shape),
            (Self::PAGE_TOKENS, x.page_tokens != y.page_tokens),
            (Self::LAYOUT, layout),
            (Self::TENANT, a.tenant != b.tenant),
        ];
        let differing = fields.into_iter().filter(|(_, differs)| *differs);
        differing.fold(NamespaceFields::default(), |set, (field, _)| set | field)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of fields in the set.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Names of the fields, for people.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMED.into_iter().filter(move |(field, _)| self.0 & field.0 != 0).map(|(_, name)| name)
    }

    /// Encoding of the set: a bit per field.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Decodes [`NamespaceFields::bits`]. Refuses undefined bits.
    pub fn from_bits(bits: u8) -> Result<NamespaceFields> {
        let defined = Self::NAMED.into_iter().fold(0, |defined, (field, _)| defined | field.0);
        if bits & !defined == 0 { Ok(NamespaceFields(bits)) } else { Err(DecodeError::Invalid("namespace fields")) }
    }
}

impl BitOr for NamespaceFields {
    type Output = NamespaceFields;

    fn bitor(self, other: NamespaceFields) -> NamespaceFields {
        NamespaceFields(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::{KvDtype, PageGeometry};

    fn descriptor() -> NamespaceDescriptor {
        let geometry = PageGeometry {
            dtype: KvDtype::Bf16,
            layers: 4,
            kv_heads: 2,
            head_dim: 8,
            page_tokens: 16,
            layers_per_part: 4,
            head_groups: 1,
        };
        NamespaceDescriptor { model: "m".into(), weights: [7; 32], geometry, tenant: "t".into() }
    }

    #[test]
    fn each_field_of_the_identity_has_a_name() {
        let base = descriptor();
        type Change = fn(&mut NamespaceDescriptor);
        let changes: [(&str, Change); 9] = [
            ("weights", |d| d.weights[3] = 1),
            ("dtype", |d| d.geometry.dtype = KvDtype::F16),
            ("shape", |d| d.geometry.layers = 5),
            ("shape", |d| d.geometry.kv_heads = 4),
            ("shape", |d| d.geometry.head_dim = 9),
            ("page tokens", |d| d.geometry.page_tokens = 32),
            ("layout", |d| d.geometry.layers_per_part = 2),
            ("layout", |d| d.geometry.head_groups = 2),
            ("tenant", |d| d.tenant = "u".into()),
        ];
        let mut all = base.clone();
        for (name, change) in changes {
            let mut other = base.clone();
            change(&mut other);
            change(&mut all);
            let fields = NamespaceFields::differing(&base, &other);
            assert_eq!(fields.names().collect::<Vec<_>>(), [name]);
            assert!(fields.count() == 1 && base.id() != other.id());
        }
        let fields = NamespaceFields::differing(&base, &all);
        assert_eq!((fields.count(), NamespaceFields::from_bits(fields.bits())), (6, Ok(fields)));
        assert!(NamespaceFields::from_bits(1 << 6).is_err());
        let renamed = NamespaceDescriptor { model: "n".into(), ..base.clone() };
        assert!(NamespaceFields::differing(&base, &renamed).is_empty() && base.id() == renamed.id());
    }
}
