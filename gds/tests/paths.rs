//! All paths move the same bytes. Faults are typed errors, deadlines hold, and the report says why
//! a path is not in use. The stand-in for libcufile makes the path `cufile` run without a GPU.

mod stand_in;

use larder_format::CHUNK_BYTES;
use larder_format::disk::BLOCK_BYTES;
use larder_gds::{
    Chunk, CuFileCode, CuFileError, CuFileLibrary, FileNumber, PageRead, PathKind, Report, TransferError,
    TransferLimits, TransferOptions, Transfers, open,
};
use larder_io::DeviceFile;
use larder_kernels::cuda::SOURCES;
use larder_kernels::device::{Device, Keep, Memory, Place, download, emulated, host};
use larder_memory::Arena;
use stand_in::{Count, Fault, StandIn};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PAGES: usize = 12;
/// Two chunks and a short one, so that the last block has padding.
const PAGE_BYTES: usize = 2 * CHUNK_BYTES + 777;
/// Distance of pages in the file.
const STRIDE: usize = PAGE_BYTES.next_multiple_of(BLOCK_BYTES) + BLOCK_BYTES;
/// Lengths of the targets of a page. They end inside chunks and blocks.
const TARGETS: [usize; 3] = [1000, CHUNK_BYTES + 24, CHUNK_BYTES - 247];
/// Bytes between two targets, which no transfer may change.
const GAP: usize = 256;
const PATTERN: u8 = 0x5A;

const _: () = assert!(TARGETS[0] + TARGETS[1] + TARGETS[2] == PAGE_BYTES);

/// Time after which a call counts as hanging. It says nothing about speed.
const PATIENCE: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn emulated_device() -> Arc<dyn Device> {
    emulated::open_with(&[], 256 << 20).unwrap()
}

/// A file with pages, as a log has them on a file system with direct I/O.
struct Fixture {
    device: Arc<dyn Device>,
    file: PathBuf,
    bytes: Vec<u8>,
    _folder: TempDir,
}

impl Fixture {
    fn new(device: Arc<dyn Device>) -> Fixture {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = folder.path().join("segment");
        let bytes: Vec<u8> = (0..PAGES * STRIDE).map(|at| (at * 31 + at / 251 + at / 65_537) as u8).collect();
        std::fs::write(&file, &bytes).unwrap();
        Fixture { device, file, bytes, _folder: folder }
    }

    fn options(&self) -> TransferOptions {
        let arena = Arena::new(8 << 20).unwrap();
        let options = TransferOptions::new(Arc::clone(&self.device), arena, Arc::new(self.open_file()));
        TransferOptions { limits: TransferLimits { workers: 3, requests: 64 }, ..options }
    }

    fn with_stand_in(&self, stand_in: &StandIn) -> TransferOptions {
        TransferOptions { library: CuFileLibrary::File(stand_in.path.clone()), ..self.options() }
    }

