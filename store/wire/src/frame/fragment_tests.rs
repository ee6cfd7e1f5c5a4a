//! Fragments: their order, frames between them, and their end.

use super::tests::{SlowSink, SlowSource};
use super::*;
use crate::VERSION_FRAGMENTS;
use larder_runtime::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

const LARGE: usize = 3 * FRAGMENT_BYTES + 1000;

fn pattern(request: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7) as u8 ^ request as u8).collect()
}

fn frame(request: u64, bytes: usize) -> Frame {
    let payload: Option<Payload> = (bytes > 0).then(|| Box::new(pattern(request, bytes)) as _);
    Frame::new(9, request, 0, b"body", payload).for_version(VERSION_FRAGMENTS)
}

fn reader(bytes: Vec<u8>, step: usize) -> FrameReader<SlowSource> {
    let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step });
    reader.set_version(VERSION_FRAGMENTS);
    reader
}

async fn sent(frames: Vec<Frame>, step: usize) -> Vec<u8> {
    let (sender, queue) = mpsc::channel(64);
    for frame in frames {
        sender.try_send(frame).map_err(|_| ()).unwrap();
    }
    drop(sender);
    let taken = Arc::default();
    let writer = FrameWriter::new(SlowSink { taken: Arc::clone(&taken), step });
    writer.send_all(queue, Duration::from_secs(1)).await.unwrap();
    taken.lock().clone()
}

/// Events of a stream: the end of a whole or an abandoned payload, and frames without one.
async fn events(bytes: Vec<u8>, step: usize) -> io::Result<Vec<(u64, &'static str)>> {
    let mut reader = reader(bytes, step);
    let mut events = Vec::new();
    while let Some(header) = reader.next().await? {
        let mut memory = vec![0; header.payload_bytes as usize];
        let mut at = 0;
        let mut end = if memory.is_empty() { "short" } else { "whole" };
        while at < memory.len() {
            match reader.piece(&mut memory[at..]).await? {
                Piece::Bytes(bytes) => at += bytes,
                Piece::Frame(head) => {
                    reader.take_body(&head).await?;
                    assert_eq!(reader.body(), b"body");
                    events.push((head.header.request, "between"));
                }
                Piece::Abandoned => {
                    end = "abandoned";
                    break;
                }
            }
        }
        assert!(memory[..at] == pattern(header.request, memory.len())[..at], "request {}", header.request);
        events.push((header.request, end));
    }
    Ok(events)
}

#[tokio::test]
async fn large_payload_arrives_in_fragments_whatever_the_steps() {
    let sizes = [LARGE, 0, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 5, 4 << 20];
    let expected: Vec<_> =
        sizes.iter().zip(0..).map(|(&size, i)| (i, if size > 0 { "whole" } else { "short" })).collect();
    for step in [999, 4096, 65_536, 10 << 20] {
        let bytes = sent((0..).zip(sizes).map(|(i, size)| frame(i, size)).collect(), step).await;
        // A header for each fragment beside that of the message.
        let fragments = 4 + 2 + 16;
        let total: usize = sizes.iter().map(|size| HEADER_BYTES + 4 + size).sum();
        assert_eq!(bytes.len(), total + fragments * HEADER_BYTES);
        assert_eq!(events(bytes, step).await.unwrap(), expected, "step {step}");
    }
}

#[tokio::test]
async fn older_peer_gets_a_payload_in_one_frame() {
    let whole = Frame::new(9, 1, 0, b"body", Some(Box::new(pattern(1, LARGE)))).for_version(VERSION_FRAGMENTS - 1);
    let bytes = sent(vec![whole], 1 << 20).await;
    assert_eq!(bytes.len(), HEADER_BYTES + 4 + LARGE);
    let mut old = FrameReader::new(SlowSource { bytes, at: 0, step: 70_000 });
    assert_eq!(old.next().await.unwrap().unwrap().payload_bytes as usize, LARGE);
    old.discard().await.unwrap();
    let mut old =
        FrameReader::new(SlowSource { bytes: sent(vec![frame(1, LARGE)], 1 << 20).await, at: 0, step: 70_000 });
    assert!(old.next().await.unwrap_err().to_string().contains("fragment"));
}

/// Sends bulk frames, and `meanwhile` once the sink has taken `after` bytes.
async fn sent_with(bulk: Vec<Frame>, after: usize, meanwhile: impl FnOnce(&mpsc::Sender<Frame>)) -> Vec<u8> {
    let (urgent, urgent_queue) = mpsc::channel(64);
    let (sender, bulk_queue) = mpsc::channel(64);
    for frame in bulk {
        sender.try_send(frame).map_err(|_| ()).unwrap();
    }
    drop(sender);
    let taken = Arc::<Mutex<Vec<u8>>>::default();
    let writer = FrameWriter::new(SlowSink { taken: taken.clone(), step: 50_000 });
    let sending = tokio::spawn(writer.send_all(FrameQueue::new(urgent_queue, bulk_queue), Duration::from_secs(1)));
    while taken.lock().len() < after {
        tokio::task::yield_now().await;
    }
    meanwhile(&urgent);
    drop(urgent);
    sending.await.unwrap().unwrap();
    std::mem::take(&mut *taken.lock())
}

