//! The protocol of ZeroMQ sockets as a server speaks it, without I/O: ZMTP 3.0 with the mechanism
//! NULL.
//!
//! Source: ZeroMQ RFC 23, <https://rfc.zeromq.org/spec/23/>. Commands of ZMTP 3.1 are known, too
//! (RFC 37, <https://rfc.zeromq.org/spec/37/>), because libzmq sends heartbeats to every peer.
//!
//! ```text
//! greeting (64 bytes): FF, 8 bytes, 7F, version (2), mechanism (20), as-server (1), filler (31)
//! frame:               flags (1), length (1, or 8 with LONG), body
//! command body:        length of the name (1), name, data
//! ```
//!
//! Invariants:
//! - The decoders keep nothing and allocate nothing. A frame borrows its body from the caller.
//! - A frame longer than [`FRAME_BYTES_MAX`] is an error as soon as its length is known.
//! - Any split of the same bytes decodes to the same frames.

#![forbid(unsafe_code)]

use std::fmt;

/// Length of the greeting in bytes.
pub const GREETING_BYTES: usize = 64;
/// Maximum body of a frame that a peer may send, in bytes. Subscriptions and requests are short.
pub const FRAME_BYTES_MAX: usize = 4 << 10;
/// Maximum context of a heartbeat in bytes, as RFC 37 has it.
pub const CONTEXT_BYTES_MAX: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Offset of the version in the greeting, after the signature.
const VERSION_AT: usize = 10;
const MECHANISM_AT: usize = 12;
const MECHANISM_BYTES: usize = 20;
const MECHANISM: &[u8] = b"NULL";
/// Version that the greeting announces. Peers with a newer one speak it, too.
const VERSION: [u8; 2] = [3, 0];
const SOCKET_TYPE: &[u8] = b"Socket-Type";

/// Violation of the protocol. The connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZmtpError {
    /// The bytes are no greeting of ZMTP.
    OtherProtocol,
    /// Major version of the peer, below 3.
    Version(u8),
    /// The peer asks for authentication or encryption.
    Mechanism,
    /// Unknown flags of a frame.
    Flags(u8),
    /// Length of a frame above [`FRAME_BYTES_MAX`].
    Length(u64),
    /// A malformed command.
    Command,
    /// A message or command that this socket does not take at this point.
    Unexpected,
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZmtpError::OtherProtocol => f.write_str("not the protocol of ZeroMQ"),
            ZmtpError::Version(major) => write!(f, "ZMTP version {major}; at least 3 is needed"),
            ZmtpError::Mechanism => f.write_str("a security mechanism other than NULL"),
            ZmtpError::Flags(flags) => write!(f, "unknown flags {flags:#04x} of a frame"),
            ZmtpError::Length(bytes) => write!(f, "a frame of {bytes} bytes; the maximum is {FRAME_BYTES_MAX}"),
            ZmtpError::Command => f.write_str("a malformed command"),
            ZmtpError::Unexpected => f.write_str("a message that this socket does not take"),
        }
    }
}

impl std::error::Error for ZmtpError {}

/// The greeting of a server.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[VERSION_AT - 1] = 0x7f;
    greeting[VERSION_AT..MECHANISM_AT].copy_from_slice(&VERSION);
    greeting[MECHANISM_AT..MECHANISM_AT + MECHANISM.len()].copy_from_slice(MECHANISM);
    greeting
}

