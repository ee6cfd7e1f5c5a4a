//! Keys and values in 8 bits with a scale per head, and a lossless split of bf16 into byte planes.
//!
//! A reference for the device kernels: plain loops on the calling thread.

/// 8-bit format of quantised keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EightBit {
    /// Floats with 4 exponent bits and 3 mantissa bits, without infinities
    /// (<https://arxiv.org/abs/2209.05433>).
    E4m3,
    /// Integers from −127 to 127, two's complement.
    Int8,
}

impl EightBit {
    /// Largest number of the format.
    pub fn largest(self) -> f32 {
        match self {
            EightBit::E4m3 => 448.0,
            EightBit::Int8 => 127.0,
        }
    }

    /// Rounds to the nearest number of the format, ties to even. A larger number becomes the
    /// largest. NaN stays NaN in [`E4m3`](Self::E4m3), and becomes 0 in [`Int8`](Self::Int8).
    pub fn encode(self, x: f32) -> u8 {
        match self {
            EightBit::E4m3 => encode_e4m3(x),
            // The cast turns NaN into 0.
            EightBit::Int8 => x.clamp(-127.0, 127.0).round_ties_even() as i8 as u8,
        }
    }

    pub fn decode(self, code: u8) -> f32 {
        match self {
            EightBit::E4m3 => decode_e4m3(code),
            EightBit::Int8 => f32::from(code as i8),
        }
    }

    /// Encodes one head: each value divided by the scale. Returns the scale, which is the largest
    /// finite magnitude divided by [`largest`](Self::largest).
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn encode_head(self, values: &[f32], codes: &mut [u8]) -> f32 {
        assert_eq!(values.len(), codes.len(), "one code per value");
        let magnitudes = values.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let scale = magnitudes.fold(0.0, f32::max) / self.largest();
        for (code, &x) in codes.iter_mut().zip(values) {
            let scaled = if scale > 0.0 { x / scale } else { x };
            *code = if scale == 0.0 && x.is_finite() { 0 } else { self.encode(scaled) };
        }
        scale
    }

    /// Decodes one head: each number times `scale`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn decode_head(self, codes: &[u8], scale: f32, out: &mut [f32]) {
        assert_eq!(out.len(), codes.len(), "one code per value");
        for (x, &code) in out.iter_mut().zip(codes) {
            *x = self.decode(code) * scale;
        }
    }
}

const E4M3_NAN: u8 = 0x7F;
const E4M3_LARGEST: u8 = 0x7E;
/// Exponent of the smallest normal number. Smaller numbers have its unit.
const E4M3_LOWEST_EXPONENT: i32 = -6;
const E4M3_MANTISSA_BITS: i32 = 3;

fn encode_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | E4M3_NAN;
    }
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32 - 127).max(E4M3_LOWEST_EXPONENT);
    let unit = 2f32.powi(exponent - E4M3_MANTISSA_BITS);
    // From 8 to 16 units for a normal number. 16 are 8 of the next exponent, as the sum makes them.
    let units = (x.abs() / unit).round_ties_even();
    let code = ((exponent - E4M3_LOWEST_EXPONENT) as f32).mul_add(8.0, units);
    sign | if code < f32::from(E4M3_LARGEST) { code as u8 } else { E4M3_LARGEST }
}

