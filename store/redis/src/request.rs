//! Requests: arrays of strings, and lines of words.

use crate::VALUE_BYTES_MAX;
use std::fmt;

/// Maximum number of arguments of a request. A request of this many short keys takes 1 MiB.
pub const ARGUMENTS_MAX: usize = 16 << 10;
/// Maximum length of an argument that the decoder keeps, in bytes. A longer one is announced as
/// [`Decoded::LongArgument`].
pub const SHORT_ARGUMENT_MAX: usize = 4 << 10;
/// Maximum memory of the short arguments of one request, in bytes. An argument counts
/// [`ARGUMENT_BYTES`] besides its length.
pub const HELD_BYTES_MAX: usize = 2 << 20;
/// Memory of an argument beside its bytes: its entry and the allocator's share.
pub const ARGUMENT_BYTES: usize = 64;
/// Maximum length of a line, in bytes: a header, or a whole request in words.
const LINE_BYTES_MAX: usize = 4 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    Short(Vec<u8>),
    /// Length of an argument that the caller has received.
    Long(u64),
}

impl Argument {
    /// Bytes of a short argument. `None` for a long one.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Argument::Short(bytes) => Some(bytes),
            Argument::Long(_) => None,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    /// All bytes are consumed, and the request goes on.
    Incomplete,
    /// A request. It has at least one argument.
    Request(Vec<Argument>),
    /// An argument of so many bytes begins. The caller receives exactly these bytes, which the
    /// decoder must not see, and goes on with the bytes behind them.
    LongArgument(u64),
}

/// Violation of the protocol. The text is that of Redis. The connection cannot go on.
#[derive(Debug, PartialEq, Eq)]
pub enum ProtocolError {
    InvalidArgumentCount,
    InvalidArgumentLength,
    /// First byte of an argument's header.
    NotAnArgument(u8),
    LongLine,
    MissingLineEnd,
    UnbalancedQuotes,
    /// A line of HTTP or TLS. A web page can have a browser send commands behind it, so no byte of
    /// this connection may be taken for a command.
    OtherProtocol,
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Protocol error: ")?;
        match self {
            ProtocolError::InvalidArgumentCount => f.write_str("invalid multibulk length"),
            ProtocolError::InvalidArgumentLength => f.write_str("invalid bulk length"),
            ProtocolError::NotAnArgument(byte) => write!(f, "expected '$', got '{}'", byte.escape_ascii()),
            ProtocolError::LongLine => f.write_str("too big inline request"),
            ProtocolError::MissingLineEnd => f.write_str("expected a line end behind an argument"),
            ProtocolError::UnbalancedQuotes => f.write_str("unbalanced quotes in request"),
            ProtocolError::OtherProtocol => f.write_str("HTTP or TLS"),
        }
    }
}

impl std::error::Error for ProtocolError {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// At the start of a request, or within its first line.
    FirstLine,
    ArgumentLine,
    /// Within a short argument, of which so many bytes are missing.
    Argument(usize),
    /// Behind an argument, of whose line end so many bytes are missing.
    LineEnd(usize),
}

/// Decodes the requests of one connection.
#[derive(Debug)]
pub struct RequestDecoder {
    state: State,
    /// Part of the current line that came in earlier pieces.
    line: Vec<u8>,
    arguments: Vec<Argument>,
    /// Arguments of the request that have not begun.
    missing: usize,
    held_bytes: usize,
}

impl Default for RequestDecoder {
    fn default() -> Self {
        RequestDecoder { state: State::FirstLine, line: Vec::new(), arguments: Vec::new(), missing: 0, held_bytes: 0 }
    }
}

