use super::*;
use crate::stream::{ByteSink, ByteSource};
use larder_runtime::lock::Mutex;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

async fn read(bytes: &[u8]) -> io::Result<Option<(FrameHeader, Vec<u8>)>> {
    let mut reader = FrameReader::new(SlowSource { bytes: bytes.to_vec(), at: 0, step: bytes.len().max(1) });
    Ok(reader.next().await?.map(|header| (header, reader.body().to_vec())))
}

pub(super) struct SlowSource {
    pub(super) bytes: Vec<u8>,
    pub(super) at: usize,
    pub(super) step: usize,
}

impl ByteSource for SlowSource {
    async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let end = self.bytes.len().min(self.at + self.step);
        let received = (&self.bytes[self.at..end]).read_vectored(into)?;
        self.at += received;
        Ok(received)
    }
}

pub(super) struct SlowSink {
    pub(super) taken: Arc<Mutex<Vec<u8>>>,
    pub(super) step: usize,
}

impl ByteSink for SlowSink {
    async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        tokio::task::yield_now().await;
        let mut left = self.step;
        let mut taken = self.taken.lock();
        for slice in from {
            let now = slice.len().min(left);
            taken.extend_from_slice(&slice[..now]);
            left -= now;
        }
        Ok(self.step - left)
    }
}

fn header() -> FrameHeader {
    FrameHeader { kind: 9, request: 1, body_bytes: 0, payload_bytes: 0, deadline_ms: 0, flags: 0, crc: 0 }
}

fn frames(payloads: &[usize]) -> impl Iterator<Item = Frame> + '_ {
    payloads.iter().enumerate().map(|(i, &bytes)| {
        let payload: Option<Payload> =
            (bytes > 0).then(|| Box::new((0..bytes).map(|at| (at * 7 + i) as u8).collect::<Vec<u8>>()) as _);
        Frame::new(9, i as u64, 0, &vec![i as u8; i * 1000], payload)
    })
}

#[tokio::test]
async fn frames_round_trip_over_streams_of_any_step() {
    let payloads = [0, 1, 5000, 0, 70_000, 4096, 1 << 20, 3, 0];
    for step in [1000, 4096, 4097, 65_536, 10 << 20] {
        let (sender, queue) = mpsc::channel(16);
        for frame in frames(&payloads) {
            sender.try_send(frame).map_err(|_| ()).unwrap();
        }
        drop(sender);
        let taken = Arc::default();
        let writer = FrameWriter::new(SlowSink { taken: Arc::clone(&taken), step });
        writer.send_all(queue, Duration::from_secs(1)).await.unwrap();
        let bytes = taken.lock().clone();
        let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step });
        for (i, expected) in frames(&payloads).enumerate() {
            let header = reader.next().await.unwrap().unwrap();
            assert_eq!((header.request, reader.body().len()), (i as u64, i * 1000));
            let mut memory = vec![0; header.payload_bytes as usize];
            let mut seen = Vec::new();
            if i == 6 {
                reader.discard().await.unwrap();
                continue;
            }
            reader.payload(&mut memory, |piece| seen.extend_from_slice(piece)).await.unwrap();
            assert!(memory == expected.payload_bytes() && seen == memory, "frame {i}, step {step}");
        }
        assert!(reader.next().await.unwrap().is_none());
    }
}

