//! What a node says: kind, then body.
#![no_main]

use larder_wire::{HEADER_BYTES, Response};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&kind, body)) = input.split_first() else { return };
    if let Ok(message) = Response::decode(kind, body) {
        let frame = message.frame(1, None);
        assert_eq!(&frame.head[HEADER_BYTES..], body, "there is one way to say a thing");
    }
});
