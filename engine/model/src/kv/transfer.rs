//! Pages that a transfer fills.
//!
//! Invariant: a page in transfer has no other owner until the last handle of its memory is dropped.

use super::KvPage;
use larder_kernels::device::{Device, DeviceError, Place, Slice};
use std::sync::Arc;

impl KvPage {
    /// Lends the bytes to a transfer, as memory of `device`: of the host, which has them already.
    /// Calls `give_back` with the page when the last handle of the memory is dropped, also after an
    /// error. The content is unspecified then, unless the transfer says otherwise.
    ///
    /// # Errors
    /// If the memory of `device` is not the host's.
    pub fn lend(
        self,
        device: &dyn Device,
        give_back: impl FnOnce(KvPage) + Send + Sync + 'static,
    ) -> Result<Slice, DeviceError> {
        let mut owner = Arc::new(PageInTransfer(Some((self, Box::new(give_back)))));
        // The address is that of the page in its new owner, which does not move any more.
        let page = Arc::get_mut(&mut owner).and_then(|owner| owner.0.as_mut());
        let Some(bytes) = page.map(|(page, _)| page.as_mut()) else { return Err(DeviceError::InUse) };
        let (address, length) = (bytes.as_mut_ptr() as u64, bytes.len());
        if device.info().kind != "host" {
            return Err(DeviceError::Shape("a page in transfer lies in memory of the host"));
        }
        // SAFETY: the page owns these bytes, and `owner` keeps it until the last handle is dropped.
        // Until then nothing else can access them: `owner` is private to the handle.
        Ok(unsafe { device.adopt(Place::Device, address, length, owner) }?.all())
    }
}

/// Owner of a page while a transfer may write to it, and the receiver of the page afterwards.
struct PageInTransfer(Option<(KvPage, GiveBack)>);

type GiveBack = Box<dyn FnOnce(KvPage) + Send + Sync>;

impl Drop for PageInTransfer {
    fn drop(&mut self) {
        if let Some((page, give_back)) = self.0.take() {
            give_back(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kv::KvPool;
    use larder_format::{KvDtype, PageGeometry};
    use larder_kernels::device::host;
    use std::time::{Duration, Instant};

    const GEOMETRY: PageGeometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 5,
        kv_heads: 4,
        head_dim: 6,
        page_tokens: 3,
        layers_per_part: 2,
        head_groups: 1,
    };

    #[test]
    fn page_in_transfer_returns_with_the_last_handle_of_its_memory() {
        let device = host::open(1 << 20);
        let pool = KvPool::for_device(GEOMETRY, 1, Some(host::open(1 << 20)));
        let page = pool.allocate().unwrap();
        let version = page.version();
        let (sender, returned) = std::sync::mpsc::channel();
        let target = page.lend(&*device, move |page| sender.send(page).unwrap()).unwrap();
        assert_eq!(target.bytes(), GEOMETRY.page_bytes());
        let stream = device.stream("test").unwrap();
        stream.fill(&target, 7).unwrap();
        stream.wait(Instant::now() + Duration::from_secs(60)).unwrap();
        let other = target.clone();
        drop(target);
        assert!(returned.try_recv().is_err() && pool.free_pages() == 0, "a handle is left");
        drop(other);
        let page = returned.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(page.as_ref().iter().all(|&byte| byte == 7));
        assert_ne!(page.version(), version, "a device would take its old copy for this content");
        drop(page);
        assert_eq!(pool.free_pages(), 1);
    }
}
