//! Shared memory in both directions:
//! - puts that the node copies from client memory;
//! - hostile clients, which share unsuitable memory or change it;
//! - pages that clients read in the node's arena.

use super::{
    PATIENCE, attach, descriptor, geometry, get, held_bytes, key, nothing_is_held, options, pages, payload, put,
    settles, soon, transport,
};
use crate::hello;
use bytes::Bytes;
use larder_client::{
    Buffer, Client, ClientOptions, DEFAULT_CONNECTIONS, NewPage, PutOptions, PutOutcome, StoreUrl, Transport,
};
use larder_format::chunk_crcs;
use larder_node::{Node, NodeOptions};
use larder_wire::{
    ArenaListenerInfo, ByteSink, ByteSource, CommitOutcome, Delivery, Entry, FrameReader, FrameWriter,
    PROTOCOL_VERSION, PartLocation, Request, ReserveOutcome, Reserved, Response,
};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream as StdStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UnixStream};

async fn attach_with_memory(node: &Node, memory_bytes: usize) -> Client {
    let url =
        StoreUrl { nodes: vec![node.addr().to_string()], transport: transport(), connections: DEFAULT_CONNECTIONS };
    let client = Client::attach(url, Some(descriptor(1)), ClientOptions { memory_bytes, ..ClientOptions::default() });
    assert!(client.ready(PATIENCE).await);
    client
}

fn filled(client: &Client, number: u32) -> Buffer {
    let mut buffer = client.buffer(geometry().page_bytes());
    buffer.copy_from_slice(&payload(number));
    buffer
}

fn copied(node: &Node) -> u64 {
    node.status()["counters"]["bytes_copied"].as_u64().expect("a number")
}

#[tokio::test]
async fn puts_from_shared_memory_are_copied_by_the_node() {
    let node = Node::start(options(None)).await.unwrap();
    let page_bytes = geometry().page_bytes();
    let client = attach_with_memory(&node, 10 * page_bytes.next_multiple_of(4096)).await;
    // More than the client sends before the node answers. The last pages are in heap memory.
    let mut shared = 0;
    let page = |number| {
        let buffer = filled(&client, number);
        shared += usize::from(buffer.is_shared());
        (NewPage::first(key(number)), buffer.freeze())
    };
    let all: Vec<(NewPage, Bytes)> = (0..30).map(page).collect();
    assert_eq!(shared, 10);
    let outcomes = client.put_pages(all, PutOptions::default(), soon()).await;
    assert!(outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored), "{outcomes:?}");
    let copies = if transport() == Transport::Shm { 1 } else { 0 };
    assert_eq!(copied(&node), copies * 10 * page_bytes as u64);
    // The memory is free again. Put part by part, then the same page again.
    let bytes = filled(&client, 40).freeze();
    let mut put = client.put(NewPage::first(key(40)), soon());
    let mut from = 0;
    for (part, length) in geometry().part_table().into_iter().enumerate() {
        put.part(part, bytes.slice(from..from + length as usize));
        from += length as usize;
    }
    assert_eq!(put.commit(soon()).await, PutOutcome::Stored);
    assert_eq!(copied(&node), copies * 11 * page_bytes as u64);
    let again = vec![(NewPage::first(key(40)), bytes)];
    assert_eq!(client.put_pages(again, PutOptions::default(), soon()).await, [PutOutcome::AlreadyThere]);
    let buffers = (0..30).chain([40]).map(|number| (key(number), client.buffer(page_bytes))).collect();
    for (number, (bytes, tier)) in (0..30).chain([40]).zip(client.get(buffers, soon()).await) {
        assert!(tier.is_some() && bytes[..] == payload(number), "page {number}");
    }
    assert!((0..10).map(|_| client.buffer(page_bytes)).collect::<Vec<_>>().iter().all(Buffer::is_shared));
    node.shutdown().await;
}

