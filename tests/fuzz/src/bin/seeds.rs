//! Writes the seeds of the corpus: one encoded sample per message and block. Usage: `seeds DIR`.
//!
//! New seeds go to the end of their list: a test of `larder-wire` takes the committed files as a
//! record of the encodings of earlier builds.

use larder_format::disk::{RecordBody, RecordHeader, RecordPlace, SegmentHeader, Superblock};
use larder_format::footer::{Footer, RecordSummary};
use larder_format::{
    KvDtype, NamespaceDescriptor, NamespaceFields, NamespaceId, PageGeometry, PageId, PageKey, PageMeta,
};
use larder_fuzz::{LOG, SEGMENT_BYTES};
use larder_wire::{
    ArenaListenerInfo, ArenaPage, CommitOutcome, Delivery, Entry, ErrorCode, Explanation, Extent, FollowState, Frame,
    GrantedRange, HEADER_BYTES, Hint, MemberEntry, MissReason, PROTOCOL_VERSION, PagePin, PageRange, PartGrant,
    PartLocation, PayloadLocation, PinKind, PutEnd, RdmaEndpoint, Request, ReserveOutcome, Reserved, Response,
    TierCode,
};
use std::fs;
use std::path::Path;

fn descriptor() -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 8,
        kv_heads: 2,
        head_dim: 64,
        page_tokens: 16,
        layers_per_part: 4,
        head_groups: 1,
    };
    NamespaceDescriptor { model: "m".into(), weights: [1; 32], geometry, tenant: "t".into() }
}

fn meta() -> PageMeta {
    let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
    PageMeta::describe(id, PageKey::NONE, 3, vec![70_000, 5], &vec![9; 70_005])
}

fn requests() -> Vec<Frame> {
    let key = PageKey([4; 32]);
    let entry = Entry { request: 5, index: 6 };
    let reserved = Reserved { parent: key, position: 1, ttl_ms: 2, ..Reserved::first(key, vec![3, 4]) };
    let hello = |namespace| Request::Hello { version_min: 1, version_max: 2, name: "n".into(), namespace };
    let requests = [
        hello(None),
        hello(Some(descriptor())),
        Request::Locate(vec![key; 3]),
        Request::Get { keys: vec![key], by: Delivery::InPlace },
        Request::Lookup { keys: vec![key; 2], hold_ms: 7, load_l3: true },
        Request::Release(vec![entry; 2]),
        Request::Reserve(vec![reserved.clone(), Reserved { copy_of: Some(7), ..reserved.clone() }]),
        Request::Part { put: entry, part: 1, crcs: vec![8, 9], bytes: PartLocation::Rdma },
        Request::Commit(vec![entry]),
        Request::Abort(entry),
        Request::Follow(key),
        Request::Warm(vec![key]),
        Request::Forget(vec![key]),
        Request::Suspect(key),
        Request::Register { name: "a".into(), ttl_ms: 1, info: "{}".into() },
        Request::Withdraw("a".into()),
        Request::Members,
        Request::Status,
        Request::Cancel(3),
        Request::Compare { key, crcs: vec![1] },
        Request::Pin { keys: vec![key], kind: PinKind::Hard, ttl_ms: 9 },
        Request::GetRanges { ranges: vec![PageRange { key, bytes: 0..65_536 }; 2], by: Delivery::Rdma(vec![1, 2]) },
        Request::RdmaChannels { closed: vec![1], offered: vec![RdmaEndpoint { channel: 2, address: [3; 32] }; 2] },
        Request::GrantParts { reserve: 5, channels: vec![2, 3] },
        Request::Part {
            put: entry,
            part: 1,
            crcs: vec![8, 9],
            bytes: PartLocation::SharedMemory { offset: 1 << 32, bytes: 70_000 },
        },
        Request::Pins(vec![key; 2]),
        Request::Ping,
        Request::RdmaProgress { entry, part: Some(1), bytes: 70_000 },
        Request::Hint { keys: vec![key; 2], generated: Some(300), hint: Hint::Retain, retain_ms: 60_000 },
        Request::Explain(vec![key; 2]),
        Request::Reserve(vec![Reserved { token_ids: vec![5, 70_000], ..reserved.clone() }, reserved]),
        Request::Extents(vec![key; 2]),
    ];
    requests.iter().map(|request| request.frame(PROTOCOL_VERSION, 1, 2, None)).collect()
}

