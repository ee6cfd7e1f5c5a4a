use super::*;
use crate::{Entry, Hint, MessageInfo, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, VERSION_COPIES, VERSION_TOKEN_IDS};
use larder_format::{PageKey, chunk_crcs};
use proptest::prelude::*;

const KEY: PageKey = PageKey([1; 32]);
const ENTRY: Entry = Entry { request: 3, index: 1 };

fn reserved(parts: usize) -> Reserved {
    Reserved { position: 7, ttl_ms: 1, ..Reserved::first(KEY, vec![1; parts]) }
}

fn part(crcs: Vec<u32>, bytes: PartLocation) -> Request {
    Request::Part { put: ENTRY, part: 2, crcs, bytes }
}

fn samples() -> Vec<Request> {
    let crcs: Vec<u32> = chunk_crcs(b"abc").collect();
    vec![
        Request::Hello { version_min: 1, version_max: 2, name: "x".into(), namespace: None },
        Request::Locate(vec![KEY; 3]),
        Request::Get { keys: vec![], by: Delivery::Inline },
        Request::Get { keys: vec![], by: Delivery::InPlace },
        Request::GetRanges { ranges: vec![PageRange { key: KEY, bytes: 3..9 }; 2], by: Delivery::Rdma(vec![3, 1]) },
        Request::Lookup { keys: vec![KEY], hold_ms: 5, load_l3: true },
        Request::Lookup { keys: vec![KEY], hold_ms: 5, load_l3: false },
        Request::Release(vec![ENTRY; 2]),
        Request::Reserve(vec![reserved(2)]),
        Request::Reserve(vec![reserved(1), Reserved { copy_of: Some(1 << 40), ..reserved(2) }]),
        Request::Reserve(vec![Reserved { token_ids: vec![0, 7, u32::MAX], ..reserved(1) }, reserved(1)]),
        part(crcs.clone(), PartLocation::Inline),
        part(crcs.clone(), PartLocation::Rdma),
        part(crcs, PartLocation::SharedMemory { offset: 1 << 40, bytes: 7 }),
        Request::Commit(vec![ENTRY; 3]),
        Request::Abort(ENTRY),
        Request::Follow(PageKey([4; 32])),
        Request::Warm(vec![KEY]),
        Request::Forget(vec![KEY]),
        Request::Suspect(KEY),
        Request::Register { name: "e".into(), ttl_ms: 1000, info: "{}".into() },
        Request::Withdraw("e".into()),
        Request::Members,
        Request::Status,
        Request::Ping,
        Request::Cancel(9),
        Request::Compare { key: KEY, crcs: vec![1, 2] },
        Request::Pin { keys: vec![KEY], kind: PinKind::Soft, ttl_ms: 5 },
        Request::Pins(vec![KEY; 2]),
        Request::RdmaChannels { closed: vec![1], offered: vec![RdmaEndpoint { channel: 2, address: [7; 32] }] },
        Request::GrantParts { reserve: 3, channels: vec![1, 2] },
        Request::RdmaProgress { entry: ENTRY, part: Some(2), bytes: 7 },
        Request::RdmaProgress { entry: ENTRY, part: None, bytes: 7 },
        Request::Hint { keys: vec![KEY; 2], generated: Some(300), hint: Hint::None, retain_ms: 0 },
        Request::Hint { keys: vec![KEY], generated: None, hint: Hint::Retain, retain_ms: 60_000 },
        Request::Explain(vec![KEY; 2]),
        Request::Extents(vec![KEY; 2]),
    ]
}

#[test]
fn requests_round_trip_in_every_version_that_has_them() {
    for message in samples() {
        let kind = message.kind();
        for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION {
            let body = message.encode(version);
            let decoded = Request::decode(version, kind as u8, &body);
            assert_eq!(decoded.is_ok(), version >= kind.since_version(), "{message:?} in version {version}");
        }
        let body = message.encode(PROTOCOL_VERSION);
        assert_eq!(Request::decode(PROTOCOL_VERSION, kind as u8, &body).unwrap(), message);
        let longer = [body.as_slice(), &[0]].concat();
        assert!(Request::decode(PROTOCOL_VERSION, kind as u8, &longer).is_err(), "{message:?} with an extra byte");
    }
}

#[test]
fn every_kind_has_a_sample() {
    for row in REQUESTS {
        assert!(samples().iter().any(|message| message.kind() as u8 == row.kind), "{} has no sample", row.name);
    }
}