/// Checks a peer's greeting. Returns its length, or `None` if bytes are missing.
///
/// # Errors
/// As soon as a byte tells that the peer speaks something else.
pub fn decode_greeting(bytes: &[u8]) -> Result<Option<usize>, ZmtpError> {
    let at = |index: usize| bytes.get(index).copied();
    if at(0).is_some_and(|byte| byte != 0xff) || at(VERSION_AT - 1).is_some_and(|byte| byte != 0x7f) {
        return Err(ZmtpError::OtherProtocol);
    }
    if let Some(major) = at(VERSION_AT).filter(|&major| major < VERSION[0]) {
        return Err(ZmtpError::Version(major));
    }
    let Some(greeting) = bytes.get(..GREETING_BYTES) else { return Ok(None) };
    let (name, padding) = greeting[MECHANISM_AT..MECHANISM_AT + MECHANISM_BYTES].split_at(MECHANISM.len());
    if name != MECHANISM || padding.iter().any(|&byte| byte != 0) {
        return Err(ZmtpError::Mechanism);
    }
    Ok(Some(GREETING_BYTES))
}

/// Kind of a server's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketKind {
    /// Sends messages to subscribers.
    Pub,
    /// Receives requests and answers each with any number of messages.
    Router,
}

impl SocketKind {
    fn name(self) -> &'static [u8] {
        match self {
            SocketKind::Pub => b"PUB",
            SocketKind::Router => b"ROUTER",
        }
    }

    /// Returns `true` if a peer with a socket of this type may connect.
    pub fn accepts(self, peer: &[u8]) -> bool {
        match self {
            SocketKind::Pub => matches!(peer, b"SUB" | b"XSUB"),
            SocketKind::Router => matches!(peer, b"REQ" | b"DEALER" | b"ROUTER"),
        }
    }
}

/// One frame of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Another frame of the same message follows.
    pub has_more: bool,
    pub is_command: bool,
    pub body: &'a [u8],
}

/// Decodes the frame at the start of `bytes`. Returns it with its length, or `None` if bytes are
/// missing.
///
/// # Errors
/// If the flags are unknown or the body is too long.
pub fn decode_frame(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, ZmtpError> {
    let Some((&flags, rest)) = bytes.split_first() else { return Ok(None) };
    let (has_more, is_command) = (flags & MORE != 0, flags & COMMAND != 0);
    if flags & !(MORE | LONG | COMMAND) != 0 || has_more && is_command {
        return Err(ZmtpError::Flags(flags));
    }
    let (length, head) = if flags & LONG == 0 {
        let Some(&length) = rest.first() else { return Ok(None) };
        (u64::from(length), 2)
    } else {
        let Some(length) = rest.first_chunk::<8>() else { return Ok(None) };
        (u64::from_be_bytes(*length), 9)
    };
    if length > FRAME_BYTES_MAX as u64 {
        return Err(ZmtpError::Length(length));
    }
    let end = head + length as usize;
    let body = bytes.get(head..end);
    Ok(body.map(|body| (Frame { has_more, is_command, body }, end)))
}

/// A command of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command<'a> {
    /// End of the peer's handshake.
    Ready { socket_type: &'a [u8] },
    /// Asks for messages whose first frame begins with these bytes (ZMTP 3.1).
    Subscribe(&'a [u8]),
    /// Ends such a subscription (ZMTP 3.1).
    Cancel(&'a [u8]),
    /// A heartbeat. The answer is [`pong`] with the same context.
    Ping { context: &'a [u8] },
    /// Any other command. A server ignores it.
    Other,
}

impl Command<'_> {
    /// Decodes the body of a command frame.
    ///
    /// # Errors
    /// If the command is malformed.
    pub fn decode(body: &[u8]) -> Result<Command<'_>, ZmtpError> {
        let (name, data) = named(body)?;
        Ok(match name {
            b"READY" => Command::Ready { socket_type: property(data, SOCKET_TYPE)? },
            b"SUBSCRIBE" => Command::Subscribe(data),
            b"CANCEL" => Command::Cancel(data),
            b"PING" => {
                // A time to live of 2 bytes, which a server without timeouts of its own ignores.
                let context = data.get(2..).ok_or(ZmtpError::Command)?;
                if context.len() > CONTEXT_BYTES_MAX {
                    return Err(ZmtpError::Command);
                }
                Command::Ping { context }
            }
            _ => Command::Other,
        })
    }
}

/// Splits a name with a length of one byte from the bytes behind it.
fn named(bytes: &[u8]) -> Result<(&[u8], &[u8]), ZmtpError> {
    let (&length, rest) = bytes.split_first().ok_or(ZmtpError::Command)?;
    rest.split_at_checked(length.into()).filter(|(name, _)| !name.is_empty()).ok_or(ZmtpError::Command)
}

/// Value of the property `wanted`. Names of properties are case-insensitive.
fn property<'a>(mut properties: &'a [u8], wanted: &[u8]) -> Result<&'a [u8], ZmtpError> {
    while !properties.is_empty() {
        let (name, rest) = named(properties)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or(ZmtpError::Command)?;
        let length = u32::from_be_bytes(*length) as usize;
        let (value, rest) = rest.split_at_checked(length).ok_or(ZmtpError::Command)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Ok(value);
        }
        properties = rest;
    }
    Err(ZmtpError::Command)
}

