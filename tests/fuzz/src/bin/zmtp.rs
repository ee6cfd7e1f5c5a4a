//! Bytes of ZeroMQ peers: greeting and frames. Bytes behind a frame never change it.

#![no_main]

use larder_zmtp::{Command, decode_frame, decode_greeting};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut rest = match decode_greeting(input) {
        Ok(Some(length)) => &input[length..],
        Ok(None) | Err(_) => input,
    };
    while let Ok(Some((frame, length))) = decode_frame(rest) {
        assert_eq!(decode_frame(&rest[..length]), Ok(Some((frame, length))));
        assert_eq!(decode_frame(&rest[..length - 1]), Ok(None));
        let _ = Command::decode(frame.body);
        rest = &rest[length..];
    }
});
