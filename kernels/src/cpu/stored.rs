//! Element types of packed weights, and their layout in a panel.
//!
//! A panel holds the weights of [`PANEL`] outputs, `[inputs][PANEL]`. The kernels convert them to
//! `f32` in registers. Narrow types hold two or four inputs of an output side by side, because one
//! instruction multiplies them together.

use super::vector::{Vector, multiplies_bf16, multiplies_bytes};
use half::{bf16, f16};

/// Outputs per panel: three AVX-512 vectors, or six AVX2 vectors.
pub(super) const PANEL: usize = 48;
/// Inputs that share one scale in [`WeightType::Q8`].
pub(super) const Q8_BLOCK: usize = 32;
/// Bytes of a block of [`WeightType::Q8`] in a panel: the scales of the outputs in bf16, then the
/// weights, `[Q8_BLOCK][PANEL]`, or `[Q8_BLOCK / 4][PANEL][4]` in [`WeightType::Q8Quads`].
pub(super) const Q8_BLOCK_BYTES: usize = PANEL * (2 + Q8_BLOCK);
pub(super) const Q8_LARGEST: f32 = 127.0;
/// Flips a signed byte to the unsigned one that is larger by 128. `vpdpbusd` needs one unsigned
/// factor.
const UNSIGNED: u8 = 0x80;

/// Element type of the weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    F32,
    Bf16,
    F16,
    /// Eight bits per weight, and a bf16 scale per output and block of 32 inputs.
    Q8,
    /// [`Bf16`](Self::Bf16) for products that also round activations to bf16. Needs AVX-512-BF16.
    Bf16Pairs,
    /// [`Q8`](Self::Q8) for products that also round activations to 8 bits, with a scale per row
    /// and block. Needs AVX-512-VNNI to be fast.
    Q8Quads,
}

impl WeightType {
    /// The type with the same weights whose products round activations as well, if this machine has
    /// instructions for it. They multiply two to four times as many weights at once.
    pub fn narrow(self) -> Option<WeightType> {
        let narrow = match self {
            WeightType::Bf16 => WeightType::Bf16Pairs,
            WeightType::Q8 if multiplies_bytes() => WeightType::Q8Quads,
            _ => return None,
        };
        narrow.is_available().then_some(narrow)
    }

    /// Returns `true` if this machine can multiply weights of this type.
    pub(super) fn is_available(self) -> bool {
        self != WeightType::Bf16Pairs || multiplies_bf16()
    }

    /// Bytes of a panel. `None` if the number exceeds the address space.
    pub(super) fn panel_bytes(self, inputs: usize) -> Option<usize> {
        match self {
            WeightType::F32 => inputs.checked_mul(4 * PANEL),
            WeightType::Bf16 | WeightType::F16 => inputs.checked_mul(2 * PANEL),
            WeightType::Bf16Pairs => inputs.div_ceil(2).checked_mul(4 * PANEL),
            WeightType::Q8 | WeightType::Q8Quads => inputs.div_ceil(Q8_BLOCK).checked_mul(Q8_BLOCK_BYTES),
        }
    }

    /// Writes the weights of output `lane` into a panel.
    pub(super) fn write(self, panel: &mut [u8], lane: usize, weights: &[f32]) {
        match self {
            WeightType::F32 => each(panel, lane, weights, f32::to_le_bytes),
            WeightType::Bf16 => each(panel, lane, weights, |weight| bf16::from_f32(weight).to_le_bytes()),
            WeightType::F16 => each(panel, lane, weights, |weight| f16::from_f32(weight).to_le_bytes()),
            WeightType::Bf16Pairs => {
                for (pairs, weights) in panel.chunks_exact_mut(4 * PANEL).zip(weights.chunks(2)) {
                    for (pair, weight) in pairs[4 * lane..].chunks_exact_mut(2).zip(weights) {
                        pair.copy_from_slice(&bf16::from_f32(*weight).to_le_bytes());
                    }
                }
            }
            WeightType::Q8 | WeightType::Q8Quads => {
                for (block, weights) in panel.chunks_exact_mut(Q8_BLOCK_BYTES).zip(weights.chunks(Q8_BLOCK)) {
                    let largest = weights.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
                    let scale = round_up(largest / Q8_LARGEST);
                    let (scales, elements) = block.split_at_mut(2 * PANEL);
                    scales[2 * lane..2 * lane + 2].copy_from_slice(&scale.to_le_bytes());
                    let inverse = if largest > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
                    for (input, weight) in weights.iter().enumerate() {
                        // The cast saturates, and turns NaN into 0.
                        let element = (weight * inverse).round() as i8 as u8;
                        match self {
                            WeightType::Q8Quads => elements[quad_offset(input, lane)] = element ^ UNSIGNED,
                            _ => elements[input * PANEL + lane] = element,
                        }
                    }
                }
            }
        }
    }

