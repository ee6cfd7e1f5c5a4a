//! Requests of Redis clients: however the bytes are split, the same requests or the same error.

#![no_main]

use larder_redis::{Argument, Command, Decoded, ProtocolError, RequestDecoder, glob};
use libfuzzer_sys::fuzz_target;

/// Decodes bytes that arrive in pieces of `piece` bytes.
fn decode(bytes: &[u8], piece: usize) -> Result<Vec<Vec<Argument>>, ProtocolError> {
    let mut decoder = RequestDecoder::default();
    let (mut requests, mut skip) = (Vec::new(), 0u64);
    for mut piece in bytes.chunks(piece) {
        while !piece.is_empty() {
            let skipped = skip.min(piece.len() as u64);
            piece = &piece[skipped as usize..];
            skip -= skipped;
            if piece.is_empty() {
                break;
            }
            match decoder.decode(&mut piece)? {
                Decoded::Incomplete => assert!(piece.is_empty()),
                Decoded::Request(request) => requests.push(request),
                Decoded::LongArgument(bytes) => skip = bytes,
            }
        }
    }
    Ok(requests)
}

fuzz_target!(|input: &[u8]| {
    let Some((&piece, bytes)) = input.split_first() else { return };
    let whole = decode(bytes, usize::MAX);
    assert_eq!(whole, decode(bytes, usize::from(piece).max(1)));
    for request in whole.into_iter().flatten() {
        if let Ok(Command::Scan { pattern: Some(pattern), .. }) = Command::parse(request) {
            glob::matches(&pattern, bytes);
        }
    }
});
