//! Pages that an engine reads from the L3 of a node of its machine, through `gds`.
//!
//! ```text
//!  node: extents of the pages, files ──▶ gds: direct I/O to the page of L1, CRCs ──▶ L1
//!  any other page, and after any fault ──▶ ordinary get from the node
//! ```
//!
//! Invariants:
//! - A page counts as read only after its CRCs have matched. Damage is reported to the node.
//! - A read that misses its deadline keeps its page of L1 until the kernel has finished. The page
//!   then returns to its pool.
//! - Reads take half of the time of a load at most. The wait for late pages takes a quarter of the
//!   other half at most. The rest is left for the node.
//! - The path is opened once. A path that fails is not used again before the next start.
//! - While a page is in a read that nothing waits for, the path is not used: its workers may hang.
//!
//! The target is memory of the host, because publishing, scrubs and preemption read pages of L1
//! there. So the device of the transfers is the host, whatever computes the model.

use futures::future::join_all;
use larder_client::{Client, Extent, PageDescription};
use larder_format::PageKey;
use larder_gds::{FileNumber, PageRead, TransferError, TransferLimits, TransferOptions, Transfers};
use larder_io::DeviceFile;
use larder_kernels::device::{Device, DeviceInfo, Keep, host};
use larder_memory::Arena;
use larder_model::KvPage;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

/// Maximum time of the reads of one load. It is below the time for which a node holds extents.
const READ_TIME_MAX: Duration = Duration::from_secs(4);
/// Maximum wait for a page after the time of its read, until the kernel has finished with it.
const RETURN_TIME_MAX: Duration = Duration::from_secs(1);
/// Maximum wait for the close of a file, once it is queued.
const DETACH_TIME_MAX: Duration = Duration::from_secs(60);
/// Time between two attempts to queue the close of a file.
const DETACH_RETRY: Duration = Duration::from_secs(1);
/// Memory of the device of the transfers beside the pages of L1, which it adopts: the block that a
/// probe reads.
const DEVICE_BYTES: usize = 64 << 10;

/// Way of pages from the L3 of a node of this machine to L1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum L3Path {
    /// [`Gds`](Self::Gds) if a CUDA device computes the model, otherwise [`Store`](Self::Store).
    #[default]
    Auto,
    /// Through the memory of the node.
    Store,
    /// Read by the engine from the files of L3. Pages that it cannot read so come through the node.
    Gds,
}

impl L3Path {
    /// Returns `true` if an engine on this device reads L3 by itself.
    pub(crate) fn is_direct(self, device: Option<&DeviceInfo>) -> bool {
        match self {
            L3Path::Auto => device.is_some_and(|device| device.kind == "cuda"),
            L3Path::Store => false,
            L3Path::Gds => true,
        }
    }
}

impl fmt::Display for L3Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            L3Path::Auto => "auto",
            L3Path::Store => "store",
            L3Path::Gds => "gds",
        })
    }
}

impl FromStr for L3Path {
    type Err = String;

    fn from_str(text: &str) -> Result<L3Path, String> {
        match text {
            "auto" => Ok(L3Path::Auto),
            "store" => Ok(L3Path::Store),
            "gds" => Ok(L3Path::Gds),
            _ => Err("expected auto, store or gds".to_string()),
        }
    }
}

/// State of the path. It goes from the first to the last, and stays at either of the last two.
#[derive(Clone)]
enum Path {
    Untried,
    Opening,
    Open(Arc<Transfers>),
    Failed,
}

/// Result for one page.
pub(crate) enum L3Read {
    /// The page holds verified bytes.
    Hit(KvPage, PageDescription),
    /// The node has to send the page. The content of the buffer is undefined.
    Unread(KvPage),
    /// A transfer still owns the buffer.
    StillRead,
}

/// Reader of an engine. Opens its path when a node first gives an extent.
pub struct L3Reads {
    /// Memory of the host.
    device: Arc<dyn Device>,
    page_bytes: usize,
    path: watch::Sender<Path>,
    overdue: Arc<AtomicUsize>,
}