#[tokio::test]
async fn urgent_frame_overtakes_bulk_frames_and_keeps_its_order() {
    let frame = |request, bytes: usize| {
        let payload: Option<Payload> = (bytes > 0).then(|| Box::new(vec![0u8; bytes]) as _);
        Frame::new(9, request, 0, b"", payload)
    };
    let (urgent, urgent_queue) = mpsc::channel(64);
    let (bulk, bulk_queue) = mpsc::channel(64);
    let send = |queue: &mpsc::Sender<Frame>, frame| queue.try_send(frame).map_err(|_| ()).unwrap();
    (0..40).for_each(|number| send(&bulk, frame(number, 600 << 10)));
    let taken = Arc::<Mutex<Vec<u8>>>::default();
    let writer = FrameWriter::new(SlowSink { taken: taken.clone(), step: 100_000 });
    let sending = tokio::spawn(writer.send_all(FrameQueue::new(urgent_queue, bulk_queue), Duration::from_secs(1)));
    // The writer is busy with bulk frames when urgent frames arrive, and then another bulk frame.
    while taken.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    (100..103).for_each(|number| send(&urgent, frame(number, 0)));
    send(&bulk, frame(200, 10));
    drop((urgent, bulk));
    sending.await.unwrap().unwrap();
    let bytes = taken.lock().clone();
    let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step: 1 << 20 });
    let mut order = Vec::new();
    while let Some(header) = reader.next().await.unwrap() {
        order.push(header.request);
        reader.discard().await.unwrap();
    }
    let urgent: Vec<usize> = (0..order.len()).filter(|&at| (100..103).contains(&order[at])).collect();
    assert!(urgent[2] <= 5 && urgent[2] == urgent[0] + 2, "{order:?}");
    order.retain(|number| !(100..103).contains(number));
    assert_eq!(order, (0..40).chain([200]).collect::<Vec<u64>>());
}

#[tokio::test]
async fn short_frames_are_sent_before_following_pages() {
    struct Sends(Arc<Mutex<Vec<usize>>>);
    impl ByteSink for Sends {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            let bytes = from.iter().map(|slice| slice.len()).sum();
            self.0.lock().push(bytes);
            Ok(bytes)
        }
    }
    let (sender, queue) = mpsc::channel(16);
    for bytes in [0, 0, 70_000, 0, 70_000] {
        let payload: Payload = Box::new(vec![0u8; bytes]);
        sender.try_send(Frame::new(9, 0, 0, b"", Some(payload))).map_err(|_| ()).unwrap();
    }
    drop(sender);
    let sends = Arc::default();
    FrameWriter::new(Sends(Arc::clone(&sends))).send_all(queue, Duration::from_secs(1)).await.unwrap();
    assert_eq!(*sends.lock(), [2 * HEADER_BYTES, 3 * HEADER_BYTES + 140_000]);
}

#[tokio::test]
async fn bulk_transfer_yields_to_other_tasks() {
    async fn yields_during<T>(work: impl Future<Output = T> + Send + 'static) -> u32
    where
        T: Send + 'static,
    {
        let work = tokio::spawn(work);
        let mut yields = 0;
        while !work.is_finished() {
            yields += 1;
            tokio::task::yield_now().await;
        }
        yields
    }
    struct InstantStream;
    impl ByteSource for InstantStream {
        async fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            Ok(into[0].len())
        }
    }
    impl ByteSink for InstantStream {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            Ok(from.iter().map(|slice| slice.len()).sum())
        }
    }
    let reading = async {
        let mut reader = FrameReader::new(InstantStream);
        reader.open_payload(&FrameHeader { payload_bytes: 16 << 20, ..header() }).unwrap();
        reader.discard().await
    };
    assert!(yields_during(reading).await >= 16);
    let (sender, queue) = mpsc::channel(16);
    for _ in 0..16 {
        let frame = Frame::new(9, 0, 0, b"", Some(Box::new(vec![0u8; 1 << 20])));
        sender.try_send(frame).map_err(|_| ()).unwrap();
    }
    drop(sender);
    let bulk = FrameQueue::new(mpsc::channel(1).1, queue);
    let writing = FrameWriter::new(InstantStream).send_all(bulk, Duration::from_secs(1));
    assert!(yields_during(writing).await >= 4);
}

#[tokio::test]
async fn body_buffer_grows_as_bytes_arrive() {
    // The header announces the largest body, and 20,000 bytes of it arrive.
    let frame = Frame::new(9, 1, 0, &vec![5; MAX_BODY_BYTES], None);
    let bytes = frame.head[..HEADER_BYTES + 20_000].to_vec();
    let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step: 1000 });
    let head = reader.head().await.unwrap().unwrap();
    let mut lengths = Vec::new();
    let ended = reader.take_body_if(&head, |bytes| {
        lengths.push(bytes);
        true
    });
    assert_eq!(ended.await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(lengths, [8 << 10, 16 << 10, 32 << 10]);
}

