//! Gather, scatter and CRC-32 in the emulator agree with the CPU references, for random shapes.

use larder_kernels::cpu::{CHUNK_BYTES, PageShape, PoolLayout, gather_page, scatter_page};
use larder_kernels::device::{Device, DeviceError, Memory, Place, Slice, Stream};
use larder_kernels::device::{cuda, download, emulated, upload};
use larder_kernels::pages::{CrcChunks, PageLocation, PageTransfer};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn emulated_device() -> Arc<dyn Device> {
    emulated::open(1 << 30).expect("the machine has a C++ compiler")
}

/// Bytes that differ from place to place.
fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Layers,
    Pages,
    Heads,
}

#[derive(Debug, Clone)]
struct Case {
    shape: PageShape,
    order: Order,
    engine_tokens: u32,
    pages: u32,
    seed: u32,
    blocks: u32,
    /// Bytes by which pages in the store's layout are displaced from an aligned address.
    displacement: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    // Element sizes 1, 2 and 4 bytes, with head dimensions that do and do not fill 16-byte units.
    let element = prop_oneof![Just(1_u32), Just(2), Just(4)];
    let dimension = prop_oneof![Just(128_u32), Just(64), Just(16), Just(45), 1..40_u32];
    let heads = (1..4_u32, 1..3_u32);
    let layers = (1..4_u32, 1..4_u32, 1..3_u32);
    let shape = (1..20_u32, element, dimension, heads, layers).prop_map(
        |(tokens, element, dimension, (group_heads, head_groups), (layers, per_part, layer_tensors))| PageShape {
            tokens,
            layers,
            kv_heads: group_heads * head_groups,
            head_bytes: element * dimension,
            layer_tensors,
            layers_per_part: per_part.min(layers),
            head_groups,
        },
    );
    let order = prop_oneof![Just(Order::Layers), Just(Order::Pages), Just(Order::Heads)];
    let displacement = prop_oneof![3 => Just(0_usize), 1 => 0..16_usize];
    (shape, order, 1..24_u32, 1..4_u32, any::<u32>(), 1..6_u32, displacement).prop_map(
        |(shape, order, engine_tokens, pages, seed, blocks, displacement)| Case {
            shape,
            order,
            engine_tokens,
            pages,
            seed,
            blocks,
            displacement,
        },
    )
}

/// Length of the pool and starts of its tensors, in bytes.
fn pool_of(case: &Case, engine_pages: u32) -> (PoolLayout, usize, Vec<usize>) {
    let shape = &case.shape;
    let tensors = (shape.layers * shape.layer_tensors) as usize;
    let layout = match case.order {
        Order::Layers => PoolLayout::layer_first(shape, case.engine_tokens),
        Order::Pages => PoolLayout::page_first(shape, case.engine_tokens),
        Order::Heads => PoolLayout::head_first(shape, case.engine_tokens),
    };
    let page_tensor = (case.engine_tokens * shape.kv_heads * shape.head_bytes) as usize;
    let spacing = match case.order {
        Order::Pages => page_tensor,
        Order::Layers | Order::Heads => page_tensor * engine_pages as usize,
    };
    let bytes = page_tensor * tensors * engine_pages as usize;
    (layout, bytes, (0..tensors).map(|tensor| tensor * spacing).collect())
}

/// First token and engine pages of each page. The pages share no engine page.
fn placements(case: &Case) -> (Vec<(u32, Vec<u32>)>, u32) {
    let mut next = 0;
    let places = (0..case.pages).map(|page| {
        let first = (case.seed >> (4 * page)) % case.engine_tokens;
        let count = (first + case.shape.tokens).div_ceil(case.engine_tokens);
        next += count;
        // Backwards, so that the order of the table matters.
        (first, (next - count..next).rev().collect())
    });
    let places: Vec<_> = places.collect();
    (places, next)
}

fn crcs_of(page: &[u8], shape: &PageShape) -> Vec<u32> {
    let parts = (0..shape.part_count()).map(|part| shape.part_range(part));
    let parts = parts.map(|range| &page[range.start as usize..range.end as usize]);
    parts.flat_map(|part| part.chunks(CHUNK_BYTES as usize)).map(crc32fast::hash).collect()
}

struct Fixture {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    pool: Memory,
    store: Memory,
    locations: Vec<PageLocation>,
    tensors: Vec<Slice>,
    layout: PoolLayout,
    starts: Vec<usize>,
}