impl L3Reads {
    /// A reader for pages of `page_bytes` bytes.
    pub fn new(page_bytes: usize) -> Arc<L3Reads> {
        Arc::new(L3Reads {
            device: host::open(DEVICE_BYTES),
            page_bytes,
            path: watch::Sender::new(Path::Untried),
            overdue: Arc::default(),
        })
    }

    /// Memory of a reader in bytes, for pages that do not lie at a multiple of a block: a page per
    /// worker.
    pub(crate) fn memory_bytes(page_bytes: usize) -> usize {
        TransferLimits::default().workers.saturating_mul(page_bytes.next_multiple_of(4096))
    }

    /// Returns `false` once the path has failed, and while pages are overdue.
    pub(crate) fn is_usable(&self) -> bool {
        self.overdue.load(Ordering::SeqCst) == 0 && !matches!(*self.path.borrow(), Path::Failed)
    }

    /// Reads those pages that nodes of this machine have on L3 alone. The results are in the order
    /// of `pages`.
    pub(crate) async fn read(
        self: &Arc<Self>,
        client: &Client,
        pages: Vec<(PageKey, KvPage)>,
        deadline: Instant,
    ) -> Vec<(PageKey, L3Read)> {
        let now = Instant::now();
        let until = now + (deadline.saturating_duration_since(now) / 2).min(READ_TIME_MAX);
        let keys: Vec<PageKey> = pages.iter().map(|(key, _)| *key).collect();
        let extents = if self.is_usable() { client.extents(&keys, until).await } else { Vec::new() };
        let transfers = match extents.iter().flatten().next() {
            Some(extent) => self.transfers(extent, until).await,
            None => None,
        };
        let Some(transfers) = transfers else {
            return pages.into_iter().map(|(key, page)| (key, L3Read::Unread(page))).collect();
        };
        let files = AttachedFiles::attach(transfers.clone(), &extents, until).await;
        let read = |((key, page), extent): ((PageKey, KvPage), Option<Extent>)| {
            let (transfers, files) = (&transfers, &files);
            async move {
                let file = extent.as_ref().and_then(|extent| files.number(extent));
                match extent.zip(file) {
                    Some((extent, file)) => {
                        (key, self.read_page(transfers, extent, file, page, [until, deadline]).await)
                    }
                    None => (key, L3Read::Unread(page)),
                }
            }
        };
        join_all(pages.into_iter().zip(extents).map(read)).await
    }

    /// Reads one page. The buffer returns when no transfer can write to it any more.
    async fn read_page(
        &self,
        transfers: &Transfers,
        extent: Extent,
        file: FileNumber,
        page: KvPage,
        [until, deadline]: [Instant; 2],
    ) -> L3Read {
        let (give_back, returned) = expect_return(&self.overdue);
        let target = page.lend(&*self.device, give_back);
        let description = extent.description();
        let extent = Arc::new(extent);
        let read = match target {
            Ok(target) => {
                let read = PageRead::of_page(extent.meta(), file, extent.offset(), vec![target]);
                // The node holds the record as long as a transfer may read it.
                transfers.read(vec![read], extent.clone() as Keep, until).await
            }
            Err(error) => Err(error.into()),
        };
        let grace = (deadline.saturating_duration_since(until) / 4).min(RETURN_TIME_MAX);
        let return_by = deadline.min(Instant::now() + grace);
        let Some(page) = returned.by(return_by).await else { return L3Read::StillRead };
        match read {
            Ok(()) => L3Read::Hit(page, description),
            Err(error) => {
                self.note_failure(&error, &extent);
                L3Read::Unread(page)
            }
        }
    }