#[tokio::test]
async fn body_that_is_refused_is_verified_and_leaves_the_stream_in_step() {
    // At once, and midway.
    for (limit, damage) in [(0, None), (0, Some(8000)), (20_000, None), (20_000, Some(100)), (20_000, Some(30_000))] {
        let mut bytes = Frame::new(9, 1, 0, &[5; 40_000], None).head;
        let mut second = Frame::new(9, 2, 0, b"x", None);
        second.number(1);
        bytes.extend(second.head);
        damage.inspect(|&at: &usize| bytes[at] ^= 1);
        let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step: 1000 });
        let head = reader.head().await.unwrap().unwrap();
        let taken = reader.take_body_if(&head, |bytes| bytes < limit).await;
        assert_eq!(taken.ok(), damage.is_none().then_some(false));
        if damage.is_none() {
            assert!(reader.body().is_empty());
            assert_eq!(reader.next().await.unwrap().unwrap().request, 2);
        }
    }
}

#[tokio::test]
async fn shared_body_is_read_like_any_other() {
    let shared: Arc<[u8]> = vec![7; 300 << 10].into();
    let taken = Arc::new(Mutex::new(Vec::new()));
    let mut writer = FrameWriter::new(SlowSink { taken: taken.clone(), step: 10_000 });
    for request in 0..2 {
        writer.send(Frame::with_shared_body(9, request, shared.clone(), ())).await.unwrap();
    }
    assert_eq!(Arc::strong_count(&shared), 1, "sent frames are dropped");
    let mut reader = FrameReader::new(SlowSource { bytes: std::mem::take(&mut taken.lock()), at: 0, step: 7000 });
    for request in 0..2 {
        assert_eq!(reader.next().await.unwrap().unwrap().request, request);
        assert_eq!(reader.body(), &shared[..]);
    }
}

#[tokio::test(start_paused = true)]
async fn send_all_times_out_on_a_stalled_sink() {
    struct StalledSink;
    impl ByteSink for StalledSink {
        async fn send(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
            std::future::pending().await
        }
    }
    let (sender, queue) = mpsc::channel(1);
    sender.send(frames(&[10]).next().unwrap()).await.map_err(|_| ()).unwrap();
    let begin = Instant::now();
    let error = FrameWriter::new(StalledSink).send_all(queue, Duration::from_secs(3)).await.unwrap_err();
    assert_eq!((error.kind(), begin.elapsed().as_secs()), (io::ErrorKind::TimedOut, 3));
}

#[tokio::test(start_paused = true)]
async fn acknowledged_bytes_are_progress_of_a_full_sink() {
    /// Takes nothing. Its peer acknowledges a byte per second, until all 20 are acknowledged.
    struct DrainingSink(Instant);
    impl ByteSink for DrainingSink {
        async fn send(&mut self, _: &[IoSlice<'_>]) -> io::Result<usize> {
            std::future::pending().await
        }

        fn unacknowledged_bytes(&self) -> Option<u64> {
            Some(20u64.saturating_sub(self.0.elapsed().as_secs()))
        }
    }
    let (sender, queue) = mpsc::channel(1);
    sender.send(frames(&[10]).next().unwrap()).await.map_err(|_| ()).unwrap();
    let begin = Instant::now();
    let writer = FrameWriter::new(DrainingSink(begin));
    let progress = writer.payload_progress();
    let error = writer.send_all(queue, Duration::from_secs(3)).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    let seconds = begin.elapsed().as_secs();
    assert!((22..26).contains(&seconds), "{seconds} s");
    assert!(progress.load(std::sync::atomic::Ordering::Relaxed) > 10);
}

#[tokio::test(start_paused = true)]
async fn bytes_of_a_long_body_are_progress() {
    /// Takes 64 KiB per second.
    struct SlowSink;
    impl ByteSink for SlowSink {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(from.iter().map(|slice| slice.len()).sum::<usize>().min(64 << 10))
        }
    }
    let mut looks = Vec::new();
    for body_bytes in [1 << 10, 700 << 10] {
        let (sender, queue) = mpsc::channel(1);
        sender.send(Frame::new(9, 0, 0, &vec![1; body_bytes], None)).await.map_err(|_| ()).unwrap();
        drop(sender);
        let writer = FrameWriter::new(SlowSink);
        let progress = writer.payload_progress();
        writer.send_all(queue, Duration::from_secs(3)).await.unwrap();
        looks.push(progress.load(std::sync::atomic::Ordering::Relaxed) as usize / (64 << 10));
    }
    assert!(looks[0] == 0 && looks[1] >= 10, "{looks:?}");
}