#[tokio::test]
async fn puts_beyond_the_copy_limit_of_a_node_succeed() {
    let room = NodeOptions { l2_bytes: 256 << 20, in_flight_bytes: Some(128 << 20), ..options(None) };
    let node = Node::start(room).await.unwrap();
    let client = attach_with_memory(&node, 256 << 20).await;
    let bytes: Vec<Bytes> = (0..20).map(|number| filled(&client, number).freeze()).collect();
    let put = |batch: u32| {
        let page = |index: u32| {
            let page = NewPage::first(key(1000 * batch + index));
            (page, bytes[index as usize % 20].clone())
        };
        client.put_pages((0..200).map(page).collect(), PutOptions::default(), soon())
    };
    let (one, two) = tokio::join!(put(1), put(2));
    let ends: Vec<PutOutcome> = one.into_iter().chain(two).collect();
    assert!(ends.iter().all(|&end| end == PutOutcome::Stored), "{ends:?}");
    assert!(get(&client, &[1000, 1199, 2101]).await.iter().zip([0, 19, 1]).all(|((got, _), n)| *got == payload(n)));
    node.shutdown().await;
}

/// A client without the checks of [`Client`], frame by frame.
struct Raw<R, W> {
    reader: FrameReader<R>,
    writer: FrameWriter<W>,
    requests: u64,
}

impl<R: ByteSource, W: ByteSink> Raw<R, W> {
    async fn handshake(read: R, write: W) -> io::Result<(Self, Option<ArenaListenerInfo>)> {
        let mut raw = Raw { reader: FrameReader::new(read), writer: FrameWriter::new(write), requests: 0 };
        match raw.request(hello(descriptor(1))).await? {
            Response::Hello { arena_listener: listener, .. } => Ok((raw, listener)),
            other => panic!("{other:?} to hello"),
        }
    }

    async fn send(&mut self, request: Request) -> io::Result<()> {
        self.requests += 1;
        self.writer.send(request.frame(PROTOCOL_VERSION, self.requests, 0, None)).await
    }

    async fn request(&mut self, request: Request) -> io::Result<Response> {
        self.send(request).await?;
        let header = self.reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(Response::decode(PROTOCOL_VERSION, header.kind, self.reader.body()).unwrap())
    }

    async fn reserve(&mut self, number: u32) -> Entry {
        let page = Reserved::first(key(number), geometry().part_table());
        let granted = self.request(Request::Reserve(vec![page])).await.unwrap();
        let is_granted =
            matches!(granted, Response::Reserved { outcomes, .. } if outcomes == [ReserveOutcome::Granted]);
        assert!(is_granted);
        Entry { request: self.requests, index: 0 }
    }

    async fn parts(&mut self, put: Entry, bytes: &[u8], mut offset: u64) -> io::Result<()> {
        let mut rest = bytes;
        for (part, length) in (0..).zip(geometry().part_table()) {
            let (now, later) = rest.split_at(length as usize);
            let crcs = chunk_crcs(now).collect();
            let bytes = PartLocation::SharedMemory { offset, bytes: length };
            self.send(Request::Part { put, part, crcs, bytes }).await?;
            offset = offset.wrapping_add(length.into());
            rest = later;
        }
        Ok(())
    }

    /// Puts a page from client memory at `offset`. Returns `true` if the node stored it.
    async fn put(&mut self, number: u32, bytes: &[u8], offset: u64) -> bool {
        let put = self.reserve(number).await;
        self.parts(put, bytes, offset).await.unwrap();
        match self.request(Request::Commit(vec![put])).await.unwrap() {
            Response::Committed(ends) => ends.iter().all(|end| end.outcome == CommitOutcome::Stored),
            other => panic!("{other:?} to commit"),
        }
    }
}

type Local = Raw<tokio::net::unix::OwnedReadHalf, tokio::net::unix::OwnedWriteHalf>;

async fn local_socket(node: &Node) -> ArenaListenerInfo {
    let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
    Raw::handshake(read, write).await.unwrap().1.expect("the node shares its memory")
}

