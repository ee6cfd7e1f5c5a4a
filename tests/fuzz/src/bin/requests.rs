//! Decodes a message of a client: kind, then body. A message that decodes must encode to the same
//! bytes.
#![no_main]

use larder_wire::{HEADER_BYTES, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Request};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&kind, body)) = input.split_first() else { return };
    for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION {
        if let Ok(message) = Request::decode(version, kind, body) {
            let frame = message.frame(version, 1, 2, None);
            assert_eq!(&frame.head[HEADER_BYTES..], body, "a message has one encoding");
        }
    }
});
