//! Extents of pages on L3. Over TCP a client gets none.

use super::*;
use larder_client::Extent;
use larder_wire::VERSION_EXTENTS;
use std::os::unix::fs::FileExt;

/// Pages on L3 alone: the node was restarted after their put.
async fn with_pages_on_l3(pages: u32, options: NodeOptions) -> Node {
    let node = Node::start(options.clone()).await.unwrap();
    let client = attach(&[&node], 1).await;
    for number in 0..pages {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    node.shutdown().await;
    Node::start(options).await.unwrap()
}

fn patient(dir: &Path) -> NodeOptions {
    NodeOptions { extent_hold_time: Duration::from_secs(600), ..options(Some(dir)) }
}

fn read(extent: &Extent) -> Vec<u8> {
    let file = std::fs::File::from(extent.file().try_clone().unwrap());
    // Whole blocks in aligned memory, as direct I/O needs them.
    let blocks = geometry().page_bytes().next_multiple_of(4096);
    let mut bytes = vec![0u8; blocks + 4096];
    let start = bytes.as_ptr().align_offset(4096);
    file.read_exact_at(&mut bytes[start..start + blocks], extent.offset()).unwrap();
    bytes[start..start + geometry().page_bytes()].to_vec()
}

fn given(extents: &[Option<Extent>]) -> usize {
    extents.iter().flatten().count()
}

fn counter(node: &Node, name: &str) -> u64 {
    node.status()["counters"][name].as_u64().unwrap()
}

#[tokio::test]
async fn extents_lead_to_the_bytes_of_pages_on_l3() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = with_pages_on_l3(3, patient(dir.path())).await;
    let client = attach(&[&node], 1).await;
    // In DRAM from here on.
    assert!(get(&client, &[2]).await[0].1.is_some());
    let keys = [0, 1, 2, 9].map(key);
    let lookup = client.lookup_without_loads(&keys, PATIENCE, soon()).await;
    assert_eq!((lookup.tiers.len(), lookup.held), (3, 0), "page 0 is on L3");
    let extents = client.extents(&keys, soon()).await;
    if transport() == Transport::Tcp {
        assert_eq!(given(&extents), 0);
    } else {
        assert!(extents[2].is_none() && extents[3].is_none());
        for number in [0, 1] {
            let extent = extents[number as usize].as_ref().expect("the page is on L3");
            let bytes = read(extent);
            assert!(extent.meta().verify(&extent.meta().id, &bytes).is_ok() && bytes == payload(number));
            assert_eq!(extent.description(), client.describe(&[key(number)], soon()).await[0].clone().unwrap());
        }
        assert_eq!(counter(&node, "pages_extents"), 2);
    }
    node.shutdown().await;

    let older = NodeOptions { protocol_max: VERSION_EXTENTS - 1, ..patient(dir.path()) };
    let node = Node::start(older).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert_eq!(client.lookup_without_loads(&keys, PATIENCE, soon()).await.tiers.len(), 3);
    assert_eq!(given(&client.extents(&keys, soon()).await), 0, "an older node");
    node.shutdown().await;
}

/// Neither a client nor all together hold more records than the bounds. Holds end with the extents
/// and with their client.
#[tokio::test]
async fn held_records_are_bounded_and_end_with_their_client() {
    const PER_CLIENT: usize = 256;
    const CLIENTS: usize = 4;
    if transport() == Transport::Tcp {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let pages = PER_CLIENT as u32 + 10;
    let node = with_pages_on_l3(pages, patient(dir.path())).await;
    let keys: Vec<PageKey> = (0..pages).map(key).collect();
    let mut holders = Vec::new();
    for _ in 0..CLIENTS {
        let client = attach_over(1, &[&node], 1).await;
        let extents = client.extents(&keys, soon()).await;
        assert_eq!(given(&extents), PER_CLIENT, "of {pages} pages");
        holders.push((client, extents));
    }
    let other = attach_over(1, &[&node], 1).await;
    assert_eq!(given(&other.extents(&keys[..1], soon()).await), 0, "the node holds all that it may");
    let gets_all = async |client: &Client, count: usize| {
        let until = soon();
        while given(&client.extents(&keys[..count], soon()).await) < count {
            assert!(Instant::now() < until, "the holds did not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The extents first, then a client with its connection.
    let (client, extents) = holders.pop().unwrap();
    drop(extents);
    gets_all(&other, 1).await;
    drop(client);
    let (client, extents) = holders.pop().unwrap();
    extents.into_iter().for_each(std::mem::forget);
    drop(client);
    gets_all(&other, 200).await;
    assert_eq!(counter(&node, "extent_holds_expired"), 0);
    node.shutdown().await;
}

#[tokio::test]
async fn hold_ends_by_time_and_its_client_gets_no_more_extents() {
    if transport() == Transport::Tcp {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    // Includes the time of the request itself.
    let hasty = NodeOptions { extent_hold_time: Duration::from_secs(1), ..options(Some(dir.path())) };
    let node = with_pages_on_l3(2, hasty).await;
    let client = attach_over(1, &[&node], 1).await;
    let until = soon();
    let gets_page_0 = async |client: &Client| loop {
        let extents = client.extents(&[key(0)], soon()).await;
        if given(&extents) == 1 {
            return extents;
        }
        assert!(Instant::now() < until, "no extent");
    };
    let _extents = gets_page_0(&client).await;
    while counter(&node, "extent_holds_expired") == 0 {
        assert!(Instant::now() < until, "the hold lasts");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(given(&client.extents(&[key(1)], soon()).await), 0);
    assert!(get(&client, &[1]).await[0].1.is_some(), "the page itself");
    // Another client.
    gets_page_0(&attach_over(1, &[&node], 1).await).await;
    node.shutdown().await;
}