fn responses() -> Vec<Frame> {
    let arena_listener = Some(ArenaListenerInfo { machine: "m".into(), name: "d".into() });
    let range = GrantedRange { channel: 1, address: 1 << 40, len: 70_005, key: 7 };
    let responses = [
        Response::Hello {
            version: 1,
            node_id: "n".into(),
            epoch: 2,
            namespace: Some(NamespaceId([3; 32])),
            arena_listener,
        },
        Response::Located(vec![TierCode::L2, TierCode::Absent]),
        Response::LookedUp { tiers: vec![TierCode::L3], held: 0, l3_expected_us: 9 },
        Response::Page { index: 1, tier: TierCode::L3, meta: meta(), location: PayloadLocation::Arena(4096) },
        Response::Miss { index: 2 },
        Response::End,
        Response::Part { part: 1, crcs: vec![2, 3] },
        Response::FollowEnd { state: FollowState::Sealed, meta: Some(meta()) },
        Response::Reserved { outcomes: vec![ReserveOutcome::Granted], retry_after_ms: 0 },
        Response::Reserved { outcomes: vec![ReserveOutcome::Busy], retry_after_ms: 5 },
        Response::Committed(vec![PutEnd { outcome: CommitOutcome::Stored, generation: 7 }]),
        Response::Count(1),
        Response::Members(vec![MemberEntry { name: "a".into(), info: "{}".into() }]),
        Response::Status("{}".into()),
        Response::Error { code: ErrorCode::Busy, message: "b".into() },
        Response::Range {
            index: 1,
            tier: TierCode::L2,
            meta: meta(),
            bytes: 65_536..70_000,
            location: PayloadLocation::Inline,
        },
        Response::Page { index: 1, tier: TierCode::L2, meta: meta(), location: PayloadLocation::Rdma(range) },
        Response::RdmaChannels(vec![RdmaEndpoint { channel: 2, address: [3; 32] }; 2]),
        Response::PartGrants(vec![PartGrant { index: 1, part: 2, range }; 2]),
        Response::Busy { index: Some(1), retry_after_ms: 2 },
        Response::Busy { index: None, retry_after_ms: 3 },
        Response::ArenaPages(vec![
            ArenaPage {
                index: 1,
                tier: TierCode::L2,
                meta: meta(),
                bytes: 0..70_005,
                offset: 1 << 20
            };
            2
        ]),
        Response::Pins(vec![None, Some(PagePin { kind: PinKind::Hard, remaining_ms: 9 })]),
        Response::Pong,
        Response::Explained(vec![
            Explanation { reason: MissReason::Evicted, at_unix_ms: 1 << 40, differing: NamespaceFields::default() },
            Explanation {
                reason: MissReason::OtherNamespace,
                at_unix_ms: 0,
                differing: NamespaceFields::WEIGHTS | NamespaceFields::TENANT,
            },
        ]),
        Response::Extents { files: 1, extents: vec![None, Some(Extent { file: 0, offset: 1 << 20, meta: meta() })] },
    ];
    responses.iter().map(|response| response.frame(PROTOCOL_VERSION, 1, None)).collect()
}

fn write(dir: &Path, target: &str, inputs: Vec<Vec<u8>>) -> std::io::Result<()> {
    let dir = dir.join(target);
    fs::create_dir_all(&dir)?;
    inputs.iter().enumerate().try_for_each(|(number, input)| fs::write(dir.join(format!("seed-{number:02}")), input))
}

fn message(frame: &Frame) -> Vec<u8> {
    [&frame.head[4..5], &frame.head[HEADER_BYTES..]].concat()
}

/// Input of the target `blocks`: the number of the block type, then the fields after the version.
fn fields(choice: u8, block: &[u8]) -> Vec<u8> {
    let end = block.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1).max(12);
    [&[choice], &block[12..end]].concat()
}

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).expect("a folder");
    let dir = Path::new(&dir);
    write(dir, "requests", requests().iter().map(message).collect())?;
    write(dir, "responses", responses().iter().map(message).collect())?;
    let numbered = |(mut frame, number): (Frame, u32)| {
        frame.number(number);
        frame.head
    };
    let stream = |frames: Vec<Frame>| frames.into_iter().take(6).zip(0..).flat_map(numbered).collect::<Vec<u8>>();
    let frames = [0x80, 3].map(|mode| [vec![mode], stream(requests())].concat());
    write(dir, "frames", frames.to_vec())?;

    let place = RecordPlace { segment: 1, epoch: 2, offset: 4096 };
    let record =
        |offset, number, body| RecordHeader { place: RecordPlace { offset, ..place }, number, durable: offset, body };
    let page = record(4096, 3, RecordBody::Page(meta()));
    let tombstone = record(4096 + page.record_bytes() as u64, 4, RecordBody::Tombstone(meta().id));
    let records =
        [&page, &tombstone].map(|record| RecordSummary::of(record).expect("pages and tombstones have a summary"));
    let footer = Footer { segment: 1, epoch: 2, records: records.to_vec() };
    let table = footer.encode(&LOG);
    let first = RecordHeader { place, ..tombstone.clone() };
    let void = RecordHeader { place, number: 5, durable: 0, body: RecordBody::Void { bytes: 8192 } };
    let blocks = vec![
        fields(0, &Superblock { log_id: LOG, segment_bytes: SEGMENT_BYTES }.encode()),
        fields(1, &SegmentHeader { log_id: LOG, segment: 1, epoch: 2 }.encode()),
        fields(2, &page.encode(&LOG)),
        fields(2, &first.encode(&LOG)),
        fields(2, &void.encode(&LOG)),
        fields(3, &table[table.len() - 4096..]),
    ];
    let described = PageMeta { token_ids: vec![5, 70_000], ..meta() };
    let described = fields(2, &record(4096, 3, RecordBody::Page(described)).encode(&LOG));
    write(dir, "blocks", [&blocks[..], &[described]].concat())?;
    let chunks = blocks.iter().map(|block| block.iter().copied().chain(std::iter::repeat(0)).take(160));
    write(dir, "segments", vec![chunks.flatten().collect()])?;
    // The table precedes the last block and is padded with zeros.
    let bytes = table[..table.len() - 4096].iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 8);
    write(dir, "tables", vec![[&[2u8], &table[..bytes]].concat(), [&[2u8], &table[..bytes - 4]].concat()])?;
    let mut namespace = Vec::new();
    descriptor().encode(&mut namespace);
    write(dir, "namespaces", vec![namespace])
}
