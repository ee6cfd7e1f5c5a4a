//! Gather and scatter of KV pages between a pool in device memory and pinned memory of the host.
//!
//! They compare with one large copy, and with one asynchronous copy per engine page, layer and
//! tensor, as an engine without kernels makes them.

use crate::Measurement;
use crate::bench::{Bench, Random};
use crate::check::Verified;
use crate::report::{Figure, Rate};
use crate::sizes::{CHECKED_PAGES, PagesSize};
use anyhow::{Result, ensure};
use larder_kernels::cpu::{CHUNK_BYTES, PageShape, PoolLayout, gather_page};
use larder_kernels::device::{DeviceError, Memory, Place, Slice};
use larder_kernels::pages::{CrcChunks, PageLocation, PageTransfer};

const TO_HOST: &str = "one copy, device to pinned";
const TO_DEVICE: &str = "one copy, pinned to device";
/// Least ratio to one large copy.
const TARGET: f64 = 0.9;
/// Blocks of the compared launches.
const CHECKED_BLOCKS: u32 = 3;

/// A pool whose layers follow each other, and its pages in the store's layout.
struct Pages {
    shape: PageShape,
    layout: PoolLayout,
    pool: Slice,
    tensors: Vec<Slice>,
    store: Memory,
    locations: Vec<PageLocation>,
}

impl Pages {
    /// Fills the pool with copies of `tile`. Its pages have a random order.
    fn new(bench: &Bench, size: &PagesSize, tile: &[u8]) -> Result<Pages> {
        let PagesSize { shape, engine_tokens, pages } = *size;
        ensure!(shape.tokens.is_multiple_of(engine_tokens), "a page has whole pages of the engine");
        let per_page = shape.tokens / engine_tokens;
        let layout = PoolLayout::layer_first(&shape, engine_tokens);
        let count = (shape.layers * shape.layer_tensors) as usize;
        let tensor_bytes = layout.page_stride as usize * (pages * per_page) as usize;
        let pool = bench.tiled(count * tensor_bytes, tile)?;
        let tensor = |number: usize| pool.slice(number * tensor_bytes..(number + 1) * tensor_bytes);
        let tensors = (0..count).map(tensor).collect::<Result<Vec<_>, _>>()?;
        let page_bytes = shape.page_bytes() as usize;
        let store = bench.device.allocate(Place::Pinned, page_bytes * pages as usize)?;
        let mut order: Vec<u32> = (0..pages * per_page).collect();
        Random::new(1).shuffle(&mut order);
        let location = |(page, engine_pages): (usize, &[u32])| {
            let store = store.slice(page * page_bytes..(page + 1) * page_bytes)?;
            Ok::<_, DeviceError>(PageLocation { store, engine_pages: engine_pages.to_vec(), first_token: 0 })
        };
        let locations = order.chunks_exact(per_page as usize).enumerate().map(location);
        let locations = locations.collect::<Result<Vec<_>, _>>()?;
        Ok(Pages { shape, layout, pool, tensors, store, locations })
    }

    fn transfer(&self, bench: &Bench) -> Result<PageTransfer> {
        let parts = 0..self.shape.part_count();
        let Pages { shape, layout, tensors, locations, .. } = self;
        Ok(PageTransfer::new(&*bench.device, shape, layout, tensors, locations, parts)?)
    }

    /// Ranges of pool and store that one copy moves: a tensor of an engine page.
    fn runs(&self) -> Result<Vec<(Slice, Slice)>> {
        let run = self.layout.page_stride as usize;
        let tensor_bytes = self.shape.tensor_bytes() as usize;
        let mut runs = Vec::new();
        for location in &self.locations {
            for (number, tensor) in self.tensors.iter().enumerate() {
                for (index, &engine_page) in location.engine_pages.iter().enumerate() {
                    let (from, to) = (engine_page as usize * run, number * tensor_bytes + index * run);
                    runs.push((tensor.slice(from..from + run)?, location.store.slice(to..to + run)?));
                }
            }
        }
        Ok(runs)
    }

