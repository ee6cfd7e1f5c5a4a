//! The two stores behind one interface.

use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, Load, PsyncIoEngineConfig, UringIoEngineConfig,
};
use larder_format::{NamespaceId, PageId, PageKey, PageMeta};
use larder_log::{L3, L3Options};
use larder_memory::Arena;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ARENA_BYTES: usize = 256 << 20;
const BLOCK_BYTES: usize = 64 << 20;
const QUEUE_DEPTH: u32 = 16;
const DEADLINE: Duration = Duration::from_secs(60);
const FLUSHERS: usize = 4;
/// Bytes that foyer's flushers may buffer. foyer drops entries beyond.
const FLUSH_BYTES: usize = 256 << 20;
/// Bytes that a caller leaves with foyer at a time: far fewer than it may buffer, so that it drops
/// none.
const QUEUED_BYTES: usize = 32 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Log,
    /// foyer with its default I/O engine: blocking calls on threads.
    Foyer,
    /// foyer with its I/O engine on io_uring. Its thread never sleeps.
    FoyerUring,
    /// foyer with its log of deletions.
    FoyerTombstones,
}

impl Kind {
    pub const ALL: [(&'static str, Kind); 4] = [
        ("log", Kind::Log),
        ("foyer", Kind::Foyer),
        ("foyer-uring", Kind::FoyerUring),
        ("foyer-tombstones", Kind::FoyerTombstones),
    ];

    pub fn named(name: &str) -> Result<Kind> {
        let found = Kind::ALL.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, kind)| kind).ok_or_else(|| format!("unknown store {name}").into())
    }

    pub fn name(self) -> &'static str {
        Kind::ALL.into_iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

#[derive(Clone)]
pub enum Store {
    Log(L3, Arc<Arena>),
    Foyer(HybridCache<Vec<u8>, Bytes>, Arc<Semaphore>),
}

/// Value of foyer. It returns its bytes of [`QUEUED_BYTES`] when foyer has written it.
struct Queued {
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Queued {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

pub fn id(number: u64) -> PageId {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    key[8..16].copy_from_slice(&number.to_le_bytes());
    PageId { namespace: NamespaceId([7; 32]), key: PageKey(key) }
}

fn key(number: u64) -> Vec<u8> {
    id(number).key.0.to_vec()
}

/// Writes the value of `number` to `bytes`: its number in each block.
fn fill(bytes: &mut [u8], number: u64) {
    for block in bytes.chunks_mut(4096) {
        block.fill(number as u8);
        block[..8].copy_from_slice(&number.to_le_bytes());
    }
}

/// True if `bytes` are the value of `number`.
pub fn is_value(bytes: &[u8], number: u64, size: usize) -> bool {
    // Bytes that equal their neighbours are all the same. Slices compare far faster than bytes.
    let is_same = |bytes: &[u8]| bytes[0] == number as u8 && bytes[1..] == bytes[..bytes.len() - 1];
    let is_block = |block: &[u8]| block[..8] == number.to_le_bytes() && is_same(&block[8..]);
    bytes.len() == size && bytes.chunks(4096).all(is_block)
}

impl Store {
    /// Opens the store in `dir`, and waits until it has recovered.
    pub async fn open(kind: Kind, dir: &Path, capacity: usize) -> Result<Store> {
        let enable = kind == Kind::FoyerTombstones;
        if kind == Kind::Log {
            let arena = Arena::new(ARENA_BYTES)?;
            let options = L3Options {
                keep_percent: 0,
                segment_bytes: BLOCK_BYTES as u64,
                queue_depth: QUEUE_DEPTH,
                ..L3Options::new(dir, capacity as u64)
            };
            let l3 = L3::open(options, arena.clone()).await?;
            l3.recovered().await?;
            return Ok(Store::Log(l3, arena));
        }
        let device = FsDeviceBuilder::new(dir).with_capacity(capacity).with_direct(true).build()?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(BLOCK_BYTES)
            .with_flushers(FLUSHERS)
            .with_buffer_pool_size(FLUSH_BYTES)
            .with_submit_queue_size_threshold(FLUSH_BYTES)
            .with_tombstone_log(enable);
        let io: Box<dyn IoEngineConfig> = match kind {
            Kind::FoyerUring => Box::new(UringIoEngineConfig::new().with_io_depth(QUEUE_DEPTH as usize)),
            _ => Box::new(PsyncIoEngineConfig::new()),
        };
        // Entries go to the disk only: the memory tier has room for none.
        let cache = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .with_flush_on_close(false)
            .memory(1)
            .with_weighter(|_: &Vec<u8>, value: &Bytes| value.len())
            .storage()
            .with_io_engine_config(io)
            .with_engine_config(engine)
            .build()
            .await?;
        Ok(Store::Foyer(cache, Arc::new(Semaphore::new(QUEUED_BYTES))))
    }

    /// Writes a value. The log answers once the device has it; foyer queues it.
    pub async fn write(&self, number: u64, size: usize) -> Result<()> {
        match self {
            Store::Log(l3, arena) => {
                let mut slot = arena.allocate(size).ok_or("the arena is full")?;
                fill(&mut slot, number);
                let mut meta = PageMeta::describe(id(number), PageKey::NONE, 0, vec![size as u32], &slot);
                meta.generation = number + 1;
                Ok(l3.write(meta, slot.freeze(), Instant::now() + DEADLINE).await?)
            }
            Store::Foyer(cache, queue) => {
                let permit = queue.clone().acquire_many_owned(size as u32).await?;
                let mut bytes = vec![0; size];
                fill(&mut bytes, number);
                let value = Bytes::from_owner(Queued { bytes, _permit: permit });
                cache.storage_writer(key(number)).force().insert(value);
                Ok(())
            }
        }
    }

    /// Waits until all writes have ended.
    pub async fn settle(&self) {
        if let Store::Foyer(cache, _) = self {
            cache.storage().wait().await;
        }
    }

    /// Reads a value from the device. `Some(true)` if it is the right one.
    pub async fn read(&self, number: u64, size: usize) -> Result<Option<bool>> {
        match self {
            Store::Log(l3, _) => {
                let found = l3.read(&id(number), Instant::now() + DEADLINE).await?;
                Ok(found.map(|(_, slot)| is_value(&slot, number, size)))
            }
            Store::Foyer(cache, _) => match cache.storage().load(&key(number)).await? {
                Load::Entry { value, .. } => Ok(Some(is_value(&value, number, size))),
                Load::Piece { .. } => Err("foyer answered from its queue".into()),
                Load::Throttled => Err("foyer refused a read".into()),
                Load::Miss => Ok(None),
            },
        }
    }

    pub async fn forget(&self, numbers: &[u64]) -> Result<()> {
        match self {
            Store::Log(l3, _) => {
                let ids: Vec<PageId> = numbers.iter().map(|number| id(*number)).collect();
                l3.forget(&ids, Instant::now() + DEADLINE).await?;
            }
            Store::Foyer(cache, _) => {
                numbers.iter().for_each(|number| cache.remove(&key(*number)));
                cache.storage().wait().await;
            }
        }
        Ok(())
    }

    pub async fn close(self) -> Result<()> {
        match self {
            Store::Log(l3, _) => l3.close().await,
            Store::Foyer(cache, _) => cache.close().await?,
        }
        Ok(())
    }
}
