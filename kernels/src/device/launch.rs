//! Launches: a kernel's name, its grid, and typed arguments.

use super::{DeviceError, Slice};
use std::ops::Range;

/// Accesses of a kernel to the memory behind one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The kernel's parameter is a pointer to `const`.
    Read,
    Write,
    ReadWrite,
}

impl Access {
    pub fn writes(self) -> bool {
        self != Access::Read
    }
}

/// Pointer argument. The race checker takes the whole slice for accessed, unless `ranges` says
/// less.
#[derive(Debug, Clone)]
pub struct Pointer {
    pub(super) slice: Slice,
    pub(super) access: Access,
    /// Accessed bytes, relative to the slice.
    pub(super) ranges: Option<Vec<Range<usize>>>,
}

/// Argument of a kernel, in the order of its parameters.
#[derive(Debug, Clone)]
pub enum Arg {
    Pointer(Pointer),
    /// Null pointer, for an optional parameter.
    Null,
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
}

impl Arg {
    pub fn read(slice: &Slice) -> Arg {
        Arg::pointer(slice, Access::Read)
    }

    pub fn write(slice: &Slice) -> Arg {
        Arg::pointer(slice, Access::Write)
    }

    pub fn read_write(slice: &Slice) -> Arg {
        Arg::pointer(slice, Access::ReadWrite)
    }

    fn pointer(slice: &Slice, access: Access) -> Arg {
        Arg::Pointer(Pointer { slice: slice.clone(), access, ranges: None })
    }

    /// Declares that the kernel accesses only `ranges` of the slice, in bytes relative to its
    /// start. Has no effect on other arguments.
    #[must_use]
    pub fn within(mut self, ranges: Vec<Range<usize>>) -> Arg {
        if let Arg::Pointer(pointer) = &mut self {
            pointer.ranges = Some(ranges);
        }
        self
    }

    /// The argument as a parameter slot. A driver or thunk reads as many low bytes as the
    /// parameter has.
    pub(super) fn slot(&self) -> u64 {
        match self {
            Arg::Pointer(pointer) => pointer.slice.address(),
            Arg::Null => 0,
            Arg::U32(value) => u64::from(*value),
            Arg::I32(value) => u64::from(*value as u32),
            Arg::U64(value) => *value,
            Arg::F32(value) => u64::from(value.to_bits()),
        }
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Arg {
        Arg::U32(value)
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Arg {
        Arg::I32(value)
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Arg {
        Arg::U64(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Arg {
        Arg::F32(value)
    }
}

/// One launch of a kernel.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Name of an `extern "C" __global__` function in one of the sources.
    pub kernel: &'static str,
    /// Number of blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
    pub args: Vec<Arg>,
    /// Memory that the kernel reaches through addresses in other memory. It stays allocated, and
    /// the race checker knows its accesses.
    pub(super) indirect: Vec<Pointer>,
}

impl Launch {
    /// A launch of `blocks` blocks of `threads` threads, in one dimension, without dynamic shared
    /// memory.
    pub fn new(kernel: &'static str, blocks: u32, threads: u32) -> Launch {
        Launch {
            kernel,
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            args: Vec::new(),
            indirect: Vec::new(),
        }
    }

    #[must_use]
    pub fn grid(mut self, grid: [u32; 3]) -> Launch {
        self.grid = grid;
        self
    }

    #[must_use]
    pub fn block(mut self, block: [u32; 3]) -> Launch {
        self.block = block;
        self
    }

    #[must_use]
    pub fn shared(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }

    /// Appends an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<Arg>) -> Launch {
        self.args.push(arg.into());
        self
    }

    /// Declares memory that the kernel reaches through addresses in other memory. Other arguments
    /// than pointers have no effect.
    #[must_use]
    pub fn reaching(mut self, arg: Arg) -> Launch {
        if let Arg::Pointer(pointer) = arg {
            self.indirect.push(pointer);
        }
        self
    }

    /// Fails if an argument would write memory that streams only read.
    pub(super) fn check_writable(&self) -> Result<(), DeviceError> {
        let mut written = self.pointers().filter(|pointer| pointer.access.writes());
        written.try_for_each(|pointer| pointer.slice.memory().check_writable())
    }

    pub(super) fn pointers(&self) -> impl Iterator<Item = &Pointer> {
        let direct = self.args.iter().filter_map(|arg| match arg {
            Arg::Pointer(pointer) => Some(pointer),
            _ => None,
        });
        direct.chain(&self.indirect)
    }
}