    /// Descriptor as another process sends it.
    fn open_file(&self) -> DeviceFile {
        let opened = DeviceFile::open_read_only(&self.file).unwrap();
        let received = DeviceFile::from_descriptor(opened.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(received.direct(), opened.direct());
        received
    }

    fn payload(&self, page: usize) -> &[u8] {
        &self.bytes[page * STRIDE..][..PAGE_BYTES]
    }

    /// Memory for the targets of one page, with gaps.
    fn memory(&self) -> Memory {
        let memory = self.device.allocate(Place::Device, PAGE_BYTES + TARGETS.len() * GAP).unwrap();
        let stream = self.device.stream("fill").unwrap();
        stream.fill(&memory.all(), PATTERN).unwrap();
        stream.wait(soon()).unwrap();
        memory
    }

    fn page(&self, file: FileNumber, page: usize, memory: &Memory) -> PageRead {
        let crc = |bytes: &[u8]| Chunk { bytes: bytes.len() as u32, crc: crc32fast::hash(bytes) };
        let mut start = 0;
        let targets = TARGETS.map(|bytes| {
            let target = memory.slice(start..start + bytes).unwrap();
            start += bytes + GAP;
            target
        });
        PageRead {
            file,
            offset: (page * STRIDE) as u64,
            chunks: self.payload(page).chunks(CHUNK_BYTES).map(crc).collect(),
            targets: targets.to_vec(),
        }
    }

    fn check_memory(&self, page: usize, memory: &Memory) {
        let stream = self.device.stream("check").unwrap();
        let found: Vec<u8> = download(&*self.device, &*stream, &memory.all(), soon()).unwrap();
        let mut expected = Vec::new();
        let mut rest = self.payload(page);
        for bytes in TARGETS {
            expected.extend_from_slice(&rest[..bytes]);
            expected.extend_from_slice(&[PATTERN; GAP]);
            rest = &rest[bytes..];
        }
        assert!(found == expected, "page {page}");
    }

    /// Reads all pages in one request and compares them.
    async fn check_all(&self, transfers: &Transfers) {
        let file = transfers.attach(self.open_file(), soon()).await.unwrap();
        let memories: Vec<Memory> = (0..PAGES).map(|_| self.memory()).collect();
        let pages = memories.iter().enumerate().map(|(page, memory)| self.page(file, page, memory)).collect();
        transfers.read(pages, keep(), soon()).await.unwrap();
        memories.iter().enumerate().for_each(|(page, memory)| self.check_memory(page, memory));
        let stats = transfers.stats();
        assert_eq!((stats.pages, stats.bytes, stats.failures), (PAGES as u64, (PAGES * PAGE_BYTES) as u64, 0));
        transfers.detach(file, soon()).await.unwrap();
    }

    async fn read_one(&self, transfers: &Transfers, file: FileNumber) -> Result<(), TransferError> {
        transfers.read(vec![self.page(file, 0, &self.memory())], keep(), soon()).await
    }
}

fn keep() -> Keep {
    Arc::new(())
}

fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = soon();
    while !is_true() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[tokio::test]
async fn cufile_path_moves_the_bytes() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    for (fault, is_direct, mode) in
        [(Fault::None, true, "direct, nvidia-fs 2.26"), (Fault::ShortReads, false, "compatibility mode")]
    {
        stand_in.set(fault, is_direct);
        let (transfers, report) = open(&fixture.with_stand_in(&stand_in)).unwrap();
        assert!(report.path == PathKind::CuFile && report.rejected.is_empty(), "{report}");
        assert!(report.to_string().starts_with("cufile (") && report.mode.contains(mode), "{report}");
        fixture.check_all(&transfers).await;
        assert!(stand_in.count(Count::Reads) as usize > PAGES);
        drop(transfers);
        assert_eq!(stand_in.count(Count::Files), 0, "files are deregistered");
    }
}

#[tokio::test]
async fn cufile_bytes_are_verified_on_the_device_if_it_has_the_kernel() {
    let stand_in = StandIn::new();
    let source = SOURCES.iter().find(|source| source.file == "crc32.cu").unwrap();
    let devices =
        [(emulated::open_with(&[*source], 256 << 20).unwrap(), "on the device"), (emulated_device(), "by a copy")];
    for (device, verified) in devices {
        let fixture = Fixture::new(device);
        stand_in.set(Fault::None, true);
        let (transfers, report) = open(&fixture.with_stand_in(&stand_in)).unwrap();
        assert!(report.path == PathKind::CuFile && report.mode.contains(verified), "{report}");
        fixture.check_all(&transfers).await;
        let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
        stand_in.set(Fault::FlippedBit, true);
        let error = fixture.read_one(&transfers, file).await.expect_err("a bit differs");
        assert!(matches!(error, TransferError::Damaged { .. }), "{verified}: {error}");
        stand_in.set(Fault::None, true);
        fixture.read_one(&transfers, file).await.unwrap();
    }
}

#[tokio::test]
async fn pinned_path_moves_the_bytes() {
    let fixture = Fixture::new(emulated_device());
    let (transfers, report) = open(&fixture.options()).unwrap();
    assert_eq!(report.path, PathKind::Pinned, "{report}");
    assert!(report.to_string().contains("; not cufile: libcufile does not know the memory of the emulated device"));
    fixture.check_all(&transfers).await;
}

