use super::*;
use crate::{MessageInfo, MissReason, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, PinKind, RESPONSES};
use larder_format::{NamespaceFields, PageId, PageKey};
use proptest::prelude::*;
use std::ops::Range;

const RANGE: GrantedRange = GrantedRange { channel: 1, address: 1 << 40, len: 5, key: 9 };
const GRANT: PartGrant = PartGrant { index: 1, part: 2, range: RANGE };
const ENDPOINT: RdmaEndpoint = RdmaEndpoint { channel: 2, address: [7; 32] };

fn meta() -> PageMeta {
    let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
    PageMeta::describe(id, PageKey::NONE, 1, vec![3, 2], b"abcde")
}

fn hello(node_id: String, machine: String, name: String) -> Response {
    let arena_listener = Some(ArenaListenerInfo { machine, name });
    Response::Hello { version: 1, node_id, epoch: 3, namespace: Some(NamespaceId([5; 32])), arena_listener }
}

fn arena_page(index: u32, bytes: Range<u32>) -> ArenaPage {
    ArenaPage { index, tier: TierCode::L2, meta: meta(), bytes, offset: 1 << 40 }
}

fn put_end(outcome: CommitOutcome, generation: u64) -> PutEnd {
    PutEnd { outcome, generation }
}

fn explanation(reason: MissReason, differing: NamespaceFields) -> Explanation {
    Explanation { reason, at_unix_ms: 9, differing }
}

fn extent(file: u32) -> Option<Extent> {
    Some(Extent { file, offset: 1 << 40, meta: meta() })
}

fn samples() -> Vec<Response> {
    vec![
        hello("n".into(), "m".into(), "d".into()),
        Response::Located(vec![TierCode::L2, TierCode::Absent, TierCode::L3]),
        Response::Page { index: 1, tier: TierCode::L3, meta: meta(), location: PayloadLocation::Inline },
        Response::Page { index: 1, tier: TierCode::L2, meta: meta(), location: PayloadLocation::Arena(4096) },
        Response::Range {
            index: 1,
            tier: TierCode::L2,
            meta: meta(),
            bytes: 0..3,
            location: PayloadLocation::Rdma(RANGE),
        },
        Response::ArenaPages(vec![arena_page(1, 0..3), arena_page(0, 1..2)]),
        Response::RdmaChannels(vec![ENDPOINT]),
        Response::PartGrants(vec![GRANT]),
        Response::LookedUp { tiers: vec![TierCode::L2, TierCode::L3], held: 1, l3_expected_us: 500 },
        Response::Miss { index: 2 },
        Response::End,
        Response::Part { part: 1, crcs: vec![7] },
        Response::FollowEnd { state: FollowState::Sealed, meta: Some(meta()) },
        Response::Reserved { outcomes: vec![ReserveOutcome::Granted, ReserveOutcome::Busy], retry_after_ms: 7 },
        Response::Reserved { outcomes: vec![ReserveOutcome::Exists], retry_after_ms: 0 },
        Response::Busy { index: Some(3), retry_after_ms: 1 },
        Response::Busy { index: None, retry_after_ms: 1000 },
        Response::Committed(vec![put_end(CommitOutcome::Refused, 0), put_end(CommitOutcome::Stored, 1 << 40)]),
        Response::Count(5),
        Response::Pong,
        Response::Members(vec![MemberEntry { name: "a".into(), info: "{}".into() }]),
        Response::Status("{}".into()),
        Response::Pins(vec![None, Some(PagePin { kind: PinKind::Hard, remaining_ms: 7 })]),
        Response::Explained(vec![
            explanation(MissReason::Evicted, NamespaceFields::default()),
            explanation(MissReason::OtherNamespace, NamespaceFields::DTYPE | NamespaceFields::TENANT),
        ]),
        Response::Extents { files: 2, extents: vec![None, extent(1), extent(0)] },
        Response::Error { code: ErrorCode::Busy, message: "later".into() },
    ]
}

#[test]
fn responses_round_trip_in_every_version_that_has_them() {
    for message in samples() {
        let kind = message.kind();
        for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION {
            let decoded = Response::decode(version, kind as u8, &message.encode(version));
            assert_eq!(decoded.is_ok(), version >= kind.since_version(), "{message:?} in version {version}");
        }
        let body = message.encode(PROTOCOL_VERSION);
        assert_eq!(Response::decode(PROTOCOL_VERSION, kind as u8, &body).unwrap(), message);
        let longer = [body.as_slice(), &[0]].concat();
        assert!(Response::decode(PROTOCOL_VERSION, kind as u8, &longer).is_err(), "{message:?} with an extra byte");
    }
}

#[test]
fn every_kind_has_a_sample() {
    for row in RESPONSES {
        assert!(samples().iter().any(|message| message.kind() as u8 == row.kind), "{} has no sample", row.name);
    }
}

