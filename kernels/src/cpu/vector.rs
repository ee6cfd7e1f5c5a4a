//! Vectors of `f32`, for each instruction set, and the choice of the set at run time.
//!
//! Invariant: every set gives the same bits. Each lane computes what [`f32::mul_add`] and the
//! conversions of the crate `half` compute.

use half::{bf16, f16};

/// Instruction sets that the kernels of this module are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler makes of plain Rust: NEON on aarch64.
    Portable,
}

impl InstructionSet {
    /// The sets that this machine has, fastest first.
    pub(super) fn available() -> impl Iterator<Item = InstructionSet> {
        let sets = [
            #[cfg(target_arch = "x86_64")]
            is_x86_feature_detected!("avx512f").then_some(InstructionSet::Avx512),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
                .then_some(InstructionSet::Avx2),
            Some(InstructionSet::Portable),
        ];
        sets.into_iter().flatten()
    }

    pub(super) fn best() -> InstructionSet {
        // The standard library caches the detection, so a call costs a few loads.
        Self::available().next().unwrap_or(InstructionSet::Portable)
    }

    /// Lanes of a vector of this set.
    pub(super) fn lanes(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => x86::Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => x86::Avx2::LANES,
            InstructionSet::Portable => Portable::LANES,
        }
    }

    /// Runs `kernel`, compiled for this set.
    ///
    /// # Safety
    /// This machine must have the set, and the contract of the kernel must hold.
    #[inline]
    pub(super) unsafe fn run<K: Kernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f")]
        unsafe fn avx512<K: Kernel>(kernel: K) {
            // SAFETY: the caller guarantees the instruction set and the contract of the kernel.
            unsafe { kernel.run::<x86::Avx512>() }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<K: Kernel>(kernel: K) {
            // SAFETY: the caller guarantees the instruction set and the contract of the kernel.
            unsafe { kernel.run::<x86::Avx2>() }
        }
        // SAFETY: the caller guarantees that the machine has the set, and the contract of the
        // kernel.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => avx2(kernel),
                InstructionSet::Portable => kernel.run::<Portable>(),
            }
        }
    }
}

/// Returns `true` if this machine multiplies and adds pairs of bf16 (AVX-512-BF16).
pub(super) fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

/// Returns `true` if this machine multiplies and adds four bytes at once (AVX-512-VNNI).
pub(super) fn multiplies_bytes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

/// Code that is generic over the vectors. Implementations mark `run` as `inline(always)`, because
/// only code inside the functions of [`InstructionSet::run`] may use their instructions.
pub(super) trait Kernel {
    /// # Safety
    /// The machine must have the instruction set of `V`. Implementations may demand more.
    unsafe fn run<V: Vector>(self);
}

/// A vector of `LANES` values.
///
/// # Safety
/// Every method needs the instruction set of the implementation. A load reads `LANES` elements, a
/// store writes them; they need no alignment.
pub trait Vector: Copy {
    const LANES: usize;
    /// Rows of a product that fit into the registers, with three vectors each.
    const TILE_ROWS: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const bf16) -> Self;
    unsafe fn load_f16(from: *const f16) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Transposes the first `LANES` of `rows`: lane `l` of row `r` becomes lane `r` of row `l`.
    unsafe fn transpose(rows: &mut [Self; LANES_MAX]);
    unsafe fn mul(self, factor: Self) -> Self;
    /// Computes `self · factor + sum` with one rounding.
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self;
    /// Asks for the cache line at `from`, which may lie anywhere.
    unsafe fn prefetch(from: *const u8);
}

/// Most lanes of a vector.
pub(super) const LANES_MAX: usize = 16;
const PORTABLE_LANES: usize = 8;

#[derive(Clone, Copy)]
struct Portable([f32; PORTABLE_LANES]);

