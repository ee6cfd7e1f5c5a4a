//! The same transfers through glommio's own file, [`DmaFile`], by 16 tasks on glommio's thread.
//!
//! This is the least that a store on glommio's files costs: no request comes from another thread,
//! as all requests of a node do. glommio chooses the memory of a transfer. A node keeps its pages
//! in the arena, so it would copy each page once.

use crate::Options;
use crate::measure::Meter;
use glommio::io::{DmaFile, OpenOptions};
use glommio::{LocalExecutorBuilder, Placement};
use larder_memory::{Arena, SlotMut};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Memory that glommio registers with the kernel for transfers.
const IO_MEMORY: usize = 64 << 20;

struct Transfers {
    file: DmaFile,
    slot: RefCell<SlotMut>,
    next: Cell<usize>,
    order: Arc<Vec<u64>>,
    size: usize,
    copies: bool,
}

impl Transfers {
    fn take(&self) -> Option<u64> {
        let number = self.next.replace(self.next.get() + 1);
        self.order.get(number).copied()
    }

    async fn read(&self) {
        while let Some(offset) = self.take() {
            let page = self.file.read_at_aligned(offset, self.size).await.expect("glommio reads");
            assert_eq!(page.len(), self.size);
            if self.copies {
                self.slot.borrow_mut()[..self.size].copy_from_slice(&page);
            }
        }
    }

    async fn write(&self) {
        while let Some(offset) = self.take() {
            let mut page = self.file.alloc_dma_buffer(self.size);
            if self.copies {
                page.as_bytes_mut().copy_from_slice(&self.slot.borrow()[..self.size]);
            }
            assert_eq!(self.file.write_at(page, offset).await.expect("glommio writes"), self.size);
        }
    }
}

/// Returns GB/s and CPU seconds per GB. `copies` copies each page from or to the arena.
pub fn run(
    arena: &Arc<Arena>,
    path: &Path,
    order: &Arc<Vec<u64>>,
    size: usize,
    options: &Options,
    copies: bool,
) -> (f64, f64) {
    let builder = LocalExecutorBuilder::new(Placement::Unbound).io_memory(IO_MEMORY).ring_depth(128);
    let executor = builder.make().expect("glommio starts: it needs lockable memory");
    let slot = RefCell::new(arena.allocate(size).expect("the arena is free"));
    let order = order.clone();
    executor.run(async move {
        let file = OpenOptions::new().read(true).write(true).dma_open(path).await.expect("glommio opens the file");
        let transfers = Rc::new(Transfers { file, slot, next: Cell::new(0), order, size, copies });
        let write = options.write;
        let meter = Meter::start();
        let tasks: Vec<_> = (0..options.depth)
            .map(|_| {
                let transfers = transfers.clone();
                glommio::spawn_local(
                    async move { if write { transfers.write().await } else { transfers.read().await } },
                )
            })
            .collect();
        for task in tasks {
            task.await;
        }
        meter.stop(options.bytes)
    })
}