    fn store_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.store.bytes()];
        self.store.all().read(&mut bytes)?;
        Ok(bytes)
    }

    /// All pages in the store's layout, by the reference. `pool` has the bytes of the pool.
    fn reference(&self, pool: &[u8]) -> Vec<u8> {
        let views: Vec<&[u8]> = pool.chunks_exact(pool.len() / self.tensors.len()).collect();
        let mut expected = vec![0; self.store.bytes()];
        let pages = expected.chunks_exact_mut(self.shape.page_bytes() as usize);
        for (page, location) in pages.zip(&self.locations) {
            gather_page(&self.shape, &self.layout, &views, &location.engine_pages, 0, page);
        }
        expected
    }

    /// CRCs of all chunks of `pages`, which are in the store's layout.
    fn crcs(&self, pages: &[u8]) -> Vec<u32> {
        let part = |page: &[u8], number: u32| {
            let range = self.shape.part_range(number);
            crcs(&page[range.start as usize..range.end as usize])
        };
        let pages = pages.chunks_exact(self.shape.page_bytes() as usize);
        pages.flat_map(|page| (0..self.shape.part_count()).flat_map(move |number| part(page, number))).collect()
    }
}

fn crcs(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(CHUNK_BYTES as usize).map(crc32fast::hash).collect()
}

/// Compares kernels and copies with the reference, on two small pages. `bulk` selects the kernels
/// with bulk copies.
fn verify(bench: &Bench, bulk: bool) -> Result<Verified> {
    let pages = Pages::new(bench, &CHECKED_PAGES, &Random::new(2).bytes(1 << 20))?;
    let (transfer, checker, stream) = (pages.transfer(bench)?.with_bulk(bulk), bench.checker, &*bench.stream);
    let found = bench.allocate(transfer.crc_bytes())?;
    transfer.gather(stream, CHECKED_BLOCKS, Some(&found))?;
    bench.wait()?;
    let pool: Vec<u8> = bench.download(&pages.pool)?;
    let expected = pages.reference(&pool);
    let expected_crcs = pages.crcs(&expected);
    checker.same("gathered pages", &pages.store_bytes()?, &expected)?;
    checker.same("CRCs of gathered pages", &bench.download::<u32>(&found)?, &expected_crcs)?;
    stream.fill(&pages.pool, 0)?;
    stream.fill(&found, 0)?;
    transfer.scatter(stream, CHECKED_BLOCKS, Some(&found))?;
    checker.same("scattered pages", &bench.download::<u8>(&pages.pool)?, &pool)?;
    checker.same("CRCs of scattered pages", &bench.download::<u32>(&found)?, &expected_crcs)?;

    let runs = pages.runs()?;
    stream.fill(&pages.store.all(), 0)?;
    runs.iter().try_for_each(|(pool, store)| stream.copy(store, pool))?;
    bench.wait()?;
    checker.same("pages by single copies", &pages.store_bytes()?, &expected)?;
    stream.fill(&pages.pool, 0)?;
    runs.iter().try_for_each(|(pool, store)| stream.copy(pool, store))?;
    checker.same("pool by single copies", &bench.download::<u8>(&pages.pool)?, &pool)?;
    stream.copy(&pages.store.all(), &pages.pool)?;
    bench.wait()?;
    checker.same("one large copy", &pages.store_bytes()?, &pool)
}

