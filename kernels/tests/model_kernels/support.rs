//! The emulated device, elements, and random numbers.

use bytemuck::{NoUninit, Pod};
use half::{bf16, f16};
use larder_kernels::cpu::{AttentionElement, KvElement};
use larder_kernels::cuda::{KernelSource, SOURCES};
use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice, Stream, download, emulated, upload};
use larder_kernels::launch::Element;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MEMORY_LIMIT: usize = 256 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

/// Outcome of a check: the difference or the device's error as text.
pub type Check = Result<(), String>;

/// An emulated device with one stream.
pub struct Emulated {
    pub device: Arc<dyn Device>,
    pub stream: Arc<dyn Stream>,
}

impl Emulated {
    /// Opens a device with all kernels. The process compiles them once.
    pub fn new() -> Emulated {
        Emulated::of(emulated::open(MEMORY_LIMIT)).expect("the kernels compile")
    }

    /// Opens a device with the kernels of one source.
    pub fn with(source: KernelSource) -> Result<Emulated, DeviceError> {
        Emulated::of(emulated::open_with(&[source], MEMORY_LIMIT))
    }

    fn of(device: Result<Arc<dyn Device>, DeviceError>) -> Result<Emulated, DeviceError> {
        let device = device?;
        let stream = device.stream("test")?;
        Ok(Emulated { device, stream })
    }

    pub fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<Slice, String> {
        let memory = upload(&*self.device, self.stream(), values, Instant::now() + DEADLINE).map_err(text)?;
        memory.slice(0..size_of_val(values)).map_err(text)
    }

    /// Allocates memory for `count` values. It holds NaN in most formats.
    pub fn empty<T>(&self, count: usize) -> Result<Slice, String> {
        let bytes = count * size_of::<T>();
        let memory: Memory = self.device.allocate(Place::Device, bytes.max(1)).map_err(text)?;
        memory.slice(0..bytes).map_err(text)
    }

    pub fn download<T: Pod>(&self, slice: &Slice) -> Result<Vec<T>, String> {
        download(&*self.device, self.stream(), slice, Instant::now() + DEADLINE).map_err(text)
    }
}

/// The error of a device as the text of a failed check.
pub fn text(error: DeviceError) -> String {
    error.to_string()
}

/// The source of the file `file`.
pub fn source(file: &str) -> KernelSource {
    *SOURCES.iter().find(|source| source.file == file).expect("a source has this name")
}

/// Element of the kernels' tensors.
pub trait Number: AttentionElement {
    const ELEMENT: Element;
    /// Largest relative error of a rounding to this type, or of some sums in f32.
    const ERROR: f32;
}

impl Number for f32 {
    const ELEMENT: Element = Element::F32;
    const ERROR: f32 = 5e-5;
}

impl Number for f16 {
    const ELEMENT: Element = Element::F16;
    const ERROR: f32 = 1.0 / 1024.0;
}

impl Number for bf16 {
    const ELEMENT: Element = Element::Bf16;
    const ERROR: f32 = 1.0 / 128.0;
}

/// Rounds values to an element.
pub fn rounded<T: Number>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&x| T::from_f32(x)).collect()
}

pub fn widened<T: Number>(values: &[T]) -> Vec<f32> {
    values.iter().map(|&x| KvElement::to_f32(x)).collect()
}

/// Compares results with the reference, within the rounding of `T`.
pub fn close<T: Number>(name: &str, found: &[T], expected: &[f32]) -> Check {
    close_within(name, found, expected, T::ERROR, 0.1)
}

/// Compares results with the reference. The error is at most `ratio` times the reference, to which
/// `floor` is added.
pub fn close_within<T: Number>(name: &str, found: &[T], expected: &[f32], ratio: f32, floor: f32) -> Check {
    if found.len() != expected.len() {
        return Err(format!("{name}: {} results of {}", found.len(), expected.len()));
    }
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = KvElement::to_f32(found);
        let error = (found - expected).abs();
        if error.is_nan() || error > ratio * (expected.abs() + floor) {
            return Err(format!("{name}: element {index} is {found}, not {expected}"));
        }
    }
    Ok(())
}

/// Compares results bit by bit.
pub fn same<T: Pod>(name: &str, found: &[T], expected: &[T]) -> Check {
    let (a, b): (&[u8], &[u8]) = (bytemuck::cast_slice(found), bytemuck::cast_slice(expected));
    if a == b {
        return Ok(());
    }
    let at = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    Err(format!("{name}: element {} of {} and {} differs", at / size_of::<T>().max(1), found.len(), expected.len()))
}

/// Random numbers of a fixed sequence (xorshift64*, <https://arxiv.org/abs/1402.6246>).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() >> 33) as usize % end
    }

    /// A number from 0 to 1, without 1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Numbers from −2 to 2.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.uniform() * 4.0 - 2.0) as f32).collect()
    }

    pub fn numbers<T: Number>(&mut self, count: usize) -> Vec<T> {
        rounded(&self.floats(count))
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for end in (1..values.len()).rev() {
            values.swap(end, self.below(end + 1));
        }
    }
}