impl Fixture {
    fn new(device: Arc<dyn Device>, case: &Case) -> Result<Fixture, DeviceError> {
        let stream = device.stream("test")?;
        let (places, engine_pages) = placements(case);
        let (layout, bytes, starts) = pool_of(case, engine_pages);
        let pool = upload(&*device, &*stream, &pattern(bytes, case.seed), soon())?;
        let page_bytes = case.shape.page_bytes() as usize;
        let spacing = (page_bytes + case.displacement).next_multiple_of(16);
        let store = device.allocate(Place::Pinned, spacing * places.len() + case.displacement)?;
        let locations = places.into_iter().enumerate().map(|(page, (first_token, engine_pages))| {
            let start = page * spacing + case.displacement;
            let store = store.slice(start..start + page_bytes)?;
            Ok::<_, DeviceError>(PageLocation { store, engine_pages, first_token })
        });
        let locations = locations.collect::<Result<Vec<_>, _>>()?;
        let tensors = starts.iter().map(|&start| pool.slice(start..bytes)).collect::<Result<Vec<_>, _>>()?;
        Ok(Fixture { device, stream, pool, store, locations, tensors, layout, starts })
    }

    fn transfer(&self, shape: &PageShape) -> Result<PageTransfer, DeviceError> {
        let parts = 0..shape.part_count();
        PageTransfer::new(&*self.device, shape, &self.layout, &self.tensors, &self.locations, parts)
    }

    fn pool_bytes(&self) -> Result<Vec<u8>, DeviceError> {
        download(&*self.device, &*self.stream, &self.pool.all(), soon())
    }

    fn page_bytes(&self) -> Result<Vec<Vec<u8>>, DeviceError> {
        let read = |location: &PageLocation| {
            let mut bytes = vec![0; location.store.bytes()];
            location.store.read(&mut bytes).map(|()| bytes)
        };
        self.locations.iter().map(read).collect()
    }

    fn words(&self, memory: &Memory) -> Result<Vec<u32>, DeviceError> {
        download(&*self.device, &*self.stream, &memory.all(), soon())
    }
}

/// Checks a case with both kinds of kernels.
fn check_case(device: Arc<dyn Device>, case: &Case) -> Result<(), DeviceError> {
    check_kernels(Arc::clone(&device), case, false)?;
    check_kernels(device, case, true)
}

fn check_kernels(device: Arc<dyn Device>, case: &Case, bulk: bool) -> Result<(), DeviceError> {
    let shape = &case.shape;
    let fixture = Fixture::new(device, case)?;
    let transfer = fixture.transfer(shape)?.with_bulk(bulk);
    assert_eq!(transfer.uses_bulk(), bulk && transfer.unit_bytes() == 16);
    let crcs = fixture.device.allocate(Place::Device, transfer.crc_bytes())?;
    transfer.gather(&*fixture.stream, case.blocks, Some(&crcs.all()))?;
    fixture.stream.wait(soon())?;

    let pool = fixture.pool_bytes()?;
    let views: Vec<&[u8]> = fixture.starts.iter().map(|&start| &pool[start..]).collect();
    let mut expected_pages = Vec::new();
    for location in &fixture.locations {
        let mut page = vec![0; shape.page_bytes() as usize];
        gather_page(shape, &fixture.layout, &views, &location.engine_pages, location.first_token, &mut page);
        expected_pages.push(page);
    }
    let expected_crcs: Vec<u32> = expected_pages.iter().flat_map(|page| crcs_of(page, shape)).collect();
    assert_eq!(fixture.page_bytes()?, expected_pages);
    assert_eq!(fixture.words(&crcs)?, expected_crcs);

    // Scatter into an empty pool, and gather again.
    fixture.stream.fill(&fixture.pool.all(), 0)?;
    fixture.stream.fill(&crcs.all(), 0)?;
    transfer.scatter(&*fixture.stream, case.blocks, Some(&crcs.all()))?;
    let scattered = fixture.pool_bytes()?;
    assert_eq!(fixture.words(&crcs)?, expected_crcs);
    let mut expected_pool = vec![0; scattered.len()];
    for (location, page) in fixture.locations.iter().zip(&expected_pages) {
        for (tensor, &start) in fixture.starts.iter().enumerate() {
            // The reference takes all tensors at once; this one writes one tensor's rows at a time.
            scatter_tensor(shape, &fixture.layout, location, page, tensor, &mut expected_pool[start..]);
        }
    }
    assert_eq!(scattered, expected_pool);
    fixture.stream.fill(&fixture.store.all(), 0)?;
    transfer.gather(&*fixture.stream, case.blocks, None)?;
    fixture.stream.wait(soon())?;
    assert_eq!(fixture.page_bytes()?, expected_pages);
    Ok(())
}