#[tokio::test(start_paused = true)]
async fn acknowledged_bytes_are_progress_while_short_frames_are_sent() {
    /// Takes all bytes at once. Its peer acknowledges a byte per second.
    struct RoomySink(Instant);
    impl ByteSink for RoomySink {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            Ok(from.iter().map(|slice| slice.len()).sum())
        }

        fn unacknowledged_bytes(&self) -> Option<u64> {
            Some(100u64.saturating_sub(self.0.elapsed().as_secs()))
        }
    }
    let (sender, queue) = mpsc::channel(1);
    let writer = FrameWriter::new(RoomySink(Instant::now()));
    let progress = writer.payload_progress();
    let sending = tokio::spawn(writer.send_all(queue, Duration::from_secs(3)));
    sender.send(frames(&[10]).next().unwrap()).await.map_err(|_| ()).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = progress.load(std::sync::atomic::Ordering::Relaxed);
    for _ in 0..20 {
        sender.send(Frame::new(9, 0, 0, b"", None)).await.map_err(|_| ()).unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let grown = progress.load(std::sync::atomic::Ordering::Relaxed) - before;
    assert!(grown >= 5, "{grown} looks in 10 s found progress");
    drop(sender);
    sending.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn send_that_ends_at_a_look_is_not_repeated() {
    /// Takes 400,000 bytes each second, so each send ends at the time of a look.
    struct EverySecond;
    impl ByteSink for EverySecond {
        async fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(from.iter().map(|slice| slice.len()).sum::<usize>().min(400_000))
        }

        fn unacknowledged_bytes(&self) -> Option<u64> {
            Some(1)
        }
    }
    // The writer yields after a mebibyte, which is in the third and last send.
    let (sender, queue) = mpsc::channel(1);
    let frame = Frame::new(9, 0, 0, b"", Some(Box::new(vec![0u8; 1 << 20])));
    sender.send(frame).await.map_err(|_| ()).unwrap();
    drop(sender);
    FrameWriter::new(EverySecond).send_all(queue, Duration::from_secs(10)).await.unwrap();
}

#[tokio::test]
async fn flipped_byte_anywhere_in_a_frame_is_detected() {
    let frame = Frame::new(7, 99, 250, b"hello", Some(Box::new(vec![1u8, 2, 3])));
    let (header, body) = read(&frame.head).await.unwrap().unwrap();
    assert_eq!((header.kind, header.request, header.deadline_ms, header.payload_bytes), (7, 99, 250, 3));
    assert_eq!(body, b"hello");
    for at in 0..frame.head.len() {
        let mut bad = frame.head.clone();
        bad[at] ^= 4;
        assert!(read(&bad).await.is_err(), "byte {at}");
    }
    assert!(read(b"").await.unwrap().is_none());
    assert!(read(&frame.head[..20]).await.is_err());
}

#[tokio::test]
async fn frame_is_accepted_only_at_its_sequence_number() {
    let numbered = |number| {
        let mut frame = Frame::new(7, 1, 0, b"body", None);
        frame.number(number);
        frame.head
    };
    let taken = async |numbers: &[u32]| {
        let bytes = numbers.iter().flat_map(|&number| numbered(number)).collect();
        let mut reader = FrameReader::new(SlowSource { bytes, at: 0, step: 100 });
        let mut taken = 0;
        while reader.next().await.is_ok_and(|header| header.is_some()) {
            taken += 1;
        }
        taken
    };
    for (numbers, good) in [(&[0, 1, 2][..], 3), (&[1], 0), (&[0, 0], 1), (&[0, 2, 1], 1), (&[0, 1, 0], 2)] {
        assert_eq!(taken(numbers).await, good, "{numbers:?}");
    }
}

#[tokio::test]
async fn header_with_excessive_length_is_refused() {
    let mut head = Frame::new(7, 1, 0, b"", None).head;
    head[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = read(&head).await.unwrap_err();
    assert!(error.to_string().contains("maximum"), "{error}");
}