/// The message that holds `count` items in the list, or bytes in the text, that a limit applies to.
fn with_length(row: &MessageInfo, limit: &str, count: usize) -> Request {
    let keys = vec![KEY; count];
    let text = "x".repeat(count);
    let by = Delivery::Rdma(vec![0; count]);
    match (row.name, limit) {
        ("Hello", "name") => Request::Hello { version_min: 1, version_max: 2, name: text, namespace: None },
        ("Locate", "keys") => Request::Locate(keys),
        ("Get", "keys") => Request::Get { keys, by: Delivery::Inline },
        ("Get", "channels") => Request::Get { keys: vec![], by },
        ("GetRanges", "ranges") => {
            Request::GetRanges { ranges: vec![PageRange { key: KEY, bytes: 0..1 }; count], by: Delivery::Inline }
        }
        ("GetRanges", "channels") => Request::GetRanges { ranges: vec![], by },
        ("Lookup", "keys") => Request::Lookup { keys, hold_ms: 0, load_l3: true },
        ("Release", "entries") => Request::Release(vec![ENTRY; count]),
        ("Reserve", "pages") => Request::Reserve(vec![reserved(1); count]),
        ("Reserve", "parts") => Request::Reserve(vec![reserved(count)]),
        ("Reserve", "tokens") => Request::Reserve(vec![Reserved { token_ids: vec![1; count], ..reserved(1) }]),
        ("Part", "crcs") => part(vec![0; count], PartLocation::Inline),
        ("Commit", "puts") => Request::Commit(vec![ENTRY; count]),
        ("Warm", "keys") => Request::Warm(keys),
        ("Forget", "keys") => Request::Forget(keys),
        ("Register", "name") => Request::Register { name: text, ttl_ms: 0, info: String::new() },
        ("Register", "info") => Request::Register { name: String::new(), ttl_ms: 0, info: text },
        ("Withdraw", "name") => Request::Withdraw(text),
        ("Compare", "crcs") => Request::Compare { key: KEY, crcs: vec![0; count] },
        ("Pin", "keys") => Request::Pin { keys, kind: PinKind::Soft, ttl_ms: 1 },
        ("Pins", "keys") => Request::Pins(keys),
        ("Explain", "keys") => Request::Explain(keys),
        ("Extents", "keys") => Request::Extents(keys),
        ("Hint", "keys") => Request::Hint { keys, generated: None, hint: Hint::Demote, retain_ms: 0 },
        ("RdmaChannels", "closed") => Request::RdmaChannels { closed: vec![0; count], offered: vec![] },
        ("RdmaChannels", "offered") => Request::RdmaChannels {
            closed: vec![],
            offered: vec![RdmaEndpoint { channel: 0, address: [0; 32] }; count],
        },
        ("GrantParts", "channels") => Request::GrantParts { reserve: 0, channels: vec![0; count] },
        (name, limit) => panic!("no message to test the limit of {limit} in {name}"),
    }
}

#[test]
fn decoder_enforces_the_limits_of_the_table() {
    for row in REQUESTS {
        for &(limit, max) in row.limits {
            let decode = |count| {
                let body = with_length(row, limit, count).encode(PROTOCOL_VERSION);
                Request::decode(PROTOCOL_VERSION, row.kind, &body)
            };
            assert!(decode(max).is_ok(), "{}: {max} {limit}", row.name);
            assert!(decode(max + 1).is_err(), "{}: {} {limit}", row.name, max + 1);
        }
    }
}

proptest! {
    #[test]
    fn decoder_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Request::decode(PROTOCOL_VERSION, kind, &body);
    }

    #[test]
    fn reserved_pages_keep_their_copy_conditions(
        conditions in prop::collection::vec(any::<Option<u64>>(), 0..5),
        version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION,
    ) {
        let pages: Vec<Reserved> = conditions.iter().map(|&copy_of| Reserved { copy_of, ..reserved(2) }).collect();
        let body = Request::Reserve(pages.clone()).encode(version);
        let decoded = Request::decode(version, RequestKind::Reserve as u8, &body);
        let known = |page: Reserved| Reserved { copy_of: page.copy_of.filter(|_| version >= VERSION_COPIES), ..page };
        prop_assert_eq!(decoded, Ok(Request::Reserve(pages.into_iter().map(known).collect())));
    }

    #[test]
    fn reserved_pages_keep_their_token_ids_from_version_9_on(
        lists in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..=MAX_TOKEN_IDS), 0..4),
        version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION,
    ) {
        let pages: Vec<Reserved> = lists.into_iter().map(|token_ids| Reserved { token_ids, ..reserved(2) }).collect();
        let body = Request::Reserve(pages.clone()).encode(version);
        let decoded = Request::decode(version, RequestKind::Reserve as u8, &body);
        let known = |page: Reserved| match version {
            VERSION_TOKEN_IDS.. => page,
            _ => Reserved { token_ids: Vec::new(), ..page },
        };
        prop_assert_eq!(decoded, Ok(Request::Reserve(pages.into_iter().map(known).collect())));
    }

    #[test]
    fn reserve_that_ends_inside_its_token_ids_is_refused(ids in 1..=MAX_TOKEN_IDS, cut in 1usize..4) {
        let page = Reserved { token_ids: vec![1; ids], ..reserved(1) };
        let body = Request::Reserve(vec![page]).encode(PROTOCOL_VERSION);
        let decoded = Request::decode(PROTOCOL_VERSION, RequestKind::Reserve as u8, &body[..body.len() - cut]);
        prop_assert!(decoded.is_err());
    }
}