/// Writes the rows of one tensor, by a reference scatter whose other tensors are scratch memory.
fn scatter_tensor(
    shape: &PageShape,
    layout: &PoolLayout,
    location: &PageLocation,
    page: &[u8],
    tensor: usize,
    target: &mut [u8],
) {
    let count = (shape.layers * shape.layer_tensors) as usize;
    let mut scratch: Vec<Vec<u8>> = (0..count).map(|_| vec![0; target.len()]).collect();
    scratch[tensor].copy_from_slice(target);
    let mut views: Vec<&mut [u8]> = scratch.iter_mut().map(Vec::as_mut_slice).collect();
    scatter_page(shape, layout, &mut views, &location.engine_pages, location.first_token, page);
    target.copy_from_slice(&scratch[tensor]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn gather_and_scatter_agree_with_the_reference(case in cases()) {
        check_case(emulated_device(), &case).unwrap();
    }

    #[test]
    fn crcs_agree_with_crc32fast(
        lengths in prop::collection::vec(prop_oneof![0..300_usize, 16_000..17_000_usize, 65_000..65_537_usize], 1..6),
        displacement in 0..17_usize,
        seed in any::<u32>(),
        blocks in 1..4_u32,
    ) {
        let device = emulated_device();
        let stream = device.stream("test").unwrap();
        let bytes = pattern(lengths.iter().sum::<usize>() + displacement + 1, seed);
        let memory = upload(&*device, &*stream, &bytes, soon()).unwrap();
        let mut end = displacement;
        let ranges = lengths.iter().map(|&length| { end += length; end - length..end });
        let ranges: Vec<_> = ranges.collect();
        let slices: Vec<Slice> = ranges.iter().map(|range| memory.slice(range.clone()).unwrap()).collect();
        let crcs = device.allocate(Place::Device, 4 * slices.len()).unwrap();
        CrcChunks::new(&*device, &slices).unwrap().compute(&*stream, blocks, &crcs.all()).unwrap();
        let found: Vec<u32> = download(&*device, &*stream, &crcs.all(), soon()).unwrap();
        let expected: Vec<u32> = ranges.into_iter().map(|range| crc32fast::hash(&bytes[range])).collect();
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn chunks_of_2_gib_are_refused() {
    let device = emulated::open(3 << 30).unwrap();
    // The system maps the memory when it is touched, and nothing touches it.
    let memory = device.allocate(Place::Device, 1 << 31).unwrap();
    assert!(matches!(CrcChunks::new(&*device, &[memory.all()]), Err(DeviceError::Shape(_))));
    assert!(CrcChunks::new(&*device, &[memory.slice(0..(1 << 31) - 1).unwrap()]).is_ok());
}

fn large_case() -> Case {
    let shape = PageShape {
        tokens: 64,
        layers: 3,
        kv_heads: 4,
        head_bytes: 256,
        layer_tensors: 2,
        layers_per_part: 2,
        head_groups: 2,
    };
    Case { shape, order: Order::Pages, engine_tokens: 16, pages: 2, seed: 7, blocks: 3, displacement: 0 }
}

#[test]
fn parts_of_several_chunks_move_by_16_byte_units() {
    let case = large_case();
    let transfer = Fixture::new(emulated_device(), &case).unwrap().transfer(&case.shape).unwrap();
    assert_eq!(transfer.unit_bytes(), 16);
    assert_eq!(transfer.chunk_lengths(), [CHUNK_BYTES; 6]);
    check_case(emulated_device(), &case).unwrap();
}

#[test]
fn a_cuda_device_agrees_with_the_reference_if_one_exists() {
    let device = match cuda::open(0) {
        Ok(device) => device,
        Err(error @ (DeviceError::NoDriver | DeviceError::NoDevice(_) | DeviceError::NoCudaCompiler)) => {
            assert!(cuda::devices().is_empty() || matches!(error, DeviceError::NoCudaCompiler));
            return println!("{error}");
        }
        Err(other) => panic!("{other}"),
    };
    println!("{:?}", device.info());
    for order in [Order::Layers, Order::Pages, Order::Heads] {
        check_case(Arc::clone(&device), &Case { order, ..large_case() }).unwrap();
        let shape = PageShape { tokens: 9, head_bytes: 90, ..large_case().shape };
        check_case(Arc::clone(&device), &Case { order, shape, displacement: 1, ..large_case() }).unwrap();
    }
}

#[test]
fn a_transfer_of_some_parts_leaves_the_others_alone() {
    let case = large_case();
    let fixture = Fixture::new(emulated_device(), &case).unwrap();
    let part = case.shape.part_range(1);
    let transfer =
        PageTransfer::new(&*fixture.device, &case.shape, &fixture.layout, &fixture.tensors, &fixture.locations, 1..2);
    fixture.stream.fill(&fixture.store.all(), 0xEE).unwrap();
    transfer.unwrap().gather(&*fixture.stream, 8, None).unwrap();
    fixture.stream.wait(soon()).unwrap();
    for page in fixture.page_bytes().unwrap() {
        let (before, rest) = page.split_at(part.start as usize);
        let (moved, after) = rest.split_at((part.end - part.start) as usize);
        assert!(before.iter().chain(after).all(|&byte| byte == 0xEE));
        assert!(moved.iter().any(|&byte| byte != 0xEE));
    }
}

#[test]
fn parts_move_one_by_one_with_their_crcs() {
    let case = Case { order: Order::Layers, ..large_case() };
    let shape = &case.shape;
    let fixture = Fixture::new(emulated_device(), &case).unwrap();
    let transfer = fixture.transfer(shape).unwrap();
    transfer.gather(&*fixture.stream, 3, None).unwrap();
    fixture.stream.wait(soon()).unwrap();
    let pages = fixture.page_bytes().unwrap();
    fixture.stream.fill(&fixture.pool.all(), 0).unwrap();
    for part in 0..shape.part_count() {
        let chunks = transfer.chunks_of(&(part..part + 1)).unwrap();
        let crcs = fixture.device.allocate(Place::Pinned, 4 * pages.len() * chunks.len()).unwrap();
        transfer.scatter_parts(&*fixture.stream, 2, part..part + 1, Some(&crcs.all())).unwrap();
        let of_page = |page: &Vec<u8>| crcs_of(page, shape)[chunks.clone()].to_vec();
        assert_eq!(fixture.words(&crcs).unwrap(), pages.iter().flat_map(of_page).collect::<Vec<u32>>(), "part {part}");
    }
    fixture.stream.fill(&fixture.store.all(), 0).unwrap();
    transfer.gather(&*fixture.stream, 3, None).unwrap();
    fixture.stream.wait(soon()).unwrap();
    assert!(fixture.page_bytes().unwrap() == pages);
    for parts in [0..5, 2..2] {
        assert!(transfer.scatter_parts(&*fixture.stream, 2, parts, None).is_err());
    }
}

#[test]
fn parts_of_other_layers_are_no_race() {
    let case = Case { order: Order::Layers, ..large_case() };
    let fixture = Fixture::new(emulated_device(), &case).unwrap();
    let transfer = fixture.transfer(&case.shape).unwrap();
    let compute = fixture.device.stream("compute").unwrap();
    // The parts of the last of three layers.
    transfer.scatter_parts(&*fixture.stream, 2, 2..4, None).unwrap();
    let first_bytes = |tensor: usize| fixture.pool.slice(fixture.starts[tensor]..fixture.starts[tensor] + 16).unwrap();
    compute.fill(&first_bytes(0), 0).unwrap();
    let error = compute.fill(&first_bytes(4), 0).unwrap_err();
    assert!(matches!(error, DeviceError::Race { .. }), "{error}");
    compute.wait(soon()).unwrap();
    fixture.stream.wait(soon()).unwrap();
}

#[test]
fn transfers_outside_the_pool_or_the_page_are_refused() {
    let case = large_case();
    let mut fixture = Fixture::new(emulated_device(), &case).unwrap();
    let new = |fixture: &Fixture, shape: &PageShape, parts| {
        let Fixture { device, layout, tensors, locations, .. } = fixture;
        PageTransfer::new(&**device, shape, layout, tensors, locations, parts).map(|_| ())
    };
    assert_eq!(new(&fixture, &case.shape, 0..4), Ok(()));
    assert!(new(&fixture, &case.shape, 0..5).is_err());
    assert!(new(&fixture, &case.shape, 2..2).is_err());
    assert!(new(&fixture, &PageShape { tokens: 63, ..case.shape }, 0..4).is_err());
    fixture.locations[1].engine_pages[2] = 9;
    assert!(new(&fixture, &case.shape, 0..4).is_err());
    fixture.locations[1].engine_pages[2] = u32::MAX;
    assert!(new(&fixture, &case.shape, 0..4).is_err());
    fixture.locations[1].engine_pages[2] = 7;
    fixture.locations[1].first_token = 1;
    assert!(new(&fixture, &case.shape, 0..4).is_err());
    fixture.locations.clear();
    assert!(new(&fixture, &case.shape, 0..4).is_err());
}

#[test]
fn two_streams_that_move_one_page_without_an_event_are_a_race() {
    let case = large_case();
    let fixture = Fixture::new(emulated_device(), &case).unwrap();
    let transfer = fixture.transfer(&case.shape).unwrap();
    let other = fixture.device.stream("compute").unwrap();
    transfer.scatter(&*fixture.stream, 2, None).unwrap();
    let error = other.fill(&fixture.pool.slice(0..16).unwrap(), 0).unwrap_err();
    assert!(matches!(error, DeviceError::Race { .. }), "{error}");
    other.wait_for(&*fixture.stream.record().unwrap()).unwrap();
    other.fill(&fixture.pool.slice(0..16).unwrap(), 0).unwrap();
    other.wait(soon()).unwrap();
}
