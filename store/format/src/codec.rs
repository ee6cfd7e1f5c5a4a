//! Little-endian reading and writing of untrusted bytes: a [`Reader`] never reads past its input and never allocates by a
//! stranger's number without a stated maximum.

use thiserror::Error;

/// Why bytes could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The input ended inside the named field.
    #[error("input ends inside {0}")]
    Short(&'static str),
    /// A length or count is above its maximum.
    #[error("{what} is {value}, the maximum is {max}")]
    TooLarge {
        /// The field.
        what: &'static str,
        /// What the input says.
        value: u64,
        /// The most that is accepted.
        max: u64,
    },
    /// A field holds a value that is not defined.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// The CRC of a block does not match its content.
    #[error("{0}: checksum mismatch")]
    Checksum(&'static str),
    /// The version is not one this build reads.
    #[error("{what} has version {found}, this build reads {supported}")]
    Version {
        /// What carries the version.
        what: &'static str,
        /// The version found.
        found: u32,
        /// The version that is read.
        supported: u32,
    },
    /// Bytes are left over after the last field.
    #[error("{0} bytes left over")]
    TrailingBytes(usize),
}

/// Result of decoding.
pub type Result<T> = std::result::Result<T, DecodeError>;

/// A cursor over untrusted bytes.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the first byte of `input`.
    pub fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Takes `len` bytes.
    pub fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8]> {
        if self.rest.len() < len {
            return Err(DecodeError::Short(what));
        }
        let (head, tail) = self.rest.split_at(len);
        self.rest = tail;
        Ok(head)
    }

    /// Takes a fixed array.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let bytes = self.take(N, what)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }

    /// One byte.
    pub fn u8(&mut self, what: &'static str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    /// A little-endian `u16`.
    pub fn u16(&mut self, what: &'static str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    /// A little-endian `u32`.
    pub fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// A little-endian `u64`.
    pub fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A `u32` count of at most `max`.
    pub fn count(&mut self, max: usize, what: &'static str) -> Result<usize> {
        let value = self.u32(what)?;
        if value as usize > max {
            return Err(DecodeError::TooLarge { what, value: u64::from(value), max: max as u64 });
        }
        Ok(value as usize)
    }

    /// A length-prefixed UTF-8 string of at most `max` bytes.
    pub fn string(&mut self, max: usize, what: &'static str) -> Result<String> {
        let len = self.count(max, what)?;
        let bytes = self.take(len, what)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| DecodeError::Invalid(what))
    }

    /// A counted list of at most `max` items. Memory is taken as items are read, never ahead of them.
    pub fn list<T>(
        &mut self,
        max: usize,
        what: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let count = self.count(max, what)?;
        let mut items = Vec::with_capacity(count.min(self.rest.len()));
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Ends the reading: an error if bytes are left.
    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::TrailingBytes(left)),
        }
    }
}

/// Appends little-endian fields; the counterpart of [`Reader`].
pub trait Put {
    /// Appends raw bytes.
    fn put(&mut self, bytes: &[u8]);

    /// Appends one byte.
    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    /// Appends a `u16`.
    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }
    /// Appends a `u32`.
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    /// Appends a `u64`.
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    /// Appends a length-prefixed string.
    fn put_string(&mut self, value: &str) {
        self.put_u32(value.len() as u32);
        self.put(value.as_bytes());
    }
    /// Appends a counted list.
    fn put_list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T))
    where
        Self: Sized,
    {
        self.put_u32(items.len() as u32);
        for it in items {
            item(self, it);
        }
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