fn decode_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match code & 0x7F {
        E4M3_NAN => f32::NAN,
        0..8 => mantissa * 2f32.powi(E4M3_LOWEST_EXPONENT - E4M3_MANTISSA_BITS),
        _ => (mantissa + 8.0) * 2f32.powi(exponent - 1 + E4M3_LOWEST_EXPONENT - E4M3_MANTISSA_BITS),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Splits the bits of bf16 into two planes without loss. The first plane holds the 8 exponent bits
/// of each element, the second its sign and its 7 mantissa bits. Exponents of neighbours are alike,
/// so the first plane compresses well.
///
/// # Panics
/// If `planes` has not twice as many bytes as `elements` has elements.
pub fn split_planes(elements: &[u16], planes: &mut [u8]) {
    assert_eq!(planes.len(), 2 * elements.len(), "two bytes per element");
    let (exponents, rests) = planes.split_at_mut(elements.len());
    for ((exponent, rest), &bits) in exponents.iter_mut().zip(rests).zip(elements) {
        *exponent = (bits >> 7) as u8;
        *rest = (bits >> 8 & 0x80 | bits & 0x7F) as u8;
    }
}

/// Reverses [`split_planes`].
///
/// # Panics
/// If `planes` has not twice as many bytes as `elements` has elements.
pub fn merge_planes(planes: &[u8], elements: &mut [u16]) {
    assert_eq!(planes.len(), 2 * elements.len(), "two bytes per element");
    let (exponents, rests) = planes.split_at(elements.len());
    for ((bits, &exponent), &rest) in elements.iter_mut().zip(exponents).zip(rests) {
        let rest = u16::from(rest);
        *bits = (rest & 0x80) << 8 | u16::from(exponent) << 7 | rest & 0x7F;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_has_the_numbers_of_its_definition() {
        let decode = |code| EightBit::E4m3.decode(code);
        assert_eq!([0x01, 0x07, 0x08, 0x38, 0x7E].map(decode), [2f32.powi(-9), 7.0 / 512.0, 1.0 / 64.0, 1.0, 448.0]);
        assert_eq!(decode(0xBC), -1.5);
        assert!(decode(0x7F).is_nan() && decode(0xFF).is_nan());
    }

    #[test]
    fn every_number_survives_and_others_go_to_the_nearest() {
        for code in 0..=u8::MAX {
            let x = EightBit::E4m3.decode(code);
            assert!(x.is_nan() || EightBit::E4m3.encode(x) == code, "{code:#x}");
            let y = EightBit::Int8.decode(code);
            assert!(y == -128.0 || EightBit::Int8.encode(y) == code, "{code:#x}");
        }
        for code in 0..0x7Eu8 {
            let (a, b) = (EightBit::E4m3.decode(code), EightBit::E4m3.decode(code + 1));
            let middle = (a + b) / 2.0;
            assert_eq!(EightBit::E4m3.encode(middle), code + (code & 1), "{middle}");
            assert_eq!(EightBit::E4m3.encode(middle.next_down()), code);
            assert_eq!(EightBit::E4m3.encode(-middle.next_up()), 0x80 | (code + 1));
        }
        assert_eq!(EightBit::E4m3.encode(f32::INFINITY), 0x7E);
        assert_eq!(EightBit::Int8.encode(f32::NEG_INFINITY), -127i8 as u8);
        assert_eq!((EightBit::Int8.encode(f32::NAN), EightBit::Int8.encode(2.5)), (0, 2));
    }

    #[test]
    fn head_keeps_its_largest_value_and_errs_by_half_a_step() {
        let values: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        for format in [EightBit::E4m3, EightBit::Int8] {
            let (mut codes, mut back) = (vec![0; 100], vec![0.0; 100]);
            let scale = format.encode_head(&values, &mut codes);
            format.decode_head(&codes, scale, &mut back);
            let worst = values.iter().zip(&back).map(|(a, b)| (a - b).abs() / scale).fold(0.0, f32::max);
            // The unit of e4m3 is 32 at its upper end.
            assert!(worst <= if format == EightBit::E4m3 { 16.01 } else { 0.5001 }, "{format:?}: {worst}");
            let largest = values.iter().map(|x| x.abs()).fold(0.0, f32::max);
            let found = back.iter().map(|x| x.abs()).fold(0.0, f32::max);
            assert!((found - largest).abs() < 1e-6 * largest);
        }
        let mut codes = [9; 3];
        assert_eq!(EightBit::E4m3.encode_head(&[0.0, -0.0, 0.0], &mut codes), 0.0);
        assert_eq!(codes, [0; 3]);
    }

    #[test]
    fn planes_restore_every_element() {
        let elements: Vec<u16> = (0..=u16::MAX).collect();
        let (mut planes, mut back) = (vec![0; 2 << 16], vec![0; 1 << 16]);
        split_planes(&elements, &mut planes);
        merge_planes(&planes, &mut back);
        assert_eq!(back, elements);
        // -1.5 in bf16: sign 1, exponent 127, mantissa 0x40.
        split_planes(&[0xBFC0], &mut planes[..2]);
        assert_eq!(planes[..2], [127, 0xC0]);
    }
}