#[tokio::test]
async fn several_devices_pin_one_arena() {
    let fixture = Fixture::new(emulated_device());
    let options = fixture.options();
    let (first, report) = open(&options).unwrap();
    assert_eq!(report.path, PathKind::Pinned, "{report}");
    let other = TransferOptions { device: emulated_device(), ..options };
    let (second, report) = open(&other).unwrap();
    assert_eq!(report.path, PathKind::Pinned, "{report}");
    drop(second);
    // Still pinned for the first.
    fixture.check_all(&first).await;
}

#[tokio::test]
async fn host_path_moves_the_bytes_to_the_host_and_to_devices() {
    let fixture = Fixture::new(host::open(256 << 20));
    let (transfers, report) = open(&fixture.options()).unwrap();
    assert_eq!(report.path, PathKind::Host, "{report}");
    let reason = "the device is memory of the host";
    assert!(report.to_string().ends_with(&format!("; not cufile: {reason}; not pinned: {reason}")), "{report}");
    fixture.check_all(&transfers).await;

    let fixture = Fixture::new(emulated_device());
    let skip = [PathKind::CuFile, PathKind::Pinned].map(|path| (path, "the test leaves it out".to_string()));
    let (transfers, report) = open(&TransferOptions { skip: skip.to_vec(), ..fixture.options() }).unwrap();
    assert_eq!(report.path, PathKind::Host);
    assert!(report.to_string().contains("not pinned: the test leaves it out"), "{report}");
    assert!(report.mode.contains("pinned buffer"), "{report}");
    fixture.check_all(&transfers).await;
}

#[tokio::test]
async fn faults_of_libcufile_are_typed_errors() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let (transfers, report) = open(&fixture.with_stand_in(&stand_in)).unwrap();
    assert_eq!(report.path, PathKind::CuFile, "{report}");
    let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
    for fault in [Fault::LibraryError, Fault::SystemError, Fault::EndOfFile, Fault::FlippedBit, Fault::LongRead] {
        stand_in.set(fault, true);
        let error = fixture.read_one(&transfers, file).await.expect_err("the fault is active");
        let is_expected = match (fault, &error) {
            (Fault::LibraryError, TransferError::CuFile(CuFileError::Call { code, .. })) => *code == CuFileCode(5030),
            (Fault::SystemError, TransferError::CuFile(CuFileError::System { error, .. })) => {
                error.raw_os_error() == Some(5)
            }
            (Fault::EndOfFile, TransferError::Io(error)) => error.kind() == ErrorKind::UnexpectedEof,
            (Fault::FlippedBit, TransferError::Damaged { offset, .. }) => *offset == 0,
            (Fault::LongRead, TransferError::CuFile(CuFileError::Length { .. })) => true,
            _ => false,
        };
        assert!(is_expected, "{fault:?}: {error}");
    }
    stand_in.set(Fault::FileError, true);
    let error = transfers.attach(fixture.open_file(), soon()).await.expect_err("the library refuses files");
    assert!(error.to_string().contains("the file system is not supported"), "{error}");
    stand_in.set(Fault::MemoryError, true);
    let error = transfers.register(fixture.memory(), soon()).await.expect_err("the library refuses memory");
    assert!(error.to_string().contains("could not be pinned"), "{error}");
    assert_eq!((transfers.stats().failures, stand_in.count(Count::Buffers)), (5, 0));
    stand_in.set(Fault::None, true);
    fixture.read_one(&transfers, file).await.unwrap();
}

#[tokio::test]
async fn registered_memory_is_deregistered_after_the_transfers() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let (transfers, _) = open(&fixture.with_stand_in(&stand_in)).unwrap();
    transfers.register(fixture.memory(), soon()).await.unwrap();
    assert_eq!(stand_in.count(Count::Buffers), 1);
    drop(transfers);
    assert_eq!(stand_in.count(Count::Buffers), 0);
}

#[tokio::test]
async fn memory_that_cannot_be_deregistered_stays_allocated() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let (transfers, _) = open(&fixture.with_stand_in(&stand_in)).unwrap();
    let memory = fixture.memory();
    let reserved = memory.bytes();
    transfers.register(memory, soon()).await.unwrap();
    stand_in.set(Fault::MemoryError, true);
    drop(transfers);
    assert_eq!(stand_in.count(Count::Buffers), 1);
    assert!(fixture.device.free_bytes().unwrap() + reserved <= fixture.device.info().memory_bytes);
}