    fn note_failure(&self, error: &TransferError, extent: &Extent) {
        match error {
            // The bytes on the device, or a segment that was reused after the hold.
            TransferError::Damaged { .. } => extent.report_corrupt(),
            TransferError::Failed(_) | TransferError::Unsettled(_) | TransferError::Stopped => {
                tracing::warn!(%error, "the engine stops reading L3 by itself; pages come through the node");
                self.path.send_replace(Path::Failed);
            }
            error => tracing::debug!(%error, ?extent, "cannot read a page of L3; it comes through the node"),
        }
    }

    /// The open path. The first call opens it, and all wait for that until the deadline.
    async fn transfers(self: &Arc<Self>, extent: &Extent, until: Instant) -> Option<Arc<Transfers>> {
        let is_first = self.path.send_if_modified(|path| {
            let is_untried = matches!(path, Path::Untried);
            if is_untried {
                *path = Path::Opening;
            }
            is_untried
        });
        if is_first {
            let (reads, file) = (self.clone(), open_again(extent));
            // Blocks for some seconds at worst.
            tokio::task::spawn_blocking(move || reads.path.send_replace(reads.open(file)));
        }
        let mut path = self.path.subscribe();
        let opened = path.wait_for(|path| !matches!(path, Path::Opening));
        match tokio::time::timeout_at(until.into(), opened).await.ok()?.ok()?.clone() {
            Path::Open(transfers) => Some(transfers),
            Path::Untried | Path::Opening | Path::Failed => None,
        }
    }

    /// Opens the path with a file of L3, which it must be able to read.
    fn open(&self, file: io::Result<DeviceFile>) -> Path {
        let opened = file.and_then(|file| Ok((file, Arena::new(L3Reads::memory_bytes(self.page_bytes))?)));
        let opened = opened.map_err(|error| error.to_string()).and_then(|(file, arena)| {
            let options = TransferOptions::new(self.device.clone(), arena, Arc::new(file));
            larder_gds::open(&options).map_err(|error| error.to_string())
        });
        match opened {
            Ok((transfers, report)) => {
                tracing::info!(path = %report, "the engine reads pages of L3 by itself");
                Path::Open(Arc::new(transfers))
            }
            Err(error) => {
                tracing::warn!(%error, "the engine cannot read L3 by itself; pages come through the node");
                Path::Failed
            }
        }
    }
}

/// Return of a page from its transfer. If this is dropped before, the page counts as overdue until
/// it returns, and then goes to its pool.
struct Return<T> {
    /// `None` after the return.
    page: Option<oneshot::Receiver<T>>,
    overdue: Arc<AtomicUsize>,
}

/// The function to call with the page, and its return.
fn expect_return<T>(overdue: &Arc<AtomicUsize>) -> (impl FnOnce(T) + Send + Sync + use<T>, Return<T>)
where
    T: Send,
{
    let (sender, receiver) = oneshot::channel();
    let counted = overdue.clone();
    let give_back = move |page| {
        // Refused only after `Return::drop` has counted the page.
        if sender.send(page).is_err() {
            counted.fetch_sub(1, Ordering::SeqCst);
        }
    };
    (give_back, Return { page: Some(receiver), overdue: overdue.clone() })
}

impl<T> Return<T> {
    /// Waits for the page. `None` at the deadline.
    async fn by(mut self, deadline: Instant) -> Option<T> {
        let returned = tokio::time::timeout_at(deadline.into(), self.page.as_mut()?).await.ok()?;
        self.page = None;
        returned.ok()
    }
}