impl Portable {
    /// # Safety
    /// `from` must be readable for the lanes of a vector.
    #[inline(always)]
    unsafe fn load<T: Copy>(from: *const T, convert: impl Fn(T) -> f32) -> Self {
        // SAFETY: the caller guarantees the elements. An array of `T` may lie where a `T` may, and
        // `read_unaligned` needs no alignment.
        let elements = unsafe { from.cast::<[T; PORTABLE_LANES]>().read_unaligned() };
        Portable(elements.map(convert))
    }
}

impl Vector for Portable {
    const LANES: usize = PORTABLE_LANES;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; PORTABLE_LANES])
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the contract of the trait covers the elements.
        unsafe { Self::load(from, |x| x) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the contract of the trait covers the elements.
        unsafe { Self::load(from, |x| f32::from_bits(u32::from(x.to_bits()) << 16)) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the contract of the trait covers the elements.
        unsafe { Self::load(from, f16::to_f32) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the contract of the trait covers the elements.
        unsafe { Self::load(from, f32::from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the contract of the trait covers the elements.
        unsafe { to.cast::<[f32; PORTABLE_LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; LANES_MAX]) {
        for row in 0..PORTABLE_LANES {
            for lane in row + 1..PORTABLE_LANES {
                let above = rows[row].0[lane];
                rows[row].0[lane] = std::mem::replace(&mut rows[lane].0[row], above);
            }
        }
    }

    #[inline(always)]
    unsafe fn mul(mut self, factor: Self) -> Self {
        for (x, factor) in self.0.iter_mut().zip(factor.0) {
            *x *= factor;
        }
        self
    }

    #[inline(always)]
    unsafe fn mul_add(mut self, factor: Self, sum: Self) -> Self {
        for lane in 0..PORTABLE_LANES {
            self.0[lane] = self.0[lane].mul_add(factor.0[lane], sum.0[lane]);
        }
        self
    }

    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES_MAX, Vector};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    // SAFETY of every block below: the contract of the trait gives the instruction set and the
    // elements. The instructions for unaligned access are used throughout.
    impl Vector for Avx512 {
        const LANES: usize = 16;
        const TILE_ROWS: usize = 8;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_set1_ps(value) })
        }

        #[inline(always)]
        unsafe fn load_f32(from: *const f32) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_loadu_ps(from) })
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // A bf16 is the upper half of an f32.
            // SAFETY: see the implementation.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the implementation.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self; LANES_MAX]) {
            // SAFETY: see the implementation.
            unsafe {
                let (top, upper) = (transpose_quarters(rows, 0), transpose_quarters(rows, 4));
                let (lower, bottom) = (transpose_quarters(rows, 8), transpose_quarters(rows, 12));
                for column in 0..4 {
                    // Columns `column`, `column + 4` and so on: quarters of four vectors each.
                    let (a, b, c, d) = (top[column], upper[column], lower[column], bottom[column]);
                    let even = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                    let odd = (_mm512_shuffle_f32x4::<0xDD>(a, b), _mm512_shuffle_f32x4::<0xDD>(c, d));
                    rows[column] = Avx512(_mm512_shuffle_f32x4::<0x88>(even.0, even.1));
                    rows[column + 4] = Avx512(_mm512_shuffle_f32x4::<0x88>(odd.0, odd.1));
                    rows[column + 8] = Avx512(_mm512_shuffle_f32x4::<0xDD>(even.0, even.1));
                    rows[column + 12] = Avx512(_mm512_shuffle_f32x4::<0xDD>(odd.0, odd.1));
                }
            }
        }

        #[inline(always)]
        unsafe fn mul(self, factor: Self) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_mul_ps(self.0, factor.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            // SAFETY: see the implementation.
            Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, sum.0) })
        }

        #[inline(always)]
        unsafe fn prefetch(from: *const u8) {
            // SAFETY: a prefetch accesses no memory that the program could observe.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
    }

    /// Transposes the square of 4 × 4 elements in each quarter of the four rows from `first` on.
    /// Not with closures: they lack the instruction set, so that its instructions become calls.
    ///
    /// # Safety
    /// The machine has the instruction set of the rows.
    #[inline(always)]
    unsafe fn transpose_quarters(rows: &[Avx512; LANES_MAX], first: usize) -> [__m512; 4] {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let (a, b, c, d) = (rows[first].0, rows[first + 1].0, rows[first + 2].0, rows[first + 3].0);
            let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
            let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
            let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
            let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
            [
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high)),
            ]
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256);

    /// Transposes the square of 4 × 4 elements in each half of the four rows from `first` on.
    /// Not with closures: they lack the instruction set, so that its instructions become calls.
    ///
    /// # Safety
    /// The machine has the instruction set of the rows.
    #[inline(always)]
    unsafe fn transpose_halves(rows: &[Avx2; LANES_MAX], first: usize) -> [__m256; 4] {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            let (a, b, c, d) = (rows[first].0, rows[first + 1].0, rows[first + 2].0, rows[first + 3].0);
            let ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
            let cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
            let ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
            let cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
            [
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)),
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high)),
            ]
        }
    }

    // SAFETY of every block below: as for `Avx512`.
    impl Vector for Avx2 {
        const LANES: usize = 8;
        const TILE_ROWS: usize = 4;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: see the implementation.
            Avx2(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        unsafe fn load_f32(from: *const f32) -> Self {
            // SAFETY: see the implementation.
            Avx2(unsafe { _mm256_loadu_ps(from) })
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const bf16) -> Self {
            // SAFETY: see the implementation.
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: see the implementation.
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: see the implementation. This load reads exactly eight bytes.
            Avx2(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) })
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the implementation.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self; LANES_MAX]) {
            // SAFETY: see the implementation.
            unsafe {
                let (upper, lower) = (transpose_halves(rows, 0), transpose_halves(rows, 4));
                for column in 0..4 {
                    let (a, b) = (upper[column], lower[column]);
                    rows[column] = Avx2(_mm256_permute2f128_ps::<0x20>(a, b));
                    rows[column + 4] = Avx2(_mm256_permute2f128_ps::<0x31>(a, b));
                }
            }
        }

        #[inline(always)]
        unsafe fn mul(self, factor: Self) -> Self {
            // SAFETY: see the implementation.
            Avx2(unsafe { _mm256_mul_ps(self.0, factor.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            // SAFETY: see the implementation.
            Avx2(unsafe { _mm256_fmadd_ps(self.0, factor.0, sum.0) })
        }

        #[inline(always)]
        unsafe fn prefetch(from: *const u8) {
            // SAFETY: a prefetch accesses no memory that the program could observe.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Transpose<'a>(&'a [f32], &'a mut [f32]);

    impl Kernel for Transpose<'_> {
        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // SAFETY: the first slice has 16 rows of 17 elements, the second as many of 18.
            unsafe {
                let mut rows = [V::splat(0.0); LANES_MAX];
                for (row, elements) in rows.iter_mut().zip(self.0.chunks_exact(17)) {
                    *row = V::load_f32(elements.as_ptr());
                }
                V::transpose(&mut rows);
                for (row, elements) in rows[..V::LANES].iter().zip(self.1.chunks_exact_mut(18)) {
                    row.store(elements.as_mut_ptr());
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_transposes_a_square() {
        let from: Vec<f32> = (0..16 * 17).map(|x| x as f32).collect();
        for set in InstructionSet::available() {
            let lanes = if format!("{set:?}") == "Avx512" { 16 } else { 8 };
            let mut to = vec![-1.0; 16 * 18];
            // SAFETY: the set is one of those available.
            unsafe { set.run(Transpose(&from, &mut to)) };
            for (index, found) in to.iter().enumerate() {
                let (row, column) = (index / 18, index % 18);
                let expected = if row < lanes && column < lanes { from[column * 17 + row] } else { -1.0 };
                assert_eq!(*found, expected, "{set:?}: row {row}, column {column}");
            }
        }
    }
}