/// Opens with a fault. Returns the report, and the limit of each path.
fn fall_back(fixture: &Fixture, stand_in: &StandIn, fault: Fault) -> (Report, Duration) {
    stand_in.set(fault, true);
    let hangs = matches!(fault, Fault::Hang | Fault::OpenHang);
    let mut seconds = if hangs { 2 } else { 60 };
    loop {
        let probe_limit = Duration::from_secs(seconds);
        let options = TransferOptions { probe_limit, ..fixture.with_stand_in(stand_in) };
        let (_, report) = open(&options).unwrap();
        // The limit is that of the next path, too. On a busy machine it may be too short.
        if report.path == PathKind::Pinned || seconds > 20 {
            return (report, probe_limit);
        }
        seconds *= 4;
    }
}

#[test]
fn open_falls_back_and_says_why() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let timeout = "cufile did not answer within";
    for (fault, reason) in [
        (Fault::OpenError, "libcufile failed to open its driver: internal error (code 5030)"),
        (Fault::FileError, "libcufile failed to register a file: the file system is not supported"),
        (Fault::FlippedBit, "CRC mismatch in chunk 0"),
        (Fault::OpenHang, timeout),
        (Fault::Hang, timeout),
    ] {
        let (report, limit) = fall_back(&fixture, &stand_in, fault);
        assert_eq!(report.path, PathKind::Pinned, "{report}");
        let reason = if reason == timeout { format!("{reason} {} ms", limit.as_millis()) } else { reason.to_string() };
        assert!(report.to_string().contains(&format!("; not cufile: {reason}")), "{fault:?}: {report}");
    }
    // The attempts that hang end now.
    stand_in.set(Fault::None, true);
    wait_until("no call hangs", || stand_in.count(Count::Hanging) == 0);
}

#[test]
fn open_fails_with_the_reason_of_each_path() {
    let fixture = Fixture::new(emulated_device());
    let library = CuFileLibrary::File(fixture.file.with_file_name("absent"));
    let empty = fixture.file.with_file_name("empty");
    std::fs::write(&empty, "").unwrap();
    let probe_file = Arc::new(DeviceFile::open_read_only(&empty).unwrap());
    let options = TransferOptions { probe_file, library, ..fixture.options() };
    let error = open(&options).expect_err("there is no library, and the file is too short");
    let paths: Vec<PathKind> = error.rejected.iter().map(|rejected| rejected.path).collect();
    assert_eq!(paths, PathKind::ALL);
    assert!(error.to_string().contains("cannot be loaded"), "{error}");
    assert!(error.to_string().contains("not host: failed to fill whole buffer"), "{error}");
}

#[tokio::test]
async fn deadline_holds_and_memory_stays_reserved_while_a_read_hangs() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let limits = TransferLimits { workers: 2, requests: 4 };
    let (transfers, _) = open(&TransferOptions { limits, ..fixture.with_stand_in(&stand_in) }).unwrap();
    let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
    wait_until("the file is attached", || transfers.stats().pending == 0);
    stand_in.set(Fault::Hang, true);
    let memories = [fixture.memory(), fixture.memory()];
    let pages =
        |first: usize| vec![fixture.page(file, first, &memories[0]), fixture.page(file, first + 1, &memories[1])];
    let (hanging, waiting) = (keep(), keep());
    // A worker drops pages whose request has ended. So the first deadline leaves time to begin.
    for (first, keep, millis) in [(2, &hanging, 5000), (4, &waiting, 200)] {
        let deadline = Instant::now() + Duration::from_millis(millis);
        let read = tokio::time::timeout(PATIENCE, transfers.read(pages(first), Arc::clone(keep), deadline));
        let result = read.await.expect("the deadline holds");
        assert!(matches!(result, Err(TransferError::Deadline)), "{result:?}");
    }
    assert_eq!(stand_in.count(Count::Hanging), 2, "both workers hang");
    assert!(Arc::strong_count(&hanging) > 1, "reads in progress own the memory");
    let result = transfers.read(pages(0), keep(), soon()).await;
    assert!(matches!(result, Err(TransferError::Busy(4))), "{result:?}");

    stand_in.set(Fault::None, true);
    wait_until("the memory is free again", || Arc::strong_count(&hanging) == 1 && Arc::strong_count(&waiting) == 1);
    wait_until("all requests have ended", || transfers.stats().pending == 0);
    fixture.check_memory(2, &memories[0]);
    fixture.check_memory(3, &memories[1]);
    assert_eq!(transfers.stats().pages, 2, "the pages that waited were cancelled");
    transfers.read(pages(6), keep(), soon()).await.unwrap();
    fixture.check_memory(6, &memories[0]);
}

