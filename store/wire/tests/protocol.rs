//! The protocol that other builds rely on: kind numbers, versions, encodings, and
//! `docs/protocol.md`.

use larder_wire::{
    HEADER_BYTES, MessageInfo, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, REQUESTS, RESPONSES, Request, Response,
};
use std::path::Path;

/// Kind, name, first version, sheddable. Deployed builds depend on these: a row may be added, never
/// changed.
const PINNED_REQUESTS: [(u8, &str, u16, bool); 29] = [
    (1, "Hello", 1, false),
    (2, "Locate", 1, true),
    (3, "Get", 1, true),
    (4, "Reserve", 1, true),
    (5, "Part", 1, false),
    (6, "Commit", 1, false),
    (7, "Abort", 1, false),
    (8, "Follow", 1, true),
    (9, "Warm", 1, true),
    (10, "Forget", 1, false),
    (11, "Suspect", 1, false),
    (12, "Register", 1, false),
    (13, "Withdraw", 1, false),
    (14, "Members", 1, false),
    (15, "Status", 1, false),
    (16, "Cancel", 1, false),
    (17, "Compare", 1, true),
    (18, "Pin", 1, true),
    (19, "Lookup", 1, true),
    (20, "Release", 1, false),
    (21, "RdmaChannels", 2, false),
    (22, "GrantParts", 2, false),
    (24, "GetRanges", 2, true),
    (25, "Pins", 3, true),
    (26, "Ping", 5, false),
    (27, "RdmaProgress", 6, false),
    (28, "Hint", 7, true),
    (29, "Explain", 8, true),
    (30, "Extents", 10, true),
];

const PINNED_RESPONSES: [(u8, &str, u16); 24] = [
    (128, "Hello", 1),
    (129, "Located", 1),
    (130, "Page", 1),
    (131, "Miss", 1),
    (132, "End", 1),
    (133, "Part", 1),
    (134, "FollowEnd", 1),
    (135, "Reserved", 1),
    (136, "Committed", 1),
    (137, "Count", 1),
    (138, "Members", 1),
    (139, "Status", 1),
    (140, "Error", 1),
    (141, "LookedUp", 1),
    (142, "RdmaChannels", 2),
    (143, "PartGrants", 2),
    (145, "Range", 2),
    (146, "Busy", 2),
    (147, "ReservedBusy", 2),
    (148, "ArenaPages", 2),
    (149, "Pins", 3),
    (150, "Pong", 5),
    (151, "Explained", 8),
    (152, "Extents", 10),
];

#[test]
fn kinds_and_versions_never_change() {
    let requests: Vec<_> = REQUESTS.iter().map(|row| (row.kind, row.name, row.since, row.sheddable)).collect();
    assert_eq!(requests, PINNED_REQUESTS);
    let responses: Vec<_> = RESPONSES.iter().map(|row| (row.kind, row.name, row.since)).collect();
    assert_eq!(responses, PINNED_RESPONSES);
    for kind in 0..=u8::MAX {
        let sheddable = REQUESTS.iter().any(|row| row.kind == kind && row.sheddable);
        assert_eq!(Request::is_sheddable(kind), sheddable, "kind {kind}");
    }
}

#[test]
fn a_version_refuses_the_kinds_that_it_lacks() {
    // An empty body tells unknown kinds from known ones: those fail in a field, or decode.
    let unknown_request = |version, kind| Request::decode(version, kind, &[]).is_err_and(|e| is_unknown_kind(&e));
    let unknown_response = |version, kind| Response::decode(version, kind, &[]).is_err_and(|e| is_unknown_kind(&e));
    for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION {
        let has = |table: &[MessageInfo], kind| table.iter().any(|row| row.kind == kind && row.since <= version);
        for kind in 0..=u8::MAX {
            assert_eq!(unknown_request(version, kind), !has(REQUESTS, kind), "request {kind} in version {version}");
            assert_eq!(unknown_response(version, kind), !has(RESPONSES, kind), "response {kind} in version {version}");
        }
    }
}

fn is_unknown_kind(error: &impl ToString) -> bool {
    error.to_string().contains("kind in this protocol version")
}

/// Messages of the fuzz corpus: bytes that earlier builds wrote.
#[expect(clippy::disallowed_methods, reason = "the corpus is test data, and no simulation runs this test")]
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn recorded_messages_keep_their_encoding() {
    let mut kinds = Vec::new();
    for recorded in corpus("requests") {
        let message = Request::decode(PROTOCOL_VERSION, recorded[0], &recorded[1..]).unwrap();
        let frame = message.frame(PROTOCOL_VERSION, 1, 2, None);
        assert_eq!([&frame.head[4..5], &frame.head[HEADER_BYTES..]].concat(), recorded, "{message:?}");
        kinds.push(recorded[0]);
    }
    for recorded in corpus("responses") {
        let message = Response::decode(PROTOCOL_VERSION, recorded[0], &recorded[1..]).unwrap();
        let frame = message.frame(PROTOCOL_VERSION, 1, None);
        assert_eq!([&frame.head[4..5], &frame.head[HEADER_BYTES..]].concat(), recorded, "{message:?}");
        kinds.push(recorded[0]);
    }
    for row in REQUESTS.iter().chain(RESPONSES) {
        assert!(kinds.contains(&row.kind), "the fuzz corpus has no message of kind {} ({})", row.kind, row.name);
    }
}