    /// Reads the weights of output `lane` from a panel.
    pub(super) fn read(self, panel: &[u8], lane: usize, weights: &mut [f32]) {
        let pair = |panel: &[u8], at: usize| [panel[at], panel[at + 1]];
        for (input, weight) in weights.iter_mut().enumerate() {
            let index = input * PANEL + lane;
            *weight = match self {
                WeightType::F32 => f32::from_le_bytes(std::array::from_fn(|byte| panel[4 * index + byte])),
                WeightType::Bf16 => bf16::from_le_bytes(pair(panel, 2 * index)).to_f32(),
                WeightType::F16 => f16::from_le_bytes(pair(panel, 2 * index)).to_f32(),
                WeightType::Bf16Pairs => {
                    bf16::from_le_bytes(pair(panel, 4 * (input / 2 * PANEL + lane) + 2 * (input % 2))).to_f32()
                }
                WeightType::Q8 | WeightType::Q8Quads => {
                    let block = &panel[input / Q8_BLOCK * Q8_BLOCK_BYTES..];
                    let scale = bf16::from_le_bytes(pair(block, 2 * lane)).to_f32();
                    let elements = &block[2 * PANEL..];
                    let element = match self {
                        WeightType::Q8Quads => elements[quad_offset(input % Q8_BLOCK, lane)] ^ UNSIGNED,
                        _ => elements[input % Q8_BLOCK * PANEL + lane],
                    };
                    f32::from(element as i8) * scale
                }
            };
        }
    }
}

/// Place of a weight of [`WeightType::Q8Quads`] behind the scales of its block.
fn quad_offset(input: usize, lane: usize) -> usize {
    4 * (input / 4 * PANEL + lane) + input % 4
}

fn each<const N: usize>(panel: &mut [u8], lane: usize, weights: &[f32], bytes: impl Fn(f32) -> [u8; N]) {
    for (row, &weight) in panel.chunks_exact_mut(N * PANEL).zip(weights) {
        row[N * lane..N * (lane + 1)].copy_from_slice(&bytes(weight));
    }
}

/// Smallest bf16 that is not below `value`, which is not negative. A smaller scale would cut off
/// the largest weight.
fn round_up(value: f32) -> bf16 {
    let cut = bf16::from_bits((value.to_bits() >> 16) as u16);
    if cut.to_f32() < value { bf16::from_bits(cut.to_bits() + 1) } else { cut }
}

/// Access to the weights of a panel in registers.
///
/// # Safety
/// The unsafe methods need the instruction set of `V`, a panel of this type with more than `input`
/// inputs, and `column + V::LANES <= PANEL`.
pub(super) trait Stored {
    /// Inputs with a common scale.
    const BLOCK: usize;
    /// Distance from one input to the next inside a block, in bytes.
    const STRIDE: usize;

    /// Distance from the start of a panel to the weights of `input`, in bytes.
    fn offset(input: usize) -> usize;

    /// Scales of the block that begins at `input`, a multiple of `BLOCK`.
    unsafe fn scale<V: Vector>(panel: *const u8, input: usize, column: usize) -> V;
    /// Weights of `input`.
    unsafe fn load<V: Vector>(panel: *const u8, input: usize, column: usize, scale: V) -> V;
}

macro_rules! plain {
    ($name:ident, $element:ty, $load:ident) => {
        pub(super) struct $name;

        impl Stored for $name {
            // No scale, so the whole matrix is one block.
            const BLOCK: usize = usize::MAX;
            const STRIDE: usize = PANEL * size_of::<$element>();

            #[inline(always)]
            fn offset(input: usize) -> usize {
                input * Self::STRIDE
            }

            #[inline(always)]
            unsafe fn scale<V: Vector>(_panel: *const u8, _input: usize, _column: usize) -> V {
                // SAFETY: the caller guarantees the instruction set.
                unsafe { V::splat(1.0) }
            }

            #[inline(always)]
            unsafe fn load<V: Vector>(panel: *const u8, input: usize, column: usize, _scale: V) -> V {
                // SAFETY: the caller guarantees that the elements lie in the panel.
                unsafe { V::$load(panel.add(Self::offset(input)).cast::<$element>().add(column)) }
            }
        }
    };
}

plain!(F32, f32, load_f32);
plain!(Bf16, bf16, load_bf16);
plain!(F16, f16, load_f16);

pub(super) struct Q8;

impl Stored for Q8 {
    const BLOCK: usize = Q8_BLOCK;
    const STRIDE: usize = PANEL;

    #[inline(always)]
    fn offset(input: usize) -> usize {
        input / Q8_BLOCK * Q8_BLOCK_BYTES + PANEL * (2 + input % Q8_BLOCK)
    }

    #[inline(always)]
    unsafe fn scale<V: Vector>(panel: *const u8, input: usize, column: usize) -> V {
        // SAFETY: the caller guarantees that the block, which begins with the scales, lies in the
        // panel.
        unsafe { V::load_bf16(panel.add(input / Q8_BLOCK * Q8_BLOCK_BYTES).cast::<bf16>().add(column)) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(panel: *const u8, input: usize, column: usize, scale: V) -> V {
        // SAFETY: the caller guarantees that the elements lie in the panel.
        unsafe { V::load_i8(panel.add(Self::offset(input) + column).cast()).mul(scale) }
    }
}