/// The workers never come to the pages that wait, and their memory is free all the same.
#[tokio::test]
async fn pages_that_no_worker_has_begun_are_dropped_with_their_request() {
    let stand_in = StandIn::new();
    let fixture = Fixture::new(emulated_device());
    let limits = TransferLimits { workers: 2, requests: 8 };
    let (transfers, _) = open(&TransferOptions { limits, ..fixture.with_stand_in(&stand_in) }).unwrap();
    let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
    stand_in.set(Fault::Hang, true);
    let pages = |count: usize| (0..count).map(|page| fixture.page(file, page, &fixture.memory())).collect();
    let (hanging, waiting) = (keep(), keep());
    // One page more than workers: it waits.
    let mut first = Box::pin(transfers.read(pages(3), Arc::clone(&hanging), soon()));
    assert!(tokio::time::timeout(Duration::ZERO, &mut first).await.is_err());
    wait_until("both workers hang", || stand_in.count(Count::Hanging) == 2);
    let free = fixture.device.free_bytes().unwrap();
    let mut second = Box::pin(transfers.read(pages(2), Arc::clone(&waiting), soon()));
    assert!(tokio::time::timeout(Duration::ZERO, &mut second).await.is_err());
    assert!(fixture.device.free_bytes().unwrap() < free);
    drop(second);
    assert_eq!((Arc::strong_count(&waiting), fixture.device.free_bytes().unwrap()), (1, free));
    drop(first);
    assert!(fixture.device.free_bytes().unwrap() > free, "the third page of the first request");
    assert_eq!(Arc::strong_count(&hanging), 3, "each read in progress has its own");
    assert_eq!((stand_in.count(Count::Hanging), transfers.stats().pending), (2, 5));

    stand_in.set(Fault::None, true);
    wait_until("all requests have ended", || transfers.stats().pending == 0);
    assert_eq!((Arc::strong_count(&hanging), transfers.stats().pages, transfers.stats().failures), (1, 2, 0));
}

/// Memory of the host at a multiple of a block is read without a slot: the arena has no room for
/// one.
#[tokio::test]
async fn host_path_reads_aligned_memory_without_the_arena() {
    let fixture = Fixture::new(host::open(256 << 20));
    let options = TransferOptions { arena: Arena::new(BLOCK_BYTES).unwrap(), ..fixture.options() };
    let (transfers, report) = open(&options).unwrap();
    assert!(report.path == PathKind::Host && report.mode.contains("straight"), "{report}");
    let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
    let memory = fixture.device.allocate(Place::Device, PAGE_BYTES + BLOCK_BYTES).unwrap();
    let start = memory.address().next_multiple_of(BLOCK_BYTES as u64) - memory.address();
    let (start, end) = (start as usize, start as usize + PAGE_BYTES);
    let described = fixture.page(file, 3, &fixture.memory());
    let read = |target| PageRead { targets: vec![target], ..described.clone() };
    transfers.read(vec![read(memory.slice(start..end).unwrap())], keep(), soon()).await.unwrap();
    let stream = fixture.device.stream("check").unwrap();
    let found: Vec<u8> = download(&*fixture.device, &*stream, &memory.slice(start..end).unwrap(), soon()).unwrap();
    assert!(found == fixture.payload(3));
    let (wrong, missing) = (Chunk { crc: 1, ..described.chunks[1] }, (PAGES * STRIDE) as u64);
    let mut chunks = described.chunks.clone();
    chunks[1] = wrong;
    let target = || memory.slice(start..end).unwrap();
    let damaged = PageRead { chunks, ..read(target()) };
    let error = transfers.read(vec![damaged], keep(), soon()).await.expect_err("a CRC differs");
    assert!(matches!(error, TransferError::Damaged { chunk: 1, .. }), "{error}");
    let behind = PageRead { offset: missing, ..read(target()) };
    let error = transfers.read(vec![behind], keep(), soon()).await.expect_err("the file is shorter");
    assert!(matches!(&error, TransferError::Io(e) if e.kind() == ErrorKind::UnexpectedEof), "{error}");
    let unaligned = read(memory.slice(start + 8..end + 8).unwrap());
    let error = transfers.read(vec![unaligned], keep(), soon()).await.expect_err("the arena is too small");
    assert!(matches!(error, TransferError::NoRoom(_)), "{error}");
}

