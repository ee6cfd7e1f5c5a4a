//! Reads a stream of frames that arrives in pieces. The first byte sets the size of the pieces, and
//! whether the target repairs magic and checksums first, and whether the peer may send fragments.
#![no_main]

use larder_wire::{ByteSource, FrameReader, HEADER_BYTES, Piece, VERSION_FRAGMENTS};
use std::io::{self, IoSliceMut, Read};

struct Pieces {
    bytes: Vec<u8>,
    at: usize,
    step: usize,
}

impl ByteSource for Pieces {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let end = self.bytes.len().min(self.at + self.step);
        let received = (&self.bytes[self.at..end]).read_vectored(into)?;
        self.at += received;
        Ok(received)
    }
}

/// Repairs magic and checksum of each frame. Without that, the fuzzer would not get past the first
/// comparison. Stops at a frame whose lengths exceed the input.
fn repair(bytes: &mut [u8]) {
    let mut at = 0;
    let mut sequence = 0u32;
    while let Some(frame) = bytes.get_mut(at..).filter(|rest| rest.len() >= HEADER_BYTES) {
        frame[..4].copy_from_slice(b"LRDR");
        frame[6..8].fill(0);
        let number = |from: usize| u32::from_le_bytes(frame[from..from + 4].try_into().unwrap()) as usize;
        let body = number(16);
        let payload = number(20);
        let is_fragmented = frame[5] == 1;
        let Some(sealed) = frame.get(HEADER_BYTES..HEADER_BYTES + body) else { return };
        let mut crc = crc32fast::Hasher::new();
        crc.update(&frame[..28]);
        crc.update(sealed);
        let check = crc.finalize() ^ sequence;
        frame[28..32].copy_from_slice(&check.to_le_bytes());
        sequence = sequence.wrapping_add(1);
        // The payload of a fragmented message is in the frames behind it.
        at += HEADER_BYTES + body + if is_fragmented { 0 } else { payload };
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&mode, rest)) = input.split_first() else { return };
    let mut bytes = rest.to_vec();
    if mode & 1 == 1 {
        repair(&mut bytes);
    }
    let whole = bytes.len();
    let mut reader = FrameReader::new(Pieces { bytes, at: 0, step: usize::from(mode) * 7 + 1 });
    reader.set_version(if mode & 2 == 2 { VERSION_FRAGMENTS } else { VERSION_FRAGMENTS - 1 });
    futures::executor::block_on(async {
        let mut used = 0;
        let mut scratch = [0; 1000];
        while let Ok(Some(header)) = reader.next().await {
            assert_eq!(reader.body().len(), header.body_bytes as usize);
            used += HEADER_BYTES + reader.body().len();
            while reader.payload_left() > 0 {
                match reader.piece(&mut scratch).await {
                    Ok(Piece::Bytes(bytes)) => used += bytes,
                    Ok(Piece::Frame(head)) => {
                        if reader.take_body(&head).await.is_err() {
                            return;
                        }
                        used += HEADER_BYTES + reader.body().len();
                    }
                    Ok(Piece::Abandoned) => used += HEADER_BYTES,
                    Err(_) => return,
                }
            }
            assert!(used <= whole, "the reader consumed more than the input");
        }
    });
});