/// Appends the end of a server's handshake.
pub fn ready(out: &mut Vec<u8>, kind: SocketKind) {
    let mut data = vec![SOCKET_TYPE.len() as u8];
    data.extend_from_slice(SOCKET_TYPE);
    data.extend_from_slice(&(kind.name().len() as u32).to_be_bytes());
    data.extend_from_slice(kind.name());
    command(out, b"READY", &data);
}

/// Appends the answer to a heartbeat.
pub fn pong(out: &mut Vec<u8>, context: &[u8]) {
    command(out, b"PONG", context);
}

fn command(out: &mut Vec<u8>, name: &[u8], data: &[u8]) {
    let mut body = vec![name.len() as u8];
    body.extend_from_slice(name);
    body.extend_from_slice(data);
    frame(out, COMMAND, &body);
}

/// Appends a message with these frames.
pub fn message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (index, body) in frames.iter().enumerate() {
        frame(out, if index + 1 < frames.len() { MORE } else { 0 }, body);
    }
}

fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    if let Ok(length) = u8::try_from(body.len()) {
        out.extend_from_slice(&[flags, length]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(body.len() as u64).to_be_bytes());
    }
    out.extend_from_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first bytes of a SUB socket of libzmq 4.3.5 with the subscription `kv@`, and a
    /// heartbeat.
    const SUB: &[u8] = include_bytes!("../../../tests/fuzz/corpus/zmtp/sub");
    /// The first bytes of a DEALER socket of libzmq 4.3.5 that sends an empty frame and the number
    /// 5.
    const DEALER: &[u8] = include_bytes!("../../../tests/fuzz/corpus/zmtp/dealer");

    /// Decodes a whole connection.
    fn frames(bytes: &[u8]) -> Vec<Frame<'_>> {
        let mut at = decode_greeting(bytes).unwrap().unwrap();
        let mut frames = Vec::new();
        while let Some((frame, length)) = decode_frame(&bytes[at..]).unwrap() {
            frames.push(frame);
            at += length;
        }
        assert_eq!(at, bytes.len());
        frames
    }

    #[test]
    fn connections_of_libzmq_are_decoded() {
        let sub = frames(SUB);
        assert_eq!(Command::decode(sub[0].body), Ok(Command::Ready { socket_type: b"SUB" }));
        assert_eq!(sub[1], Frame { has_more: false, is_command: false, body: b"\x01kv@" });
        assert_eq!(Command::decode(sub[2].body), Ok(Command::Ping { context: b"" }));
        let dealer = frames(DEALER);
        assert_eq!(Command::decode(dealer[0].body), Ok(Command::Ready { socket_type: b"DEALER" }));
        assert_eq!(dealer[1], Frame { has_more: true, is_command: false, body: b"" });
        assert_eq!(dealer[2], Frame { has_more: false, is_command: false, body: &5u64.to_be_bytes() });
    }

    #[test]
    fn bytes_of_a_server_are_those_of_the_specification() {
        let mut expected = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
        expected.extend_from_slice(b"NULL");
        expected.resize(64, 0);
        assert_eq!(greeting().as_slice(), expected);
        let mut out = Vec::new();
        ready(&mut out, SocketKind::Pub);
        assert_eq!(out, b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
        out.clear();
        pong(&mut out, b"ab");
        assert_eq!(out, b"\x04\x07\x04PONGab");
        out.clear();
        message(&mut out, &[b"kv@", &7u64.to_be_bytes(), &[9; 256]]);
        let mut expected = b"\x01\x03kv@\x01\x08\0\0\0\0\0\0\0\x07\x02\0\0\0\0\0\0\x01\0".to_vec();
        expected.extend([9; 256]);
        assert_eq!(out, expected);
    }

    #[test]
    fn other_protocols_and_mechanisms_are_refused() {
        assert_eq!(decode_greeting(b"GET / HTTP/1.1\r\n"), Err(ZmtpError::OtherProtocol));
        assert_eq!(decode_greeting(b"\x16\x03\x01"), Err(ZmtpError::OtherProtocol));
        let mut old = greeting();
        old[VERSION_AT] = 2;
        assert_eq!(decode_greeting(&old[..11]), Err(ZmtpError::Version(2)));
        let mut curve = greeting();
        curve[MECHANISM_AT..MECHANISM_AT + 5].copy_from_slice(b"CURVE");
        assert_eq!(decode_greeting(&curve), Err(ZmtpError::Mechanism));
        assert_eq!(decode_greeting(&greeting()[..63]), Ok(None));
        assert!(!SocketKind::Pub.accepts(b"PUB") && SocketKind::Router.accepts(b"REQ"));
    }

    #[test]
    fn malformed_frames_and_commands_are_refused() {
        assert_eq!(decode_frame(b"\x08\x00"), Err(ZmtpError::Flags(8)));
        assert_eq!(decode_frame(b"\x05\x00"), Err(ZmtpError::Flags(5)));
        let long = [0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(decode_frame(&long), Err(ZmtpError::Length(u64::MAX)));
        for body in [
            b"".as_slice(),
            b"\x00",
            b"\x05REA",
            b"\x05READY",
            b"\x05READY\x0bSocket-Type\0\0\0\x09PUB",
            b"\x05READY\x0bSocket-Type\0\0",
            b"\x04PING\x00",
            b"\x04PING\0\0seventeen bytes !!",
        ] {
            assert_eq!(Command::decode(body), Err(ZmtpError::Command), "{body:?}");
        }
        assert_eq!(Command::decode(b"\x05ERROR\x00"), Ok(Command::Other));
        assert_eq!(Command::decode(b"\x09SUBSCRIBEkv"), Ok(Command::Subscribe(b"kv")));
    }

    proptest! {
        #[test]
        fn messages_round_trip_and_prefixes_are_incomplete(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..5),
            cut: prop::sample::Index,
        ) {
            let slices: Vec<&[u8]> = bodies.iter().map(Vec::as_slice).collect();
            let mut bytes = Vec::new();
            message(&mut bytes, &slices);
            let mut rest = bytes.as_slice();
            for (index, body) in bodies.iter().enumerate() {
                let (frame, length) = decode_frame(rest).unwrap().unwrap();
                prop_assert_eq!(frame, Frame { has_more: index + 1 < bodies.len(), is_command: false, body });
                prop_assert_eq!(decode_frame(&rest[..cut.index(length)]), Ok(None));
                rest = &rest[length..];
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn decoders_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_greeting(&bytes);
            if let Ok(Some((frame, length))) = decode_frame(&bytes) {
                prop_assert!(length <= bytes.len());
                let _ = Command::decode(frame.body);
            }
            let _ = Command::decode(&bytes);
        }
    }
}