#[tokio::test]
async fn damaged_and_missing_bytes_are_errors_on_every_path() {
    let stand_in = StandIn::new();
    for device in [emulated_device(), host::open(256 << 20)] {
        let fixture = Fixture::new(device);
        for path in PathKind::ALL {
            let skip = PathKind::ALL.into_iter().filter(|other| *other != path);
            let skip = skip.map(|other| (other, "the test leaves it out".to_string())).collect();
            let Ok((transfers, _)) = open(&TransferOptions { skip, ..fixture.with_stand_in(&stand_in) }) else {
                assert!(fixture.device.info().kind == "host" && path != PathKind::Host, "{path}");
                continue;
            };
            let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
            let memory = fixture.memory();
            let page = fixture.page(file, 1, &memory);
            let at = (STRIDE + CHUNK_BYTES + 5) as u64;
            let writer = std::fs::OpenOptions::new().write(true).open(&fixture.file).unwrap();
            let original = fixture.bytes[at as usize];
            writer.write_all_at(&[original ^ 1], at).unwrap();
            writer.sync_all().unwrap();
            let error = transfers.read(vec![page.clone()], keep(), soon()).await.expect_err("a bit differs");
            assert!(matches!(error, TransferError::Damaged { chunk: 1, .. }), "{path}: {error}");
            writer.write_all_at(&[original], at).unwrap();
            writer.sync_all().unwrap();
            transfers.read(vec![page.clone()], keep(), soon()).await.unwrap();
            fixture.check_memory(1, &memory);

            let behind = PageRead { offset: (PAGES * STRIDE) as u64, ..page.clone() };
            let error = transfers.read(vec![behind], keep(), soon()).await.expect_err("the file is shorter");
            assert!(matches!(&error, TransferError::Io(e) if e.kind() == ErrorKind::UnexpectedEof), "{path}: {error}");
            transfers.detach(file, soon()).await.unwrap();
            let error = transfers.read(vec![page], keep(), soon()).await.expect_err("the file is detached");
            assert!(matches!(error, TransferError::UnknownFile(_)), "{path}: {error}");
        }
    }
}

#[tokio::test]
async fn requests_with_wrong_lengths_are_refused() {
    let fixture = Fixture::new(host::open(256 << 20));
    let (transfers, _) = open(&fixture.options()).unwrap();
    let file = transfers.attach(fixture.open_file(), soon()).await.unwrap();
    let memory = fixture.memory();
    let page = fixture.page(file, 0, &memory);
    let long = Chunk { bytes: CHUNK_BYTES as u32 + 1, crc: 0 };
    let wrong = [
        PageRead { offset: 512, ..page.clone() },
        PageRead { offset: !(BLOCK_BYTES as u64 - 1), ..page.clone() },
        PageRead { chunks: Vec::new(), ..page.clone() },
        PageRead { chunks: vec![long], ..page.clone() },
        PageRead { targets: page.targets[..2].to_vec(), ..page.clone() },
        PageRead { targets: vec![fixture.device.allocate(Place::Pinned, PAGE_BYTES).unwrap().all()], ..page.clone() },
    ];
    for page in wrong {
        let result = transfers.read(vec![page], keep(), soon()).await;
        assert!(matches!(result, Err(TransferError::Invalid(_))), "{result:?}");
    }
    let many = vec![page.clone(); 65];
    let result = transfers.read(many, keep(), soon()).await;
    assert!(matches!(result, Err(TransferError::Invalid(_))), "more pages than requests: {result:?}");
    transfers.read(vec![page], keep(), soon()).await.unwrap();
    fixture.check_memory(0, &memory);
}
