//! Puts of copies: pages that a client keeps and puts again. A copy never brings a forgotten page
//! back.

use super::*;
use larder_client::PageDescription;
use larder_format::{PageOrigin, chunk_crcs};
use larder_wire::VERSION_COPIES;

fn page(number: u32) -> NewPage {
    NewPage::first(key(number))
}

async fn put_described(client: &Client, number: u32, options: PutOptions) -> Option<PageOrigin> {
    let mut put = client.put_with(page(number), options, soon());
    parts(&payload(number)).into_iter().enumerate().for_each(|(part, bytes)| put.part(part, bytes));
    let (outcome, origin) = put.commit_described(soon()).await;
    assert_eq!(outcome, PutOutcome::Stored);
    origin
}

async fn put_copy(client: &Client, number: u32, origin: Option<PageOrigin>) -> (PutOutcome, Option<PageOrigin>) {
    let mut put = client.put_copy(page(number), origin, PutOptions::default(), soon());
    parts(&payload(number)).into_iter().enumerate().for_each(|(part, bytes)| put.part(part, bytes));
    put.commit_described(soon()).await
}

/// Puts `bytes` as a copy of a page, with the checksums of the page's own bytes.
async fn put_with_crcs(
    client: &Client,
    number: u32,
    origin: Option<PageOrigin>,
    bytes: &[u8],
) -> (PutOutcome, Option<PageOrigin>) {
    let mut put = client.put_copy(page(number), origin, PutOptions::default(), soon());
    for (part, (bytes, good)) in parts(bytes).into_iter().zip(parts(&payload(number))).enumerate() {
        // A node on this machine copies from there.
        let mut buffer = client.buffer(bytes.len());
        buffer.copy_from_slice(&bytes);
        put.part_with_crcs(part, buffer.freeze(), chunk_crcs(&good).collect());
    }
    put.commit_described(soon()).await
}

async fn describe(client: &Client, number: u32) -> Option<PageDescription> {
    let pages = vec![(key(number), vec![0u8; geometry().page_bytes()])];
    client.get_described(pages, Default::default(), soon()).await.remove(0).2
}

async fn exists(client: &Client, number: u32) -> bool {
    client.exists(&[key(number)], soon()).await[0]
}

/// Puts a page and waits until the node has dropped it. No client has forgotten it.
async fn put_and_expire(client: &Client, number: u32) -> Option<PageOrigin> {
    let ttl = Some(Duration::from_millis(1));
    let origin = put_described(client, number, PutOptions { ttl, ..PutOptions::default() }).await;
    while exists(client, number).await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    origin
}

#[tokio::test]
async fn copy_of_a_forgotten_page_is_refused() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let other = attach(&[&node], 1).await;
    let put = put_described(&client, 1, PutOptions::default()).await;
    let read = describe(&other, 1).await.unwrap().origin;
    let (_, _, followed) = other.follow(key(1), vec![0u8; geometry().page_bytes()], soon()).finish_described().await;
    assert!(put.is_some() && put == read && put == followed.unwrap().origin);
    assert_eq!(put_copy(&other, 1, read).await, (PutOutcome::AlreadyThere, put));

    assert!(client.forget(&[key(1)], soon()).await.complete);
    assert_eq!(put_copy(&other, 1, read).await, (PutOutcome::Forgotten, None));
    assert!(!exists(&client, 1).await);
    let again = put_described(&client, 1, PutOptions::default()).await;
    assert_eq!(put_copy(&other, 1, read).await, (PutOutcome::AlreadyThere, again), "the page was put after the forget");
    node.shutdown().await;
}

#[tokio::test]
async fn copy_of_a_page_that_was_not_forgotten_is_stored() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let origin = put_and_expire(&client, 1).await;
    assert!(client.forget(&[key(2)], soon()).await.complete, "of another page");
    assert_eq!(put_copy(&client, 1, None).await, (PutOutcome::Forgotten, None), "its origin is unknown");
    let (outcome, newer) = put_copy(&client, 1, origin).await;
    assert_eq!((outcome, get(&client, &[1]).await[0].0 == payload(1)), (PutOutcome::Stored, true));
    assert!(newer.unwrap().generation > origin.unwrap().generation);
    node.shutdown().await;
}