impl RequestDecoder {
    /// Memory that the decoder keeps for the request so far, in bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Arguments of the request that have arrived.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Decodes `input` up to the next event, and takes its bytes off.
    ///
    /// # Errors
    /// After an error the rest of the stream has no meaning.
    pub fn decode(&mut self, input: &mut &[u8]) -> Result<Decoded, ProtocolError> {
        loop {
            match self.state {
                State::FirstLine => {
                    let Some(line) = self.take_line(input)? else { return Ok(Decoded::Incomplete) };
                    if let Some(request) = self.begin(&line)? {
                        return Ok(Decoded::Request(request));
                    }
                }
                State::ArgumentLine => {
                    let Some(line) = self.take_line(input)? else { return Ok(Decoded::Incomplete) };
                    if let Some(bytes) = self.begin_argument(&line)? {
                        return Ok(Decoded::LongArgument(bytes));
                    }
                }
                State::Argument(missing) => {
                    let (taken, rest) = input.split_at(missing.min(input.len()));
                    if let Some(Argument::Short(argument)) = self.arguments.last_mut() {
                        argument.extend_from_slice(taken);
                    }
                    self.held_bytes += taken.len();
                    *input = rest;
                    if taken.len() < missing {
                        self.state = State::Argument(missing - taken.len());
                        return Ok(Decoded::Incomplete);
                    }
                    self.state = State::LineEnd(2);
                }
                State::LineEnd(missing) => {
                    let Some((&byte, rest)) = input.split_first() else { return Ok(Decoded::Incomplete) };
                    if byte != b"\r\n"[2 - missing] {
                        return Err(ProtocolError::MissingLineEnd);
                    }
                    *input = rest;
                    if missing == 2 {
                        self.state = State::LineEnd(1);
                    } else if self.missing > 0 {
                        self.state = State::ArgumentLine;
                    } else {
                        return Ok(Decoded::Request(self.end()));
                    }
                }
            }
        }
    }

    fn end(&mut self) -> Vec<Argument> {
        self.state = State::FirstLine;
        self.held_bytes = 0;
        std::mem::take(&mut self.arguments)
    }

    /// Takes a line off, without its end. Returns `None` if its end has not arrived.
    fn take_line(&mut self, input: &mut &[u8]) -> Result<Option<Vec<u8>>, ProtocolError> {
        let room = LINE_BYTES_MAX - self.line.len();
        let Some(end) = input.iter().take(room).position(|&byte| byte == b'\n') else {
            if input.len() >= room {
                return Err(ProtocolError::LongLine);
            }
            self.line.extend_from_slice(input);
            *input = &[];
            return Ok(None);
        };
        let mut line = std::mem::take(&mut self.line);
        line.extend_from_slice(&input[..end]);
        *input = &input[end + 1..];
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(Some(line))
    }

    /// Begins a request. Returns the whole request if the line has it.
    fn begin(&mut self, line: &[u8]) -> Result<Option<Vec<Argument>>, ProtocolError> {
        let Some(count) = line.strip_prefix(b"*") else {
            if is_other_protocol(line) {
                return Err(ProtocolError::OtherProtocol);
            }
            let words = words(line)?;
            return Ok((!words.is_empty()).then(|| words.into_iter().map(Argument::Short).collect()));
        };
        let count = number(count).ok_or(ProtocolError::InvalidArgumentCount)?;
        // Redis ignores an empty request.
        if count <= 0 {
            return Ok(None);
        }
        let count = usize::try_from(count).ok().filter(|&count| count <= ARGUMENTS_MAX);
        self.missing = count.ok_or(ProtocolError::InvalidArgumentCount)?;
        self.state = State::ArgumentLine;
        Ok(None)
    }

    /// Begins an argument. Returns its length if it is long.
    fn begin_argument(&mut self, line: &[u8]) -> Result<Option<u64>, ProtocolError> {
        let Some((b'$', bytes)) = line.split_first() else {
            return Err(ProtocolError::NotAnArgument(line.first().copied().unwrap_or(b'\r')));
        };
        let bytes = number(bytes).and_then(|bytes| u64::try_from(bytes).ok()).filter(|&bytes| bytes <= VALUE_BYTES_MAX);
        let bytes = bytes.ok_or(ProtocolError::InvalidArgumentLength)?;
        self.missing -= 1;
        self.held_bytes += ARGUMENT_BYTES;
        if bytes > SHORT_ARGUMENT_MAX as u64 {
            self.arguments.push(Argument::Long(bytes));
            self.state = State::LineEnd(2);
            return Ok(Some(bytes));
        }
        let bytes = bytes as usize;
        // Before any byte is kept.
        if self.held_bytes + bytes > HELD_BYTES_MAX {
            return Err(ProtocolError::InvalidArgumentLength);
        }
        self.arguments.push(Argument::Short(Vec::new()));
        self.state = State::Argument(bytes);
        Ok(None)
    }
}

/// Reads a decimal number as Redis does: no plus sign, no spaces, no leading zeros.
pub(crate) fn number(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let is_canonical = digits.first().is_some_and(|&first| first != b'0' || text.len() == 1);
    let all_digits = digits.iter().all(u8::is_ascii_digit);
    (is_canonical && all_digits).then(|| std::str::from_utf8(text).ok()?.parse().ok()).flatten()
}