#[tokio::test]
async fn urgent_frame_leaves_between_two_fragments() {
    let bytes = sent_with(vec![frame(1, LARGE), frame(2, LARGE)], 60_000, |urgent| {
        (100..103).for_each(|request| urgent.try_send(frame(request, 0)).map_err(|_| ()).unwrap());
    });
    let bytes = bytes.await;
    let begin = bytes.windows(8).position(|window| window == 100u64.to_le_bytes()).unwrap();
    assert!(begin < 60_000 + 50_000 + FRAGMENT_BYTES + 1000, "the frame left after {begin} bytes");
    let between = [(100, "between"), (101, "between"), (102, "between"), (1, "whole"), (2, "whole")];
    assert_eq!(events(bytes, 3000).await.unwrap(), between);
}

#[tokio::test]
async fn abandoned_payload_ends_after_the_fragment_that_has_begun() {
    let guards = Arc::<QueuedPayloads>::default();
    let with_guard = |request| {
        let mut frame = frame(request, LARGE);
        let guard = guards.add(request);
        frame.abandon_when(move || guard.is_abandoned());
        frame
    };
    let frames = || vec![with_guard(1), with_guard(2), frame(3, LARGE), with_guard(1), frame(4, 0)];
    // Before the first byte, within the head of the message, and within its fragments.
    for after in [0, 50_000, 300_000, 600_000] {
        let bytes = sent_with(frames(), after, |_| guards.abandon(1)).await;
        let expected: &[_] = match after {
            0 => &[(2, "whole"), (3, "whole"), (4, "short")],
            _ => &[(1, "abandoned"), (2, "whole"), (3, "whole"), (4, "short")],
        };
        let found = events(bytes.clone(), 3000).await.unwrap();
        assert!(found == expected || after == 0 && found[0] == (1, "abandoned"), "{found:?} after {after} bytes");
        let most = after + 50_000 + FRAGMENT_BYTES + 2 * LARGE + 20 * HEADER_BYTES;
        assert!(bytes.len() <= most, "{} bytes after {after}", bytes.len());
    }
    drop(guards.add(1));
    assert!(!guards.add(1).is_abandoned(), "a later payload of the number is not abandoned");
}

#[tokio::test]
async fn condition_that_turns_true_between_two_checks_leaves_a_valid_stream() {
    for checks in 0..40 {
        let left = Arc::new(Mutex::new(checks));
        let mut unwanted = frame(1, LARGE);
        unwanted.abandon_when(move || {
            let mut left = left.lock();
            *left -= i32::from(*left > 0);
            *left == 0
        });
        let found = events(sent(vec![unwanted, frame(2, 10)], 100_000).await, 5000).await.unwrap();
        assert_eq!(found.last(), Some(&(2, "whole")), "{checks} checks: {found:?}");
        assert!(found.len() < 3, "{checks} checks: {found:?}");
    }
}

#[tokio::test]
async fn wrong_fragment_is_a_protocol_error() {
    let number = |heads: Vec<(Vec<u8>, usize)>| -> Vec<u8> {
        let numbered = heads.into_iter().zip(0u32..).flat_map(|((mut head, payload), number)| {
            let check = &mut head[CRC_AT..HEADER_BYTES];
            check.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, of_number)| *byte ^= of_number);
            head.resize(head.len() + payload, 0);
            head
        });
        numbered.collect()
    };
    let begin = || (frame(1, LARGE).head, 0);
    let whole = |request, bytes| (Frame::new(9, request, 0, b"", Some(Box::new(vec![0u8; bytes]))).head, bytes);
    let fragment = |request, bytes| (fragment_head(request, bytes), bytes);
    let cases = [
        ("without a message", vec![fragment(1, 10)]),
        ("of another request", vec![begin(), fragment(2, 10)]),
        ("beyond the total", vec![(Frame::new(9, 1, 0, b"", None).head, 0), fragment(1, 10)]),
        ("after the total", {
            let mut all = vec![begin()];
            all.extend([FRAGMENT_BYTES, FRAGMENT_BYTES, FRAGMENT_BYTES, 1001].map(|bytes| fragment(1, bytes)));
            all
        }),
        ("too long", vec![begin(), fragment(1, FRAGMENT_BYTES + 1)]),
        ("after the end", vec![begin(), fragment(1, 0), fragment(1, 10)]),
        ("payload between fragments", vec![begin(), fragment(1, 10), whole(3, 10)]),
    ];
    for (name, heads) in cases {
        assert_eq!(events(number(heads), 70_000).await.unwrap_err().kind(), io::ErrorKind::InvalidData, "{name}");
    }
    let truncated = number(vec![begin(), fragment(1, 10)]);
    assert_eq!(events(truncated, 70_000).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn dropped_receive_loses_no_bytes() {
    /// Delivers bytes only in every other poll.
    struct Hesitant(SlowSource, Arc<AtomicBool>);
    impl crate::ByteSource for Hesitant {
        async fn receive(&mut self, into: &mut [std::io::IoSliceMut<'_>]) -> io::Result<usize> {
            if self.1.fetch_xor(true, Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            self.0.receive(into).await
        }
    }
    let bytes = sent(vec![frame(1, 2 << 20), frame(2, 0)], 1 << 20).await;
    let mut reader = FrameReader::new(Hesitant(SlowSource { bytes, at: 0, step: 30_000 }, Arc::default()));
    reader.set_version(VERSION_FRAGMENTS);
    let mut memory = vec![0; 2 << 20];
    assert_eq!(reader.next().await.unwrap().unwrap().request, 1);
    let mut at = 0;
    while at < memory.len() {
        tokio::select! {
            biased;
            piece = reader.piece(&mut memory[at..]) => {
                let Piece::Bytes(bytes) = piece.unwrap() else { panic!("there is no other frame") };
                at += bytes;
            }
            () = std::future::ready(()) => {}
        }
    }
    assert!(memory == pattern(1, 2 << 20) && reader.payload_left() == 0);
}
