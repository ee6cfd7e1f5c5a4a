//! Little-endian encoding and decoding of untrusted bytes.
//!
//! Invariants:
//! - A [`Reader`] never reads past its input.
//! - It never allocates by a number from the input alone: every count has a maximum, and memory
//!   grows with the items read.

use thiserror::Error;

/// Returns `true` if a terminal or a log file shows `text` as it is, in one line.
pub fn is_printable(text: &str) -> bool {
    text.chars().all(is_printable_char)
}

/// Returns `false` for control characters, line separators and marks that change the direction of
/// text. They could move a cursor, begin a forged line, or show a name in another order.
pub fn is_printable_char(c: char) -> bool {
    !(c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'))
}

/// Reason that bytes do not decode. A decoder reports the first field that is wrong and reads
/// nothing behind it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The input ended inside the named field.
    #[error("input ends inside {0}")]
    Short(&'static str),
    /// A length or count is above its maximum.
    #[error("{what} is {value}, the maximum is {max}")]
    TooLarge { what: &'static str, value: u64, max: u64 },
    /// A field has an undefined value.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// A CRC does not match the content.
    #[error("{0}: checksum mismatch")]
    Checksum(&'static str),
    /// The input has a version that this build does not read.
    #[error("{what} has version {found}, this build reads {supported}")]
    Version { what: &'static str, found: u32, supported: u32 },
    /// Bytes follow the last field. The encoder and this decoder then disagree about the layout, so
    /// nothing is accepted.
    #[error("{0} bytes left over")]
    TrailingBytes(usize),
}

pub type Result<T> = std::result::Result<T, DecodeError>;

/// A cursor over untrusted bytes. Its methods return errors and never panic, and they allocate no
/// more than the input justifies.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Takes `len` bytes. `what` names the field in errors, as in all methods. The bytes are
    /// borrowed from the input, not copied.
    pub fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8]> {
        if self.rest.len() < len {
            return Err(DecodeError::Short(what));
        }
        let (head, tail) = self.rest.split_at(len);
        self.rest = tail;
        Ok(head)
    }

    /// Takes an array of fixed length. `what` names the field in the error, as in the other reads
    /// of this type.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let bytes = self.take(N, what)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &'static str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Takes a `u32` count of at most `max`. A larger value is [`DecodeError::TooLarge`], before
    /// anything is allocated for it.
    pub fn count(&mut self, max: usize, what: &'static str) -> Result<usize> {
        let value = self.u32(what)?;
        if value as usize > max {
            return Err(DecodeError::TooLarge { what, value: u64::from(value), max: max as u64 });
        }
        Ok(value as usize)
    }

    /// Takes a length-prefixed UTF-8 string of at most `max` bytes. The length is checked before
    /// memory is allocated.
    pub fn string(&mut self, max: usize, what: &'static str) -> Result<String> {
        let len = self.count(max, what)?;
        let bytes = self.take(len, what)?;
        let text = String::from_utf8(bytes.to_vec()).map_err(|_| DecodeError::Invalid(what))?;
        // Names reach terminals and log lines.
        if is_printable(&text) { Ok(text) } else { Err(DecodeError::Invalid(what)) }
    }

    /// Takes a counted list of at most `max` items. Memory grows with the items read, never ahead
    /// of them.
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

    /// Ends the decoding. Unread bytes are an error, so that no input hides data behind a message.
    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::TrailingBytes(left)),
        }
    }
}

/// Encoder that appends little-endian fields: the counterpart of [`Reader`]. It checks no limits.
/// The caller encodes only values that the decoder accepts.
pub trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    /// Appends a length-prefixed string: the length of its UTF-8 bytes as a `u32`, then the bytes
    /// themselves.
    fn put_string(&mut self, value: &str) {
        self.put_u32(value.len() as u32);
        self.put(value.as_bytes());
    }
    /// Appends a counted list: the number of items as a `u32`, then each item as `item` encodes it.
    /// [`Reader::list`] reads it back under a maximum.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_with_control_characters_are_refused() {
        let decode = |text: &str| {
            let mut bytes = Vec::new();
            bytes.put_string(text);
            Reader::new(&bytes).string(100, "name")
        };
        for good in ["decode-1", "Qwen3 235B", "größe", "模型", "{\"a\": \"b\\n\"}"] {
            assert_eq!(decode(good).as_deref(), Ok(good));
        }
        for bad in ["a\nb", "a\rb", "\u{1b}[2J", "a\0", "a\u{7f}", "\u{9b}31m", "a\u{2028}b", "a\u{202e}b", "\t"] {
            assert_eq!(decode(bad), Err(DecodeError::Invalid("name")), "{bad:?}");
        }
    }
}