/// Recognises a line of HTTP or TLS. A body that a web page sends without permission follows a line
/// that begins with `POST`, and behind any other method comes a header `Host`. The first message of
/// TLS has control bytes.
fn is_other_protocol(line: &[u8]) -> bool {
    let first = line.trim_ascii_start().split(u8::is_ascii_whitespace).next().unwrap_or_default();
    first.eq_ignore_ascii_case(b"POST")
        || first.get(..5).is_some_and(|name| name.eq_ignore_ascii_case(b"Host:"))
        || line.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace())
}

/// Splits a line into words. A word in double quotes may have spaces and the escapes `\"` and `\\`;
/// one in single quotes has none.
fn words(line: &[u8]) -> Result<Vec<Vec<u8>>, ProtocolError> {
    let mut words = Vec::new();
    let mut rest = line.trim_ascii_start();
    while let Some(&first) = rest.first() {
        let mut word = Vec::new();
        let mut at = 0;
        if first == b'"' || first == b'\'' {
            at = 1;
            loop {
                match rest.get(at) {
                    None => return Err(ProtocolError::UnbalancedQuotes),
                    Some(&byte) if byte == first => break,
                    Some(b'\\') if first == b'"' && matches!(rest.get(at + 1), Some(b'"' | b'\\')) => {
                        word.push(rest[at + 1]);
                        at += 2;
                    }
                    Some(&byte) => {
                        word.push(byte);
                        at += 1;
                    }
                }
            }
            at += 1;
            if rest.get(at).is_some_and(|byte| !byte.is_ascii_whitespace()) {
                return Err(ProtocolError::UnbalancedQuotes);
            }
        } else {
            while let Some(&byte) = rest.get(at).filter(|byte| !byte.is_ascii_whitespace()) {
                word.push(byte);
                at += 1;
            }
        }
        words.push(word);
        rest = rest[at..].trim_ascii_start();
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes a stream that arrives in pieces of these lengths, and then in one piece.
    fn decode_in(bytes: &[u8], pieces: &[usize]) -> Result<Vec<Vec<Argument>>, ProtocolError> {
        let mut decoder = RequestDecoder::default();
        let mut requests = Vec::new();
        let mut skip = 0;
        let mut rest = bytes;
        let mut pieces = pieces.iter().copied().chain(std::iter::repeat(usize::MAX));
        while !rest.is_empty() {
            let (mut piece, behind) = rest.split_at(pieces.next().unwrap().clamp(1, rest.len()));
            rest = behind;
            while !piece.is_empty() {
                let skipped = skip.min(piece.len());
                piece = &piece[skipped..];
                skip -= skipped;
                if skip > 0 || piece.is_empty() {
                    continue;
                }
                match decoder.decode(&mut piece)? {
                    Decoded::Incomplete => assert!(piece.is_empty()),
                    Decoded::Request(request) => requests.push(request),
                    Decoded::LongArgument(bytes) => skip = bytes as usize,
                }
                assert!(decoder.held_bytes() <= HELD_BYTES_MAX);
            }
        }
        Ok(requests)
    }

    fn encode(requests: &[Vec<Vec<u8>>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for request in requests {
            bytes.extend(format!("*{}\r\n", request.len()).bytes());
            for argument in request {
                bytes.extend(format!("${}\r\n", argument.len()).bytes());
                bytes.extend_from_slice(argument);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        bytes
    }

    fn arguments() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            8 => proptest::collection::vec(any::<u8>(), 0..40),
            1 => (SHORT_ARGUMENT_MAX - 2..SHORT_ARGUMENT_MAX + 3).prop_map(|length| vec![b'\r'; length]),
        ]
    }

    proptest! {
        #[test]
        fn every_split_decodes_to_the_same_requests(
            requests in proptest::collection::vec(proptest::collection::vec(arguments(), 1..5), 1..5),
            pieces in proptest::collection::vec(1usize..50, 0..40),
        ) {
            let argument = |bytes: &Vec<u8>| match bytes.len() {
                length if length > SHORT_ARGUMENT_MAX => Argument::Long(length as u64),
                _ => Argument::Short(bytes.clone()),
            };
            let expected: Vec<Vec<Argument>> =
                requests.iter().map(|request| request.iter().map(argument).collect()).collect();
            let bytes = encode(&requests);
            prop_assert_eq!(decode_in(&bytes, &pieces), Ok(expected.clone()));
            prop_assert_eq!(decode_in(&bytes, &vec![1; bytes.len()]), Ok(expected));
        }

        #[test]
        fn any_bytes_decode_or_fail_alike_however_they_are_split(
            bytes in proptest::collection::vec(
                prop_oneof![Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'2'), any::<u8>()],
                0..200,
            ),
            pieces in proptest::collection::vec(1usize..20, 0..40),
        ) {
            prop_assert_eq!(decode_in(&bytes, &pieces), decode_in(&bytes, &[]));
        }
    }

    #[test]
    fn hostile_lengths_are_refused_before_any_memory_is_taken() {
        let fails = |text: &str| decode_in(text.as_bytes(), &[]).unwrap_err();
        for count in ["16385", "9223372036854775807", "99999999999999999999", "01", "+1", "", "1 "] {
            assert_eq!(fails(&format!("*{count}\r\n")), ProtocolError::InvalidArgumentCount, "{count}");
        }
        for bytes in ["-1", "536870913", "18446744073709551616", "x", "", "00"] {
            assert_eq!(fails(&format!("*1\r\n${bytes}\r\n")), ProtocolError::InvalidArgumentLength, "{bytes}");
        }
        assert_eq!(fails("*1\r\n:1\r\n"), ProtocolError::NotAnArgument(b':'));
        assert_eq!(fails("*1\r\n$1\r\naXY"), ProtocolError::MissingLineEnd);
        assert_eq!(fails(&"x".repeat(LINE_BYTES_MAX)), ProtocolError::LongLine);
        assert_eq!(decode_in(b"*0\r\n*-1\r\n\r\n", &[]), Ok(vec![]));
        let mut decoder = RequestDecoder::default();
        let mut input = &b"*16384\r\n$4096\r\n"[..];
        assert_eq!(decoder.decode(&mut input), Ok(Decoded::Incomplete));
        assert_eq!((decoder.held_bytes(), decoder.arguments.capacity() < 8), (ARGUMENT_BYTES, true));
        let argument = format!("$4096\r\n{}\r\n", "y".repeat(4096));
        let many = format!("*16384\r\n{}", argument.repeat(HELD_BYTES_MAX / 4096));
        assert_eq!(fails(&many), ProtocolError::InvalidArgumentLength, "together they are too long");
    }

    #[test]
    fn commands_behind_a_line_of_http_or_tls_are_never_decoded() {
        for start in [
            "POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
            " post /\r\n",
            "\r\nPOST\r\n",
            "Host: localhost:6379\r\n",
            "hOST:a\r\n",
            "\u{16}\u{3}\u{1}\u{2}\r\n",
        ] {
            let mut decoder = RequestDecoder::default();
            let text = format!("{start}FLUSHALL\r\n");
            assert_eq!(decoder.decode(&mut text.as_bytes()), Err(ProtocolError::OtherProtocol), "{start:?}");
        }
        // Of an array, every byte is the client's own.
        let request = decode_in(b"*2\r\n$4\r\nPOST\r\n$5\r\nHost:\r\n", &[]).unwrap();
        assert_eq!(request.len(), 1);
        assert_eq!(decode_in(b"POSTS\r\nhosts\r\nget Host:\r\n", &[]).unwrap().len(), 3);
    }

    #[test]
    fn lines_of_words_are_requests_too() {
        let words = |text: &str| {
            let requests = decode_in(text.as_bytes(), &[])?;
            let text = |argument: &Argument| String::from_utf8(argument.bytes().unwrap().to_vec()).unwrap();
            Ok(requests.iter().map(|request| request.iter().map(text).collect::<Vec<_>>()).collect::<Vec<_>>())
        };
        assert_eq!(words("PING\r\n  get  a\n"), Ok(vec![vec!["PING".into()], vec!["get".into(), "a".into()]]));
        assert_eq!(words("set \"a b\\\"\" 'c d'\r\n"), Ok(vec![vec!["set".into(), "a b\"".into(), "c d".into()]]));
        assert_eq!(words("get \"a\r\n"), Err(ProtocolError::UnbalancedQuotes));
        assert_eq!(words("get 'a'b\r\n"), Err(ProtocolError::UnbalancedQuotes));
    }
}