impl<T> Drop for Return<T> {
    fn drop(&mut self) {
        let Some(mut receiver) = self.page.take() else { return };
        // Before the close, after which the page may return at any time.
        self.overdue.fetch_add(1, Ordering::SeqCst);
        receiver.close();
        if receiver.try_recv().is_ok() {
            self.overdue.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The file of an extent, for an owner of its own.
fn open_again(extent: &Extent) -> io::Result<DeviceFile> {
    extent.file().try_clone().and_then(DeviceFile::from_descriptor)
}

/// Files of extents, attached until this is dropped.
struct AttachedFiles {
    transfers: Arc<Transfers>,
    /// By the descriptor in the extent, which the request's extents in one file share.
    numbers: BTreeMap<RawFd, FileNumber>,
    runtime: Handle,
}

impl AttachedFiles {
    /// Attaches the files of `extents`. Leaves out those that fail, so that their pages come from
    /// the node.
    async fn attach(transfers: Arc<Transfers>, extents: &[Option<Extent>], until: Instant) -> AttachedFiles {
        let mut files = AttachedFiles { transfers, numbers: BTreeMap::new(), runtime: Handle::current() };
        for extent in extents.iter().flatten() {
            let descriptor = extent.file().as_raw_fd();
            if files.numbers.contains_key(&descriptor) {
                continue;
            }
            let attached = match open_again(extent) {
                Ok(file) => files.transfers.attach(file, until).await,
                Err(error) => Err(error.into()),
            };
            match attached {
                Ok(number) => drop(files.numbers.insert(descriptor, number)),
                Err(error) => tracing::debug!(%error, "cannot attach a file of L3; its pages come through the node"),
            }
        }
        files
    }

    fn number(&self, extent: &Extent) -> Option<FileNumber> {
        self.numbers.get(&extent.file().as_raw_fd()).copied()
    }
}

impl Drop for AttachedFiles {
    fn drop(&mut self) {
        let (transfers, numbers) = (self.transfers.clone(), std::mem::take(&mut self.numbers));
        // Here too if the load was given up: the table of files is bounded.
        self.runtime.spawn(async move {
            for number in numbers.into_values() {
                detach(&transfers, number).await;
            }
        });
    }
}

/// Queues the close of a file, as often as the queue is full. Files attach through the same queue,
/// so their bound is that of these tasks too.
async fn detach(transfers: &Transfers, file: FileNumber) {
    loop {
        match transfers.detach(file, Instant::now() + DETACH_TIME_MAX).await {
            Err(TransferError::Busy(_)) => tokio::time::sleep(DETACH_RETRY).await,
            Err(TransferError::Deadline) => {
                return tracing::debug!("a file of L3 stays open until the calls that hang return");
            }
            Err(error) => return tracing::warn!(%error, "cannot close a file of L3"),
            Ok(()) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn path_is_unusable_while_a_page_is_overdue() {
        let reads = L3Reads::new(4096);
        let soon = Instant::now() + Duration::from_secs(60);
        let (give_back, returned) = expect_return(&reads.overdue);
        give_back(1);
        assert_eq!(returned.by(soon).await, Some(1));
        assert!(reads.is_usable(), "in time");

        let (give_back, returned) = expect_return::<u32>(&reads.overdue);
        let (give_other_back, other) = expect_return::<u32>(&reads.overdue);
        assert_eq!(returned.by(Instant::now()).await, None);
        drop(other);
        assert!(!reads.is_usable(), "late, and given up");
        give_back(2);
        assert!(!reads.is_usable(), "one of two");
        give_other_back(3);
        assert!(reads.is_usable());

        let (give_back, returned) = expect_return(&reads.overdue);
        give_back(4);
        drop(returned);
        assert!(reads.is_usable(), "returned before it was given up");
    }

    #[test]
    fn path_is_direct_by_choice_or_with_a_cuda_device() {
        let info = |kind| DeviceInfo { kind, ..host::open(1).info().clone() };
        for (text, direct) in [("auto", [false, false, true]), ("store", [false; 3]), ("gds", [true; 3])] {
            let path: L3Path = text.parse().unwrap();
            assert_eq!(path.to_string(), text);
            let devices = [None, Some(info("emulated")), Some(info("cuda"))];
            assert_eq!(devices.map(|device| path.is_direct(device.as_ref())), direct, "{text}");
        }
        assert!("cufile".parse::<L3Path>().is_err());
    }
}
