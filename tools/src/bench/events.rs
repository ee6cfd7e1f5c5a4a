//! Server-sent events of a router's answer.

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use serde_json::Value;

/// Longest event that is accepted, in bytes.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Calls `each` with the JSON of every event until the answer ends.
///
/// # Errors
/// If the answer breaks off, an event reports an error of the router, or `each` fails.
pub async fn for_each_event(response: reqwest::Response, mut each: impl FnMut(&Value) -> Result<()>) -> Result<()> {
    let mut received: Vec<u8> = Vec::new();
    let mut stream = response.bytes_stream();
    while let Some(bytes) = stream.next().await {
        // The separator can lie across two chunks.
        let mut searched = received.len().saturating_sub(1);
        received.extend_from_slice(&bytes?);
        while let Some(end) = received[searched..].windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = received.drain(..searched + end + 2).collect();
            searched = 0;
            let event = std::str::from_utf8(&event)?.trim();
            let Some(data) = event.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
            let event: Value = serde_json::from_str(data).context("an event is not JSON")?;
            if let Some(error) = event.get("error") {
                bail!("the router failed while generating: {error}");
            }
            each(&event)?;
        }
        if received.len() > EVENT_BYTES_MAX {
            bail!("an event has more than {EVENT_BYTES_MAX} bytes");
        }
    }
    Ok(())
}