#[tokio::test]
async fn copy_damaged_after_its_checksums_fails_its_own_put_only() {
    let node = Node::start(options(None)).await.unwrap();
    // One connection carries the damaged parts and all other requests.
    let client = attach_over(1, &[&node], 1).await;
    let origin = put_and_expire(&client, 1).await;
    let follow = client.follow(key(2), vec![0u8; geometry().page_bytes()], soon());
    settles(&node, "/readers_waiting", 1).await;
    let good = payload(1);
    for at in [0, good.len() / 2, good.len() - 1] {
        let mut damaged = good.clone();
        damaged[at] ^= 0x10;
        assert_eq!(put_with_crcs(&client, 1, origin, &damaged).await, (PutOutcome::Lost, origin), "byte {at}");
        assert!(!exists(&client, 1).await, "byte {at}");
    }
    assert_eq!(node.status()["counters"]["parts_corrupt"], 3);
    put_described(&client, 2, PutOptions::default()).await;
    let (bytes, end) = follow.finish().await;
    assert!(end == FollowEnd::Sealed && bytes == payload(2), "a request from before the damage goes on");

    let (outcome, stored) = put_with_crcs(&client, 1, origin, &good).await;
    assert_eq!((outcome, get(&client, &[1]).await[0].0 == good), (PutOutcome::Stored, true));
    // The checksums tell that the writer means this page.
    let mut damaged = good.clone();
    damaged[0] ^= 0x10;
    assert_eq!(put_with_crcs(&client, 1, stored, &damaged).await, (PutOutcome::AlreadyThere, stored));
    assert_eq!((get(&client, &[1]).await[0].0 == good, client.stats().corrupt), (true, 0));
    node.shutdown().await;
}

#[tokio::test]
async fn put_with_a_wrong_number_of_checksums_is_lost() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    for count in [0, 2] {
        let mut put = client.put(page(1), soon());
        put.part_with_crcs(0, parts(&payload(1))[0].clone(), vec![0; count]);
        assert_eq!(put.commit(soon()).await, PutOutcome::Lost, "{count} checksums");
    }
    settles(&node, "/puts_open", 0).await;
    assert_eq!(node.status()["counters"]["parts_corrupt"], 0, "the client sent none of them");
    node.shutdown().await;
}

#[tokio::test]
async fn forget_ends_an_open_put_of_a_copy() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach_over(1, &[&node], 1).await;
    let origin = put_and_expire(&client, 1).await;
    let mut put = client.put_copy(page(1), origin, PutOptions::default(), soon());
    let mut parts = parts(&payload(1)).into_iter().enumerate();
    let (part, bytes) = parts.next().unwrap();
    put.part(part, bytes);
    while node.status()["puts_open"] != 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(client.forget(&[key(1)], soon()).await.complete);
    parts.for_each(|(part, bytes)| put.part(part, bytes));
    assert_eq!((put.commit(soon()).await, exists(&client, 1).await), (PutOutcome::Lost, false));
    node.shutdown().await;
}

#[tokio::test]
async fn copy_from_another_node_or_an_earlier_run_is_refused() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let elsewhere = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let origin = put_and_expire(&client, 1).await;
    let other = attach(&[&elsewhere], 1).await;
    assert_eq!(put_copy(&other, 1, origin).await.0, PutOutcome::Forgotten);
    let kept = put_described(&client, 2, PutOptions::default()).await;
    node.shutdown().await;

    let node = Node::start(options(Some(dir.path()))).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert_eq!(put_copy(&client, 1, origin).await.0, PutOutcome::Forgotten);
    let read = describe(&client, 2).await.unwrap().origin;
    assert!(read.unwrap().generation == kept.unwrap().generation && read != kept, "the same page in another run");
    node.shutdown().await;
    elsewhere.shutdown().await;
}

#[tokio::test]
async fn copy_is_not_put_at_a_node_that_cannot_refuse_it() {
    let older = NodeOptions { protocol_max: VERSION_COPIES - 1, ..options(None) };
    let node = Node::start(older).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert_eq!(put_described(&client, 1, PutOptions::default()).await, None);
    assert_eq!(put_copy(&client, 2, None).await.0, PutOutcome::Forgotten);
    assert!(describe(&client, 1).await.is_some());
    assert_eq!(lose(&client, 3, async || ()).await, None, "no copy of it could be put");
    node.shutdown().await;
}

/// Ends a put without its last part. The node then does not take the page.
async fn lose(client: &Client, number: u32, meanwhile: impl AsyncFnOnce()) -> Option<PageOrigin> {
    let mut put = client.put(page(number), soon());
    let mut parts = parts(&payload(number));
    parts.pop();
    parts.into_iter().enumerate().for_each(|(part, bytes)| put.part(part, bytes));
    meanwhile().await;
    let (outcome, origin) = put.commit_described(soon()).await;
    assert_eq!(outcome, PutOutcome::Lost);
    origin
}

#[tokio::test]
async fn lost_put_can_be_repeated_unless_the_page_was_forgotten_since() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert_eq!(lose(&client, 1, async || ()).await, None, "the node has told no generation yet");
    put_described(&client, 2, PutOptions::default()).await;

    let origin = lose(&client, 3, async || ()).await;
    assert_eq!(put_copy(&client, 3, origin).await.0, PutOutcome::Stored);
    assert_eq!(get(&client, &[3]).await[0].0, payload(3));

    let forget_and_put = async || {
        assert!(client.forget(&[key(4)], soon()).await.complete);
        // What the client learns after the begin of the lost put does not count.
        put_described(&client, 5, PutOptions::default()).await;
    };
    let origin = lose(&client, 4, forget_and_put).await;
    assert!(origin.is_some());
    assert_eq!(put_copy(&client, 4, origin).await.0, PutOutcome::Forgotten);
    node.shutdown().await;
}
