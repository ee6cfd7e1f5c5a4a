//! Element types of keys and values in pages.
//!
//! The conversions to `f32` and to `bf16` have no branches, so that the compiler vectorises loops
//! over them. Rounding to `f16` asks for the processor's instructions each time.

use super::vector::Vector;
use half::{bf16, f16};

/// Element of a page of keys and values. Sums are `f32` whatever the element.
pub trait KvElement: bytemuck::Pod + Send + Sync {
    fn to_f32(self) -> f32;
    /// Rounds to the nearest element, and to the even one of two. A value beyond the largest
    /// element becomes infinite.
    fn from_f32(value: f32) -> Self;
    fn is_finite(self) -> bool;
    /// Converts the next elements to a vector.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`, and `from` is readable for its lanes.
    #[doc(hidden)]
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

impl KvElement for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller guarantees the instruction set and the elements.
        unsafe { V::load_f32(from) }
    }
}

impl KvElement for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        // Rounding could turn a NaN into an infinity.
        let bits = if value.is_nan() { bits >> 16 | 0x40 } else { rounded };
        bf16::from_bits(bits as u16)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.to_bits() & 0x7F80 != 0x7F80
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const bf16) -> V {
        // SAFETY: the caller guarantees the instruction set and the elements.
        unsafe { V::load_bf16(from) }
    }
}

impl KvElement for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        /// 2¹¹², the difference of the exponents' biases.
        const REBIAS: f32 = f32::from_bits(239 << 23);
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7FFF) << 13;
        // The product also normalises subnormal numbers, without rounding.
        let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
        let magnitude = if self.is_finite() { finite } else { magnitude | 0x7F80_0000 };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> f16 {
        f16::from_f32(value)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.to_bits() & 0x7C00 != 0x7C00
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f16) -> V {
        // SAFETY: the caller guarantees the instruction set and the elements.
        unsafe { V::load_f16(from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_the_crate_half_for_every_element() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert_eq!(KvElement::to_f32(a).is_nan(), a.is_nan());
            assert!(a.is_nan() || KvElement::to_f32(a).to_bits() == a.to_f32().to_bits(), "{bits:x}");
            assert_eq!(KvElement::to_f32(b).is_nan(), b.is_nan());
            assert!(b.is_nan() || KvElement::to_f32(b).to_bits() == b.to_f32().to_bits(), "{bits:x}");
            assert_eq!((KvElement::is_finite(a), KvElement::is_finite(b)), (a.is_finite(), b.is_finite()));
            // Around every bf16: the value itself, the halfway point and its neighbours.
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(bits) << 16 | low);
                let found = <bf16 as KvElement>::from_f32(value);
                let same = found.to_bits() == bf16::from_f32(value).to_bits();
                assert!(same || (value.is_nan() && found.is_nan()), "{value:e}");
            }
        }
    }
}