fn with_length(row: &MessageInfo, limit: &str, count: usize) -> Response {
    let text = "x".repeat(count);
    let none = String::new;
    let members = |count, member: MemberEntry| Response::Members(vec![member; count]);
    match (row.name, limit) {
        ("Hello", "node") => hello(text, none(), none()),
        ("Hello", "machine") => hello(none(), text, none()),
        ("Hello", "socket") => hello(none(), none(), text),
        ("Located", "tiers") => Response::Located(vec![TierCode::L2; count]),
        ("LookedUp", "tiers") => Response::LookedUp { tiers: vec![TierCode::L2; count], held: 0, l3_expected_us: 0 },
        ("Part", "crcs") => Response::Part { part: 0, crcs: vec![0; count] },
        ("Reserved", "outcomes") => {
            Response::Reserved { outcomes: vec![ReserveOutcome::Granted; count], retry_after_ms: 0 }
        }
        ("ReservedBusy", "outcomes") => {
            Response::Reserved { outcomes: vec![ReserveOutcome::Busy; count], retry_after_ms: 1 }
        }
        ("Committed", "outcomes") => Response::Committed(vec![put_end(CommitOutcome::Stored, 1); count]),
        ("Members", "members") => members(count, MemberEntry { name: none(), info: none() }),
        ("Members", "name") => members(1, MemberEntry { name: text, info: none() }),
        ("Members", "info") => members(1, MemberEntry { name: none(), info: text }),
        ("Status", "json") => Response::Status(text),
        ("Error", "message") => Response::Error { code: ErrorCode::Busy, message: text },
        ("RdmaChannels", "accepted") => Response::RdmaChannels(vec![ENDPOINT; count]),
        ("PartGrants", "grants") => Response::PartGrants(vec![GRANT; count]),
        ("Extents", "extents") => Response::Extents { files: 1, extents: vec![extent(0); count] },
        ("ArenaPages", "pages") => Response::ArenaPages(vec![arena_page(0, 0..1); count]),
        ("Pins", "pins") => Response::Pins(vec![None; count]),
        ("Explained", "explanations") => {
            Response::Explained(vec![explanation(MissReason::Evicted, NamespaceFields::default()); count])
        }
        (name, limit) => panic!("no message to test the limit of {limit} in {name}"),
    }
}

#[test]
fn decoder_enforces_the_limits_of_the_table() {
    for row in RESPONSES {
        for &(limit, max) in row.limits {
            let decode = |count| {
                let body = with_length(row, limit, count).encode(PROTOCOL_VERSION);
                Response::decode(PROTOCOL_VERSION, row.kind, &body)
            };
            assert!(decode(max).is_ok(), "{}: {max} {limit}", row.name);
            assert!(decode(max + 1).is_err(), "{}: {} {limit}", row.name, max + 1);
        }
    }
}

#[test]
fn page_without_a_pin_has_one_encoding() {
    // One page: kind "none", one millisecond left.
    let body = [&1u32.to_le_bytes()[..], &[0], &1u64.to_le_bytes()].concat();
    assert!(Response::decode(PROTOCOL_VERSION, ResponseKind::Pins as u8, &body).is_err());
}

#[test]
fn only_another_namespace_differs_in_fields() {
    for (reason, differing) in
        [(MissReason::Evicted, NamespaceFields::WEIGHTS), (MissReason::OtherNamespace, NamespaceFields::default())]
    {
        let body = Response::Explained(vec![explanation(reason, differing)]).encode(PROTOCOL_VERSION);
        assert!(Response::decode(PROTOCOL_VERSION, ResponseKind::Explained as u8, &body).is_err(), "{reason:?}");
    }
}

#[test]
fn retired_namespace_is_a_malformed_put_to_older_clients() {
    let refused = Response::Reserved { outcomes: vec![ReserveOutcome::Retired], retry_after_ms: 0 };
    for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION {
        let body = refused.encode(version);
        let decoded = Response::decode(version, ResponseKind::Reserved as u8, &body).unwrap();
        let outcome = if version < VERSION_EXPLAIN { ReserveOutcome::Malformed } else { ReserveOutcome::Retired };
        assert_eq!(decoded, Response::Reserved { outcomes: vec![outcome], retry_after_ms: 0 });
        // The code itself, of a node that ignores the version.
        let newest = refused.encode(PROTOCOL_VERSION);
        let is_known = Response::decode(version, ResponseKind::Reserved as u8, &newest).is_ok();
        assert_eq!(is_known, version >= VERSION_EXPLAIN, "one encoding per message");
    }
}

#[test]
fn only_stored_bytes_have_a_generation() {
    let with_generation = Response::Committed(vec![put_end(CommitOutcome::Refused, 7)]).encode(PROTOCOL_VERSION);
    assert!(Response::decode(PROTOCOL_VERSION, ResponseKind::Committed as u8, &with_generation).is_err());
}

proptest! {
    #[test]
    fn decoder_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Response::decode(PROTOCOL_VERSION, kind, &body);
    }

    #[test]
    fn put_ends_keep_their_generations(
        generations in prop::collection::vec(any::<u64>(), 0..5),
        version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION,
    ) {
        let stored = |&generation| put_end(CommitOutcome::Stored, generation);
        let ends: Vec<PutEnd> = generations.iter().map(stored).collect();
        let body = Response::Committed(ends.clone()).encode(version);
        let decoded = Response::decode(version, ResponseKind::Committed as u8, &body);
        let known = |end: PutEnd| if version >= VERSION_COPIES { end } else { put_end(end.outcome, 0) };
        prop_assert_eq!(decoded, Ok(Response::Committed(ends.into_iter().map(known).collect())));
    }
}

#[test]
fn extent_names_a_file_that_the_answer_has() {
    let decode = |files, file| {
        let body = Response::Extents { files, extents: vec![extent(file)] }.encode(PROTOCOL_VERSION);
        Response::decode(PROTOCOL_VERSION, ResponseKind::Extents as u8, &body)
    };
    let most = MAX_EXTENT_FILES as u32;
    assert!(decode(1, 0).is_ok() && decode(most, most - 1).is_ok());
    assert!(decode(1, 1).is_err() && decode(0, 0).is_err() && decode(most + 1, 0).is_err());
}
