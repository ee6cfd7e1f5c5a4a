//! Client of a Larder node. It verifies identity and CRC of every page, like any client.

use crate::drive::{Cell, Notes, Op, Workload};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use larder_client::{Client, ClientOptions, NewPage, PageView, PutOptions, PutOutcome, StoreUrl};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
/// First and longest pause before the client repeats puts that the node refused as busy. The pause
/// doubles in between.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(16);
/// Maximum payload bytes of one put, with room to spare for 64 pages of 4 MiB.
const PUT_BYTES_MAX: usize = 512 << 20;

pub struct Larder {
    url: StoreUrl,
    index: u32,
    client: Option<Client>,
    keys: Vec<PageKey>,
    payload: Vec<Bytes>,
    buffers: Vec<Vec<u8>>,
    views: Vec<PageView>,
    notes: Notes,
}

fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

fn namespace(page_bytes: usize) -> Result<NamespaceDescriptor> {
    let mut geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 1,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 1,
        layers_per_part: 1,
        head_groups: 1,
    };
    geometry.page_tokens = (page_bytes / geometry.page_bytes()) as u32;
    ensure!(
        geometry.page_bytes() == page_bytes,
        "pages of {page_bytes} bytes: not a multiple of the bytes of one token"
    );
    Ok(NamespaceDescriptor { model: "bench".into(), weights: [0; 32], geometry, tenant: "bench".into() })
}

impl Larder {
    pub fn new(url: StoreUrl, index: u32) -> Self {
        Self {
            url,
            index,
            client: None,
            keys: Vec::new(),
            payload: Vec::new(),
            buffers: Vec::new(),
            views: Vec::new(),
            notes: Notes::default(),
        }
    }

    fn client(&self) -> Result<&Client> {
        self.client.as_ref().context("get, view or exists before the first put")
    }

    fn key(&self, cell: &Cell, page: usize) -> PageKey {
        PageKey::chain(None, &[cell.cell, self.index, page as u32])
    }

    /// Makes keys, payload and buffers. Attaches anew if the page size changed, as a namespace has
    /// one page size.
    async fn prepare_put(&mut self, cell: &Cell) -> Result<()> {
        if self.client.as_ref().and_then(Client::geometry).is_none_or(|geometry| geometry.page_bytes() != cell.size) {
            let options = ClientOptions {
                put_queue_bytes_max: PUT_BYTES_MAX,
                memory_bytes: PUT_BYTES_MAX,
                ..ClientOptions::default()
            };
            let client = Client::attach(self.url.clone(), Some(namespace(cell.size)?), options);
            ensure!(client.ready(Duration::from_secs(10)).await, "the node did not answer within 10 s");
            self.client = Some(client);
        }
        self.keys = (0..cell.batch * cell.batches).map(|page| self.key(cell, page)).collect();
        self.payload.clear();
        for page in 0..cell.batch {
            // A node on this machine copies pages from this buffer, which it has mapped.
            let mut payload = self.client()?.buffer(cell.size);
            payload.iter_mut().zip(page * cell.size..).for_each(|(byte, i)| *byte = (i * 31 + i / cell.size * 7) as u8);
            self.payload.push(payload.freeze());
        }
        self.buffers = (0..cell.batch).map(|_| vec![1; cell.size]).collect();
        // One-time work, such as connecting, must not count.
        self.put(vec![(self.key(cell, u32::MAX as usize), self.payload[0].clone())]).await
    }

    async fn put(&mut self, pages: Vec<(PageKey, Bytes)>) -> Result<()> {
        let deadline = deadline();
        let mut pause = BUSY_PAUSE;
        let mut left: Vec<(NewPage, Bytes)> =
            pages.into_iter().map(|(key, bytes)| (NewPage::first(key), bytes)).collect();
        loop {
            let outcomes = self.client()?.put_pages(left.clone(), PutOptions::default(), deadline).await;
            let mut outcomes = outcomes.into_iter();
            let mut busy = Vec::new();
            for page in left {
                match outcomes.next() {
                    Some(PutOutcome::Stored) => {}
                    Some(PutOutcome::Busy { .. }) => busy.push(page),
                    outcome => anyhow::bail!("put: {outcome:?}"),
                }
            }
            if busy.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the node was busy until the deadline");
            self.notes.busy += busy.len() as u64;
            tokio::time::sleep(pause).await;
            pause = BUSY_PAUSE_MAX.min(2 * pause);
            left = busy;
        }
    }

    fn batch(&self, cell: &Cell, batch: usize) -> &[PageKey] {
        &self.keys[batch * cell.batch..][..cell.batch]
    }

    async fn get(&mut self, cell: &Cell, batch: usize) -> Result<()> {
        let buffers = std::mem::take(&mut self.buffers);
        let wanted = self.batch(cell, batch).iter().copied().zip(buffers).collect();
        for (buffer, tier) in self.client()?.get(wanted, deadline()).await {
            ensure!(tier.is_some(), "get missed a page that was put");
            self.buffers.push(buffer);
        }
        Ok(())
    }

    async fn view(&mut self, cell: &Cell, batch: usize) -> Result<()> {
        // Drops the last batch first, as the node limits the memory that readers hold.
        self.views.clear();
        for view in self.client()?.view(self.batch(cell, batch), deadline()).await {
            let view = view.context("view missed a page that was put")?;
            self.notes.copied += u64::from(!view.in_place());
            self.views.push(view);
        }
        Ok(())
    }

    async fn exists(&self, cell: &Cell, batch: usize) -> Result<()> {
        ensure!(self.keys.len() >= cell.batch, "exists: the batch has more keys than were put");
        let from = batch * cell.batch % (self.keys.len() - cell.batch + 1);
        let there = self.client()?.exists(&self.keys[from..from + cell.batch], deadline()).await;
        ensure!(there.iter().all(|&there| there), "exists missed a page that was put");
        Ok(())
    }

    async fn clear(&mut self) -> Result<()> {
        self.views.clear();
        if let Some(client) = &self.client {
            ensure!(client.forget(&self.keys, deadline()).await.complete, "the node did not forget all pages");
        }
        Ok(())
    }
}

impl Workload for Larder {
    async fn prepare(&mut self, cell: &Cell) -> Result<()> {
        self.notes = Notes::default();
        match cell.op {
            Op::Put => self.prepare_put(cell).await,
            Op::Clear => self.clear().await,
            Op::Get | Op::View | Op::Exists => Ok(()),
        }
    }

    async fn operate(&mut self, cell: &Cell, batch: usize) -> Result<()> {
        match cell.op {
            Op::Put => {
                let pages = self.batch(cell, batch).iter().copied().zip(self.payload.iter().cloned()).collect();
                self.put(pages).await
            }
            Op::Get => self.get(cell, batch).await,
            Op::View => self.view(cell, batch).await,
            Op::Exists => self.exists(cell, batch).await,
            Op::Clear => Ok(()),
        }
    }

    async fn check(&mut self, cell: &Cell, batch: usize) -> Result<Notes> {
        if cell.op == Op::Put {
            self.keys.truncate((batch + 1) * cell.batch);
        }
        let same = match cell.op {
            Op::Get => self.buffers.iter().zip(&self.payload).all(|(got, put)| got[..] == put[..]),
            Op::View => self.views.iter().zip(&self.payload).all(|(got, put)| got[..] == put[..]),
            _ => true,
        };
        ensure!(same, "the bytes differ from those that were put");
        self.views.clear();
        Ok(std::mem::take(&mut self.notes))
    }
}