/// Rows of the table under a heading of `docs/protocol.md`, as trimmed cells, without its two
/// header lines.
fn table_under(heading: &str) -> Vec<Vec<String>> {
    let document = include_str!("../../../docs/protocol.md");
    let section = document.split("\n## ").find(|section| section.lines().next() == Some(heading));
    let section = section.unwrap_or_else(|| panic!("docs/protocol.md has no section \"{heading}\""));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect();
    section.lines().filter(|line| line.starts_with('|')).skip(2).map(cells).collect()
}

/// The cells of a message's row that follow from its declaration.
fn expected_cells(row: &MessageInfo, has_sheddable: bool) -> Vec<String> {
    let limits: Vec<String> = row.limits.iter().map(|(name, max)| format!("{name} {max}")).collect();
    let or_dash = |text: String| if text.is_empty() { "–".to_string() } else { text };
    let mut cells = vec![row.kind.to_string(), row.since.to_string(), row.name.to_string()];
    if has_sheddable {
        cells.push(if row.sheddable { "yes" } else { "no" }.to_string());
    }
    cells.push(or_dash(limits.join(", ")));
    cells
}

fn compare_with_document(heading: &str, table: &[MessageInfo], has_sheddable: bool) {
    let documented = table_under(heading);
    for row in table {
        let expected = expected_cells(row, has_sheddable);
        let found = documented.iter().find(|cells| cells[0] == expected[0]);
        let found = found.unwrap_or_else(|| panic!("docs/protocol.md, {heading}: kind {} is missing", row.kind));
        assert_eq!(found[..expected.len()], expected, "docs/protocol.md, {heading}: row of kind {}", row.kind);
    }
    let found: Vec<String> = documented.iter().map(|cells| cells[0].clone()).collect();
    let declared: Vec<String> = table.iter().map(|row| row.kind.to_string()).collect();
    assert_eq!(found, declared, "docs/protocol.md, {heading}: kinds, in order");
}

#[test]
fn document_lists_all_messages_with_their_limits() {
    compare_with_document("Requests", REQUESTS, true);
    compare_with_document("Responses", RESPONSES, false);
}

#[test]
fn document_lists_all_versions() {
    let documented: Vec<String> = table_under("Versions").into_iter().map(|cells| cells[0].clone()).collect();
    let versions: Vec<String> = (PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION).map(|v| v.to_string()).collect();
    assert_eq!(documented, versions);
}

#[test]
fn largest_requests_fit_the_bounds_of_their_bodies() {
    use larder_format::{MAX_CHUNKS, PageKey};
    use larder_wire::{
        Entry, MAX_EXPLAINED, MAX_EXTENTS, MAX_INFO_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_PUTS, MAX_RDMA_CHANNELS,
        PartLocation, RdmaEndpoint,
    };
    let entry = Entry { request: 1, index: 2 };
    let name = "n".repeat(MAX_NAME_BYTES);
    let endpoint = RdmaEndpoint { channel: 1, address: [0; 32] };
    let largest = [
        Request::Ping,
        Request::Members,
        Request::Status,
        Request::Cancel(1),
        Request::Abort(entry),
        Request::Suspect(PageKey([1; 32])),
        Request::Follow(PageKey([1; 32])),
        Request::Withdraw(name.clone()),
        Request::Register { name, ttl_ms: 1, info: "i".repeat(MAX_INFO_BYTES) },
        Request::Release(vec![entry; MAX_KEYS]),
        Request::Commit(vec![entry; MAX_PUTS]),
        Request::Forget(vec![PageKey([1; 32]); MAX_KEYS]),
        Request::Part {
            put: entry,
            part: 1,
            crcs: vec![0; MAX_CHUNKS],
            bytes: PartLocation::SharedMemory { offset: 0, bytes: 1 },
        },
        Request::RdmaChannels { closed: vec![1; MAX_RDMA_CHANNELS], offered: vec![endpoint; MAX_RDMA_CHANNELS] },
        Request::GrantParts { reserve: 1, channels: vec![1; MAX_RDMA_CHANNELS] },
        Request::RdmaProgress { entry, part: Some(1), bytes: 1 },
        Request::Explain(vec![PageKey([1; 32]); MAX_EXPLAINED]),
        Request::Extents(vec![PageKey([1; 32]); MAX_EXTENTS]),
    ];
    for request in largest {
        let frame = request.frame(PROTOCOL_VERSION, 1, 0, None);
        let bytes = frame.len() - HEADER_BYTES;
        let max = Request::max_body_bytes(frame.head[4]);
        assert!(bytes <= max, "{} bytes of kind {} are above {max}", bytes, frame.head[4]);
        let is_never_shed = !Request::is_sheddable(frame.head[4]);
        assert!(max <= 272 << 10 || !is_never_shed, "kind {}", frame.head[4]);
    }
}
