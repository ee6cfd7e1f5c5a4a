//! The task that drives a link: takes completions, watches deadlines, and ends it.
//!
//! Always true: it sleeps when there is nothing to do; no completion is missed between looking and sleeping; when it ends, however
//! that comes, the queue pair is destroyed.

use crate::apart;
use crate::error::Death;
use crate::link::{Link, Phase};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

/// How long requests of a dead link may take to be flushed, before the queue pair is destroyed with them in it.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// How often they are looked for.
const DRAIN_STEP: Duration = Duration::from_millis(1);

/// The descriptor on which completions are announced. It is the link's, which therefore comes along.
pub(crate) struct Announcements(Arc<Link>);

impl AsRawFd for Announcements {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Announcements {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.pair.completions.event_fd()
    }
}

/// Destroys the queue pair if the task is dropped before it has.
struct Guard(Arc<Link>);

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.0.is_ended() {
            self.0.condemn(Death::Runtime);
            self.0.destroy();
        }
    }
}

/// Prepares the task, so that what can go wrong is told to whoever makes the endpoint.
pub(crate) fn announcements(link: &Arc<Link>) -> std::io::Result<AsyncFd<Announcements>> {
    // SAFETY: the descriptor stays open, and the same, as long as the link that comes along.
    let registered = unsafe { AsyncFd::register_with_interest(Announcements(link.clone()), Interest::READABLE) };
    Ok(registered?)
}

pub(crate) async fn drive(link: Arc<Link>, announcements: AsyncFd<Announcements>) {
    let guard = Guard(link.clone());
    while !is_dead(&link) {
        if let Err(error) = turn(&link, &announcements).await {
            link.condemn(error);
        }
    }
    drop(announcements);
    end(&link).await;
    drop(guard);
}

fn is_dead(link: &Link) -> bool {
    matches!(link.phase(), Phase::Dead(_))
}

/// Takes what has come, and sleeps until there is more, or a deadline passed, or somebody calls.
async fn turn(link: &Arc<Link>, announcements: &AsyncFd<Announcements>) -> Result<(), Death> {
    let spin_end = Instant::now() + link.options.spin;
    loop {
        if link.poll() > 0 {
            // Others on this thread have waited for long enough.
            tokio::task::yield_now().await;
            return Ok(());
        }
        if link.options.spin.is_zero() || link.is_idle() || Instant::now() >= spin_end {
            break;
        }
        tokio::task::yield_now().await;
    }
    // What comes before the queue is armed makes no event, so it is looked at once more behind that.
    link.pair.completions.arm().map_err(|error| error.into_death())?;
    if link.poll() > 0 {
        return Ok(());
    }
    let deadline = link.deadline();
    tokio::select! {
        ready = announcements.readable() => {
            let mut ready = ready.map_err(|_| Death::Runtime)?;
            // First the flag, then the events: one that comes in between sets it again.
            ready.clear_ready();
            link.pair.completions.take_events();
        }
        () = link.wake.notified() => {}
        () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
            // A completion may have come with the deadline.
            if link.poll() == 0 {
                return Err(Death::Deadline);
            }
        }
    }
    Ok(())
}

/// Flushes what is with the device, so that memory comes back as soon as it can, and destroys the queue pair.
async fn end(link: &Arc<Link>) {
    let begin = Instant::now();
    let pair = link.clone();
    let failed = apart(move || {
        let to = ibverbs_sys::ibv_qp_attr { qp_state: ibverbs_sys::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        pair.pair.modify(to, ibverbs_sys::ibv_qp_attr_mask(0))
    });
    if let Ok(Err(error)) = failed.await {
        tracing::debug!(%error, "a dead queue pair could not be flushed");
    }
    while !link.is_idle() && begin.elapsed() < DRAIN_MAX {
        if link.poll() == 0 {
            sleep(DRAIN_STEP).await;
        }
    }
    let ended = link.clone();
    if apart(move || ended.destroy()).await.is_err() {
        tracing::debug!("the runtime ended before an RDMA connection did");
    }
}