async fn share_file(listener: &ArenaListenerInfo, file: BorrowedFd<'_>, bytes: u64) -> io::Result<Local> {
    let address = SocketAddr::from_abstract_name(&listener.name).unwrap();
    let stream = StdStream::connect_addr(&address)?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    stream.read_exact(&mut [0; 16]).await?;
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
    let message = [b"LRDRMEM1".as_slice(), &bytes.to_le_bytes()].concat();
    sendmsg(&stream, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
    let (read, write) = stream.into_split();
    Ok(Raw::handshake(read, write).await?.0)
}

/// A memory file without seals, so that its owner can change and truncate it.
fn memory(bytes: &[u8]) -> File {
    let file = File::from(memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(bytes, 0).unwrap();
    file
}

fn sharing() -> NodeOptions {
    NodeOptions { share_memory: Some(true), ..options(None) }
}

#[tokio::test]
async fn wrong_location_fails_its_own_put_only() {
    let node = Node::start(sharing()).await.unwrap();
    let honest = attach(&[&node], 1).await;
    assert_eq!(put(&honest, 1).await, PutOutcome::Stored);
    let page = payload(50);
    let bytes = geometry().page_bytes() as u64;
    let file = memory(&[&payload(49)[..], &page].concat());
    let mut raw = share_file(&local_socket(&node).await, file.as_fd(), 2 * bytes).await.unwrap();
    for (number, offset) in (100..).zip([0, bytes - 1, bytes + 1, 2 * bytes, 1 << 40, u64::MAX, u64::MAX - 5]) {
        assert!(!raw.put(number, &page, offset).await, "from {offset}");
        assert_eq!(put(&honest, number).await, PutOutcome::Stored, "the key is free again");
    }
    assert!(raw.put(50, &page, bytes).await);
    // Truncated, and extended again with zeros.
    file.set_len(bytes + 5000).unwrap();
    assert!(!raw.put(200, &page, bytes).await);
    file.set_len(2 * bytes).unwrap();
    assert!(!raw.put(201, &page, bytes).await);
    file.write_all_at(&page, bytes).unwrap();
    assert!(raw.put(202, &page, bytes).await);
    for (number, content) in [(1, 1), (50, 50), (202, 50), (100, 100)] {
        let (got, tier) = get(&honest, &[number]).await.remove(0);
        assert!(tier.is_some() && got == payload(content), "page {number}");
    }
    let failed = get(&honest, &[200, 201]).await;
    assert!(failed.iter().all(|(_, tier)| tier.is_none()));
    settles(&node, "/puts_open", 0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn bytes_that_change_during_the_copy_are_served_intact_or_not_at_all() {
    let node = Node::start(NodeOptions { l2_bytes: 128 << 20, ..sharing() }).await.unwrap();
    let page = payload(7);
    let file = Arc::new(memory(&page));
    let mut raw = share_file(&local_socket(&node).await, file.as_fd(), page.len() as u64).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let other = file.clone();
    let stopped = stop.clone();
    let first = page[60_000];
    let changing = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for byte in [first ^ 0x55, first] {
                other.write_all_at(&[byte], 60_000).unwrap();
                std::thread::yield_now();
            }
        }
    });
    let mut stored = Vec::new();
    for number in 0..200 {
        if raw.put(number, &page, 0).await {
            stored.push(number);
        }
    }
    stop.store(true, Ordering::Relaxed);
    changing.join().unwrap();
    assert!(raw.put(1000, &page, 0).await, "the last write restored the page");
    let reader = attach(&[&node], 1).await;
    for (number, (got, tier)) in stored.iter().zip(get(&reader, &stored).await) {
        assert!(tier.is_some() && got == page, "page {number}");
    }
    assert_eq!(reader.stats().corrupt, 0);
    println!("{} of 200 puts were stored", stored.len());
    node.shutdown().await;
}

#[tokio::test]
async fn node_accepts_only_memory_files_of_the_announced_length() {
    let node = Node::start(sharing()).await.unwrap();
    let listener = local_socket(&node).await;
    let page = payload(3);
    let (pipe, _writer) = io::pipe().unwrap();
    let disk = tempfile::tempfile_in("/var/tmp").unwrap();
    disk.set_len(1 << 20).unwrap();
    let zero = File::open("/dev/zero").unwrap();
    let dir = File::open("/").unwrap();
    let memory = memory(&page);
    let refused: [(&str, BorrowedFd<'_>, u64); 5] = [
        ("a pipe", pipe.as_fd(), 4096),
        ("a file on disk", disk.as_fd(), 4096),
        ("a device", zero.as_fd(), 4096),
        ("a folder", dir.as_fd(), 1),
        ("a file that is too short", memory.as_fd(), page.len() as u64 + 1),
    ];
    for (what, file, bytes) in refused {
        let came = tokio::time::timeout(PATIENCE, share_file(&listener, file, bytes)).await;
        assert!(came.expect("at once").is_err(), "the node accepted {what}");
    }
    // A location from a client that shares no memory.
    let (read, write) = TcpStream::connect(node.addr()).await.unwrap().into_split();
    let mut raw = Raw::handshake(read, write).await.unwrap().0;
    let put = raw.reserve(3).await;
    let _ = raw.parts(put, &page, 0).await;
    let end = async {
        while raw.reader.next().await?.is_some() {}
        io::Result::Ok(())
    };
    assert!(tokio::time::timeout(PATIENCE, end).await.is_ok(), "the connection ends");
    let mut good = share_file(&listener, memory.as_fd(), page.len() as u64).await.unwrap();
    assert!(good.put(3, &page, 0).await);
    node.shutdown().await;
}

#[tokio::test]
async fn client_that_disconnects_before_its_commit_leaves_no_put_open() {
    let node = Node::start(sharing()).await.unwrap();
    let page = payload(5);
    let file = memory(&page);
    let mut raw = share_file(&local_socket(&node).await, file.as_fd(), page.len() as u64).await.unwrap();
    let open = raw.reserve(5).await;
    raw.parts(open, &page, 0).await.unwrap();
    raw.reserve(6).await;
    assert_eq!(node.status()["puts_open"], 2);
    drop((raw, file));
    settles(&node, "/puts_open", 0).await;
    let other = attach(&[&node], 1).await;
    assert!(get(&other, &[5]).await[0].1.is_none(), "the page was not sealed");
    let outcomes = other.put_pages(pages(&[5, 6], payload), PutOptions::default(), soon()).await;
    assert_eq!(outcomes, [PutOutcome::Stored; 2]);
    node.shutdown().await;
}

#[tokio::test]
async fn page_locations_arrive_in_batches_and_stay_valid_until_released() {
    let node = Node::start(sharing()).await.unwrap();
    let writer = attach(&[&node], 1).await;
    let numbers: Vec<u32> = (0..20).collect();
    writer.put_pages(pages(&numbers, payload), PutOptions::default(), soon()).await;
    let file = memory(&[0; 4096]);
    let mut raw = share_file(&local_socket(&node).await, file.as_fd(), 4096).await.unwrap();
    let held = 20 * geometry().page_bytes().next_multiple_of(4096) as u64;
    for round in 0..2 {
        raw.send(Request::Get { keys: (0..21).map(key).collect(), by: Delivery::InPlace }).await.unwrap();
        let mut messages = 0;
        let mut found = Vec::new();
        let mut offsets = Vec::new();
        loop {
            let header = raw.reader.next().await.unwrap().expect("an answer");
            match Response::decode(PROTOCOL_VERSION, header.kind, raw.reader.body()).unwrap() {
                Response::ArenaPages(placed) => {
                    messages += 1;
                    found.extend(placed.iter().map(|placed| (placed.index, placed.meta.id.key, placed.bytes.len())));
                    offsets.extend(placed.iter().map(|placed| placed.offset));
                }
                Response::Miss { index: 20 } => {}
                Response::End => break,
                other => panic!("{other:?}"),
            }
        }
        let all: Vec<_> = numbers.iter().map(|&number| (number, key(number), geometry().page_bytes())).collect();
        assert_eq!((messages, &found), (2, &all), "round {round}");
        offsets.sort();
        offsets.dedup();
        assert_eq!((offsets.len(), held_bytes(&node).await), (20, held));
        let entries = numbers.iter().map(|&index| Entry { request: raw.requests, index }).collect();
        if round == 0 {
            raw.send(Request::Release(entries)).await.unwrap();
            nothing_is_held(&node).await;
        }
    }
    // The same request number again, whose pages are still held.
    raw.requests -= 1;
    raw.send(Request::Get { keys: vec![key(3), key(4)], by: Delivery::InPlace }).await.unwrap();
    let end = async { while let Ok(Some(_)) = raw.reader.next().await {} };
    tokio::time::timeout(PATIENCE, end).await.expect("the connection ends");
    // The end of the connection releases everything.
    nothing_is_held(&node).await;
    node.shutdown().await;
}