pub fn measure(run: &mut Measurement) -> Result<()> {
    let bench = &run.bench;
    let verified = verify(bench, false)?;
    let pages = Pages::new(bench, &run.sizes.pages, &Random::new(3).bytes(run.sizes.tile_bytes))?;
    let (bytes, stream, store) = (pages.store.bytes(), &*bench.stream, pages.store.all());
    let to_host = Rate::bytes(bytes, &bench.device_time(&|| Ok(stream.copy(&store, &pages.pool)?))?);
    run.report.figure(verified, &Figure::new(TO_HOST, to_host))?;
    let to_device = Rate::bytes(bytes, &bench.device_time(&|| Ok(stream.copy(&pages.pool, &store)?))?);
    run.report.figure(verified, &Figure::new(TO_DEVICE, to_device))?;

    let runs = pages.runs()?;
    let copies = |direction: fn(&(Slice, Slice)) -> (&Slice, &Slice)| {
        bench.submission_and_device_time(&|| {
            let copy = |run: &(Slice, Slice)| {
                let (target, source) = direction(run);
                stream.copy(target, source)
            };
            Ok(runs.iter().try_for_each(copy)?)
        })
    };
    let run_bytes = runs.first().map_or(0, |(pool, _)| pool.bytes());
    let name = |way: &str| format!("{} copies of {} KiB, {way}, with their submission", runs.len(), run_bytes >> 10);
    let rate = Rate::bytes(bytes, &copies(|(pool, store)| (store, pool))?);
    run.report.figure(verified, &Figure::new(name("device to pinned"), rate).against(TO_HOST, to_host))?;
    let rate = Rate::bytes(bytes, &copies(|(pool, store)| (pool, store))?);
    run.report.figure(verified, &Figure::new(name("pinned to device"), rate).against(TO_DEVICE, to_device))?;

    let transfer = pages.transfer(bench)?;
    let crcs = bench.allocate(transfer.crc_bytes())?;
    // A GPU without bulk copies runs a twin of these kernels that is not meant to be fast.
    let has_bulk = transfer.uses_bulk() || bench.device.info().kind != "cuda";
    let kinds: &[(bool, &str)] = if has_bulk { &[(false, ""), (true, ", bulk copies")] } else { &[(false, "")] };
    for &(bulk, kind) in kinds {
        let verified = if bulk { verify(bench, true)? } else { verified };
        let transfer = pages.transfer(bench)?.with_bulk(bulk);
        for (name, crcs) in [("", None), (", CRC-32 included", Some(&crcs))] {
            for blocks in run.sizes.blocks(bench.multiprocessors()) {
                let times = bench.device_time(&|| Ok(transfer.gather(stream, blocks, crcs)?))?;
                let figure = Figure::new(format!("gather, device to pinned{name}{kind}"), Rate::bytes(bytes, &times));
                run.report.figure(verified, &figure.blocks(blocks).against(TO_HOST, to_host).target(TARGET))?;
                let times = bench.device_time(&|| Ok(transfer.scatter(stream, blocks, crcs)?))?;
                let figure = Figure::new(format!("scatter, pinned to device{name}{kind}"), Rate::bytes(bytes, &times));
                run.report.figure(verified, &figure.blocks(blocks).against(TO_DEVICE, to_device).target(TARGET))?;
            }
        }
    }
    Ok(())
}

/// Chunks of `memory`, as the store has them.
fn chunks(memory: &Slice) -> Result<Vec<Slice>, DeviceError> {
    let bytes = memory.bytes();
    let starts = (0..bytes).step_by(CHUNK_BYTES as usize);
    starts.map(|start| memory.slice(start..bytes.min(start + CHUNK_BYTES as usize))).collect()
}

/// CRC-32 of chunks in device memory.
pub fn measure_crc(run: &mut Measurement) -> Result<()> {
    let bench = &run.bench;
    let stream = &*bench.stream;
    let bytes = Random::new(4).bytes(3 * CHUNK_BYTES as usize + 776);
    let memory = chunks(&bench.upload(&bytes)?)?;
    let found = bench.allocate(4 * memory.len())?;
    CrcChunks::new(&*bench.device, &memory)?.compute(stream, CHECKED_BLOCKS, &found)?;
    let verified = bench.checker.same("CRCs of chunks", &bench.download::<u32>(&found)?, &crcs(&bytes))?;

    let bytes = run.sizes.crc_bytes;
    let memory = chunks(&bench.tiled(bytes, &Random::new(5).bytes(run.sizes.tile_bytes))?)?;
    let found = bench.allocate(4 * memory.len())?;
    let plan = CrcChunks::new(&*bench.device, &memory)?;
    for blocks in run.sizes.blocks(bench.multiprocessors()) {
        let times = bench.device_time(&|| Ok(plan.compute(stream, blocks, &found)?))?;
        let figure = Figure::new("CRC-32 of device memory", Rate::bytes(bytes, &times)).blocks(blocks);
        run.report.figure(verified, &figure.against(crate::ceilings::MEMORY, run.ceilings.memory))?;
    }
    Ok(())
}
